"""What may be set: the values that options take, checks of what callers pass, and the environment's switches."""
