"""Models by name: plan and inspect before a download, list, rm, and what is shown at a terminal."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
from pathlib import Path

import pytest
from fake_hub import Repo
from hub_world import PYTHON, SHARPI, World
from tiny_models import MODELS, write

from sharpi.loading.description import BUNDLED_MODEL

# --- plan and inspect before the download ------------------------------------------------------------------------


def test_plan_before_the_download_needs_the_header_alone(large: World) -> None:
    path = large.hub.repos["user/large"].files["large-Q4_0.gguf"]
    plan = ("--profile", str(large.profile), "-t", "4", "--vram", "4GiB", "--device", "cuda")
    here, _ = large.run("plan", str(path), *plan)
    out, err = large.run("plan", "user/large:Q4_0", *plan)
    size = path.stat().st_size
    assert out == f"{here}\nNot downloaded yet: {size / 2**30:.2f} GiB; `sharpi pull user/large:Q4_0` downloads it.\n"
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
    assert err == "sharpi: Not downloaded yet: 14.3 MiB; `sharpi pull user/story:Q4_K_M` downloads it.\n"
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
    out, _ = large.run("inspect", "user/large", TMPDIR=str(large.folder))
    assert "Not downloaded yet" in out
    assert not list(large.folder.glob("sharpi-*"))


def test_two_threads_may_ask_for_one_header(large: World) -> None:
    """Both receive it at once; each into a draft of its own."""
    large.hub.pause = 0.02
    script = """
import threading
from concurrent.futures import ThreadPoolExecutor
from sharpi.hub import look
both = threading.Barrier(2)
def ask(_):
    both.wait()
    return look("user/large").path
with ThreadPoolExecutor(2) as pool:
    assert len(set(pool.map(ask, range(2)))) == 1
"""
    large.run(script, program=PYTHON)


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
    assert err.splitlines()[-1] == ("sharpi: error: nobody can confirm here: add -y to remove (see sharpi rm"
                                    " --help)")
    assert (story.snapshot() / "story-Q8_0.gguf").exists()


@pytest.mark.parametrize("answer, left", [("y\n", False), ("n\n", True), ("\n", True)])
def test_rm_asks_at_a_terminal(story: World, answer: str, left: bool) -> None:
    story.run("pull", "user/story:Q8_0")
    main, terminal = pty.openpty()
    os.write(main, answer.encode())
    process = subprocess.run([*SHARPI, "rm", "user/story:Q8_0"], env=story.environment, cwd=story.folder,
                             stdin=terminal, capture_output=True, text=True, timeout=60)
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


def test_rm_forgets_the_header(story: World) -> None:
    headers = story.folder / "xdg" / "sharpi" / "headers"
    story.run("inspect", "user/story:Q8_0")
    assert list(headers.rglob("*.gguf"))
    story.run("pull", "user/story:Q8_0")
    story.run("rm", "-y", "user/story")
    assert not list(headers.rglob("*.gguf"))


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
