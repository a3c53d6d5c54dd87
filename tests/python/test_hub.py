"""Models by name, against a Hub of our own: every command as a program, which may reach nothing but the loopback."""

from __future__ import annotations

import hashlib
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest
from fake_hub import FakeHub, Repo
from fake_weights import MACHINE
from tiny_models import MODELS, write

from sharpi.gguf import GgufFile
from sharpi.model import BUNDLED_MODEL

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
    """A file with the header of a model of several GiB, with a vocabulary that makes it longer than the first range, and
    without its tensors; its size."""
    writer = gguf.GGUFWriter(path, "llama")
    for key, value in {"block_count": 32, "context_length": 8192, "embedding_length": 4096, "feed_forward_length": 14336,
                       "attention.head_count": 32, "attention.head_count_kv": 8, "rope.dimension_count": 128}.items():
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
    """user/large has a model of several GiB, of which nobody needs more than the header."""
    path = world.folder / "served-large.gguf"
    large_model(path)
    world.hub.repos["user/large"] = Repo({"large-Q4_0.gguf": path}, hashes={"large-Q4_0.gguf": "a" * 64})
    return world


# --- pull --------------------------------------------------------------------------------------------------------


def test_pull_puts_the_file_where_other_tools_look(story: World) -> None:
    out, err = story.run("pull", "user/story")
    path = story.snapshot() / "story-Q4_K_M.gguf"
    assert out == f"{path}\n"
    assert err == "sharpi: user/story:Q4_K_M: downloading 14.3 MiB\n"
    assert path.read_bytes() == BUNDLED_MODEL.read_bytes()
    assert path.is_symlink() and path.resolve().name == hashlib.sha256(BUNDLED_MODEL.read_bytes()).hexdigest()
    library = ("import huggingface_hub; print(huggingface_hub.hf_hub_download('user/story', 'story-Q4_K_M.gguf',"
               " local_files_only=True))")
    assert story.run(library, program=PYTHON)[0] == out


def test_the_token_goes_to_the_hub_and_nowhere_else(story: World) -> None:
    story.hub.repos["user/story"].token = "hf_secret"
    story.run("pull", "user/story", HF_TOKEN="hf_secret")
    assert {request.token for request in story.hub.requests if "/cdn/" not in request.path} >= {"hf_secret"}
    assert [request.token for request in story.hub.asked("/cdn/")] == [None]


def test_pull_again_downloads_nothing(story: World) -> None:
    first, _ = story.run("pull", "user/story")
    story.forget_requests()
    again, err = story.run("pull", "user/story")
    assert again == first and err == "sharpi: user/story:Q4_K_M: nothing new to download\n"
    assert story.hub.asked("/cdn/") == []


def test_pull_brings_what_is_newer(story: World) -> None:
    story.run("pull", "user/story:Q8_0")
    newer = write(story.folder / "newer.gguf", MODELS["qwen2"])
    repo = story.hub.repos["user/story"]
    story.hub.repos["user/story"] = Repo({**repo.files, "story-Q8_0.gguf": newer}, commit="2" * 40)
    story.run("inspect", "user/story:Q8_0")  # what is here is used
    assert len(story.blobs()) == 1
    path, _ = story.run("pull", "user/story:Q8_0")
    assert Path(path.strip()).read_bytes() == newer.read_bytes()
    assert json.loads(story.run("inspect", "--json", "user/story:Q8_0")[0])["architecture"] == "qwen2"
    assert json.loads(story.run("inspect", "--json", f"user/story@{'1' * 40}:Q8_0")[0])["architecture"] == "llama"


def test_pull_of_all_parts(split: World) -> None:
    out, err = split.run("pull", "user/split:q4_0")
    names = sorted(split.hub.repos["user/split"].files)
    assert err == f"sharpi: user/split:Q4_0: downloading 0.4 MiB in {len(names)} parts\n"
    assert out == f"{split.snapshot('user/split') / names[0]}\n"
    assert len(GgufFile.open(out.strip()).paths) == len(names)


def test_pull_without_q4_k_m_says_what_it_takes(split: World) -> None:
    assert split.run("pull", "user/split")[1].splitlines()[0] == (
        "sharpi: user/split: there is no Q4_K_M; Q4_0 is taken")


