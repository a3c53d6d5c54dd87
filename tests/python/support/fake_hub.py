"""A small Hub on the loopback address: what `huggingface_hub` and Sharpi ask of the real one, and its ways to fail.

Files lie behind a redirect to another origin, as on the real Hub, which must not see the token.
"""

from __future__ import annotations

import hashlib
import json
import threading
import time
import urllib.parse
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import NamedTuple

__all__ = ["FakeHub", "Repo", "Request"]

_BLOCK = 64 << 10


class Request(NamedTuple):
    """A request that was made."""

    method: str
    path: str
    range: str | None
    token: str | None


@dataclass
class Repo:
    """A repository: its files by path, and the access to it. Files are served from disk, in part or whole."""

    files: dict[str, Path]
    commit: str = "1" * 40
    token: str | None = None  # needed to see it at all
    gated: bool = False
    hashes: dict[str, str] = field(default_factory=dict)  # of files too large to be read whole
    not_lfs: bool = False  # small files that git itself keeps

    def hash_of(self, path: str) -> str:
        """The file's etag: SHA-256, or git's hash."""
        if path not in self.hashes:
            data = self.files[path].read_bytes()
            self.hashes[path] = (hashlib.sha1(b"blob %d\0" % len(data) + data) if self.not_lfs
                                 else hashlib.sha256(data)).hexdigest()
        return self.hashes[path]


class FakeHub:
    """The server; use it in a `with` block. Attributes say how it misbehaves."""

    def __init__(self) -> None:
        self.repos: dict[str, Repo] = {}
        self.requests: list[Request] = []
        self.abort_after: int | None = None  # bytes of a file after which a connection is cut
        self.aborts = 0  # how often that happens still
        self.corrupt = False  # the last byte of each file is another one
        self.no_ranges = False
        self.pause = 0.0  # seconds between blocks
        self.sent = 0  # bytes of files
        self.broken_with: int | None = None  # status of all answers about repositories
        self.not_a_hub = False
        self.said_of_files: dict[str, object] = {}  # what the list of files says of each instead
        self.files_broken_with: int | None = None
        hub = self

        class Handler(_Handler):
            fake = hub

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        port = self._server.server_address[1]
        self.url = f"http://127.0.0.1:{port}"
        self.other_origin = f"http://localhost:{port}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    def __enter__(self) -> FakeHub:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def asked(self, part: str, method: str = "GET") -> list[Request]:
        """The requests whose path has `part` in it."""
        return [request for request in self.requests if part in request.path and request.method == method]


class _Handler(BaseHTTPRequestHandler):
    fake: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        authorization = self.headers.get("Authorization")
        token = authorization.removeprefix("Bearer ") if authorization else None
        path = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path)
        self.fake.requests.append(Request(self.command, path, self.headers.get("Range"), token))
        parts = path.strip("/").split("/")
        if parts[0] == "cdn":
            self._file("/".join(parts[1:3]), "/".join(parts[3:]))
        elif parts[:2] == ["api", "models"]:
            self._info("/".join(parts[2:4]), "/".join(parts[5:]) or "main", token)
        elif len(parts) > 4 and parts[2] == "resolve":
            self._resolve("/".join(parts[:2]), parts[3], "/".join(parts[4:]), token)
        else:
            self._refuse(404)

    def _refuse(self, status: int, code: str = "") -> None:
        body = b'{"error": "refused"}'
        self.send_response(status)
        if code:
            self.send_header("X-Error-Code", code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def _repo(self, name: str, revision: str, token: str | None) -> Repo | None:
        """The repository, or `None` after a refusal was sent."""
        repo = self.fake.repos.get(name)
        if self.fake.broken_with is not None:
            self._refuse(self.fake.broken_with)
        elif repo is None or (repo.token is not None and token != repo.token):
            self._refuse(404 if token else 401, "RepoNotFound")
        elif revision not in ("main", repo.commit):
            self._refuse(404, "RevisionNotFound")
        else:
            return repo
        return None

    def _info(self, name: str, revision: str, token: str | None) -> None:
        repo = self._repo(name, revision, token)
        if repo is None:
            return
        siblings = []
        for path, file in repo.files.items():
            sibling = {"rfilename": path, "size": file.stat().st_size, "blobId": repo.hash_of(path)[:40]}
            if not repo.not_lfs:
                sibling["lfs"] = {"sha256": repo.hash_of(path), "size": file.stat().st_size, "pointerSize": 134,
                                  **self.fake.said_of_files}
            siblings.append(sibling)
        body = json.dumps({"id": name, "sha": repo.commit, "siblings": siblings, "private": False, "tags": [],
                           "downloads": 0, "likes": 0}).encode()
        if self.fake.not_a_hub:
            body = b"<html>please log in</html>"
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def _resolve(self, name: str, revision: str, path: str, token: str | None) -> None:
        repo = self._repo(name, revision, token)
        if repo is None:
            return
        if path not in repo.files:
            self._refuse(404, "EntryNotFound")
        elif repo.gated:
            self._refuse(403 if token else 401, "GatedRepo")
        else:
            etag = repo.hash_of(path)
            self.send_response(302)
            self.send_header("Location", f"{self.fake.other_origin}/cdn/{name}/{urllib.parse.quote(path)}")
            self.send_header("X-Repo-Commit", repo.commit)
            self.send_header("X-Linked-Etag", f'"{etag}"')
            self.send_header("X-Linked-Size", str(repo.files[path].stat().st_size))
            if path.endswith(".gguf"):
                # It could be had through Xet too, which must not be needed.
                self.send_header("X-Xet-Hash", "0" * 64)
                self.send_header("Link", f'<{self.fake.other_origin}/xet-token>; rel="xet-auth"')
            self.send_header("Content-Length", "0")
            self.end_headers()

    def _file(self, name: str, path: str) -> None:
        if self.fake.files_broken_with is not None:
            self._refuse(self.fake.files_broken_with)
            return
        file = self.fake.repos[name].files[path]
        size = file.stat().st_size
        start, end = 0, size
        asked = self.headers.get("Range")
        if asked and not self.fake.no_ranges:
            first, _, last = asked.removeprefix("bytes=").partition("-")
            start, end = int(first), min(size, int(last) + 1 if last else size)
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{end - 1}/{size}")
        else:
            self.send_response(200)
        self.send_header("Content-Length", str(end - start))
        self.end_headers()
        try:
            self._send(file, start, end, size)
        except OSError:
            self.close_connection = True  # whoever asked has enough

    def _send(self, file: Path, start: int, end: int, size: int) -> None:
        fake = self.fake
        sent = 0
        with file.open("rb") as stream:
            stream.seek(start)
            while start + sent < end:
                block = stream.read(min(_BLOCK, end - start - sent))
                if fake.corrupt and start + sent + len(block) == size:
                    block = block[:-1] + bytes([block[-1] ^ 1])
                if fake.aborts and fake.abort_after is not None and sent + len(block) > fake.abort_after:
                    fake.aborts -= 1
                    self.wfile.write(block[: fake.abort_after - sent])
                    self.wfile.flush()
                    self.close_connection = True
                    return
                self.wfile.write(block)
                sent += len(block)
                fake.sent += len(block)
                if fake.pause:
                    self.wfile.flush()
                    time.sleep(fake.pause)
