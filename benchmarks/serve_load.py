"""Mixed load on `sharpi serve`, a third of whose clients are killed at random moments: what is lost, and what is left.

    python benchmarks/serve_load.py                      10,000 requests to the bundled model
    python benchmarks/serve_load.py --seconds 3600       an hour of them
        [-m MODEL] [--device cpu] [--clients 24] [--seed 1] [--serve-option=--vram=8GiB ...]

The server runs in a process of its own. Clients ask it by OpenAI's chats, completions and responses, Anthropic's
messages, and Ollama's chats and completions, streamed and not, with JSON schemas and forced tool calls among them. Half
of the clients wait for the whole answer on a connection that they keep; some read slowly; some send what must be
refused. A third are killed in the middle of a header, of the body, before the answer, or in it: their connection is
reset, closed, half-closed, or left open and never read again. The cache has room for a few answers only, so requests
are paused, too.

It fails (exit code 1) if a request that waited has no answer, or another one than the same question before; if a
hostile request is not refused with 4xx; if the server's log has a traceback; or if anything is left at the end: a
request, a connection, pages of the cache (a prompt as long as the cache must fit), or more than 64 MiB of memory beyond
what the server had after a tenth of the load.

Times to the first token and gaps between pieces are those of streams that were read at once. Clients, server and model
share the machine.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from traffic.chat_model import write_chat_model
from traffic.hostile import HOSTILE
from traffic.questions import MODEL, Question, questions
from traffic.server_process import ServerProcess
from traffic.wire import Answer, BrokenAnswer, Connection, request_bytes

CONTEXT = 1024  # tokens of a request, and of the cache
MOST_GROWTH = 64 << 20
SETTLING_SECONDS = 120.0  # what is left after these stays
_QUESTIONS = 120
_PATIENCE = 300.0  # seconds after which a request has no answer
_MOST_ABANDONED = 48  # connections that killed clients have left open
_MOMENTS = ("in the headers", "in the body", "before the answer", "in the answer")
_ENDS = ("reset", "closed", "half-closed", "abandoned")


@dataclass
class Tally:
    """What became of the requests. lost: what must not happen, in words. texts: answers by the question's number.
    first_tokens, gaps: seconds."""

    outcomes: Counter[str] = field(default_factory=Counter)
    queue_full: int = 0
    lost: list[str] = field(default_factory=list)
    texts: dict[int, str] = field(default_factory=dict)
    first_tokens: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def check(self, question: Question, text: str) -> None:
        """An answer has come; it must be the one that the question has always had."""
        before = self.texts.setdefault(question.number, text)
        if text != before:
            self.lost.append(f"question {question.number} ({question.api.name}) was answered {text!r}, before"
                             f" {before!r}")


class Client:
    """Sends one request after another, each as chance will have it."""

    def __init__(self, port: int, asked: list[Question], tally: Tally, draw: random.Random,
                 abandoned: list[Connection]) -> None:
        self._port, self._asked, self._tally, self._draw, self._abandoned = port, asked, tally, draw, abandoned
        self._kept: Connection | None = None

    async def request(self) -> None:
        question, stream, kind = self._draw.choice(self._asked), self._draw.random() < 0.6, self._draw.random()
        try:
            if kind < 0.53:
                await asyncio.wait_for(self._patient(question, stream), _PATIENCE)
            elif kind < 0.58:
                await asyncio.wait_for(self._slow(question), _PATIENCE)
            elif kind < 0.67:
                await asyncio.wait_for(self._hostile(self._draw.choice(list(HOSTILE))), _PATIENCE)
            else:
                await asyncio.wait_for(self._killed(question, stream), _PATIENCE)
        except (BrokenAnswer, OSError, asyncio.TimeoutError) as error:
            self._drop()
            self._lose(f"{question.api.name}, {'streamed' if stream else 'whole'}: {error!r}")

    def close(self) -> None:
        self._drop()

    def _lose(self, what: str) -> None:
        self._tally.outcomes["LOST"] += 1
        self._tally.lost.append(what)

    def _drop(self) -> None:
        if self._kept is not None:
            self._kept.close()
            self._kept = None

    async def _open(self, small_buffer: bool = False) -> Connection:
        return await Connection.open("127.0.0.1", self._port, small_buffer)

    async def _patient(self, question: Question, stream: bool) -> None:
        """Asks until the queue has room, and reads the answer at once."""
        while True:
            if self._kept is None:
                self._kept = await self._open()
            began = time.perf_counter()
            await self._kept.send(request_bytes(question.api.path, question.asked(stream)))
            answer = await self._kept.answer()
            if answer.status != 429:
                break
            await answer.body()
            self._tally.queue_full += 1
            await asyncio.sleep(0.05 + 0.1 * self._draw.random())
        body = await self._read(answer, question, began) if stream else await answer.body()
        self._judge(question, stream, answer.status, body, "answered, " + ("streamed" if stream else "whole"))

    async def _read(self, answer: Answer, question: Question, began: float) -> bytes:
        """The body of a stream, with the times of its pieces."""
        pieces, before = [], None
        async for piece in answer.pieces():
            pieces.append(piece)
            if re.search(question.api.piece, piece):
                now = time.perf_counter()
                if before is None:
                    self._tally.first_tokens.append(now - began)
                else:
                    self._tally.gaps.append(now - before)
                before = now
        return b"".join(pieces)

    def _judge(self, question: Question, stream: bool, status: int, body: bytes, outcome: str) -> None:
        if status != 200:
            return self._lose(f"{question.api.name}: status {status}: {body[:200]!r}")
        try:
            text = question.api.text_of_stream(body) if stream else question.api.text_of_whole(body)
        except (ValueError, KeyError, IndexError, TypeError) as error:
            return self._lose(f"{question.api.name}: no answer ({error!r}): {body[-300:]!r}")
        self._tally.outcomes[outcome] += 1
        self._tally.check(question, text)

    async def _slow(self, question: Question) -> None:
        """Reads a stream in small pieces with pauses."""
        connection = await self._open(small_buffer=True)
        try:
            await connection.send(request_bytes(question.api.path, question.asked(True)))
            answer = await connection.answer()
            pieces = []
            async for piece in answer.pieces():
                pieces.append(piece)
                await asyncio.sleep(0.03 * self._draw.random())
            if answer.status == 429:
                self._tally.outcomes["slow, refused by the full queue"] += 1
            else:
                self._judge(question, True, answer.status, b"".join(pieces), "answered, read slowly")
        finally:
            connection.close()

    async def _hostile(self, name: str) -> None:
        connection = await self._open()
        try:
            with contextlib.suppress(BrokenAnswer):  # it may be refused before all of it is sent
                await connection.send(HOSTILE[name])
            status = (await connection.answer()).status
            if 400 <= status < 500:
                self._tally.outcomes["hostile, refused"] += 1
            else:
                self._lose(f"{name}: status {status}")
        except BrokenAnswer as error:
            self._lose(f"{name}: {error}")
        finally:
            connection.close()

    async def _killed(self, question: Question, stream: bool) -> None:
        moment = self._draw.choice(_MOMENTS)
        connection = await self._open()
        whole = request_bytes(question.api.path, question.asked(stream))
        head = whole.index(b"\r\n\r\n") + 4
        sent = {"in the headers": self._draw.randrange(head - 1), "in the body": self._draw.randrange(head, len(whole))}
        await connection.send(whole[:sent.get(moment, len(whole))])
        if moment == "before the answer":
            await asyncio.sleep(0.05 * self._draw.random())
        elif moment == "in the answer":
            await connection.take(self._draw.randrange(1, 4000))
        self._tally.outcomes[f"killed {moment}"] += 1
        await self._end(connection, self._draw.choice(_ENDS))

    async def _end(self, connection: Connection, how: str) -> None:
        if how == "reset":
            connection.reset()
        elif how == "abandoned":
            self._abandoned.append(connection)
            if len(self._abandoned) > _MOST_ABANDONED:
                self._abandoned.pop(0).reset()
        else:
            if how == "half-closed":
                connection.finish_sending()
                while await connection.take(1 << 16):  # until the server closes its half
                    pass
            connection.close()


async def under_load(server: ServerProcess, arguments: argparse.Namespace, tally: Tally) -> int:
    """Sends the load. Returns the server's memory after a tenth of it, in bytes."""
    draw, asked = random.Random(arguments.seed), questions(_QUESTIONS, arguments.seed)
    until = None if arguments.seconds is None else time.monotonic() + arguments.seconds
    abandoned: list[Connection] = []
    clients = [Client(server.port, asked, tally, random.Random(draw.random()), abandoned)
               for _ in range(arguments.clients)]
    begun, warm = 0, 0

    def next_one() -> bool:
        nonlocal begun, warm
        left = arguments.requests - begun if until is None else until - time.monotonic()
        if not warm and left <= 0.9 * (arguments.requests if until is None else arguments.seconds):
            warm = server.resident_bytes()
        begun += 1
        return left > 0

    async def work(client: Client) -> None:
        while next_one():
            await client.request()
        client.close()

    await asyncio.gather(*map(work, clients))
    for connection in abandoned:
        connection.close()
    await asyncio.sleep(0)
    return warm


