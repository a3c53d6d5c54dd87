"""What every request passes on its way to an API, what all endpoints share, and the process around them."""
