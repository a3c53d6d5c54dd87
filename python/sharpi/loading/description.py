"""What a model is, read from its file's header: hyperparameters, tokenizer and chat template. No weights are read."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import numpy as np

from sharpi import _core, hub
from sharpi.errors import ModelFileError
from sharpi.files.gguf import GgufFile
from sharpi.files.rope import RopeScaling
from sharpi.text.chat import ChatTemplate
from sharpi.text.tokenizer import Tokenizer

__all__ = ["BUNDLED_MODEL", "describe", "read_chat_template", "read_spec", "read_tokenizer"]

BUNDLED_MODEL = Path(__file__).parents[1] / "bundled" / "story.gguf"

_log = logging.getLogger(__name__)


def describe(path: str | os.PathLike[str] | None = None, *, mtp: bool = True,
             rope: RopeScaling | None = None) -> tuple[GgufFile, _core.Description]:
    """Reads what a model is, without its weights. `None` is the bundled model. If a name such as "user/repo:Q4_K_M" is
    not in the cache, only the header is downloaded. mtp: whether a prediction layer that the file may have is
    part of it. rope: a scaling to use in place of the file's.

    Raises `ModelFileError` for a file that cannot be run, `InvalidRequestError` for a scaling that does not suit it.
    """
    file = GgufFile.open(BUNDLED_MODEL if path is None else hub.look(path).path)
    _log.debug("%s: %s, %d tensors of %d bytes in %d files", file.paths[0], file.architecture, len(file.tensors),
               file.total_bytes, len(file.paths))
    return file, read_spec(file, mtp, rope)


def read_tokenizer(file: GgufFile, spec: _core.Description | None) -> Tokenizer:
    """The file's tokenizer. Raises `ModelFileError` for a file without one, and for one that does not go with the
    model, if there is a model to go with."""
    tokenizer = Tokenizer.from_metadata(file.metadata)
    if spec is not None and tokenizer.vocab_size > spec.vocab_size:
        raise file.error(f"the tokenizer has {tokenizer.vocab_size} tokens, the model only {spec.vocab_size}")
    return tokenizer


def read_chat_template(file: GgufFile, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The file's chat template, `None` if it has none. Raises `ModelFileError` for one that does not parse. Without a
    tokenizer, it is given no begin and end tokens."""
    source = file.metadata.get_str("tokenizer.chat_template", None)
    if source is None:
        return None

    def text(token: int | None) -> str:
        return "" if tokenizer is None or token is None else tokenizer.token_text(token)

    bos, eos = (None, None) if tokenizer is None else (tokenizer.bos_id, tokenizer.eos_id)
    return ChatTemplate(source, text(bos), text(eos), file.paths[0])


def read_spec(file: GgufFile, mtp: bool = True, rope: RopeScaling | None = None) -> _core.Description:
    """What the model is. Raises `ModelFileError` for a file that cannot be run."""
    rows = [(t.name, t.type, list(t.shape), t.file, t.offset, t.nbytes) for t in file.tensors]
    try:
        metadata = file.metadata.scalars() | (rope.metadata(file) if rope else {})
        with np.errstate(invalid="ignore"):  # an odd NaN in an array is no news for people
            return _core.Description(metadata, rows, predictions=mtp)
    except ModelFileError as error:
        raise file.error(str(error)) from None
