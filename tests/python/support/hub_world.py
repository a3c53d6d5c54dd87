"""What the tests of models by name share: a Hub with a few models, and programs that may reach nothing but it."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from fake_hub import FakeHub, Repo
from fake_weights import MACHINE
from tiny_models import MODELS, write

from sharpi.loading.description import BUNDLED_MODEL

__all__ = ["PYTHON", "SHARPI", "World", "large", "split", "story", "world"]

# Put into every program's start: whoever wants to reach another host fails, and is written down.
GUARD = """
import os, sys

def refuse(event, arguments):
    if event == "socket.getaddrinfo":
        host = arguments[0]
    elif event == "socket.connect" and isinstance(arguments[1], tuple):
        host = arguments[1][0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host not in ("127.0.0.1", "localhost", "::1", None):
        with open(os.environ["REACHED_OUT"], "a") as log:
            log.write(f"{event} {host}\\n")
        raise OSError(f"the test forbids to reach {host}")

sys.addaudithook(refuse)
"""

# Runs a snippet instead of the command, in the same surroundings.
PYTHON = [sys.executable, "-c"]
SHARPI = [sys.executable, "-c", "from sharpi.cli import main; main(prog_name='sharpi')"]


class World:
    """A Hub, an empty cache, and programs that know no other."""

    def __init__(self, hub: FakeHub, folder: Path) -> None:
        self.hub = hub
        self.folder = folder
        self.cache = folder / "hf" / "hub"
        self.reached_out = folder / "reached-out"
        self.profile = folder / "machine.json"
        (folder / "guard").mkdir()
        (folder / "guard" / "sitecustomize.py").write_text(GUARD)
        MACHINE.save(self.profile)
        forgotten = re.compile("HF_|HUGGING|SHARPI_|.*_PROXY$|.*_proxy$|NO_COLOR|TERM$|XDG_CACHE_HOME|TRANSFORMERS")
        self.environment = {key: value for key, value in os.environ.items() if not forgotten.match(key)} | {
            "HF_ENDPOINT": hub.url, "HF_HOME": str(folder / "hf"), "XDG_CACHE_HOME": str(folder / "xdg"),
            "HOME": str(folder), "PYTHONPATH": str(folder / "guard"), "REACHED_OUT": str(self.reached_out),
            "HF_HUB_DOWNLOAD_TIMEOUT": "5", "TERM": "xterm"}

    def start(self, *arguments: str, program: list[str] = SHARPI, **environment: str) -> subprocess.Popen:
        return subprocess.Popen([*program, *arguments], env=self.environment | environment, cwd=self.folder, text=True,
                                stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler))

    def run(self, *arguments: str, code: int = 0, program: list[str] = SHARPI, **environment: str) -> tuple[str, str]:
        """What a command prints on standard output and standard error."""
        process = self.start(*arguments, program=program, **environment)
        out, err = process.communicate(timeout=120)
        assert process.returncode == code, f"{process.returncode}\n{out}\n{err}"
        assert "Traceback" not in err
        return out, err

    def refused(self, *arguments: str, **environment: str) -> str:
        """The one line of an error, after lines that only inform."""
        out, err = self.run(*arguments, code=2, **environment)
        *notices, last = err.splitlines()
        assert out == "" and last.startswith("sharpi: error: ")
        assert all(line.startswith("sharpi: ") and "error" not in line for line in notices)
        return last.removeprefix("sharpi: error: ")

    def snapshot(self, repo: str = "user/story") -> Path:
        return self.cache / f"models--{repo.replace('/', '--')}" / "snapshots" / self.hub.repos[repo].commit

    def blobs(self, repo: str = "user/story") -> dict[str, int]:
        """Sizes of what the cache has of a repository, by name."""
        return {path.name: path.stat().st_size
                for path in (self.cache / f"models--{repo.replace('/', '--')}" / "blobs").iterdir()}

    def forget_requests(self) -> None:
        self.hub.requests.clear()


@pytest.fixture()
def world(tmp_path: Path) -> Iterator[World]:
    with FakeHub() as hub:
        world = World(hub, tmp_path)
        yield world
        assert not world.reached_out.exists(), world.reached_out.read_text()


@pytest.fixture()
def story(world: World) -> World:
    """user/story has the bundled model under the name of Q4_K_M, and another one."""
    other = write(world.folder / "served-tiny.gguf", MODELS["llama"])
    world.hub.repos["user/story"] = Repo({"README.md": Path(__file__), "story-Q4_K_M.gguf": BUNDLED_MODEL,
                                          "story-Q8_0.gguf": other, "mmproj-story-Q4_K_M.gguf": other})
    return world


@pytest.fixture()
def split(world: World) -> World:
    """user/split has a model of three and more parts in a folder."""
    folder = world.folder / "served" / "Q4_0"
    folder.mkdir(parents=True)
    write(folder / "tiny-Q4_0.gguf", MODELS["llama"], split_max_tensors=8)
    world.hub.repos["user/split"] = Repo({f"Q4_0/{path.name}": path for path in sorted(folder.iterdir())})
    assert len(world.hub.repos["user/split"].files) >= 3
    return world


def large_model(path: Path) -> int:
    """A file with the header of a model of several GiB, which its vocabulary makes longer than the first range, and
    without its tensors; its size."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 32, "context_length": 8192, "embedding_length": 4096,
                       "feed_forward_length": 14336, "attention.head_count": 32, "attention.head_count_kv": 8,
                       "rope.dimension_count": 128}.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_name("large")
    writer.add_tokenizer_model("none")
    writer.add_token_list([f"a token with a rather long text, number {index}" for index in range(96000)])
    matrix, total = gguf.GGMLQuantizationType.Q4_0, 0

    def tensor(name: str, *shape: int, plain: bool = False) -> None:
        nonlocal total
        count = int(np.prod(shape))
        size = count * 4 if plain else count // 32 * 18
        if plain:
            writer.add_tensor_info(name, shape, np.dtype(np.float32), size)
        else:
            writer.add_tensor_info(name, (*shape[:-1], shape[-1] // 32 * 18), np.dtype(np.uint8), size, matrix)
        total += size

    tensor("token_embd.weight", 96000, 4096)
    tensor("output.weight", 96000, 4096)
    tensor("output_norm.weight", 4096, plain=True)
    for layer in range(32):
        for name in ("attn_norm", "ffn_norm"):
            tensor(f"blk.{layer}.{name}.weight", 4096, plain=True)
        for name, rows, columns in (("attn_q", 4096, 4096), ("attn_k", 1024, 4096), ("attn_v", 1024, 4096),
                                    ("attn_output", 4096, 4096), ("ffn_gate", 14336, 4096), ("ffn_up", 14336, 4096),
                                    ("ffn_down", 4096, 14336)):
            tensor(f"blk.{layer}.{name}.weight", rows, columns)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    header = path.stat().st_size
    assert header > 2 << 20
    size = -(-header // 32) * 32 + total
    os.truncate(path, size)
    return size


@pytest.fixture()
def large(world: World) -> World:
    """user/large has a model of several GiB; its tests need only the header."""
    path = world.folder / "served-large.gguf"
    large_model(path)
    world.hub.repos["user/large"] = Repo({"large-Q4_0.gguf": path}, hashes={"large-Q4_0.gguf": "a" * 64})
    return world
