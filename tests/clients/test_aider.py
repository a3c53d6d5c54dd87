"""aider's scripted edit: the request is answered, and a file that the model rewrites is written.

A model of 135M parameters cannot edit by itself, so the answer is forced: what is tested is the way from aider to the
server and back.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import Served

AIDER = os.environ.get("SHARPI_AIDER") or shutil.which("aider")


@pytest.mark.skipif(AIDER is None, reason="aider is not installed")
def test_a_scripted_edit(served: Served, tmp_path: Path) -> None:
    assert AIDER is not None
    (tmp_path / "hello.py").write_text("print('hello')\n", encoding="utf-8")
    done = subprocess.run(
        [AIDER, "--model", f"openai/{served.model}", "--openai-api-base", f"{served.url}/v1", "--openai-api-key", "x",
         "--no-git", "--yes-always", "--no-show-model-warnings", "--no-check-update", "--analytics-disable",
         "--edit-format", "whole", "--map-tokens", "0", "--message", "Print 'bye' instead of 'hello'.", "hello.py"],
        cwd=tmp_path, capture_output=True, text=True, timeout=300, env={**os.environ, "HOME": str(tmp_path)})
    assert done.returncode == 0, done.stderr
    assert "Tokens:" in done.stdout, "the usage that the server counted is shown"
    assert "litellm." not in done.stdout, "that is how its errors begin"
