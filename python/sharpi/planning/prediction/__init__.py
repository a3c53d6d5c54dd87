"""Predicted speeds: sums over what a plan says and what the machine was measured to do."""
