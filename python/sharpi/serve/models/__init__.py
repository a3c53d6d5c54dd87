"""The models of a server: their names, and which of them are loaded."""
