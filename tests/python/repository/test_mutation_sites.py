"""The changes that tests/mutate.py makes: each changes one place, Python that is changed still parses, and comments and
strings of C++ are left alone."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path.insert(0, str(ROOT / "tests"))
from mutation_sites import Site, cpp_sites, python_sites  # noqa: E402


@pytest.mark.parametrize("name", ["planning/drafts", "session", "text/chat"])
def test_changes_of_python_parse_and_differ(name: str) -> None:
    path = ROOT / f"python/sharpi/{name}.py"
    source = path.read_text(encoding="utf-8")
    sites = python_sites(path, ROOT)
    assert len(sites) > 20 and len({site.kind for site in sites}) >= 6
    for site in sites:
        changed = site.applied(source)
        assert changed is not None and ast.dump(ast.parse(changed)) != ast.dump(ast.parse(source)), site


def test_changes_of_cpp_are_of_one_line_of_code() -> None:
    path = ROOT / "cpp/engine/texts/sampler.cpp"
    source = path.read_text(encoding="utf-8")
    sites = cpp_sites(path, ROOT)
    assert len(sites) > 40 and {site.kind for site in sites} == {"operator", "constant", "statement"}
    for site in sites:
        changed = site.applied(source)
        assert changed is not None
        lines = [(a, b) for a, b in zip(source.splitlines(), changed.splitlines(), strict=True) if a != b]
        assert len(lines) == 1 and lines[0][0] == source.splitlines()[site.line - 1], site
        before, after = lines[0]
        assert before.split("//")[1:] == after.split("//")[1:], f"a comment was changed: {site}"


def test_a_place_that_is_gone_is_said() -> None:
    assert Site("a.py", 1, "constant", "one = 1", "one = 2", 0).applied("two = 2\n") is None
    assert Site("a.py", 2, "constant", "one = 1", "one = 2", 1).applied("one = 1\none = 1\n") == "one = 1\none = 2\n"
