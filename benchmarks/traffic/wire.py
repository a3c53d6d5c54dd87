"""HTTP/1.1 spoken byte by byte, by a client that can stop anywhere: in the middle of a header, a body or an answer."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator
from typing import Any

__all__ = ["Answer", "BrokenAnswer", "Connection", "request_bytes"]


class BrokenAnswer(Exception):
    """The connection ended before the answer did, or what came is not HTTP."""


def request_bytes(path: str, body: Any, length: int | None = None) -> bytes:
    """A POST with `body` as JSON. length: what Content-Length says instead of the body's length."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    head = (f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            f"Content-Length: {len(content) if length is None else length}\r\n\r\n")
    return head.encode() + content


class Answer:
    """A response whose headers have come. Read `pieces` to the end before the connection is used again."""

    def __init__(self, status: int, headers: dict[str, str], reader: asyncio.StreamReader) -> None:
        self.status = status
        self.headers = headers
        self._reader = reader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `BrokenAnswer` if it ends too early."""
        try:
            if self.headers.get("transfer-encoding") == "chunked":
                while size := int((await self._reader.readuntil(b"\r\n")).strip(), 16):
                    yield (await self._reader.readexactly(size + 2))[:-2]
                await self._reader.readexactly(2)
            else:
                yield await self._reader.readexactly(int(self.headers["content-length"]))
        except (asyncio.IncompleteReadError, OSError, ValueError, KeyError) as error:
            raise BrokenAnswer(f"the body broke off: {error!r}") from None

    async def body(self) -> bytes:
        return b"".join([piece async for piece in self.pieces()])


class Connection:
    """One connection to a server. small_buffer: the kernel takes little that is not read, as for a slow client."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    @classmethod
    async def open(cls, host: str, port: int, small_buffer: bool = False) -> Connection:
        raw = socket.socket()
        raw.setblocking(False)
        if small_buffer:
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
        await asyncio.get_running_loop().sock_connect(raw, (host, port))
        limit = {"limit": 512} if small_buffer else {}  # of asyncio's own buffer
        return cls(*await asyncio.open_connection(sock=raw, **limit))

    async def send(self, data: bytes) -> None:
        """Raises `BrokenAnswer` if the server has closed the connection."""
        try:
            self._writer.write(data)
            await self._writer.drain()
        except OSError as error:
            raise BrokenAnswer(f"the server closed the connection: {error!r}") from None

    async def answer(self) -> Answer:
        """Waits for a response's headers. Raises `BrokenAnswer`."""
        try:
            head = await self._reader.readuntil(b"\r\n\r\n")
            line, *lines = head.decode("latin-1").split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (row.partition(":") for row in lines if row)}
            return Answer(int(line.split()[1]), headers, self._reader)
        except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, OSError, ValueError, IndexError) as error:
            raise BrokenAnswer(f"no answer: {error!r}") from None

    async def take(self, count: int) -> bytes:
        """At most this many bytes, as they come; none if the server has closed the connection."""
        try:
            return await self._reader.read(count)
        except OSError:
            return b""

    def finish_sending(self) -> None:
        """Half-closes the connection: nothing more is sent, but what comes can be read."""
        with contextlib.suppress(OSError):
            self._writer.write_eof()

    def reset(self) -> None:
        """Ends the connection with a TCP reset, as a killed client's kernel does."""
        raw = self._writer.get_extra_info("socket")
        with contextlib.suppress(OSError):
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self._writer.transport.abort()

    def close(self) -> None:
        self._writer.close()
