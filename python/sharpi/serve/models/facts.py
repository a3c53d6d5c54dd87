"""What a model's file says of it, without loading it."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from pathlib import Path

from sharpi.errors import SharpiError
from sharpi.loading.description import describe, read_tokenizer

__all__ = ["Facts", "facts_of"]


@dataclass(frozen=True)
class Facts:
    """bytes: the size of its files. context: the longest that the model was made for."""

    architecture: str
    bytes: int
    parameters: int
    context: int
    vocabulary: int
    width: int
    chat_template: str | None
    bos_token: str | None
    eos_token: str | None


def facts_of(path: Path) -> Facts | None:
    """`None` for a file that is gone or cannot be run. Reads the header once, as long as the file stays the same."""
    try:
        status = path.stat()
        return _read(path, status.st_mtime_ns, status.st_size)
    except (OSError, SharpiError):
        return None


@functools.lru_cache(64)
def _read(path: Path, modified: int, size: int) -> Facts:
    file, spec = describe(path)
    template = file.metadata.get_str("tokenizer.chat_template", None)
    try:
        tokenizer = read_tokenizer(file, spec)
    except SharpiError:  # a file without one still answers in token ids
        bos = eos = None
    else:
        bos, eos = (None if token is None else tokenizer.token_text(token)
                    for token in (tokenizer.bos_id, tokenizer.eos_id))
    return Facts(file.architecture, file.total_bytes, sum(math.prod(tensor.shape) for tensor in file.tensors),
                 spec.context_length, spec.vocab_size, spec.embedding_length, template, bos, eos)
