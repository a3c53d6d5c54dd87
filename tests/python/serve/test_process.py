"""`sharpi serve` as a process: what it prints, how it ends, and what it refuses to begin with."""

from __future__ import annotations

import contextlib
import json
import re
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from sharpi.cli import main

LONG = {"model": "story", "prompt": "Once upon a time", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-m", "sharpi", "serve", "--port", "0", "--device", "cpu", "-t", "1", *arguments]


class Process:
    """A server, and what it has printed. `url`: where it listens."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(command(*arguments), stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.lines: list[str] = []
        assert self.process.stderr is not None
        self._reader = threading.Thread(target=lambda: self.lines.extend(iter(self.process.stderr.readline, "")))
        self._reader.start()
        self.url = self.line(r"listening at (http://127\.0\.0\.1:\d+)")
        self.until(lambda: httpx.get(f"{self.url}/health").status_code == 200)

    def line(self, pattern: str) -> str:
        """The first group of a line that it has printed, or prints soon."""
        found: list[str] = []

        def look() -> bool:
            found[:] = [match[1] for line in list(self.lines) if (match := re.search(pattern, line))]
            return bool(found)

        self.until(look)
        return found[0]

    def until(self, condition: Any) -> None:
        deadline = time.monotonic() + 30
        while not condition():
            assert time.monotonic() < deadline and self.process.poll() is None, self.lines
            time.sleep(0.02)

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self) -> int:
        """Its exit code."""
        code = self.process.wait(30)
        self._reader.join()
        return code

    def metric(self, name: str) -> float:
        found = re.search(rf'^{name}{{model="story"}} (\S+)$', httpx.get(f"{self.url}/metrics").text, re.MULTILINE)
        return float(found[1]) if found else 0.0


@contextlib.contextmanager
def started(*arguments: str) -> Iterator[Process]:
    made = Process("-c", "512", *arguments)
    try:
        yield made
    finally:
        made.process.kill()
        made.process.wait()


def streamed(url: str, found: list[str]) -> None:
    """The texts of a stream, and "[DONE]" if it ended as it should."""
    with contextlib.suppress(httpx.HTTPError), httpx.stream(
            "POST", f"{url}/v1/completions", json={**LONG, "stream": True}, timeout=60) as answer:
        for line in answer.iter_lines():
            if line == "data: [DONE]":
                found.append("[DONE]")
            elif line.startswith("data: "):
                piece = json.loads(line[6:])
                found.append(piece["choices"][0]["text"] if piece.get("choices") else "")


def begin(work: Any, *arguments: Any) -> threading.Thread:
    thread = threading.Thread(target=work, args=arguments)
    thread.start()
    return thread


def test_a_signal_under_load_lets_answers_finish_and_refuses_new_ones() -> None:
    with started("--parallel", "4") as server:
        assert server.line(r"the model is (\w+)") == "story"
        alone: list[str] = []
        streamed(server.url, alone)
        texts: list[list[str]] = [[] for _ in range(4)]
        threads = [begin(streamed, server.url, text) for text in texts]
        server.until(lambda: all(texts))
        with httpx.Client(base_url=server.url) as client:
            assert client.get("/health").status_code == 200
            server.signal(signal.SIGTERM)
            server.line(r"(ending when 4 requests are finished)")
            assert client.get("/health").json()["status"] == "ending"
            refused = client.post("/v1/completions", json=LONG)
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "server_ending"
        for thread in threads:
            thread.join()
        assert texts == [alone] * 4 and alone[-1] == "[DONE]", "every answer is whole, and the same as alone"
        assert server.end() == 0
        assert not [line for line in server.lines if "Traceback" in line], server.lines


def test_what_is_not_finished_in_time_is_cancelled() -> None:
    with started("--drain-seconds", "0.1") as server:
        answers: list[httpx.Response] = []
        long = {**LONG, "prompt": [LONG["prompt"]] * 8, "n": 8}  # the server gives up about a second after the signal
        thread = begin(lambda: answers.append(httpx.post(f"{server.url}/v1/completions", json=long, timeout=60)))
        server.until(lambda: server.metric("sharpi_requests_running") > 0)
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        thread.join()
        [answer] = answers
        assert answer.status_code == 503 and answer.json()["error"]["code"] == "server_ending"


def test_a_second_signal_ends_at_once() -> None:
    with started() as server:
        text: list[str] = []
        thread = begin(streamed, server.url, text)
        server.until(lambda: text)
        server.signal(signal.SIGINT)
        server.line("(a second signal ends at once)")
        server.signal(signal.SIGINT)
        assert server.end() == 128 + signal.SIGINT
        thread.join()
        assert "[DONE]" not in text


def test_the_next_server_goes_on_with_the_prompts_of_the_last(tmp_path: Path) -> None:
    folder = tmp_path / "cache"
    answers = []
    for _ in range(2):
        with started("--cache-dir", str(folder), "--cache-dir-size", "1GiB") as server:
            asked = {**LONG, "prompt": "Once upon a time there were ships. " * 12, "max_tokens": 20, "logprobs": 2}
            answer = httpx.post(f"{server.url}/v1/completions", json=asked, timeout=60).json()
            answers.append(answer["choices"][0])
            cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
            restored = server.metric("sharpi_restored_pages_total")
            server.signal(signal.SIGTERM)
            assert server.end() == 0
    assert answers[0] == answers[1]
    assert cached >= 64 and restored == cached / 64
    assert [path.name for path in folder.iterdir() if not path.is_dir()] == []


def test_a_full_disk_is_told_once_and_ends_no_request(tmp_path: Path) -> None:
    """A limit on files' sizes stands for the full disk: a page of this model is larger."""
    prompts = [[1 + (7 * number + at) % 900 for at in range(400)] for number in range(3)]

    def answer(url: str, prompt: list[int]) -> Any:
        body = {"prompt": prompt, "max_tokens": 4, "temperature": 0}
        return httpx.post(f"{url}/v1/completions", json=body, timeout=60).raise_for_status().json()["choices"]

    with started() as server:
        right = [answer(server.url, prompt) for prompt in prompts]
    with started("--cache-dir", str(tmp_path / "cache"), "--spill", "0") as server:
        resource.prlimit(server.process.pid, resource.RLIMIT_FSIZE, (4096, 4096))
        assert [answer(server.url, prompt) for prompt in [*prompts, *prompts]] == right * 2
        server.signal(signal.SIGTERM)
        assert server.end() == 0
        assert sum("File too large" in line for line in server.lines) == 1, server.lines
        assert not any("Traceback" in line for line in server.lines)


def test_keys_are_read_again_at_sighup(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("old\n")
    with started("--api-key-file", str(file)) as server:
        def status(key: str) -> int:
            return httpx.get(f"{server.url}/v1/models", headers={"x-api-key": key}).status_code

        assert (status("old"), status("new")) == (200, 401)
        file.write_text("new\n")
        server.signal(signal.SIGHUP)
        server.until(lambda: status("new") == 200)
        assert status("old") == 401
        server.signal(signal.SIGTERM)
        assert server.end() == 0


def test_a_model_whose_file_goes_while_it_is_served_still_answers(tmp_path: Path) -> None:
    from sharpi.loading.description import BUNDLED_MODEL

    for name in ("one.gguf", "two.gguf"):
        (tmp_path / name).write_bytes(BUNDLED_MODEL.read_bytes())
    with started("-m", str(tmp_path)) as server:
        def answer(model: str) -> httpx.Response:
            return httpx.post(f"{server.url}/v1/completions", json={**LONG, "max_tokens": 4, "model": model})

        for name in ("one.gguf", "two.gguf"):
            (tmp_path / name).unlink()
        assert answer("one").status_code == 200
        gone = answer("two")
        assert gone.status_code == 500
        assert gone.json()["error"]["message"] == "the model 'two' cannot be loaded: two: the file is gone"
        assert answer("one").status_code == 200 and httpx.get(f"{server.url}/health").status_code == 200


@pytest.mark.parametrize(("arguments", "said"), [
    (["--host", "0.0.0.0"], "there is no key: give --api-key, set SHARPI_API_KEY, or allow everyone with --insecure"),
    (["-m", "gone.gguf"], "gone.gguf: no such file"),
    (["--config", "none.toml"], "none.toml: No such file or directory"),
    (["--host", "no.such.host.invalid", "--insecure"], "is no address to listen at"),
    (["--max-gap", "0"], "max_gap must be more than 0"),
    (["--cache-dir", "/dev/null/cache"], "--cache-dir /dev/null/cache cannot be used: Not a directory"),
    (["--port", "TAKEN"], "cannot be listened at: Address already in use"),
])
def test_what_cannot_be_served_is_one_line(arguments: list[str], said: str, server: str,
                                           monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("SHARPI_API_KEY", raising=False)
    taken = server.rpartition(":")[2]
    with pytest.raises(SystemExit) as ended:
        main(["serve", *(taken if argument == "TAKEN" else argument for argument in arguments)])
    assert ended.value.code == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith("sharpi: error: ") and said in line


def test_a_first_model_that_cannot_be_loaded_ends_the_process() -> None:
    ended = subprocess.run(command("-m", __file__), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2 and "Traceback" not in ended.stderr
    assert ended.stderr.count("cannot be loaded") == 1 and "is not a GGUF file" in ended.stderr.splitlines()[-1]
