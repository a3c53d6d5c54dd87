"""`ServerSettings`: all that `sharpi serve` can be told, from options, from a file, and from the environment."""

from __future__ import annotations

import ipaddress
import math
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from sharpi.errors import InvalidRequestError
from sharpi.planning.planner import parse_amount, parse_spill, parse_vram
from sharpi.settings import arguments
from sharpi.settings.choices import DEFAULT_CACHE_DIR_BYTES, DEVICES, KV_DTYPES, PROMPT_MODES
from sharpi.storage import require_writable

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["DEFAULT_PARALLEL", "KEY_VARIABLE", "ServerSettings", "is_loopback", "key_problem", "read_config"]

KEY_VARIABLE = "SHARPI_API_KEY"
DEFAULT_PARALLEL = 8
_LONGEST_CONFIG = 1 << 20
_LONGEST_KEY = 512
# Arguments of `Model.load` that a setting of the same name gives.
_FOR_LOADING = ("device", "vram", "context", "kv_dtype", "threads", "batch", "cache_tokens", "prompt", "cpu_moe")


@dataclass(frozen=True)
class ServerSettings:
    """models: files, folders of files, or names such as "user/repo:Q4_K_M", each perhaps behind "NAME="; without any,
    the bundled model. port: 0 takes a free one.

    api_keys, api_key_file: a request must have one of these keys, if there are any; the file has one on each line.
    hosts: names by which clients may reach the server, beside its own address and those of the machine itself.
    cors_origins: pages that may use the server from a browser; "*" is any. insecure: the server may listen to other
    machines without asking for a key.

    max_queue: requests that may wait; further ones are refused. max_gap: seconds that an answer should at most wait for
    the prompts of others. parallel: requests that may be answered at a time. memory: bytes, or text such as "24GiB",
    that the loaded models may take together; without it, one model is loaded at a time. request_seconds: after these
    an answer ends; 0 is never. drain_seconds: how long requests may go on when the server ends. stall_seconds: if no
    step ends for so long while answers are being written, /health says so. keep_alive_seconds: how long a connection
    without requests stays open.

    spill: memory for what the KV cache of a model had to give up of prompts, in bytes or text such as "4GiB"; without
    it, what `Scheduler` takes.
    cache_dir: a directory where that goes when it has no room in memory, and when the server ends, for all models;
    cache_dir_size: what it may hold.

    log_prompts: the log holds prompts and answers. preload: the first model is loaded when the server starts.

    The rest are arguments of `Model.load`.
    """

    models: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8080
    api_keys: tuple[str, ...] = ()
    api_key_file: str | None = None
    hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    insecure: bool = False
    max_queue: int = 64
    max_gap: float = 0.2
    parallel: int = DEFAULT_PARALLEL
    memory: int | str | None = None
    request_seconds: float = 3600.0
    drain_seconds: float = 30.0
    stall_seconds: float = 60.0
    keep_alive_seconds: float = 75.0
    spill: int | str | None = None
    cache_dir: str | None = None
    cache_dir_size: int | str = DEFAULT_CACHE_DIR_BYTES
    log_prompts: bool = False
    preload: bool = True
    device: str = "auto"
    vram: int | str | None = None
    context: int | None = None
    kv_dtype: str | None = None
    threads: int | None = None
    batch: int | None = None
    cache_tokens: int | None = None
    prompt: str | None = None
    cpu_moe: bool | None = None

    def __post_init__(self) -> None:
        """Raises `InvalidRequestError`, which names the setting."""
        for field in fields(self):
            value = getattr(self, field.name)
            if value is not None or field.default is not None:
                object.__setattr__(self, field.name, _CHECKS[field.name](field.name, value))
        object.__setattr__(self, "memory", None if self.memory is None else parse_amount("memory", self.memory))
        object.__setattr__(self, "spill", parse_spill(self.spill))
        object.__setattr__(self, "cache_dir_size", parse_amount("cache_dir_size", self.cache_dir_size))
        parse_vram(self.vram)

    @property
    def has_keys(self) -> bool:
        """Whether requests must have a key."""
        return bool(self.api_keys) or self.api_key_file is not None

    @property
    def memory_bytes(self) -> int | None:
        """`memory` as bytes."""
        return self.memory if isinstance(self.memory, int) else None

    @property
    def spill_bytes(self) -> int | None:
        """`spill` as bytes."""
        return self.spill if isinstance(self.spill, int) else None

    def require_safe(self) -> None:
        """Raises `InvalidRequestError` if other machines could use the server without a key."""
        if not (self.insecure or self.has_keys or is_loopback(self.host)):
            raise InvalidRequestError(
                f"--host {self.host} lets other machines in, and there is no key: give --api-key, set {KEY_VARIABLE},"
                " or allow everyone with --insecure")

    def require_cache_dir(self) -> None:
        """Makes the directory for the cache of prompts. Raises `InvalidRequestError` if it cannot be used: otherwise
        that would be known only when a model is loaded."""
        if self.cache_dir is None:
            return
        try:
            os.makedirs(self.cache_dir, mode=0o700, exist_ok=True)
            require_writable(os.path.join(self.cache_dir, "probe"))
        except OSError as error:
            raise InvalidRequestError(f"--cache-dir {self.cache_dir} cannot be used: {error.strerror}") from error

    def load_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `Model.load`."""
        given = {name: getattr(self, name) for name in _FOR_LOADING}
        # Each answer takes one state, and one more serves to go back in a conversation.
        return {**given, "sequences": self.parallel + 1, "ram_budget": self.memory_bytes,
                "spill_bytes": self.spill_bytes}

    def scheduler_arguments(self) -> dict[str, Any]:
        """Keyword arguments for `Scheduler`."""
        return {"max_gap": self.max_gap, "queue": self.max_queue, "running": self.parallel,
                "spill_bytes": self.spill_bytes, "cache_dir": self.cache_dir, "cache_dir_bytes": self.cache_dir_size}

    def changed(self, given: Mapping[str, Any]) -> ServerSettings:
        """These settings with others in place of some. Raises `InvalidRequestError`."""
        return replace(self, **given)


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches `host`."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def key_problem(key: str) -> str | None:
    """What is wrong with an API key, if anything. A header could not carry such a one."""
    if not key:
        return "is empty"
    if len(key) > _LONGEST_KEY:
        return f"has more than {_LONGEST_KEY} characters"
    if not (key.isascii() and key.isprintable()) or " " in key:
        return "has characters other than printable ASCII without spaces"
    return None


def read_config(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The settings in a TOML file. Paths of models are relative to its folder. Raises `InvalidRequestError`."""
    try:
        with open(path, "rb") as file:
            content = file.read(_LONGEST_CONFIG + 1)
        if len(content) > _LONGEST_CONFIG:
            raise InvalidRequestError(f"{path}: is too large to be a configuration")
        given = tomllib.loads(content.decode())
    except OSError as error:
        raise InvalidRequestError(f"{path}: {error.strerror}") from error
    except ValueError as error:
        if isinstance(error, InvalidRequestError):
            raise
        raise InvalidRequestError(f"{path}: is not TOML: {error}") from error
    known = [field.name for field in fields(ServerSettings)]
    for name in given:
        if name not in known:
            raise InvalidRequestError(f"{path}: unknown setting {arguments.shown(name)}; there are {', '.join(known)}")
    try:
        ServerSettings(**given)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"{path}: {error}") from None
    folder = Path(path).parent
    if "models" in given:
        given["models"] = [_beside(folder, model) for model in _texts("models", given["models"])]
    for name in ("api_key_file", "cache_dir"):
        if given.get(name):
            given[name] = str(folder / Path(given[name]).expanduser())
    return given


