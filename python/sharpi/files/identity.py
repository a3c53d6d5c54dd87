"""Tells models apart by their weights, without reading all of them."""

from __future__ import annotations

import hashlib
import os

from sharpi.files.gguf import GgufFile

__all__ = ["weights_identity"]

_SAMPLE = 4096


def weights_identity(file: GgufFile) -> str:
    """A digest of the model's files: their headers, a sample of each tensor's beginning, middle and end, and their
    sizes and the times when they were last written. Files that differ only where no sample is differ in those times;
    a copy of a file that does not keep its time counts as another model. Raises `OSError` if a file is gone."""
    digest = hashlib.sha256()
    for part, path in enumerate(file.paths):
        tensors = [tensor for tensor in file.tensors if tensor.file == part]
        with path.open("rb") as source:
            status = os.fstat(source.fileno())
            digest.update(repr((status.st_size, status.st_mtime_ns, len(tensors))).encode())
            digest.update(source.read(min((tensor.offset for tensor in tensors), default=status.st_size)))
            for tensor in tensors:
                for begin in (0, tensor.nbytes // 2, max(tensor.nbytes - _SAMPLE, 0)):
                    source.seek(tensor.offset + begin)
                    digest.update(source.read(min(_SAMPLE, tensor.nbytes - begin)))
    return digest.hexdigest()
