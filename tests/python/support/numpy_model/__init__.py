"""The forward pass once more, in float64 numpy and as plainly as it can be said: what the engine is held against.

`description.py` says what layers can be, `families.py` which layers each architecture has, `parts.py` has the
functions, and `model.py` runs a file. It shares no code with the engine but the reading of the file's container.
"""

from numpy_model.model import NumpyModel, relative_error

__all__ = ["NumpyModel", "relative_error"]