def test_pull_by_file_and_revision(story: World) -> None:
    path = str(story.snapshot() / "story-Q8_0.gguf")
    assert story.run("pull", f"user/story@{'1' * 40}/story-Q8_0.gguf")[0] == f"{path}\n"
    assert story.refused("pull", "user/story@v2") == f"user/story@v2: {story.hub.url}/user/story has no revision v2"


def test_a_file_that_git_itself_keeps_is_checked_too(story: World) -> None:
    story.hub.repos["user/story"].not_lfs = True
    story.run("pull", "user/story:Q8_0")
    assert list(map(len, story.blobs())) == [40]


def test_a_file_that_arrives_damaged_is_removed(story: World) -> None:
    for not_lfs in (False, True):
        story.hub.repos["user/story"] = Repo(story.hub.repos["user/story"].files, not_lfs=not_lfs)
        story.hub.corrupt = True
        assert story.refused("pull", "user/story:Q8_0") == (
            f"user/story:Q8_0: story-Q8_0.gguf arrived damaged (its checksum is not the one that {story.hub.url} gives)"
            " and was removed: try again")
        assert story.blobs() == {} and not (story.snapshot() / "story-Q8_0.gguf").exists()
    story.hub.corrupt = False
    story.run("pull", "user/story:Q8_0")


def test_a_connection_that_is_cut_goes_on(story: World) -> None:
    story.hub.abort_after, story.hub.aborts = 5 << 20, 2
    story.run("pull", "user/story")
    ranges = [request.range for request in story.hub.asked("/cdn/")]
    size = BUNDLED_MODEL.stat().st_size
    assert ranges == [f"bytes={start << 20}-{size - 1}" for start in (0, 5, 10)]


def test_a_connection_that_stays_cut_keeps_what_came(story: World) -> None:
    story.hub.abort_after, story.hub.aborts = 3 << 20, 1
    path = story.hub.repos["user/story"].files["story-Q4_K_M.gguf"]
    story.hub.repos["user/story"].hash_of("story-Q4_K_M.gguf")
    process = story.start("pull", "user/story")
    while story.hub.aborts:
        time.sleep(0.01)
    story.hub.files_broken_with = 503
    out, err = process.communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.splitlines()[-1] == (f"sharpi: error: user/story: {story.hub.url} answers with error 503:"
                                    " try again later")
    (partial, size), = story.blobs().items()
    assert partial.endswith(".incomplete") and size == 3 << 20
    story.hub.files_broken_with = None
    story.forget_requests()
    story.run("pull", "user/story")
    assert [request.range for request in story.hub.asked("/cdn/")] == [f"bytes={3 << 20}-{path.stat().st_size - 1}"]


def test_ctrl_c_keeps_what_came_and_the_next_pull_goes_on(story: World) -> None:
    story.hub.pause = 0.02
    process = story.start("pull", "user/story")
    deadline = time.time() + 60
    while time.time() < deadline:
        time.sleep(0.05)
        try:
            if max(story.blobs().values(), default=0) > 2 << 20:
                break
        except FileNotFoundError:
            pass
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 130 and out == ""
    assert err.splitlines()[-1] == ("sharpi: interrupted; what has come stays, and the same command goes on from there")
    (partial, size), = story.blobs().items()
    assert partial.endswith(".incomplete") and 2 << 20 < size < BUNDLED_MODEL.stat().st_size
    assert story.run("list")[0].splitlines()[1].startswith("user/story (interrupted)")
    story.hub.pause = 0
    story.forget_requests()
    story.run("pull", "user/story")
    assert [request.range.split("-")[0] for request in story.hub.asked("/cdn/")] == [f"bytes={size}"]
    assert (story.snapshot() / "story-Q4_K_M.gguf").read_bytes() == BUNDLED_MODEL.read_bytes()


def test_a_server_without_ranges_starts_over(story: World) -> None:
    story.hub.no_ranges = True
    story.hub.abort_after, story.hub.aborts = 5 << 20, 1
    path, _ = story.run("pull", "user/story")
    assert Path(path.strip()).read_bytes() == BUNDLED_MODEL.read_bytes()


def test_two_pulls_at_once_download_once(story: World) -> None:
    story.hub.pause = 0.01
    pulls = [story.start("pull", "user/story") for _ in range(2)]
    outs = [process.communicate(timeout=120) for process in pulls]
    assert [process.returncode for process in pulls] == [0, 0]
    assert outs[0][0] == outs[1][0] and len(story.hub.asked("/cdn/")) == 1


