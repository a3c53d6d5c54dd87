"""The machine: its processors and memory, and the rates measured on it."""
