"""What an answer may consist of: a `Constraint` says, before each token, which ones may come next."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt

__all__ = ["Constraint"]


class Constraint(Protocol):
    """Follows the tokens of one answer and forbids those that may not come next.

    The scheduler's thread calls it, never two methods at once, and between the calls other Python threads run. If a
    method raises an exception, the answer ends with that error; other answers go on. Drafted tokens are accepted before
    it is known whether they stay, and rolled back if they do not.

    A constraint may have a further method, `matcher()`. It returns the `Matcher` that alone decides from the accepted
    tokens on, or `None`. The core then asks that matcher's library itself, which is several times cheaper, and tells
    the constraint of no further token; a rollback to before that call reaches the constraint as ever.
    """

    def fill(self, words: npt.NDArray[np.uint32]) -> bool:
        """Writes which tokens may come next: bit i % 32 of words[i // 32] is 1 if token i may. Returns whether any
        token is forbidden; if it returns `False`, the words do not count. An end token is a token like any other: one
        that is forbidden does not end the answer."""

    def accept(self, token: int) -> None:
        """The answer goes on with this token, which fill() allowed."""

    def rollback(self, tokens: int) -> None:
        """Takes back the last accepted tokens, this number of them."""

    def ended(self) -> bool:
        """Whether the answer is complete after the accepted tokens. It then ends as at an end token."""