def test_a_full_disk(story: World) -> None:
    blobs = story.snapshot().parents[1] / "blobs"
    blobs.mkdir(parents=True)
    # What is written there fails as on a disk without room.
    partial = blobs / (story.hub.repos["user/story"].hash_of("story-Q4_K_M.gguf") + ".incomplete")
    partial.symlink_to("/dev/full")
    assert story.refused("pull", "user/story") == (
        f"user/story: the disk with {story.cache} is full; what has come stays, for the next attempt, and HF_HOME names"
        " another place")
    assert len(story.hub.asked("/cdn/")) == 1  # another attempt would not help


def test_too_little_room_is_said_before(large: World) -> None:
    larger = large.folder / "larger.gguf"
    larger.touch()
    os.truncate(larger, 1 << 43)  # 8 TiB, of which the disk holds nothing
    large.hub.repos["user/large"] = Repo({"large-Q4_0.gguf": larger}, hashes={"large-Q4_0.gguf": "a" * 64})
    large.hub.files_broken_with = 404  # so that a test that fails does not fill the disk
    message = large.refused("pull", "user/large")
    assert re.fullmatch(r"user/large: 8192\.00 GiB are to be downloaded, but \S+ has room for only [\d.]+ GiB; HF_HOME"
                        " names another place", message)
    assert large.hub.asked("/cdn/") == []


def test_a_cache_that_cannot_be_written_to(story: World) -> None:
    (story.folder / "hf").write_text("a file where the cache should be")
    assert story.refused("pull", "user/story") == (
        f"user/story: cannot be put into {story.cache}: Not a directory; HF_HOME names another place")


# --- what is refused ---------------------------------------------------------------------------------------------


def test_repositories_that_are_missing_private_or_gated(story: World) -> None:
    url, repo = story.hub.url, story.hub.repos["user/story"]
    missing = f"no such file here, and no such model at {url}, or "
    assert story.refused("pull", "user/none") == f"user/none: {missing}it is private: then set HF_TOKEN"
    repo.token = "hf_secret"
    assert story.refused("pull", "user/story") == f"user/story: {missing}it is private: then set HF_TOKEN"
    assert story.refused("pull", "user/story", HF_TOKEN="hf_other") == (
        f"user/story: {missing}HF_TOKEN may not read it")
    repo.token, repo.gated = None, True
    gated = f"user/story: access is gated: accept its terms at {url}/user/story "
    assert story.refused("pull", "user/story") == f"{gated}and set HF_TOKEN to a token of yours"
    assert story.refused("plan", "user/story", HF_TOKEN="hf_other") == f"{gated}with the account of your token"


@pytest.mark.parametrize("status, said", [
    (500, "answers with error 500: try again later"), (403, "forbids it; the token (HF_TOKEN) may lack the permission"),
    (429, "answers with error 429: try again later"),
])
def test_a_hub_in_trouble(story: World, status: int, said: str) -> None:
    story.hub.broken_with = status
    assert story.refused("pull", "user/story") == f"user/story: {story.hub.url} {said}"


def test_what_is_not_a_hub(story: World) -> None:
    story.hub.not_a_hub = True
    assert story.refused("pull", "user/story") == (
        f"user/story: {story.hub.url} does not answer like a Hub; HF_ENDPOINT names it")


def test_a_hub_does_not_choose_where_files_go(story: World) -> None:
    paths = ("../../../evil-Q4_K_M.gguf", "/tmp/evil-Q4_K_M.gguf", "a/../../evil-Q4_K_M.gguf", "evil\x1b[2J-Q4_K_M.gguf")
    story.hub.repos["user/evil"] = Repo({path: BUNDLED_MODEL for path in paths})
    for command in ("pull", "plan"):
        assert "has no GGUF file of a model" in story.refused(command, "user/evil")
    story.hub.repos["user/evil"] = Repo({"m-Q4_K_M.gguf": BUNDLED_MODEL}, commit="../" * 10 + "evil")
    assert "does not say which commit it has" in story.refused("plan", "user/evil")
    story.hub.repos["user/evil"] = Repo({"m-Q4_K_M.gguf": BUNDLED_MODEL}, hashes={"m-Q4_K_M.gguf": "../../evil"})
    assert "gives no checksum for m-Q4_K_M.gguf" in story.refused("pull", "user/evil")