def leftovers(server: ServerProcess) -> list[str]:
    """What is still there although nobody asks for anything."""
    def found() -> list[str]:
        gauges = server.gauges()
        names = ("sharpi_requests_waiting", "sharpi_requests_preparing", "sharpi_requests_running")
        left = [f"{name} is {gauges[name]:.0f}" for name in names if gauges[name]]
        if busy := server.busy_slots():
            left.append(f"{busy} slots are busy")
        if connections := server.connections():
            left.append(f"{connections} connections are open")
        return left

    deadline = time.monotonic() + SETTLING_SECONDS
    while (left := found()) and time.monotonic() < deadline:
        time.sleep(0.1)
    health = httpx.get(f"{server.url}/health")
    if health.status_code != 200:
        left.append(f"/health says {health.text}")
    body = {"model": MODEL, "prompt": [1] * (CONTEXT - 1), "max_tokens": 1}
    whole = httpx.post(f"{server.url}/v1/completions", json=body, timeout=_PATIENCE)
    if whole.status_code != 200:
        left.append(f"the cache is not whole: a prompt as long as it is answered {whole.text}")
    if "Traceback" in server.log():
        left.append(f"the server's log has a traceback: {server.log()[-3000:]}")
    return left


def report(tally: Tally, seconds: float) -> None:
    count = tally.outcomes.total()
    print(f"{count:,} requests in {seconds:.0f} s ({count / seconds:.0f} a second)")
    for outcome, times in sorted(tally.outcomes.items()):
        print(f"  {outcome:32} {times:7,}")
    print(f"  asked again as the queue was full {tally.queue_full:6,}")
    for name, times in (("first token", tally.first_tokens), ("gap between pieces", tally.gaps)):
        if len(times) > 1:
            cut = statistics.quantiles(times, n=100, method="inclusive")
            print(f"{name}: p50 {1e3 * cut[49]:.1f} ms, p99 {1e3 * cut[98]:.1f} ms, worst {1e3 * max(times):.0f} ms")


