"""Where the pieces of an answer are gathered."""

from __future__ import annotations

from sharpi.text.answers.pieces import CallBegins, CallContinues, Piece, Saying, Thinking

__all__ = ["Sink"]


class Sink:
    """Gathers pieces, and drops the white space around reasoning and around calls if it trims."""

    def __init__(self, trim: bool) -> None:
        self._trim = trim
        self._pieces: list[Piece] = []
        self._space = ""  # held back: it is dropped if a mark follows
        self._drops = False  # the white space that comes next
        self._ids: set[str] = set()
        self.calls = 0
        self.in_call = False

    def taken(self) -> list[Piece]:
        """The pieces since the last time, neighbours of one kind joined."""
        pieces, self._pieces = self._pieces, []
        if len(pieces) < 2:
            return pieces
        joined: list[Piece] = []
        for piece in pieces:
            last = joined[-1] if joined else None
            if isinstance(piece, Thinking) and isinstance(last, Thinking):
                joined[-1] = Thinking(last.text + piece.text)
            elif isinstance(piece, Saying) and isinstance(last, Saying):
                joined[-1] = Saying(last.text + piece.text)
            elif isinstance(piece, CallContinues) and isinstance(last, CallContinues) and piece.index == last.index:
                joined[-1] = CallContinues(piece.index, last.json + piece.json)
            else:
                joined.append(piece)
        return joined

    def think(self, text: str) -> None:
        if text := self._trimmed(text):
            self._pieces.append(Thinking(text))

    def say(self, text: str) -> None:
        if text := self._trimmed(text):
            self._pieces.append(Saying(text))

    def _trimmed(self, text: str) -> str:
        if not self._trim:
            return text
        text = self._space + text
        if self._drops:
            text = text.lstrip()
            self._drops = not text
        kept = text.rstrip()
        self._space = text[len(kept):]
        return kept

    def turn(self) -> None:
        """Reasoning or calls begin or end here."""
        self._space = ""
        self._drops = True

    def end(self, thinking: bool) -> None:
        """The answer is over: the white space at its end is part of it."""
        if self._space:
            self._pieces.append(Thinking(self._space) if thinking else Saying(self._space))
            self._space = ""

    def begin_call(self, name: str, call_id: str | None) -> None:
        self.turn()
        if call_id is not None and call_id in self._ids:
            call_id = None  # an id must tell calls apart
        if call_id is not None:
            self._ids.add(call_id)
        self._pieces.append(CallBegins(self.calls, name, call_id))
        self.in_call = True

    def arguments(self, json: str) -> None:
        if json:
            self._pieces.append(CallContinues(self.calls, json))

    def end_call(self) -> None:
        self.calls += 1
        self.in_call = False
        self.turn()