def test_no_network(story: World) -> None:
    assert re.fullmatch(r"user/story: cannot be read from http://127\.0\.0\.1:9: .*refused.*",
                        story.refused("run", "-m", "user/story", "-p", "x", HF_ENDPOINT="http://127.0.0.1:9"))


def test_a_quant_that_is_not_there(story: World) -> None:
    assert story.refused("run", "-m", "user/story:Q6_K", "-p", "x") == (
        "user/story:Q6_K: the Hub has no Q6_K; it has Q4_K_M, Q8_0")


@pytest.mark.parametrize("arguments", [("plan", "./x.gguf"), ("run", "-m", "user/x.gguf", "-p", "x"), ("inspect", "x"),
                                       ("bench", "-m", "/no/such/file.gguf"), ("plan", "../user/repo")])
def test_paths_with_a_mistake_in_them_ask_no_hub(story: World, arguments: tuple[str, ...]) -> None:
    path = next(argument for argument in arguments[1:] if not argument.startswith("-"))
    assert story.refused(*arguments) == f"{Path(path)}: no such file"
    assert story.hub.requests == []


def test_pull_takes_only_names(story: World) -> None:
    (story.folder / "x.gguf").touch()
    assert story.refused("pull", "x.gguf") == "x.gguf: is a local file; names are user/repo or user/repo:QUANT"
    assert story.refused("pull", "y.gguf") == "y.gguf: is no name of a model; names are user/repo or user/repo:QUANT"


# --- names in a file's place -------------------------------------------------------------------------------------


def test_run_by_name_downloads_once_and_then_needs_no_network(story: World) -> None:
    told = ("-p", "Once upon a time", "-n", "8", "--temp", "0", "--no-stats")
    plain, _ = story.run("run", *told)
    assert story.run("run", "-m", "user/story", *told) == (plain, "sharpi: user/story:Q4_K_M: downloading 14.3 MiB\n")
    story.forget_requests()
    for option in ("-m", "--model", "-hf", "--hf-repo"):
        assert story.run("run", option, "user/story:q4_k_m", *told) == (plain, "")
    assert story.run("run", "-hf", "user/story", *told, HF_HUB_OFFLINE="1") == (plain, "")
    assert story.hub.requests == []


def test_offline_without_the_model(story: World) -> None:
    assert story.refused("run", "-m", "user/story", "-p", "x", HF_HUB_OFFLINE="1") == (
        "user/story: is not in the cache, and HF_HUB_OFFLINE forbids to download it")
    assert story.hub.requests == []


def test_pull_offline_gives_what_is_here(story: World) -> None:
    path, _ = story.run("pull", "user/story:Q8_0")
    story.forget_requests()
    assert story.run("pull", "user/story:Q8_0", HF_HUB_OFFLINE="1") == (
        path, "sharpi: user/story:Q8_0: is in the cache; HF_HUB_OFFLINE forbids to look for a newer one\n")
    assert story.hub.requests == []


def test_another_quant_in_the_cache_is_used_and_named(story: World) -> None:
    story.run("pull", "user/story:Q8_0")
    story.forget_requests()
    assert story.run("inspect", "user/story")[1] == "sharpi: user/story: Q8_0 is taken, which is in the cache\n"
    assert story.hub.requests == []


def test_what_only_an_older_commit_has_is_still_found(story: World) -> None:
    story.run("pull", "user/story:Q8_0")
    story.hub.repos["user/story"] = Repo(story.hub.repos["user/story"].files, commit="2" * 40)
    story.run("pull", "user/story")
    story.forget_requests()
    assert json.loads(story.run("inspect", "--json", "-m", "user/story:Q8_0")[0])["architecture"] == "llama"
    assert story.hub.requests == []


def test_hf_hub_cache_moves_the_cache(story: World) -> None:
    story.run("pull", "user/story:Q8_0", HF_HUB_CACHE=str(story.folder / "elsewhere"))
    assert (story.folder / "elsewhere" / "models--user--story").is_dir() and not story.cache.exists()


def test_a_split_model_of_which_a_part_is_missing_is_not_here(split: World) -> None:
    split.run("pull", "user/split")
    part = sorted((split.snapshot("user/split") / "Q4_0").iterdir())[1]
    part.resolve().unlink()
    split.forget_requests()
    split.run("pull", "user/split")
    assert len(split.hub.asked("/cdn/")) == 1
    assert len(GgufFile.open(part).tensors) == len(GgufFile.open(next(iter(
        split.hub.repos["user/split"].files.values()))).tensors)


