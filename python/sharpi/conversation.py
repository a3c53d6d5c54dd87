"""`Conversation`: a chat that remembers what was said.

The whole conversation is rendered and tokenized anew for every answer, because templates rewrite earlier turns
(most drop old reasoning). What stays the same at its start is found again in the session's KV cache.

When the context gets full, the oldest turns are dropped: only then, and then until half of it is free, because what
comes after a dropped turn has to be computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sharpi.errors import SharpiError
from sharpi.reply import ChatPrompt, Message, Reply, assistant_message, chat_prompt, require_template
from sharpi.text.chat import Part

if TYPE_CHECKING:
    from sharpi.model import Model

__all__ = ["Conversation"]

# The part of the context that should be free for an answer: if it is not, turns are dropped until twice that is.
_ANSWER_ROOM = 0.25


class Conversation:
    """The messages so far, and the session that remembers them.

    An answer that was stopped half way stays in the conversation as far as it came.
    """

    def __init__(self, model: Model, options: Mapping[str, Any], *, system: str | None = None, thinking: bool = True,
                 max_tokens: int | None = None, notice: Callable[[str], None] | None = None) -> None:
        """`options`: keyword arguments for `generate`; notice: called with a line on what was dropped. Raises
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
        options: Any = {**self._options, "max_tokens": self._max_tokens}
        return self._session.reply(self._fitting_prompt(), options)

    def _fitting_prompt(self) -> ChatPrompt:
        """The conversation as a prompt that leaves room for an answer, if dropping turns can make some."""
        prompt = self._prompt(self.messages)
        context = self._model.context
        room = int(context * _ANSWER_ROOM)
        if self._max_tokens is not None:
            room = min(room, self._max_tokens)
        if len(prompt.ids) + room <= context:
            return prompt
        messages, turns = list(self.messages), 0
        while len(prompt.ids) + 2 * room > context and _drop_oldest_turn(messages, len(self._opening)):
            turns += 1
            prompt = self._prompt(messages)
        if turns and len(prompt.ids) <= context:  # a question that fits in no case drops nothing
            self.messages = messages
            dropped = "turn was" if turns == 1 else f"{turns:,} turns were"
            self._notice(f"the context of {context:,} tokens is nearly full: the oldest {dropped} dropped (-c sets it)")
        return prompt

    def _prompt(self, messages: Sequence[Message]) -> ChatPrompt:
        return chat_prompt(self._model, messages, thinking=None if self._thinking else False)

    def _keep(self, spoken: list[Part]) -> None:
        """Turns what was said into the assistant's message; templates want none, or one that says something."""
        if not spoken:
            self.messages.pop()
            return
        self.messages.append(assistant_message(spoken))


def _drop_oldest_turn(messages: list[Message], opening: int) -> bool:
    """Drops a question and its answer, which come after `opening` messages. The last question stays."""
    later = (index for index in range(opening + 1, len(messages)) if messages[index]["role"] == "user")
    end = next(later, None)
    if end is None:
        return False
    del messages[opening:end]
    return True