def _beside(folder: Path, model: str) -> str:
    """A model of a configuration file in `folder`: a path that is there is meant, or else a name."""
    name, equals, path = model.rpartition("=")
    found = folder / Path(path).expanduser()
    return f"{name}{equals}{found}" if found.exists() or path.lower().endswith(".gguf") else model


# --- checks -----------------------------------------------------------------------------------------------------------


def _whole(least: int, most: int) -> Callable[[str, Any], int]:
    def check(name: str, value: Any) -> int:
        count = arguments.whole(name, value)
        if not least <= count <= most:
            raise InvalidRequestError(f"{name} must be {least} to {most}, not {count}")
        return count

    return check


def _seconds(name: str, value: Any) -> float:
    seconds = arguments.number(name, value)
    if not 0 <= seconds <= 1e7 or math.isnan(seconds):
        raise InvalidRequestError(f"{name} must be 0 or more seconds, not {seconds}")
    return seconds


def _positive(name: str, value: Any) -> float:
    seconds = _seconds(name, value)
    if seconds == 0:
        raise InvalidRequestError(f"{name} must be more than 0")
    return seconds


def _filled(name: str, value: Any) -> str:
    text = arguments.text(name, value)
    if not text:
        raise InvalidRequestError(f"{name} is empty")
    return text


def _texts(name: str, value: Any) -> tuple[str, ...]:
    if isinstance(value, str) or not isinstance(value, (list, tuple)):
        raise InvalidRequestError(f"{name} must be a list of texts, not {arguments.shown(value)}")
    return tuple(_filled(name, part) for part in value)


def _keys(name: str, value: Any) -> tuple[str, ...]:
    keys = () if value in ((), []) else tuple(arguments.text(name, key) for key in value) \
        if isinstance(value, (list, tuple)) else _texts(name, value)
    for key in keys:
        if problem := key_problem(key):
            raise InvalidRequestError(f"a key of {name} {problem}")  # and is not shown
    return keys


def _one_of(*known: str) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        if value not in known:
            raise InvalidRequestError(f"{name} must be one of {', '.join(known)}, not {arguments.shown(value)}")
        return str(value)

    return check


def _origins(name: str, value: Any) -> tuple[str, ...]:
    origins = _texts(name, value)
    for origin in origins:
        scheme, separator, rest = origin.partition("://")
        if origin != "*" and (not separator or scheme not in ("http", "https") or not rest or "/" in rest):
            raise InvalidRequestError(f"{name}: {arguments.shown(origin)} is no origin, such as https://example.org")
    return origins


def _bytes_or_text(name: str, value: Any) -> int | str:
    return value if isinstance(value, str) else arguments.whole(name, value)


_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "models": _texts, "host": _filled, "port": _whole(0, 65535), "api_keys": _keys, "api_key_file": _filled,
    "hosts": _texts, "cors_origins": _origins, "insecure": arguments.flag, "max_queue": _whole(0, 1 << 16),
    "max_gap": _positive, "parallel": _whole(1, 1024), "memory": _bytes_or_text, "request_seconds": _seconds,
    "drain_seconds": _seconds, "stall_seconds": _positive, "keep_alive_seconds": _positive,
    "log_prompts": arguments.flag, "preload": arguments.flag, "device": _one_of(*DEVICES), "vram": _bytes_or_text,
    "context": _whole(0, 1 << 40), "kv_dtype": _one_of(*KV_DTYPES), "threads": _whole(1, 1024),
    "batch": _whole(1, 65536), "cache_tokens": _whole(1, 1 << 40), "prompt": _one_of(*PROMPT_MODES),
    "cpu_moe": arguments.flag, "spill": _bytes_or_text, "cache_dir": _filled, "cache_dir_size": _bytes_or_text,
}
