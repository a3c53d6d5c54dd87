"""How models mark the reasoning in their answers."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["THINK", "Markers"]


class Markers(NamedTuple):
    """The texts by which models mark the reasoning in an answer; they are no part of the answer.

    openings: each begins reasoning. closing: ends it. dropped: other marks outside of reasoning. No mark is the
    beginning of another.
    """

    openings: tuple[str, ...]
    closing: str
    dropped: tuple[str, ...] = ()

    @staticmethod
    def of(template: str) -> Markers:
        """The marks that the source of a chat template writes."""
        return next((known for known in _KNOWN if known.openings[0].rstrip() in template), THINK)

    def opened_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends inside reasoning that has just begun, so that the answer continues it."""
        return prompt.rstrip().endswith(tuple(opening.rstrip() for opening in self.openings))

    def closed_by(self, prompt: str) -> bool:
        """Whether a rendered prompt ends behind reasoning, so that the answer has none."""
        return prompt.rstrip().endswith(self.closing)


THINK = Markers(("<think>",), "</think>")
_KNOWN = (
    Markers(("<|channel|>analysis<|message|>",), "<|end|>"),
    Markers(("<|channel>thought\n",), "<channel|>"),
    Markers(("[THINK]",), "[/THINK]"),
    Markers(("<|START_THINKING|>",), "<|END_THINKING|>", ("<|START_RESPONSE|>", "<|END_RESPONSE|>")),
)
