"""A conversation with a model, without a terminal: messages in, pieces of an answer out.

The whole conversation is rendered and tokenized anew for every answer, because templates rewrite earlier turns
(most drop old reasoning). What stays the same at its start is found again in the session's KV cache.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import closing
from typing import TYPE_CHECKING, Any

from sharpi.chat import ChatTemplate, Part, ThinkingSplitter, prompt_opens_thinking
from sharpi.errors import InvalidRequestError, SharpiError

if TYPE_CHECKING:
    from sharpi.model import Model

Message = dict[str, str]


class Conversation:
    """The messages so far, and the session that remembers them.

    An answer that was stopped half way stays in the conversation as far as it came.
    """

    def __init__(self, model: Model, options: Mapping[str, Any], *, system: str | None = None, thinking: bool = True,
                 max_tokens: int | None = None) -> None:
        """`options`: keyword arguments for `generate`. Raises `InvalidRequestError` for a model without a template."""
        require_template(model)
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
        self.messages.append({"role": "user", "content": text})
        spoken: list[Part] = []
        try:
            with closing(self._generate()) as parts:
                for part in parts:
                    spoken.append(part)
                    yield part
        except SharpiError:
            spoken.clear()
            raise
        finally:
            self._keep(spoken)

    def _generate(self) -> Generator[Part, None, None]:
        prompt = render_prompt(self._model, self.messages, thinking=self._thinking)
        tokens = self._model.tokenize(prompt, add_special=False, parse_special=True)
        splitter = ThinkingSplitter(prompt_opens_thinking(prompt))
        with closing(self._session.generate(tokens, max_tokens=self._max_tokens, **self._options)) as generated:
            for token in generated:
                yield from splitter.push(token.text)
        yield from splitter.flush()

    def _keep(self, spoken: list[Part]) -> None:
        """Turns what was said into the assistant's message; templates want none, or one that says something."""
        if not spoken:
            self.messages.pop()
            return
        answer, thinking = ("".join(text for kind, text in spoken if kind == wanted).strip()
                            for wanted in ("answer", "thinking"))
        message = {"role": "assistant", "content": answer}
        if thinking:
            message["reasoning_content"] = thinking  # where the templates that show old reasoning look for it
        self.messages.append(message)


def require_template(model: Model) -> ChatTemplate:
    """The model's chat template. Raises `InvalidRequestError` for a model that holds none."""
    template = model.chat_template
    if template is None:
        raise InvalidRequestError(
            f"{model.file.name} has no chat template, so it cannot chat; `sharpi run` continues a text")
    return template


def render_prompt(model: Model, messages: list[Message], *, thinking: bool) -> str:
    """`messages` as the model's template words them, up to where its answer begins.

    `thinking` false asks the template to leave reasoning out; true leaves the choice to the template. Raises
    `InvalidRequestError` for a message that contains a control token.
    """
    for message in messages:
        _refuse_control_tokens(model, message)
    return require_template(model).render(messages, enable_thinking=None if thinking else False)


def _refuse_control_tokens(model: Model, message: Message) -> None:
    """A rendered prompt is read with its control tokens, so a message that spells one could speak for another role."""
    text = message["content"]
    if message["role"] != "assistant" and model.tokenize(text, parse_special=True) != model.tokenize(text):
        raise InvalidRequestError(
            f"the {message['role']} message spells one of the model's control tokens, such as an end of turn: "
            "write it differently")
