"""`benchmarks/serve_load.py`: that a server loses none of some hundreds of requests, and that it would say so."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"
sys.path.insert(0, str(BENCHMARKS))

import serve_load  # noqa: E402
from traffic.chat_model import write_chat_model  # noqa: E402
from traffic.questions import MODEL, questions  # noqa: E402
from traffic.server_process import ServerProcess  # noqa: E402

FEW = ["--device", "cpu", "--clients", "12", "--serve-option=-t1"]


def test_nothing_is_lost_and_nothing_left(capsys: pytest.CaptureFixture[str]) -> None:
    serve_load.main([*FEW, "--requests", "200"])
    said = capsys.readouterr().out
    assert said.startswith("200 requests in ") and said.splitlines()[-1].startswith("nothing is lost")
    for outcome in ("answered, streamed", "answered, whole", "hostile, refused", *(
            f"killed {moment}" for moment in ("in the headers", "in the body", "before the answer", "in the answer"))):
        assert outcome in said


def test_what_is_lost_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    welcome = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
    monkeypatch.setattr(serve_load, "HOSTILE", {"not hostile": welcome})
    with pytest.raises(SystemExit, match="not hostile: status 200"):
        serve_load.main([*FEW, "--requests", "60"])


def test_another_answer_than_before_is_told() -> None:
    tally, question = serve_load.Tally(), questions(1, 1)[0]
    tally.check(question, "a")
    tally.check(question, "a")
    assert not tally.lost
    tally.check(question, "b")
    assert "was answered 'b', before 'a'" in tally.lost[0]


def test_what_is_left_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(serve_load, "SETTLING_SECONDS", 0.3)
    write_chat_model(tmp_path / "story.gguf")
    options = ["-m", f"{MODEL}={tmp_path / 'story.gguf'}", "--device", "cpu", "-t", "1", "-c", "1000"]
    with ServerProcess(options, tmp_path / "log") as server, socket.create_connection(("127.0.0.1", server.port)):
        left = serve_load.leftovers(server)
    # The client that asks for the gauges may have one that is just being closed.
    assert left[0] in ("1 connections are open", "2 connections are open"), left
    assert left[1].startswith("the cache is not whole"), left


def test_an_answer_without_its_end_is_none() -> None:
    by_name = {question.api.name: question.api for question in questions(60, 1)}
    whole = b'data: {"choices":[{"delta":{"content":"a"}}]}\n\n'
    with pytest.raises(ValueError, match="no end"):
        by_name["chat"].text_of_stream(whole)
    assert by_name["chat"].text_of_stream(whole + b"data: [DONE]\n\n") == "a"
    failed = b'event: error\ndata: {"error":{"message":"no"}}\n\nevent: message_stop\n'
    with pytest.raises(ValueError, match="failed"):
        by_name["messages"].text_of_stream(failed)
    assert len(by_name) == 6
