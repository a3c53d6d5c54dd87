"""Streams over HTTP: `sharpi serve` beside llama.cpp's `llama-server`, on the same file in one run.

    python benchmarks/http_streams.py -m FILE --llama-server llama.cpp/build/bin/llama-server [--device cuda]
        [--streams 1 4 8 16 32 64] [--tokens 512] [--llama-option=-fa --llama-option=on ...] [--serve-option=...]

For each number of streams, that many requests come at once, each on a connection of its own, with a prompt of
its own of random tokens. Half of --tokens are prompt and half answer, greedy, with no end before that. Both servers are
asked by /v1/completions. `sharpi serve` runs once, with room for the most streams; `llama-server` runs anew for each
number of them, as `-np N`, with as much context. First the scheduler alone is timed, by `sharpi bench --streams`.

The table: tokens a second of all streams, from the first request to the last token; the median stream's, from its first
token on; milliseconds to the first token, and between two pieces of an answer (a piece is a token, but for those that
end within a character, which both servers hold back). "beside the model" is the processor time that the main thread of
`sharpi serve` takes for a token: it does all but run the model. Client and servers share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import httpx
from http_cost import main_thread_seconds
from traffic.server_process import ServerProcess
from traffic.wire import BrokenAnswer, Connection, request_bytes

from sharpi.benchmark.streams import part
from sharpi.files.gguf import GgufFile

_SLACK = 64  # tokens of context beyond those of a request
_STARTING_SECONDS = 300
_PIECE = re.compile(rb'"text":"[^"]')  # both servers write JSON without a space here, or with one
_SPACED = re.compile(rb'"text": "[^"]')
_COUNT = re.compile(rb'"completion_tokens": ?(\d+)')


@dataclass(frozen=True)
class Measured:
    """Tokens a second, and seconds. main_thread: seconds of the processor a token, if they are known."""

    engine: str
    streams: int
    all_streams: float
    one_stream: float | None
    first_median: float
    first_p99: float
    gap_median: float
    gap_p99: float
    main_thread: float | None = None


@dataclass
class _Stream:
    """One answer: its tokens, and when each piece came, in seconds since all were asked for."""

    tokens: int
    times: list[float]


async def _stream(port: int, prompt: list[int], answer: int, began: float) -> _Stream:
    body = {"prompt": prompt, "max_tokens": answer, "temperature": 0, "stream": True, "ignore_eos": True,
            "stream_options": {"include_usage": True}}
    connection = await Connection.open("127.0.0.1", port)
    try:
        await connection.send(request_bytes("/v1/completions", body))
        response = await connection.answer()
        times, end = [], b""
        async for piece in response.pieces():
            now = time.perf_counter() - began
            times += [now] * (len(_PIECE.findall(piece)) + len(_SPACED.findall(piece)))
            end = (end + piece)[-4096:]
    finally:
        connection.close()
    counted = _COUNT.findall(end)
    if response.status != 200 or not counted or not times:
        raise BrokenAnswer(f"status {response.status}: {end.decode(errors='replace')[-300:]}")
    return _Stream(int(counted[-1]), times)


async def _ask(port: int, streams: int, vocabulary: int, tokens: int, seed: int) -> tuple[list[_Stream], float]:
    """All answers, and the seconds that they took together."""
    draw = random.Random(seed)
    prompts = [[draw.randrange(vocabulary) for _ in range(tokens // 2)] for _ in range(streams)]
    began = time.perf_counter()
    found = await asyncio.gather(*(_stream(port, prompt, tokens - tokens // 2, began) for prompt in prompts))
    return found, time.perf_counter() - began


def measure(engine: str, port: int, streams: int, vocabulary: int, tokens: int,
            main_thread: Callable[[], float] | None = None) -> Measured:
    """Raises `BrokenAnswer` if an answer breaks off or has not all of its tokens."""
    asyncio.run(_ask(port, min(streams, 4), vocabulary, 64, 0))  # warms up
    before = main_thread() if main_thread else 0.0
    found, seconds = asyncio.run(_ask(port, streams, vocabulary, tokens, streams))
    used = main_thread() - before if main_thread else None
    count = sum(stream.tokens for stream in found)
    if count != streams * (tokens - tokens // 2):
        raise BrokenAnswer(f"{engine} gave {count} tokens for {streams} requests of {tokens - tokens // 2}")
    firsts = [stream.times[0] for stream in found]
    gaps = [after - before for one in found for before, after in zip(one.times, one.times[1:], strict=False)] or [0.0]
    each = [stream.tokens / max(stream.times[-1] - stream.times[0], 1e-9) for stream in found]
    return Measured(engine, streams, count / seconds, statistics.median(each), part(firsts, 0.5), part(firsts, 0.99),
                    part(gaps, 0.5), part(gaps, 0.99), None if used is None else used / count)


def scheduler_alone(arguments: argparse.Namespace) -> list[Measured]:
    command = [sys.executable, "-m", "sharpi", "bench", "-m", str(arguments.model), "--device", arguments.device,
               "--tokens", str(arguments.tokens), "--json"]
    for streams in arguments.streams:
        command += ["--streams", str(streams)]
    found = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    return [Measured("scheduler", one["streams"], one["tokens_per_second"], None,
                     one["first_token_median"], one["first_token_p99"], one["gap_median"], one["gap_p99"])
            for one in json.loads(found)["streams"]]


def over_http(arguments: argparse.Namespace, vocabulary: int, folder: Path) -> Iterator[Measured]:
    most, each = max(arguments.streams), arguments.tokens + _SLACK
    options = ["-m", str(arguments.model), "--device", arguments.device, "-c", str(each), "--cache-tokens",
               str(most * each), "-np", str(most), "--max-queue", str(most), *arguments.serve_option]
    with ServerProcess(options, folder / "sharpi.log") as server:
        def used() -> float:
            return main_thread_seconds(server.process.pid)

        for streams in arguments.streams:
            yield measure("sharpi serve", server.port, streams, vocabulary, arguments.tokens, used)


@contextlib.contextmanager
def llama_server(arguments: argparse.Namespace, streams: int, log: Path) -> Iterator[int]:
    """Its port. Raises `RuntimeError` with the end of its log if it does not start."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    command = [str(arguments.llama_server), "-m", str(arguments.model), "--host", "127.0.0.1", "--port", str(port),
               "-np", str(streams), "-c", str(streams * (arguments.tokens + _SLACK)),
               "-ngl", "0" if arguments.device == "cpu" else "999", *arguments.llama_option]
    with log.open("wb") as out, subprocess.Popen(command, stdout=out, stderr=out) as server:
        try:
            deadline = time.monotonic() + _STARTING_SECONDS
            while not _is_healthy(port):
                if server.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f"llama-server does not start: {_end_of(log)}")
                time.sleep(0.1)
            yield port
        finally:
            server.terminate()