def main(given: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-m", "--model", type=Path, help="with a chat template; without it, the bundled model")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seconds", type=float, help="for how long, whatever --requests says")
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--serve-option", action="append", default=[], help="further option of `sharpi serve`")
    arguments = parser.parse_args(given)
    tally = Tally()
    with tempfile.TemporaryDirectory() as folder:
        model = arguments.model or Path(folder) / "story.gguf"
        if arguments.model is None:
            write_chat_model(model)
        options = ["-m", f"{MODEL}={model}", "--device", arguments.device, "-c", str(CONTEXT), "--cache-tokens",
                   str(CONTEXT), "--parallel", "8", "--max-queue", "16", *arguments.serve_option]
        with ServerProcess(options, Path(folder) / "log") as server:
            started = time.perf_counter()
            warm = asyncio.run(under_load(server, arguments, tally))
            report(tally, time.perf_counter() - started)
            left, memory = leftovers(server), server.resident_bytes()
            gauges = server.gauges()
    print(f"the server's memory: {warm / 2**20:.1f} MiB after a tenth, {memory / 2**20:.1f} MiB at the end;"
          f" {gauges.get('sharpi_pauses_total', 0):,.0f} pauses")
    if memory > warm + MOST_GROWTH:
        left.append(f"the server's memory has grown by {(memory - warm) / 2**20:.0f} MiB")
    if tally.lost or left:
        sys.exit("\n".join([*tally.lost[:20], *left]))
    print("nothing is lost, and nothing is left: no request, no slot, no connection, no page")


if __name__ == "__main__":
    main()
