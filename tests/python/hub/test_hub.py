"""Models by name: downloads, what can go wrong with them, and names in a file's place.

Each command is a program of its own, which may reach nothing but the loopback address.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import signal
import time
from pathlib import Path

import pytest
from fake_hub import Repo
from hub_world import PYTHON, World
from tiny_models import MODELS, write

from sharpi.files.gguf import GgufFile
from sharpi.loading.description import BUNDLED_MODEL

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
    assert err == f"sharpi: user/split:Q4_0: downloading 387.3 KiB in {len(names)} parts\n"
    assert out == f"{split.snapshot('user/split') / names[0]}\n"
    assert len(GgufFile.open(out.strip()).paths) == len(names)


def test_pull_without_q4_k_m_says_what_it_takes(split: World) -> None:
    assert split.run("pull", "user/split")[1].splitlines()[0] == (
        "sharpi: user/split: no Q4_K_M there; using Q4_0")


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
            f"user/story:Q8_0: story-Q8_0.gguf is damaged: its checksum differs from the one at {story.hub.url}; it was"
            " removed, try again")
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
    assert err.splitlines()[-1] == ("sharpi: interrupted; the same command resumes the download")
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
        f"user/story: the disk of {story.cache} is full; the partial download stays for the next attempt; HF_HOME"
        " moves the cache")
    assert len(story.hub.asked("/cdn/")) == 1  # another attempt would not help


def test_too_little_room_is_said_before(large: World) -> None:
    larger = large.folder / "larger.gguf"
    larger.touch()
    os.truncate(larger, 1 << 43)  # 8 TiB, of which the disk holds nothing
    large.hub.repos["user/large"] = Repo({"large-Q4_0.gguf": larger}, hashes={"large-Q4_0.gguf": "a" * 64})
    large.hub.files_broken_with = 404  # so that a test that fails does not fill the disk
    message = large.refused("pull", "user/large")
    assert re.fullmatch(r"user/large: needs 8\.00 TiB, but \S+ has only [\d.]+ GiB free; HF_HOME moves the cache",
                        message)
    assert large.hub.asked("/cdn/") == []


def test_a_cache_that_cannot_be_written_to(story: World) -> None:
    (story.folder / "hf").write_text("a file where the cache should be")
    assert story.refused("pull", "user/story") == (
        f"user/story: cannot be written to {story.cache}: Not a directory; HF_HOME moves the cache")


# --- what is refused ---------------------------------------------------------------------------------------------


def test_repositories_that_are_missing_private_or_gated(story: World) -> None:
    url, repo = story.hub.url, story.hub.repos["user/story"]
    missing = f"no such file, and no such model at {url} "
    assert story.refused("pull", "user/none") == f"user/none: {missing}(if it is private, set HF_TOKEN)"
    repo.token = "hf_secret"
    assert story.refused("pull", "user/story") == f"user/story: {missing}(if it is private, set HF_TOKEN)"
    assert story.refused("pull", "user/story", HF_TOKEN="hf_other") == (
        f"user/story: {missing}(or HF_TOKEN may not read it)")
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
        f"user/story: {story.hub.url} does not answer like a Hub; check HF_ENDPOINT")


@pytest.mark.parametrize("said", [{"size": "12"}, {"size": -5}, {"size": 1.5}, {"sha256": 7}])
def test_a_hub_that_says_odd_things_of_its_files(story: World, said: dict[str, object]) -> None:
    story.hub.said_of_files = said
    for command in ("pull", "plan"):
        assert story.refused(command, "user/story") == (
            f"user/story: {story.hub.url} does not answer like a Hub; check HF_ENDPOINT")


@pytest.mark.parametrize(("name", "value"), [("HF_ENDPOINT", "http://[bad"), ("HF_ENDPOINT", "http://host:abc"),
                                           ("HF_HUB_DOWNLOAD_TIMEOUT", "soon")])
def test_variables_that_make_no_sense(story: World, name: str, value: str) -> None:
    for command in (["pull", "user/story"], ["list"], ["run", "-m", "user/story", "-p", "x"], ["rm", "user/story"]):
        assert story.refused(*command, **{name: value}).startswith("an HF_ variable of the environment makes no sense")


def test_a_hub_does_not_choose_where_files_go(story: World) -> None:
    paths = ("../../../evil-Q4_K_M.gguf", "/tmp/evil-Q4_K_M.gguf", "a/../../evil-Q4_K_M.gguf",
             "evil\x1b[2J-Q4_K_M.gguf")
    story.hub.repos["user/evil"] = Repo(dict.fromkeys(paths, BUNDLED_MODEL))
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
    assert story.refused("pull", "y.gguf") == (
        "y.gguf: is not the name of a model; names are user/repo or user/repo:QUANT")


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
        "user/story: is not in the cache, and HF_HUB_OFFLINE forbids a download")
    assert story.hub.requests == []


def test_pull_offline_gives_what_is_here(story: World) -> None:
    path, _ = story.run("pull", "user/story:Q8_0")
    story.forget_requests()
    assert story.run("pull", "user/story:Q8_0", HF_HUB_OFFLINE="1") == (
        path, "sharpi: user/story:Q8_0: is in the cache; HF_HUB_OFFLINE is set, so no newer version is looked for\n")
    assert story.hub.requests == []


def test_another_quant_in_the_cache_is_used_and_named(story: World) -> None:
    story.run("pull", "user/story:Q8_0")
    story.forget_requests()
    assert story.run("inspect", "user/story")[1] == "sharpi: user/story: using Q8_0, which is in the cache\n"
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
    assert split.refused("inspect", "user/split", HF_HUB_OFFLINE="1") == (
        "user/split: is not in the cache, and HF_HUB_OFFLINE forbids a download")
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
