"""A turn that is being answered: the tokens of its answers become events."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from sharpi.errors import SharpiError
from sharpi.generation import Token
from sharpi.scheduler import Answer
from sharpi.serve.answering.channels import Reader
from sharpi.serve.answering.merging import Merged
from sharpi.serve.answering.scoring import Scorer
from sharpi.serve.errors import ApiError
from sharpi.serve.server import OpenTurn
from sharpi.serve.turns import CallArguments, CallBegun, Ended, Event, PromptScores, Said, Score, Thought, Usage
from sharpi.text.answers.pieces import CallBegins, CallContinues, Piece, Saying, Thinking

__all__ = ["Choice", "ModelTurn"]


class Choice:
    """One of a turn's answers, as far as it has come. scorer: makes its tokens' scores, if they are wanted. echo: the
    prompt's text, if it is part of the answer."""

    def __init__(self, index: int, answer: Answer, reader: Reader, scorer: Scorer | None = None,
                 echo: str | None = None) -> None:
        self.answer = answer
        self._index = index
        self._reader = reader
        self._scorer = scorer
        self._echo = echo
        self._calls: set[int] = set()
        self._started = time.perf_counter()
        self._first_seconds: float | None = None
        self._seconds = 0.0
        self._thinks = False  # what the last piece was
        self._thinking_tokens = 0

    def push(self, token: Token) -> list[Event]:
        """What the next token adds."""
        if self._first_seconds is None:
            self._first_seconds = time.perf_counter() - self._started
        scores = () if self._scorer is None else self._scorer.shown(token)
        events = self._worded(self._reader.push(token.text), scores)
        if self._echo is not None:
            events = [*self._echoed(), *events]
        self._thinking_tokens += self._thinks
        return events

    def end(self) -> list[Event]:
        """After the last token. Raises `ApiError` for an answer that was cut off."""
        self._seconds = time.perf_counter() - self._started
        reason = self.answer.finish_reason
        if reason not in ("end", "stop", "length", "context", "timeout"):
            raise ApiError(503, "server_error", "the answer was cut off: the server is ending")
        left = () if self._scorer is None or self.answer.stop_text is not None else self._scorer.rest()
        events = [*self._echoed(), *self._worded(self._reader.flush(), left)]
        if self._calls and reason in ("end", "stop"):
            return [*events, Ended(self._index, "tool_calls")]
        if reason in ("end", "stop"):
            return [*events, Ended(self._index, "stop", self.answer.stop_text)]
        return [*events, Ended(self._index, "timeout" if reason == "timeout" else "length")]

    @property
    def tokens(self) -> int:
        """All that were computed."""
        return self.answer.token_count + (self.answer.finish_reason == "end")

    @property
    def thinking_tokens(self) -> int:
        return min(self._thinking_tokens, self.answer.token_count)

    def figures(self) -> Mapping[str, Any]:
        """What `Answer.figures` says; of an answer that a stop text ended, as much as was seen of it."""
        return {"first_token_seconds": self._first_seconds or self._seconds, "seconds": self._seconds,
                "queued_seconds": 0.0, "tokens": self.tokens, **self.answer.figures}

    def _echoed(self) -> list[Event]:
        """The prompt, before all else."""
        if self._echo is None:
            return []
        text, self._echo = self._echo, None
        scores = () if self._scorer is None else self._scorer.of_prompt(self.answer.prompt_scores)
        return [PromptScores(self._index, text, scores)]

    def _worded(self, pieces: Sequence[Piece], scores: tuple[Score, ...]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if isinstance(piece, Saying):
                self._thinks = False
                events.append(Said(self._index, piece.text, scores))
                scores = ()
            elif isinstance(piece, Thinking):
                self._thinks = True
                events.append(Thought(self._index, piece.text, scores))
                scores = ()
            else:
                self._thinks = False
                events.append(self._call(piece))
        if scores:
            events.append(Thought(self._index, "", scores) if self._thinks else Said(self._index, "", scores))
        return events

    def _call(self, piece: CallBegins | CallContinues) -> Event:
        if isinstance(piece, CallContinues):
            return CallArguments(self._index, piece.index, piece.json)
        self._calls.add(piece.index)
        return CallBegun(self._index, piece.index, piece.id or f"call_{secrets.token_hex(12)}", piece.name)


class ModelTurn(OpenTurn):
    """One whose choices a scheduler answers."""

    def __init__(self, choices: Sequence[Choice], prompt_tokens: int) -> None:
        self.prompt_tokens = prompt_tokens
        self._choices = choices
        self._ready: deque[Event] = deque()
        self._alone = choices[0] if len(choices) == 1 else None
        self._merged: Merged[Token] = Merged([choice.answer for choice in choices])
        self._left = len(choices)

    @property
    def cached_tokens(self) -> int:
        return self._choices[0].answer.reused_tokens

    @property
    def computed_tokens(self) -> int:
        return self._choices[0].answer.computed_tokens

    @property
    def answer_tokens(self) -> int:
        return sum(choice.answer.token_count for choice in self._choices)

    def ready(self) -> Event | None:
        choice = self._alone
        while not self._ready and choice is not None and (token := choice.answer.ready()) is not None:
            self._ready.extend(choice.push(token))
        return self._ready.popleft() if self._ready else None

    async def more(self) -> bool:
        if not self._left:
            return False
        try:
            if self._alone is None:
                for index, token in await self._merged.next():
                    self._take(self._choices[index], token)
            elif not await self._alone.answer.more():
                self._take(self._alone, None)
            return True
        except BaseException as error:
            await self.aclose()
            if isinstance(error, SharpiError):
                raise ApiError(500, "server_error", str(error)) from None
            raise

    def _take(self, choice: Choice, token: Token | None) -> None:
        """token: `None` at the answer's end."""
        if token is not None:
            self._ready.extend(choice.push(token))
            return
        self._ready.extend(choice.end())
        self._left -= 1
        if not self._left:
            self._ready.append(self._usage())

    def _usage(self) -> Usage:
        return Usage(self.prompt_tokens, self.cached_tokens, sum(choice.tokens for choice in self._choices),
                     sum(choice.thinking_tokens for choice in self._choices),
                     tuple(choice.figures() for choice in self._choices))

    async def aclose(self) -> None:
        self._left = 0
        for choice in self._choices:
            choice.answer.cancel()
        await self._merged.aclose()
        self._ready.clear()
