"""`sharpi serve`: models behind HTTP. Needs the extra `sharpi[serve]`; nothing else in the package imports this one."""
