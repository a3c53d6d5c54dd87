"""Turns are answered by a model: prompts are made of them, the scheduler's tokens become events."""
