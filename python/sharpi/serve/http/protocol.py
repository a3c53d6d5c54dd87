"""HTTP/1.1 on one connection: uvicorn's, with limits on headers, which its fast parser lacks."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from sharpi.serve.http import limits

__all__ = ["BoundedProtocol"]

_BODY = (b'{"error": {"message": "the headers are larger than %d bytes", "type": "invalid_request_error",'
         b' "param": null, "code": "headers_too_large"}}' % limits.HEADER_BYTES)
_REFUSAL = (b"HTTP/1.1 431 Request Header Fields Too Large\r\ncontent-type: application/json\r\ncontent-length: %d\r\n"
            b"connection: close\r\n\r\n%s" % (len(_BODY), _BODY))


class BoundedProtocol(HttpToolsProtocol):
    """Refuses headers that are too large, however they arrive, and closes connections whose headers do not come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_headers = True  # of a request that has begun, or is the first
        self._waiting = 0        # bytes in earlier pieces of headers that are not complete
        self._header_bytes = 0
        self._header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_timer()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # A header is told of when it is whole; until then it could grow without end.
        if self._in_headers and self._waiting > limits.HEADER_BYTES:
            return self._refuse()
        super().data_received(data)
        self._waiting = self._waiting + len(data) if self._in_headers else 0

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._in_headers, self._header_bytes, self._waiting = True, 0, 0
        self._start_timer()

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        self._header_bytes += len(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        super().on_header(name, value)
        self._header_bytes += len(name) + len(value) + 4

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_headers = False
        if self._header_bytes > limits.HEADER_BYTES:
            return self._refuse()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        if not self._refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        if not self._refused:
            super().on_message_complete()

    @property
    def _refused(self) -> bool:
        """Whether this request was refused before it had a cycle that could take its body."""
        return self._header_bytes > limits.HEADER_BYTES

    def _refuse(self) -> None:
        if not self.transport.is_closing():
            self.transport.write(_REFUSAL)
            self.transport.close()

    def _start_timer(self) -> None:
        self._stop_timer()
        self._header_timer = self.loop.call_later(limits.HEADER_SECONDS, self.transport.close)

    def _stop_timer(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None
