"""Messages in, the parts of an answer out: how a chat's messages become a prompt, and `Reply`."""

from __future__ import annotations

import json
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpi.errors import InvalidRequestError
from sharpi.generation import Generation, Stream, Timing
from sharpi.loading.loaded_model import LoadedModel
from sharpi.settings import arguments
from sharpi.text.answers.pieces import Piece, Saying, Thinking
from sharpi.text.answers.reader import AnswerReader
from sharpi.text.answers.tool_format import ToolFormat
from sharpi.text.chat import ChatTemplate, Part
from sharpi.text.marks import chat_marks

__all__ = ["ChatPrompt", "Message", "Reply", "assistant_message", "chat_prompt", "checked_messages",
           "refuse_control_tokens", "require_template"]

# "role" and "content"; an assistant's may have "reasoning_content" and "tool_calls", as templates know them.
Message = Mapping[str, Any]


@dataclass(frozen=True)
class ChatPrompt:
    """Messages as a model's template words them, up to where its answer begins. marks: see `Scheduler.submit`. form:
    how the model writes its answers."""

    text: str
    ids: list[int]
    marks: list[int]
    form: ToolFormat


class Reply(Stream[Part]):
    """A model's answer to some messages: iterate over its parts.

    It is one `Generation`: see there what starts and stops the work. `message` is the answer as the assistant's
    message, as far as it has come.
    """

    def __init__(self, generation: Generation, prompt: ChatPrompt) -> None:
        """prompt: what the answer continues; it says whether the answer begins with reasoning."""
        form = prompt.form
        super().__init__(self._read(AnswerReader(form, opened=form.thinking.opened_by(prompt.text), trim=False)))
        self._generation = generation
        self._spoken: list[Part] = []

    def _read(self, reader: AnswerReader) -> Generator[Part, None, None]:
        for token in self._generation:
            yield from _parts(reader.push(token.text))
        yield from _parts(reader.flush())

    def __next__(self) -> Part:
        part = super().__next__()
        self._spoken.append(part)
        return part

    def close(self) -> None:
        super().close()
        self._generation.close()

    def __repr__(self) -> str:
        return f"<Reply, {self.timing.generated_tokens:,} tokens so far>"

    @property
    def message(self) -> dict[str, str]:
        """{"role": "assistant", "content": ...} with what was said so far, and "reasoning_content" if there was any."""
        return assistant_message(self._spoken)

    @property
    def timing(self) -> Timing:
        """What the answer has cost so far."""
        return self._generation.timing

    def stats(self) -> dict[str, Any]:
        """Counts and speeds so far, under the names that `Model.stats` has for them."""
        return self._generation.stats()


def _parts(pieces: Sequence[Piece]) -> Iterator[Part]:
    """A reader that knows no tools gives no calls: they are part of the text."""
    for piece in pieces:
        if isinstance(piece, Thinking):
            yield Part("thinking", piece.text)
        elif isinstance(piece, Saying):
            yield Part("answer", piece.text)


def assistant_message(spoken: Sequence[Part]) -> dict[str, str]:
    answer, thinking = ("".join(text for kind, text in spoken if kind == wanted).strip()
                        for wanted in ("answer", "thinking"))
    message = {"role": "assistant", "content": answer}
    if thinking:
        message["reasoning_content"] = thinking  # where the templates that show old reasoning look for it
    return message


def checked_messages(messages: Any, system: Any = None) -> list[Message]:
    """`messages` after a system message, if one is given. Raises `InvalidRequestError`, which says which message is
    wrong, for what no template could take."""
    if isinstance(messages, (str, bytes, Mapping)) or not isinstance(messages, Sequence):
        raise InvalidRequestError('messages must be a list of messages such as {"role": "user", "content": "Hello"},'
                                  f" not {arguments.shown(messages)}")
    if not messages:
        raise InvalidRequestError("messages is empty: give at least one message")
    for index, message in enumerate(messages):
        name = f"messages[{index}]"
        if not isinstance(message, Mapping):
            raise InvalidRequestError(f"{name} must have a role and a content, not be {arguments.shown(message)}")
        arguments.text(f'{name}["role"]', message.get("role"))
        if message.get("content") is not None or "tool_calls" not in message:
            arguments.text(f'{name}["content"]', message.get("content"))
    if arguments.maybe(arguments.text, "system", system) is None:
        return list(messages)
    if messages[0]["role"] == "system":
        raise InvalidRequestError("system: the messages begin with a system message already")
    return [{"role": "system", "content": system}, *messages]


def require_template(model: LoadedModel) -> ChatTemplate:
    """The model's chat template. Raises `InvalidRequestError` for a model that holds none."""
    template = model.chat_template
    if template is None:
        raise InvalidRequestError(
            f"{model.file.name} has no chat template, so it cannot chat; `sharpi run` continues a text")
    return template


def chat_prompt(model: LoadedModel, messages: Sequence[Message], *, thinking: bool | None = None,
                tools: Sequence[Mapping[str, Any]] | None = None) -> ChatPrompt:
    """The prompt for `messages`.

    thinking: whether the template asks for reasoning; `None` leaves the choice to the template. tools: descriptions of
    functions that the model may call, as the template wants them. Raises `InvalidRequestError` for a message or a tool
    that contains a control token.
    """
    template = require_template(model)
    for message in messages:
        if message["role"] != "assistant" and message.get("content"):
            refuse_control_tokens(model, f"the {message['role']} message spells", message["content"])
    given: dict[str, Any] = {}
    if tools is not None:
        refuse_control_tokens(model, "tools spell", _tools_text(tools))
        given["tools"] = list(tools)
    text = template.render(messages, enable_thinking=thinking, **given)
    ids = model.tokenize(text, add_special=False, parse_special=True)
    return ChatPrompt(text, ids, chat_marks(messages, text, ids, model.tokenizer), template.format)


def _tools_text(tools: Any) -> str:
    """Raises `InvalidRequestError` unless `tools` is a list of JSON objects."""
    if (isinstance(tools, (str, bytes, Mapping)) or not isinstance(tools, Sequence)
            or any(not isinstance(tool, Mapping) for tool in tools)):
        raise InvalidRequestError(f"tools must be a list of descriptions of functions, not {arguments.shown(tools)}")
    try:
        return json.dumps([*tools], ensure_ascii=False)
    except (TypeError, ValueError, RecursionError):
        raise InvalidRequestError(
            "tools must be JSON: text, numbers, lists, and dictionaries with text as keys") from None


def refuse_control_tokens(model: LoadedModel, what: str, text: str) -> None:
    """A rendered prompt is read with its control tokens, so a message that spells one could speak for another role."""
    if model.tokenize(text, parse_special=True) != model.tokenize(text):
        raise InvalidRequestError(f"{what} one of the model's control tokens, such as an end of turn:"
                                  " write it differently")