def _is_healthy(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).status_code == 200
    except httpx.TransportError:
        return False


def _end_of(log: Path) -> str:
    return log.read_text(encoding="utf-8", errors="replace")[-600:]


def of_llama(arguments: argparse.Namespace, vocabulary: int, folder: Path) -> Iterator[Measured]:
    """What fails is told, and the rest goes on: some versions end themselves at what random weights write."""
    log = folder / "llama.log"
    for streams in arguments.streams:
        try:
            with llama_server(arguments, streams, log) as port:
                yield measure("llama-server", port, streams, vocabulary, arguments.tokens)
        except (RuntimeError, BrokenAnswer, OSError) as error:
            print(f"llama-server, {streams} streams: {error}; its log ends: {_end_of(log)}", file=sys.stderr)


def table(rows: Sequence[Measured]) -> str:
    lines = ["| | streams | tokens/s | over llama-server | of the scheduler | a stream's | first token, ms: p50 | p99 |"
             " gap, ms: p50 | p99 | beside the model, us a token |", "| --- " + "| ---: " * 10 + "|"]
    speeds = {(row.engine, row.streams): row.all_streams for row in rows}
    for row in rows:
        def over(engine: str, row: Measured = row) -> float | None:
            other = speeds.get((engine, row.streams))
            return None if other is None or row.engine == engine else row.all_streams / other

        llama, alone = over("llama-server"), over("scheduler")
        cells = [row.engine, f"{row.streams}", f"{row.all_streams:,.0f}", "" if llama is None else f"{llama:.2f}",
                 f"{alone:.1%}" if alone is not None and row.engine == "sharpi serve" else "",
                 "" if row.one_stream is None else f"{row.one_stream:,.1f}",
                 f"{1e3 * row.first_median:.0f}", f"{1e3 * row.first_p99:.0f}", f"{1e3 * row.gap_median:.1f}",
                 f"{1e3 * row.gap_p99:.1f}",
                 "" if row.main_thread is None else f"{1e6 * row.main_thread:.1f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, required=True)
    parser.add_argument("--llama-server", type=Path, help="its binary; without it, Sharpi alone")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--streams", type=int, nargs="+", default=(1, 4, 8, 16, 32, 64))
    parser.add_argument("--tokens", type=int, default=512, help="of each request: half prompt, half answer")
    parser.add_argument("--without-scheduler", action="store_true", help="leaves the first part out")
    parser.add_argument("--serve-option", action="append", default=[], help="further option of `sharpi serve`")
    parser.add_argument("--llama-option", action="append", default=[], help="further option of `llama-server`")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args(given)
    vocabulary = len(GgufFile.open(arguments.model).metadata["tokenizer.ggml.tokens"])
    rows: list[Measured] = [] if arguments.without_scheduler else scheduler_alone(arguments)
    with tempfile.TemporaryDirectory() as folder:
        try:
            rows += over_http(arguments, vocabulary, Path(folder))
            if arguments.llama_server is not None:
                rows += of_llama(arguments, vocabulary, Path(folder))
        finally:
            print(table(rows), flush=True)
    if arguments.json is not None:
        found: list[dict[str, Any]] = [asdict(row) for row in rows]
        arguments.json.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
