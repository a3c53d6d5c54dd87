"""From a turn to the tokens of its prompt."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sharpi.errors import InvalidRequestError, ModelFileError
from sharpi.loading.loaded_model import LoadedModel
from sharpi.reply import refuse_control_tokens, require_template
from sharpi.serve.answering.messages import normalized, tool_descriptions
from sharpi.serve.errors import ApiError
from sharpi.serve.turns import Turn
from sharpi.settings.generation_options import DEFAULT_OPTIONS
from sharpi.text.answers.instructions import instructed
from sharpi.text.chat import ChatTemplate
from sharpi.text.marks import chat_marks

__all__ = ["Prompt", "PromptMaker", "refused"]

# What the server itself gives a template.
_TAKEN = frozenset({"messages", "tools", "self"})

_FIELD = re.compile(r"(?:the )?(" + "|".join(name.replace("_", "[-_ ]") for name in DEFAULT_OPTIONS)
                    + r"|prompt|tools|(?:messages|chat_template_kwargs)[\w.\[\]]*)\b")


@dataclass(frozen=True)
class Prompt:
    """ids: its tokens. text: what they spell. template: that of a chat; `None` for a plain prompt. marks: see
    `Scheduler.submit`."""

    ids: list[int]
    text: str
    template: ChatTemplate | None
    marks: Sequence[int] = ()


class PromptMaker:
    """Makes prompts for one model. Any thread may use it."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._template: ChatTemplate | None = None

    @property
    def template(self) -> ChatTemplate:
        """The model's chat template, which is compiled once."""
        if self._template is None:
            self._template = require_template(self._model)
        return self._template

    def make(self, turn: Turn) -> Prompt:
        """Raises `ApiError` for a turn that the model's template or its tokenizer does not take."""
        try:
            return self._plain(turn) if turn.prompt is not None else self._chat(turn)
        except (InvalidRequestError, ModelFileError) as error:
            raise refused(error) from None

    def _plain(self, turn: Turn) -> Prompt:
        """A client that sends a prompt as one text may write its control tokens itself, and often must."""
        if isinstance(turn.prompt, str):
            return Prompt(self._model.tokenize(turn.prompt, parse_special=True), turn.prompt, None)
        ids = [*(turn.prompt or ())]
        rows = self._model.spec.vocab_size
        wrong = next((token for token in ids if not 0 <= token < rows), None)
        if wrong is not None:
            raise ApiError(400, "invalid_request_error", f"token {wrong} is outside the vocabulary of {rows}",
                           param="prompt")
        return Prompt(ids, self._model.tokenizer.decode(ids, skip_special=False) if turn.echo else "", None)

    def _chat(self, turn: Turn) -> Prompt:
        messages = normalized(turn.messages)
        self._refuse_control_tokens(messages, turn)
        variables = dict(turn.template)
        for name in _TAKEN & variables.keys():
            raise ApiError(400, "invalid_request_error", f"chat_template_kwargs cannot set {name!r}",
                           param=f"chat_template_kwargs.{name}")
        if turn.thinking is not None:  # templates know it by either name
            variables |= {"enable_thinking": turn.thinking, "thinking": turn.thinking}
        text = self._with_tools(messages, variables, turn)
        ids = self._model.tokenize(text, add_special=False, parse_special=True)
        return Prompt(ids, text, self.template, chat_marks(messages, text, ids, self._model.tokenizer))

    def _with_tools(self, messages: list[dict[str, Any]], variables: dict[str, Any], turn: Turn) -> str:
        def text(said: list[dict[str, Any]]) -> str:
            return self._continued(said, variables) if turn.continues else self.template.render(said, **variables)

        if not turn.tools or turn.tool_choice == "none":
            return text(messages)
        tools = tool_descriptions(turn.tools)
        if not self.template.format.needs_instructions:
            variables["tools"] = tools
            return text(messages)
        try:
            return text(instructed(messages, tools))
        except InvalidRequestError:  # some templates refuse a system message
            return text(instructed(messages, tools, system=False))

    def _continued(self, messages: list[dict[str, Any]], variables: Mapping[str, Any]) -> str:
        """The prompt up to the end of the last message's content, so that the answer continues it."""
        last = messages[-1]
        if last["role"] != "assistant" or not last["content"].strip():
            raise ApiError(400, "invalid_request_error",
                           "only an assistant's message with a text can be continued: the last message is none",
                           param="messages")
        text = self.template.render(messages, **{**variables, "add_generation_prompt": False})
        content = last["content"]
        at = text.rfind(content.strip())
        if at < 0:
            raise ApiError(400, "invalid_request_error",
                           "the model's chat template changes the last message's text, so it cannot be continued",
                           param="messages")
        # Most templates strip a message; what is not stripped belongs to it.
        whole = content.lstrip()
        return text[:at + len(whole if text.startswith(whole, at) else content.strip())]

    def _refuse_control_tokens(self, messages: list[dict[str, Any]], turn: Turn) -> None:
        for index, message in enumerate(messages):
            if message["role"] == "assistant":
                continue
            for field in ("content", "name", "tool_call_id"):
                if text := message.get(field):
                    refuse_control_tokens(self._model, f"messages[{index}].{field} spells", text)
        if turn.tools and turn.tool_choice != "none":
            text = json.dumps(tool_descriptions(turn.tools), ensure_ascii=False)
            refuse_control_tokens(self._model, "tools spell", text)
        if turn.template:
            refuse_control_tokens(self._model, "chat_template_kwargs spell",
                                  json.dumps(dict(turn.template), ensure_ascii=False))


def refused(error: Exception) -> ApiError:
    """What a client is told if the engine refuses a request. The field is the one that the message begins with."""
    message = str(error)
    named = _FIELD.match(message)
    # The core words an option as people do: "top-p must be ...".
    param = named[1].replace("-", "_").replace(" ", "_") if named else None
    return ApiError(400, "invalid_request_error", message, param=param)
