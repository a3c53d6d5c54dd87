"""The options that shape one answer: their defaults and checks."""

from __future__ import annotations

import functools
import inspect
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict, TypeVar

from sharpi.errors import InvalidRequestError
from sharpi.settings import arguments
from sharpi.settings.choices import MIN_P, TEMPERATURE, TOP_K, TOP_P

__all__ = ["DEFAULT_OPTIONS", "GenerationOptions", "checked_options", "takes_generation_options"]

F = TypeVar("F", bound=Callable[..., Any])

_MOST_SEED = (1 << 64) - 1


class GenerationOptions(TypedDict, total=False):
    """The keyword arguments of every method that generates; `DEFAULT_OPTIONS` has their defaults.

    max_tokens: the most tokens to generate; `None` leaves the end to the model and the context. temperature: 0 always
    takes the most likely token. top_k, top_p, min_p: keep the k most likely tokens (0: all), the most likely ones that
    reach this probability together, and those at least this likely relative to the most likely one.
    repetition_penalty, presence_penalty, frequency_penalty: for tokens already seen. logit_bias: what to add to the
    logits of tokens; -inf forbids one. seed: the same seed gives the same text; `None` takes a new one. stop: a text,
    or several, before the first of which the answer ends.

    draft: what guesses tokens, so that the model can check several in one step: "mtp", the model's prediction layer;
    "ngram", what followed the last few tokens earlier in the text; "off". `None` is "mtp" if a prediction layer is
    loaded and the plan expects it to pay, else "off". draft_tokens: the most tokens guessed at once, 1 to 7 (default:
    1 for "mtp", 4 for "ngram"); a model with recurrent layers has room for `sequences` less two (see `Model.load`). The
    text is the same with any of these.
    """

    max_tokens: int | None
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float] | None
    seed: int | None
    stop: str | Sequence[str]
    draft: str | None
    draft_tokens: int | None


DEFAULT_OPTIONS: GenerationOptions = {
    "max_tokens": None,
    "temperature": TEMPERATURE,
    "top_k": TOP_K,
    "top_p": TOP_P,
    "min_p": MIN_P,
    "repetition_penalty": 1.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "logit_bias": None,
    "seed": None,
    "stop": (),
    "draft": None,
    "draft_tokens": None,
}


def checked_options(options: GenerationOptions) -> dict[str, Any]:
    """All options, each of its type, with defaults for those left out; `stop` as a tuple. The core checks the ranges of
    the sampling options. Raises `InvalidRequestError`, which names the option, and `TypeError` for an unknown one."""
    unknown = [name for name in options if name not in _CHECKS]
    if unknown:
        raise TypeError(f"{unknown[0]!r} is no option of a generation; there are {', '.join(_CHECKS)}")
    given = {**DEFAULT_OPTIONS, **options}
    return {name: check(name, given[name]) for name, check in _CHECKS.items()}


def _limit(name: str, value: Any) -> int | None:
    count = arguments.maybe(arguments.whole, name, value)
    if count is not None and count < 0:
        raise InvalidRequestError(f"{name} must be 0 or more, not {count}")
    return count


def _seed(name: str, value: Any) -> int | None:
    seed = arguments.maybe(arguments.whole, name, value)
    if seed is not None and not 0 <= seed <= _MOST_SEED:
        raise InvalidRequestError(f"the {name} must be 0 to 2^64 - 1, not {seed}")
    return seed


def _top(name: str, value: Any) -> int:
    count = arguments.whole(name, value)
    if not 0 <= count < 1 << 31:
        raise InvalidRequestError(f"{name} must be 0 to 2^31 - 1, not {count}")
    return count


def _texts(name: str, value: Any) -> tuple[str, ...]:
    texts = (value,) if isinstance(value, str) else value
    if not isinstance(texts, Sequence) or any(not isinstance(part, str) for part in texts):
        raise InvalidRequestError(f"{name} must be a text or a sequence of texts, not {arguments.shown(value)}")
    if any(not part for part in texts):
        raise InvalidRequestError(f"a {name} text is empty")
    return tuple(texts)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "max_tokens": _limit,
    "temperature": arguments.number,
    "top_k": _top,
    **dict.fromkeys(("top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
                    arguments.number),
    "logit_bias": lambda name, value: arguments.maybe(arguments.token_numbers, name, value),
    "seed": _seed,
    "stop": _texts,
    "draft": lambda name, value: arguments.maybe(arguments.text, name, value),
    "draft_tokens": lambda name, value: arguments.maybe(arguments.whole, name, value),
}


def takes_generation_options(method: F) -> F:
    """Lets `inspect.signature` and `help` show the options of a method that takes them as `**options`, as type checkers
    do."""

    @functools.wraps(method)
    def shown(*args: Any, **options: Any) -> Any:
        return method(*args, **options)

    signature = inspect.signature(method)
    kinds = GenerationOptions.__annotations__
    named = [parameter for parameter in signature.parameters.values() if parameter.kind is not parameter.VAR_KEYWORD]
    options = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default,
                                 annotation=getattr(kinds[name], "__forward_arg__", kinds[name]))
               for name, default in DEFAULT_OPTIONS.items()]
    shown.__signature__ = signature.replace(parameters=[*named, *options])  # type: ignore[attr-defined]
    return typing.cast(F, shown)