def test_python_loads_by_name(story: World) -> None:
    program = ("from sharpi import Model\n"
               "seen, lines = [], []\n"
               "with Model.load('user/story:Q4_K_M', context=64, device='cpu', notice=lines.append,\n"
               "                progress=lambda done, total: seen.append((done, total))) as model:\n"
               "    print(''.join(token.text for token in model.generate('Once', max_tokens=4, temperature=0)))\n"
               "print(lines[0], seen[0][1])")
    text, told = story.run(program, program=PYTHON)[0].splitlines()
    assert text and told == f"user/story:Q4_K_M: downloading 14.3 MiB {BUNDLED_MODEL.stat().st_size}"


def test_a_path_in_python_is_never_a_name(story: World) -> None:
    program = ("from pathlib import Path\nfrom sharpi import Model, ModelFileError\n"
               "try: Model.load(Path('user/story'))\n"
               "except ModelFileError as error: print(error)")
    assert story.run(program, program=PYTHON)[0] == "user/story: no such file\n"
    assert story.hub.requests == []


# --- plan and inspect before the download ------------------------------------------------------------------------


def test_plan_before_the_download_needs_the_header_alone(large: World) -> None:
    path = large.hub.repos["user/large"].files["large-Q4_0.gguf"]
    plan = ("--profile", str(large.profile), "-t", "4", "--vram", "4GiB", "--device", "cuda")
    here, _ = large.run("plan", str(path), *plan)
    out, err = large.run("plan", "user/large:Q4_0", *plan)
    size = path.stat().st_size
    assert out == f"{here}\nNot downloaded yet: {size / 2**30:.2f} GiB; `sharpi pull user/large:Q4_0` gets it.\n"
    assert err == "" and "Predicted:" in out and "It fits with" in out
    received = sum(int(last) + 1 - int(first) for first, last in (
        request.range.removeprefix("bytes=").split("-") for request in large.hub.asked("/cdn/")))
    assert 2 << 20 < received <= 8 << 20
    assert not list(large.cache.rglob("*.gguf"))
    kept, = (large.folder / "xdg" / "sharpi" / "headers").rglob("large-Q4_0.gguf")
    assert kept.stat().st_size == size and kept.stat().st_blocks * 512 < 16 << 20
    large.forget_requests()
    assert large.run("plan", "-hf", "user/large", *plan)[0] == out
    assert large.hub.asked("/cdn/") == []


def test_a_plan_as_json_says_it_aside_and_is_carried_out_after_the_download(story: World) -> None:
    arguments = ("--device", "cpu", "-c", "64", "-t", "2", "--json")
    out, err = story.run("plan", "user/story", *arguments, "--profile", str(story.profile))
    assert err == "sharpi: Not downloaded yet: 14.3 MiB; `sharpi pull user/story:Q4_K_M` gets it.\n"
    (story.folder / "plan.json").write_text(out)
    text, _ = story.run("run", "-m", "user/story", "--plan", "plan.json", "-p", "Once", "-n", "4", "--no-stats")
    assert text.startswith("Once") and len(text) > len("Once\n")


def test_plan_of_a_split_model_reads_the_headers_of_all_parts(split: World) -> None:
    parts = sorted(map(str, split.hub.repos["user/split"].files.values()))
    here = json.loads(split.run("inspect", "--json", parts[0])[0])
    out, err = split.run("inspect", "--json", "user/split")
    there = json.loads(out)
    assert there["files"] == [f"user/split/{path}" for path in sorted(split.hub.repos["user/split"].files)]
    differing = {key for key in here if here[key] != there[key]}
    assert differing == {"files", "obstacle", "obstacles"}
    assert there["obstacle"] == here["obstacle"].replace(str(Path(parts[0]).parent.parent), "user/split")
    assert "Not downloaded yet" in err and not list(split.cache.rglob("*.gguf"))


def test_inspect_before_the_download(large: World) -> None:
    out, _ = large.run("inspect", "user/large:Q4_0")
    assert "file           user/large/large-Q4_0.gguf\n" in out
    assert "user/large/large-Q4_0.gguf: the file has no tokenizer" in out and "tokenizer.ggml.tokens" in out
    assert out.splitlines()[-1].startswith("Not downloaded yet: 4.")


