"""Grammars are compiled by a process of its own first.

A hostile grammar can exhaust the stack of the library's compiler, which ends the process, or keep it busy without end,
which no limit of the library prevents. A trial tells so, and costs a millisecond for an ordinary grammar. Run as a
module, this is that process.
"""

from __future__ import annotations

import json
import queue
import subprocess
import sys
import threading
from typing import IO, Any

from sharpi.constraints.library import llguidance, parser_limits
from sharpi.errors import InvalidRequestError

__all__ = ["try_grammar"]

_SECONDS = 1.0
_STARTING_SECONDS = 30.0
_MEMORY = 1 << 30  # of the process's addresses, above what it has when it starts
_AT_ONCE = threading.BoundedSemaphore(2)
_idle: queue.SimpleQueue[_Trial] = queue.SimpleQueue()


def try_grammar(grammar: str) -> None:
    """Raises InvalidRequestError if the library cannot compile the grammar within a second."""
    with _AT_ONCE:
        try:
            trial = _idle.get_nowait()
        except queue.Empty:
            trial = _Trial()
        error = trial.compile(grammar)
        if trial.alive:
            _idle.put(trial)
    if error:
        raise InvalidRequestError(error)


class _Trial:
    """One process. `alive`: it can compile another grammar."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-m", __name__], stdin=subprocess.PIPE,
                                         stdout=subprocess.PIPE, stderr=subprocess.DEVNULL)
        self.alive = True
        self._answer(_STARTING_SECONDS)

    def compile(self, grammar: str) -> str:
        """What is wrong with the grammar; "" if nothing is."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(grammar).encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            self.alive = False
        answer = self._answer(_SECONDS)
        return str(json.loads(answer)) if answer else "compiling it takes more than a second, or all of the stack"

    def _answer(self, seconds: float) -> bytes:
        """The next line; b"" if there is none in time, after which the process is gone."""
        assert self._process.stdout is not None
        killer = threading.Timer(seconds, self._process.kill)
        killer.start()
        line: bytes = self._process.stdout.readline()
        killer.cancel()
        if not line.endswith(b"\n"):
            self._process.kill()
            self._process.communicate()
            self.alive = False
            return b""
        return line


class _Bytes:
    """A vocabulary of single bytes."""

    is_tokenizer_wrapper = True
    bos_token_id = None
    eos_token_id = 256
    special_token_ids = (256,)
    tokens = (*(bytes([byte]) for byte in range(256)), b"<end>")

    def __call__(self, text: bytes | str) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)


def _limit_memory() -> None:
    try:
        import resource
    except ImportError:  # not on this system
        return
    with open("/proc/self/statm") as sizes:
        used = int(sizes.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + _MEMORY, used + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _serve(requests: IO[bytes], answers: IO[bytes]) -> None:
    library = llguidance()
    tokens: Any = library.LLTokenizer(_Bytes())
    _limit_memory()
    answers.write(b"ready\n")
    answers.flush()
    for line in requests:
        matcher = library.LLMatcher(tokens, json.loads(line), log_level=0, limits=parser_limits())
        if not matcher.is_error():
            matcher.compute_bitmask()
        answers.write(json.dumps(matcher.get_error()).encode() + b"\n")
        answers.flush()


if __name__ == "__main__":
    _serve(sys.stdin.buffer, sys.stdout.buffer)
