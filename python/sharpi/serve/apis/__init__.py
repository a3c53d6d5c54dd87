"""The APIs, one module each: what a client sends becomes a `Turn`, and its events become what that client expects."""
