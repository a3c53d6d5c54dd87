"""Types: the stubs of the core say what the module has, and type checkers see the API as it is.

mypy and pyright run if they are installed (the `types` extra has mypy); each looks at the package and at programs as
users write them.
"""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import WrapperDescriptorType
from typing import Any

import pytest

import sharpi
from sharpi import _core

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = Path(sharpi.__file__).parent

GOOD = """
from collections.abc import Iterator
import numpy as np
import numpy.typing as npt
from sharpi import Generation, Model, Part, Reply, Session, Token

with Model.load("m.gguf", device="cuda", vram="12GiB", context=8192, rope_scaling="yarn", rope_scale=4.0,
                prompt="exact") as model:
    ids: list[int] = model.tokenize("Once")
    rows: npt.NDArray[np.float32] = model.logits(ids)
    steps: npt.NDArray[np.float32] = model.logits(ids, chunks=[1], kind="decode")
    running: Generation = model.generate("Once", max_tokens=3, temperature=0.5, stop=["a", "b"], logit_bias={5: -1.0})
    texts: list[str] = [token.text for token in running]
    seconds: float = running.timing.prompt_seconds
    token: Token = next(model.generate(ids, seed=None))
    session: Session = model.session()
    reply: Reply = session.chat([{"role": "user", "content": "Hello"}], system="Brief.", thinking=False, max_tokens=5)
    parts: Iterator[Part] = iter(reply)
    kind: str = next(parts).kind
    message: dict[str, str] = reply.message
    with model.chat([{"role": "user", "content": "Hello"}], tools=[{"name": "add"}], top_p=0.5) as other:
        other.close()
"""
# Each line is wrong in one way.
WRONG = """
from sharpi import Model
model = Model.load()
model.generate("Once", max_tokens="3")
model.generate("Once", temprature=0.5)
model.session().generate(3)
model.chat([{"role": "user", "content": "Hello"}], top_k=1.5)
model.chat("Hello")
Model.load(context="long")
Model.load(rope_scaling=4)
Model.load(prompt=True)
model.logits([1], kind="answer")
text: int = next(model.generate("Once")).text
"""


def signature(line: str) -> ast.FunctionDef:
    """What a function that pybind11 has made takes, by the first line of its docstring."""
    tree = ast.parse(f"def {line}: ...").body[0]
    assert isinstance(tree, ast.FunctionDef)
    return tree


def parameters(function: ast.FunctionDef) -> dict[str, Any]:
    """Names in order with defaults (`...` for none), a star where keywords begin; names of no meaning are "_"."""
    given = function.args
    positional = [*(None for _ in given.posonlyargs), *(a.arg for a in given.args)]
    names = ["_" if name is None or name.startswith("arg") else name for name in positional]
    if given.posonlyargs and names:
        names[0] = "self" if given.posonlyargs[0].arg == "self" else names[0]
    defaults = [...] * (len(names) - len(given.defaults)) + [ast.literal_eval(value) for value in given.defaults]
    found: dict[str, Any] = dict(zip(names, defaults, strict=True))
    if given.kwonlyargs:
        found["*"] = ...
    for argument, default in zip(given.kwonlyargs, given.kw_defaults, strict=True):
        found[argument.arg] = ... if default is None else ast.literal_eval(default)
    return found


def of_module(value: Any) -> dict[str, Any] | str:
    """A function's parameters, or what kind of attribute it is."""
    if isinstance(value, property):
        return "read and written" if value.fset else "read"
    if isinstance(value, staticmethod):
        value = value.__func__
    if callable(value):
        return parameters(signature(value.__doc__.splitlines()[0]))
    return type(value).__name__


def of_stub(node: ast.stmt) -> tuple[str, dict[str, Any] | str]:
    if isinstance(node, ast.AnnAssign):
        # A value of the module shows its class, and not the types of its elements.
        kind = ast.unparse(node.annotation).partition("[")[0]
        return ast.unparse(node.target), "read and written" if node.col_offset else kind
    assert isinstance(node, ast.FunctionDef)
    is_property = any(ast.unparse(decorator) == "property" for decorator in node.decorator_list)
    return node.name, "read" if is_property else parameters(node)


def test_the_stubs_are_the_module() -> None:
    stub = ast.parse((PACKAGE / "_core.pyi").read_text(encoding="utf-8"))
    classes = {node.name: node for node in stub.body
               if isinstance(node, ast.ClassDef) and not node.name.startswith("_")}
    rest = [node for node in stub.body if isinstance(node, ast.FunctionDef | ast.AnnAssign)]
    public = {name: value for name, value in vars(_core).items() if not name.startswith("_")}
    assert {name for name, value in public.items() if isinstance(value, type)} == set(classes)
    for name, node in classes.items():
        # A class that only the core makes objects of has no constructor but object's.
        members = {key: of_module(value) for key, value in vars(getattr(_core, name)).items()
                   if not key.startswith("_") or (key == "__init__" and not isinstance(value, WrapperDescriptorType))}
        assert dict(map(of_stub, [part for part in node.body if not isinstance(part, ast.Expr)])) == members, name
    assert dict(map(of_stub, rest)) == {name: of_module(value) for name, value in public.items()
                                        if not isinstance(value, type)}


def complaints(tool: list[str], programs: Path, is_error: str, *settings: str) -> dict[str, set[int]]:
    """The lines of each file that a type checker complains about; GOOD and WRONG are among the files."""
    (programs / "good.py").write_text(GOOD, encoding="utf-8")
    (programs / "wrong.py").write_text(WRONG, encoding="utf-8")
    search = os.pathsep.join(map(str, (ROOT / "python", programs)))
    done = subprocess.run([sys.executable, "-m", *tool, *settings], cwd=ROOT, text=True, check=False,
                          capture_output=True, timeout=600, env={**os.environ, "MYPYPATH": search})
    found: dict[str, set[int]] = {}
    for line in done.stdout.splitlines():
        if is_error in line:
            path, number = line.split(is_error)[0].strip().split(":")[:2]
            found.setdefault(Path(path).name, set()).add(int(number))
    assert done.returncode == (1 if found else 0), done.stdout + done.stderr
    return found


EXPECTED = {"wrong.py": set(range(4, len(WRONG.splitlines()) + 1))}


@pytest.mark.skipif(find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_finds_the_package_sound_and_sees_the_api(tmp_path: Path) -> None:
    settings = ("--config-file", str(ROOT / "pyproject.toml"), "-p", "sharpi", "-m", "good", "-m", "wrong")
    assert complaints(["mypy"], tmp_path, ": error:", *settings) == EXPECTED


@pytest.mark.skipif(find_spec("pyright") is None or shutil.which("node") is None,
                    reason="pyright is not installed, or would download node")
def test_pyright_sees_the_api(tmp_path: Path) -> None:
    # The package takes pyright a minute on two cores.
    targets = [tmp_path, *([ROOT / "python" / "sharpi"] if os.environ.get("SHARPI_LONG_TESTS") == "1" else [])]
    pyright = ["pyright", "--pythonpath", sys.executable]
    assert complaints(pyright, tmp_path, " - error:", *map(str, targets)) == EXPECTED
