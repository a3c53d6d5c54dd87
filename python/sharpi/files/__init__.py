"""Model files: the GGUF container, its metadata, and what a context beyond the trained one changes."""
