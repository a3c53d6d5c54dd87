"""Conversations with a model: messages in, the parts of an answer out.

The whole conversation is rendered and tokenized anew for every answer, because templates rewrite earlier turns
(most drop old reasoning). What stays the same at its start is found again in the session's KV cache.

When the context gets full, the oldest turns are dropped: only then, and then until half of it is free, because what
comes after a dropped turn has to be computed again.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharpi.errors import InvalidRequestError, SharpiError
from sharpi.generation import Generation, Stream
from sharpi.settings import arguments
from sharpi.text.chat import ChatTemplate, Part, ThinkingSplitter, prompt_opens_thinking

if TYPE_CHECKING:
    from sharpi.model import Model
    from sharpi.session import Session, Timing

__all__ = ["Conversation", "Message", "Reply", "checked_messages", "render_prompt", "reply_to", "require_template"]

# "role" and "content"; an assistant's may have "reasoning_content" and "tool_calls", as templates know them.
Message = Mapping[str, Any]

# The part of the context that should be free for an answer: if it is not, turns are dropped until twice that is.
_ANSWER_ROOM = 0.25


class Reply(Stream[Part]):
    """A model's answer to some messages: iterate over its parts.

    It is one `Generation`: see there what starts and stops the work. `message` is the answer as the assistant's
    message, as far as it has come.
    """

    def __init__(self, generation: Generation, splitter: ThinkingSplitter) -> None:
        super().__init__(self._read(splitter))
        self._generation = generation
        self._spoken: list[Part] = []

    def _read(self, splitter: ThinkingSplitter) -> Generator[Part, None, None]:
        for token in self._generation:
            yield from splitter.push(token.text)
        yield from splitter.flush()

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
        return _assistant_message(self._spoken)

    @property
    def timing(self) -> Timing:
        """What the answer has cost so far."""
        return self._generation.timing

    def stats(self) -> dict[str, Any]:
        """Counts and speeds so far, under the names that `Model.stats` has for them."""
        return self._generation.stats()


class Conversation:
    """The messages so far, and the session that remembers them.

    An answer that was stopped half way stays in the conversation as far as it came.
    """

    def __init__(self, model: Model, options: Mapping[str, Any], *, system: str | None = None, thinking: bool = True,
                 max_tokens: int | None = None, notice: Callable[[str], None] | None = None) -> None:
        """`options`: keyword arguments for `generate`; notice: is told in a line what was dropped. Raises
        `InvalidRequestError` for a model without a template."""
        require_template(model)
        self._notice = notice or (lambda line: None)
        self._model = model
        self._options = options
        self._thinking = thinking
        self._max_tokens = max_tokens
        self._opening: list[Message] = [{"role": "system", "content": system}] if system is not None else []
        self._session = model.session()
        self.messages: list[Message] = list(self._opening)

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = list(self._opening)
        self._session.reset()

    def answer(self, text: str) -> Generator[Part, None, None]:
        """Say `text` and yield the answer's parts as they come; close the iterator to stop it.

        After an error, such as a context that is full, the conversation is as it was before.
        """
        before = list(self.messages)
        self.messages.append({"role": "user", "content": text})
        spoken: list[Part] = []
        try:
            with self._reply() as parts:
                for part in parts:
                    spoken.append(part)
                    yield part
        except SharpiError:
            spoken.clear()
            self.messages = [*before, self.messages[-1]]  # turns may have been dropped
            raise
        finally:
            self._keep(spoken)

    def _reply(self) -> Reply:
        prompt, tokens = self._fitting_prompt()
        generation = self._session.generate(tokens, **{**self._options, "max_tokens": self._max_tokens})
        return Reply(generation, ThinkingSplitter(prompt_opens_thinking(prompt)))

    def _fitting_prompt(self) -> tuple[str, list[int]]:
        """The conversation as a prompt that leaves room for an answer, if dropping turns can make some."""
        prompt, tokens = self._prompt(self.messages)
        context = self._model.context
        room = int(context * _ANSWER_ROOM)
        if self._max_tokens is not None:
            room = min(room, self._max_tokens)
        if len(tokens) + room <= context:
            return prompt, tokens
        messages, turns = list(self.messages), 0
        while len(tokens) + 2 * room > context and _drop_oldest_turn(messages, len(self._opening)):
            turns += 1
            prompt, tokens = self._prompt(messages)
        if turns and len(tokens) <= context:  # a question that fits in no case drops nothing
            self.messages = messages
            dropped = "turn was" if turns == 1 else f"{turns:,} turns were"
            self._notice(f"the context of {context:,} tokens is nearly full: the oldest {dropped} dropped (-c sets it)")
        return prompt, tokens

    def _prompt(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        prompt = render_prompt(self._model, messages, thinking=None if self._thinking else False)
        return prompt, self._model.tokenize(prompt, add_special=False, parse_special=True)

    def _keep(self, spoken: list[Part]) -> None:
        """Turns what was said into the assistant's message; templates want none, or one that says something."""
        if not spoken:
            self.messages.pop()
            return
        self.messages.append(_assistant_message(spoken))


def _drop_oldest_turn(messages: list[Message], opening: int) -> bool:
    """Drops a question and its answer, which come after `opening` messages. The last question stays."""
    later = (index for index in range(opening + 1, len(messages)) if messages[index]["role"] == "user")
    end = next(later, None)
    if end is None:
        return False
    del messages[opening:end]
    return True


def _assistant_message(spoken: Sequence[Part]) -> dict[str, str]:
    answer, thinking = ("".join(text for kind, text in spoken if kind == wanted).strip()
                        for wanted in ("answer", "thinking"))
    message = {"role": "assistant", "content": answer}
    if thinking:
        message["reasoning_content"] = thinking  # where the templates that show old reasoning look for it
    return message


def reply_to(prompt: str, model: Model, session: Session, options: Mapping[str, Any]) -> Reply:
    """The answer to a rendered prompt. options: keyword arguments for `Session.generate`."""
    tokens = model.tokenize(prompt, add_special=False, parse_special=True)
    return Reply(session.generate(tokens, **options), ThinkingSplitter(prompt_opens_thinking(prompt)))


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


def require_template(model: Model) -> ChatTemplate:
    """The model's chat template. Raises `InvalidRequestError` for a model that holds none."""
    template = model.chat_template
    if template is None:
        raise InvalidRequestError(
            f"{model.file.name} has no chat template, so it cannot chat; `sharpi run` continues a text")
    return template


def render_prompt(model: Model, messages: Sequence[Message], *, thinking: bool | None = None,
                  tools: Sequence[Mapping[str, Any]] | None = None) -> str:
    """`messages` as the model's template words them, up to where its answer begins.

    thinking: whether the template asks for reasoning; `None` leaves the choice to the template. tools: descriptions of
    functions that the model may call, as the template wants them. Raises `InvalidRequestError` for a message or a tool
    that contains a control token.
    """
    template = require_template(model)
    for message in messages:
        if message["role"] != "assistant" and message.get("content"):
            _refuse_control_tokens(model, f"the {message['role']} message spells", message["content"])
    if tools is None:
        return template.render(messages, enable_thinking=thinking)
    _refuse_control_tokens(model, "tools spell", _tools_text(tools))
    return template.render(messages, enable_thinking=thinking, tools=list(tools))


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


def _refuse_control_tokens(model: Model, what: str, text: str) -> None:
    """A rendered prompt is read with its control tokens, so a message that spells one could speak for another role."""
    if model.tokenize(text, parse_special=True) != model.tokenize(text):
        raise InvalidRequestError(f"{what} one of the model's control tokens, such as an end of turn:"
                                  " write it differently")