def test_what_was_downloaded_in_part_is_not_counted_again(story: World) -> None:
    blobs = story.snapshot().parents[1] / "blobs"
    blobs.mkdir(parents=True)
    (blobs / (story.hub.repos["user/story"].hash_of("story-Q4_K_M.gguf") + ".incomplete")).write_bytes(bytes(10 << 20))
    assert "Not downloaded yet: 4.3 MiB;" in story.run("inspect", "user/story")[0]


def test_plan_of_a_server_without_ranges_still_reads_no_more_than_the_header(large: World) -> None:
    large.hub.no_ranges = True
    assert "Not downloaded yet" in large.run("inspect", "user/large")[0]
    # What a connection holds on its way is sent too.
    assert large.hub.sent < 64 << 20


def test_a_file_that_is_no_model(story: World) -> None:
    web_page = story.folder / "page.gguf"
    web_page.write_text("<!DOCTYPE html>" + " " * 1000)
    story.hub.repos["user/page"] = Repo({"page.gguf": web_page})
    message = story.refused("plan", "user/page")
    assert re.fullmatch(r"user/page: page\.gguf: is not a GGUF file: it is a web page.*", message)
    write(story.folder / "lacking.gguf", MODELS["llama"], leave_out_key="block_count")
    story.hub.repos["user/lacking"] = Repo({"lacking.gguf": story.folder / "lacking.gguf"})
    assert story.refused("plan", "user/lacking") == (
        "user/lacking/lacking.gguf: metadata key 'llama.block_count' is missing")
    cut = story.folder / "cut.gguf"
    cut.write_bytes(BUNDLED_MODEL.read_bytes()[:5000])
    story.hub.repos["user/cut"] = Repo({"cut.gguf": cut})
    assert "cut.gguf: the file ends inside" in story.refused("plan", "user/cut")


def test_without_a_cache_of_ones_own_headers_pass(large: World) -> None:
    (large.folder / "xdg").write_text("a file where the cache should be")
    before = set(Path("/tmp").glob("sharpi-*"))
    out, _ = large.run("inspect", "user/large", TMPDIR=str(large.folder))
    assert "Not downloaded yet" in out
    assert not list(large.folder.glob("sharpi-*")) and set(Path("/tmp").glob("sharpi-*")) == before


def test_two_models_are_too_many(story: World) -> None:
    for command in ("plan", "inspect"):
        assert story.refused(command, "user/story", "-m", "user/story").startswith("give one model, not two")


# --- list and rm -------------------------------------------------------------------------------------------------


def test_list_names_what_is_here(story: World, split: World) -> None:
    assert story.run("list") == ("", "sharpi: no models yet; `sharpi pull user/repo` downloads one\n")
    story.run("pull", "user/story", "user/story:Q8_0", "user/split")
    (story.snapshot() / "config.json").write_text("{}")
    out, _ = story.run("list")
    head, *rows = out.splitlines()
    assert head.split() == ["name", "size", "last", "used"]
    assert [re.split(r"  +", row)[0] for row in rows] == ["user/split:Q4_0", "user/story:Q4_K_M", "user/story:Q8_0"]
    assert [re.split(r"  +", row)[1] for row in rows][1] == "14.3 MiB"
    assert str(story.snapshot() / "story-Q8_0.gguf") in story.run("list", "-v")[0]
    found = {model["name"]: model for model in json.loads(story.run("list", "--json")[0])}
    assert found["user/story:Q4_K_M"]["bytes"] == BUNDLED_MODEL.stat().st_size
    assert len(found["user/split:Q4_0"]["files"]) >= 3
    for name in found:
        story.run("inspect", name, HF_HUB_OFFLINE="1")


def test_rm_needs_a_yes(story: World) -> None:
    story.run("pull", "user/story:Q8_0")
    out, err = story.run("rm", "user/story:Q8_0", code=2)
    assert err.splitlines()[-1] == ("sharpi: error: nobody can be asked here: -y removes without asking (see sharpi rm"
                                    " --help)")
    assert (story.snapshot() / "story-Q8_0.gguf").exists()


@pytest.mark.parametrize("answer, left", [("y\n", False), ("n\n", True), ("\n", True)])
def test_rm_asks_at_a_terminal(story: World, answer: str, left: bool) -> None:
    story.run("pull", "user/story:Q8_0")
    main, terminal = pty.openpty()
    os.write(main, answer.encode())
    process = subprocess.run([*SHARPI, "rm", "user/story:Q8_0"], env=story.environment, cwd=story.folder, stdin=terminal,
                             capture_output=True, text=True, timeout=60)
    os.close(main)
    os.close(terminal)
    assert "Remove it? [y/N]" in process.stderr
    assert (story.snapshot() / "story-Q8_0.gguf").exists() == left
    assert process.returncode == (130 if left else 0)


