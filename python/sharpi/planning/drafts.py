"""Drafted tokens: what guesses them, and how many at once.

A step over a few tokens takes hardly longer than one over a single token. So guessed tokens are judged all at once, and
those that the model would have chosen anyway are kept. For the same seed, the text is the same with drafts and without.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sharpi.errors import InvalidRequestError
from sharpi.settings.choices import DRAFTS, MOST_DRAFT_TOKENS

if TYPE_CHECKING:
    from sharpi.planning.plan import Plan

__all__ = [
    "DEFAULT_DRAFT_TOKENS",
    "DRAFTS",
    "DraftedRun",
    "MOST_COST",
    "MOST_DRAFT_TOKENS",
    "choose_drafts",
    "missing_states",
]

# A prediction layer is trained to guess one token; its second guess is worse. A repeated passage is often long, and
# looking it up costs nothing.
DEFAULT_DRAFT_TOKENS = {"mtp": 1, "ngram": 4}
# As a part of a plain step. A prediction layer that costs more would have to be right more often than most are, so it
# drafts only if it is asked to.
MOST_COST = 0.8


class DraftedRun(NamedTuple):
    """What it took to generate `tokens` tokens. steps: passes of the model; drafted, accepted: tokens."""

    seconds: float
    tokens: int
    steps: int
    drafted: int
    accepted: int

    @property
    def seconds_per_step(self) -> float:
        """The mean, drafting included."""
        return self.seconds / max(1, self.steps)


def choose_drafts(draft: str | None, count: int | None, *, mtp: bool, cost: float | None = None) -> tuple[str, int]:
    """What drafts, and how many tokens, if `draft` and `count` were asked for. mtp: whether a prediction layer is
    loaded. cost: what a token that it drafts adds to a step, as a part of a plain step, if that is known. Raises
    `InvalidRequestError` for what is not possible."""
    by_itself = mtp and (count is not None or cost is None or cost < MOST_COST)
    chosen: Any = ("mtp" if by_itself else "off") if draft is None else draft
    if chosen not in DRAFTS:
        raise InvalidRequestError(f"draft must be mtp, ngram or off, not {draft!r}")
    if chosen == "mtp" and not mtp:
        raise InvalidRequestError("draft mtp needs a prediction layer, and none is loaded: the file has none to use, or"
                                  " it was left there (--no-mtp); draft ngram works without")
    if count is None:
        return chosen, DEFAULT_DRAFT_TOKENS.get(chosen, 1)
    if not isinstance(count, (int, np.integer)) or isinstance(count, bool) or not 1 <= count <= MOST_DRAFT_TOKENS:
        raise InvalidRequestError(f"draft_tokens must be 1 to {MOST_DRAFT_TOKENS}, not {count!r}")
    if chosen == "off":
        raise InvalidRequestError(f"draft_tokens is {count}, but draft is off: say draft ngram too")
    return chosen, int(count)


def missing_states(count: int, plan: Plan) -> str | None:
    """A line for people if a model with recurrent layers has no room for the states of `count` drafted tokens: the
    state that a step begins from, and one after each of its rows."""
    room = max(0, plan.sequences - 2)
    if not plan.state_bytes or count <= room:
        return None
    return (f"no more than {room} of {count} drafted tokens at once: each needs a state, and sequences {count + 2}"
            " makes room")
