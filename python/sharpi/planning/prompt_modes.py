"""How prompts are computed: the default by the kind of GPU, and the batches that go with it.

"exact" follows the contract that decode follows, so every processor gives the same bits. "fast" runs on the GPU's
tensor cores, so the bits depend on the kind of GPU too. The CPU has one arithmetic, which is exact.
"""

from __future__ import annotations

import reprlib

from sharpi.errors import InvalidRequestError
from sharpi.machine.hardware import Gpu
from sharpi.settings.choices import EXACT, FAST, PROMPT_MODES

__all__ = ["choose_prompt", "least_batch", "prompt_tile", "rounding_words"]

_LEAST_EXACT_BATCH = 32  # a batch below it is not worth suggesting

# Modes by compute capability; "fast" for all that are not listed. A kind of GPU whose exact prompts are fast will be
# listed here. The mode decides bits, so it depends on the kind of GPU alone: never on where weights are, on a
# budget, on a prompt's length or on measured rates. A hardware profile does not know the capability, so plans for
# another machine need it there before the first entry is made here.
_BY_COMPUTE_CAPABILITY: dict[str, str] = {}


def prompt_tile() -> int:
    """Tokens of a tile of a fast prompt. A batch holds at least one tile: a smaller one is rounded up, as far as the
    context goes."""
    from sharpi import _core  # late: `sharpi --help` needs no core

    return _core.prompt_tile


def choose_prompt(asked: str | None, found: Gpu | str | None) -> str:
    """How a GPU computes prompts: `asked`, or the default for the GPU `found`. If there is no GPU, `found` says why.
    Raises `InvalidRequestError` for an unknown mode."""
    if asked is not None and asked not in PROMPT_MODES:
        raise InvalidRequestError(
            f"prompt mode {reprlib.repr(asked)} is unknown; there are {' and '.join(PROMPT_MODES)}"
        )
    if asked is not None:
        return asked
    return _BY_COMPUTE_CAPABILITY.get(found.compute_capability, FAST) if isinstance(found, Gpu) else FAST


def least_batch(device: str, prompt: str) -> int:
    """The smallest batch that is worth suggesting. A smaller one is rounded up if prompts are fast."""
    return prompt_tile() if device == "cuda" and prompt == FAST else _LEAST_EXACT_BATCH


def rounding_words(asked: int, batch: int) -> str:
    """The line that says why a batch is not as asked."""
    tile = prompt_tile()
    done = "rounded up" if batch >= tile else "raised"
    whole = "" if batch >= tile else ", the whole context"
    return (f"a batch of {asked} is {done} to {batch}{whole}: fast prompts are computed in tiles of {tile} tokens"
            f" (--prompt {EXACT} takes any batch)")
