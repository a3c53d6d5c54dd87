"""`LoadedModel`: a model that is ready, as sessions use it."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import TypeVar

from sharpi import _core
from sharpi.errors import InvalidRequestError, SharpiError
from sharpi.files.gguf import GgufFile
from sharpi.generation import Meter, Timing
from sharpi.loading.description import read_chat_template, read_tokenizer
from sharpi.planning.expert_stats import ExpertStats
from sharpi.planning.plan import Plan
from sharpi.settings import arguments
from sharpi.text.chat import ChatTemplate
from sharpi.text.tokenizer import Tokenizer

__all__ = ["LoadedModel", "Notice", "teller"]

Notice = Callable[[str], None]
M = TypeVar("M", bound="LoadedModel")

_log = logging.getLogger(__name__)


def teller(notice: Notice | None) -> Notice:
    """Passes lines for people to `notice`, if there is one, and to the log, whose records say whether they were already
    `told`."""
    def tell(line: str) -> None:
        _log.info("%s", line, extra={"told": notice is not None})
        if notice is not None:
            notice(line)

    return tell


class LoadedModel:
    """A file, its description and its plan, with the engine that runs it until the model is closed."""

    def __init__(self, file: GgufFile, spec: _core.Description, engine: _core.Engine, plan: Plan, load_seconds: float,
                 expert_stats: str | None = None, notice: Notice | None = None, notes: Sequence[str] = (),
                 spill_bytes: int | None = None) -> None:
        self.file = file
        self.spec = spec
        self.plan = plan
        self.threads = plan.threads
        self.spill_bytes = spill_bytes  # for schedulers that are not told
        self._load_seconds = load_seconds
        self._notes = tuple(notes)  # on what became of the plan, beside the engine's own
        self._last_meter = Meter(Timing())
        self._engine: _core.Engine | None = engine
        self._tokenizer: Tokenizer | None = None
        self._expert_stats = expert_stats
        self._process = os.getpid()
        self._notice = notice
        self._noticed: set[str] = set()

    def __enter__(self: M) -> M:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        try:
            self.close()
        except SharpiError as unsaved:
            if error is None or self._notice is None:
                raise
            self._notice(str(unsaved))  # the error from inside the block goes on its way

    def close(self) -> None:
        """Releases memory, and writes the expert statistics that were asked for. Sessions that still exist keep the
        memory until they are gone. Raises `InvalidRequestError` if the statistics can no longer be written."""
        engine, self._engine = self._engine, None
        # A forked child's counts are its parent's.
        if engine is not None and self._expert_stats is not None and os.getpid() == self._process:
            stats = ExpertStats.from_engine(engine, self.plan)
            if stats is not None:
                stats.save(self._expert_stats)

    def tell(self, line: str) -> None:
        """Passes `line` to the caller's `notice` and to the log, once."""
        if line not in self._noticed:
            self._noticed.add(line)
            teller(self._notice)(line)

    @property
    def engine(self) -> _core.Engine:
        """The core's engine. Raises `InvalidRequestError` on a closed model."""
        if self._engine is None:
            raise InvalidRequestError("the model is closed")
        return self._engine

    @property
    def context(self) -> int:
        """Tokens that the KV cache has room for: the prompt and the answer without its last token."""
        return self.plan.context

    @property
    def device(self) -> str:
        """Where the model runs: "cpu" or "cuda"."""
        return self.plan.device

    @property
    def device_name(self) -> str:
        """The name of the GPU, or what the CPU kernels are compiled for."""
        return self.engine.device_name

    @property
    def isa(self) -> str:
        """The instruction set that the CPU kernels use: "scalar", "avx2", "avx512" or "amx"."""
        return _core.cpu_isa()

    @property
    def tokenizer(self) -> Tokenizer:
        """The file's tokenizer, built on first use. Raises `ModelFileError` for a file without one."""
        if self._tokenizer is None:
            self._tokenizer = read_tokenizer(self.file, self.spec)
        return self._tokenizer

    @property
    def chat_template(self) -> ChatTemplate | None:
        """The file's chat template, `None` if it has none."""
        return read_chat_template(self.file, self.tokenizer)

    def tokenize(self, text: str, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of `text`. add_special: with BOS and EOS as the model wants them. parse_special: the names of
        control tokens in the text become those tokens."""
        return self.tokenizer.encode(arguments.text("text", text), arguments.flag("add_special", add_special),
                                     arguments.flag("parse_special", parse_special))

    def detokenize(self, ids: Sequence[int]) -> str:
        """The text of token ids, control tokens left out."""
        return self.tokenizer.decode(arguments.token_ids("ids", ids))

    def note_generation(self, meter: Meter) -> None:
        """Makes a generation the one whose figures `Model.stats` has: the one that began last in any session."""
        self._last_meter = meter