def test_rm_of_one_leaves_the_others(story: World) -> None:
    story.run("pull", "user/story", "user/story:Q8_0")
    out, err = story.run("rm", "-y", "user/story:q4_k_m")
    assert out == "removed user/story:q4_k_m: 14.3 MiB of disk space\n" and err == "user/story:Q4_K_M  14.3 MiB\n"
    assert len(story.blobs()) == 1 and (story.snapshot() / "story-Q8_0.gguf").exists()
    story.run("rm", "-y", "user/story:Q8_0")
    assert not story.snapshot().parents[1].exists()
    assert story.refused("rm", "-y", "user/story:Q8_0") == (
        "user/story:Q8_0: is not in the cache; `sharpi list` shows what is")


def test_rm_of_a_repository_leaves_what_is_no_model(story: World) -> None:
    story.run("pull", "user/story", "user/story:Q8_0")
    other = "import huggingface_hub; huggingface_hub.hf_hub_download('user/story', 'README.md')"
    story.run(other, program=PYTHON)
    story.run("rm", "-y", "user/story")
    assert [path.name for path in story.snapshot().iterdir()] == ["README.md"] and len(story.blobs()) == 1


def test_rm_of_a_file_that_two_commits_share(story: World) -> None:
    story.run("pull", "user/story:Q8_0")
    files = story.hub.repos["user/story"].files
    story.hub.repos["user/story"] = Repo(files, commit="2" * 40)
    story.run("pull", "user/story:Q8_0")
    assert len(story.blobs()) == 1
    assert story.run("list")[0].count("user/story") == 1
    story.run("rm", "-y", "user/story:Q8_0")
    assert not story.snapshot().parents[1].exists()


def test_rm_of_an_interrupted_download(story: World) -> None:
    blobs = story.snapshot().parents[1] / "blobs"
    blobs.mkdir(parents=True)
    (blobs / ("a" * 64 + ".incomplete")).write_bytes(bytes(2 << 20))
    assert story.run("rm", "-y", "user/story") == ("removed user/story: 2.0 MiB of disk space\n",
                                                   "user/story (interrupted)  2.0 MiB\n")
    assert not blobs.exists()


def test_rm_forgets_the_header(large: World) -> None:
    large.run("inspect", "user/large")
    assert list((large.folder / "xdg" / "sharpi" / "headers").rglob("*.gguf"))
    assert "is not in the cache" in large.refused("rm", "-y", "user/large")


# --- what is shown -----------------------------------------------------------------------------------------------


def at_terminal(world: World, *arguments: str, **environment: str) -> str:
    """What a command draws on standard error if that is a terminal."""
    main, terminal = pty.openpty()
    process = subprocess.Popen([*SHARPI, *arguments], env=world.environment | environment, cwd=world.folder,
                               stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=terminal)
    os.close(terminal)
    drawn = b""
    try:
        while data := os.read(main, 65536):
            drawn += data
    except OSError:
        pass  # the end, as Linux says it
    os.close(main)
    assert process.wait(timeout=60) == 0
    return drawn.decode()


def test_progress_is_drawn_at_a_terminal_and_nowhere_else(story: World) -> None:
    story.hub.pause = 0.002
    drawn = at_terminal(story, "pull", "user/story")
    assert "downloading" in drawn and "\x1b[" in drawn and "MiB" in drawn
    for switch in ({"NO_COLOR": "1"}, {"TERM": "dumb"}):
        story.run("rm", "-y", "user/story")
        assert at_terminal(story, "pull", "user/story", **switch) == (
            "sharpi: user/story:Q4_K_M: downloading 14.3 MiB\r\n")


def test_help_does_not_wait_for_the_network_s_modules(world: World) -> None:
    program = ("import sys\nfrom sharpi.cli import main\n"
               "try: main(['--help'], prog_name='sharpi')\n"
               "except SystemExit: pass\n"
               "print([name for name in sys.modules if name.split('.')[0] in ('huggingface_hub', 'httpx', 'rich')],\n"
               "      file=sys.stderr)")
    out, err = world.run(program, program=PYTHON)
    assert all(name in out for name in ("pull", "list", "rm")) and err == "[]\n"
