"""How a model writes calls of tools, as data: what reads them and what forces them share it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sharpi.text.answers.markers import THINK, Markers

__all__ = ["Notation", "Parameter", "ToolFormat"]

# How a call's arguments are written: as a JSON object; each in tags of its own; as Gemma's objects, in braces, whose
# keys are bare and whose strings stand between <|"|>; as Python's keyword arguments, without their parentheses.
Notation = Literal["json", "tags", "bare", "python"]


@dataclass(frozen=True)
class Parameter:
    """How one argument is written in tags: `begin(...)`, its value, `end`.

    Strings stand there as they are, all else as JSON. kinds: what follows `after_name` for a string, and for all else;
    empty if nothing tells them apart.
    """

    before_name: str
    after_name: str
    end: str
    kinds: tuple[str, ...] = ()

    def begin(self, name: str, is_string: bool) -> str:
        kind = "" if not self.kinds else self.kinds[0] if is_string else self.kinds[1]
        return f"{self.before_name}{name}{self.after_name}{kind}"


@dataclass(frozen=True)
class ToolFormat:
    """How a model writes calls.

    An answer's calls read: `opening`, then each call as `begin(name)`, its arguments and `end`, with `separator`
    between two, then `closing`.

    triggers: calls begin where one of these appears.
    starts: at the very start of the text (after the reasoning) calls also begin with one of these, which elsewhere are
        text.
    reader: which parser reads them (`reader.py`).
    names, arguments_names: the keys of a call that is a JSON object.
    parameter: for arguments in tags.
    several: whether the model may make more than one call in an answer.
    id_length: what calls' ids must have, in letters and digits; `None`: ids are free.
    tokens: texts of tokens that are control tokens in some files, but must be seen by the parser.
    needs_instructions: the template knows nothing of tools (see `instructions.py`).
    """

    name: str
    reader: Literal["objects", "named", "mistral", "tags", "bare", "python", "harmony"]
    triggers: tuple[str, ...]
    before_name: str
    after_name: str
    end: str
    notation: Notation = "json"
    opening: str = ""
    separator: str = ""
    closing: str = ""
    starts: tuple[str, ...] = ()
    names: tuple[str, ...] = ("name",)
    arguments_names: tuple[str, ...] = ("arguments", "parameters")
    parameter: Parameter | None = None
    several: bool = True
    id_length: int | None = None
    tokens: tuple[str, ...] = ()
    thinking: Markers = THINK
    needs_instructions: bool = False

    def begin(self, name: str, index: int = 0) -> str:
        """A call of the tool up to its arguments. index: which of the conversation's calls it is, for formats that
        count."""
        return self.before_name + name + self.after_name.replace("{index}", str(index))

    @property
    def last_tag(self) -> str:
        """What stands behind a call's brackets, or behind those of all calls; "" if nothing does."""
        return self.end.lstrip("}]) \n") or self.closing.lstrip("}]) \n")
