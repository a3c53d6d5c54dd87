"""What documents say of tests, and what the sources must not have for it to stay true."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
_NAMED = re.compile(r"`(tests/[\w/]+\.(?:py|cpp))(?:::([\w.]+))?`")
_CPP_TEST = r"TEST(?:_F|_P)?\(\s*{suite},\s*{name}\)"
# They run what a file says, or can be made to.
_DANGEROUS = {"pickle", "cPickle", "dill", "marshal", "shelve", "torch", "joblib", "cloudpickle"}
# Whoever listens: the server's process, and nothing else.
_LISTENERS = {"python/sharpi/serve/http/process.py"}


def named_tests() -> list[tuple[str, str, str]]:
    """Each test that a document names: the document, the test's file, and its name, which is empty for a whole file."""
    return [(page.relative_to(ROOT).as_posix(), file, name) for page in sorted((ROOT / "docs").rglob("*.md"))
            for file, name in _NAMED.findall(page.read_text(encoding="utf-8"))]


def is_there(file: str, name: str) -> bool:
    path = ROOT / file
    if not name or not path.exists():
        return path.exists()
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".cpp":
        suite, _, test = name.partition(".")
        return re.search(_CPP_TEST.format(suite=re.escape(suite), name=re.escape(test)), text) is not None
    return any(isinstance(node, ast.FunctionDef) and node.name == name for node in ast.parse(text).body)


def test_tests_that_documents_name_are_there() -> None:
    named = named_tests()
    assert {page for page, _, _ in named} >= {"docs/serve/security.md", "docs/serve/compatibility.md"}
    missing = [f"{page}: {file}::{name}" for page, file, name in named if not is_there(file, name)]
    assert not missing, "\n".join(missing)


def imported(tree: ast.AST) -> set[str]:
    found = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    return found | {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module}


def called(tree: ast.AST) -> set[str]:
    functions = [node.func for node in ast.walk(tree) if isinstance(node, ast.Call)]
    return {getattr(one, "id", None) or getattr(one, "attr", "") for one in functions}


def test_nothing_is_unpickled_or_evaluated_and_one_module_listens() -> None:
    listeners = set()
    for path in sorted((ROOT / "python" / "sharpi").rglob("*.py")):
        tree, name = ast.parse(path.read_text(encoding="utf-8")), path.relative_to(ROOT).as_posix()
        assert not {module.partition(".")[0] for module in imported(tree)} & _DANGEROUS, name
        plain = {node.func.id for node in ast.walk(tree) if isinstance(node, ast.Call)
                 and isinstance(node.func, ast.Name)}
        assert not plain & {"eval", "exec", "__import__"}, name
        if called(tree) & {"bind", "create_server", "start_server", "listen"} and "socket" in imported(tree):
            listeners.add(name)
    assert listeners == _LISTENERS
