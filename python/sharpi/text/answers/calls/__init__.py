"""Readers of the formats in which models write calls of tools."""
