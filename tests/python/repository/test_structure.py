"""The shape of the sources: which folder may include which, no circles, and bounds for folders, classes, functions and
lines.

Nothing is built or imported. Exceptions are listed by name with a reason; one that is no longer needed fails the test.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
PACKAGE = ROOT / "python" / "sharpi"

MOST_FILES, MOST_METHODS, MOST_LINES, MOST_CHARACTERS = 16, 25, 60, 120

# --- The rules, and what is excepted from them --------------------------------------------------------------------

# A room is a folder, with the folders inside it that are not rooms themselves. Its sources include headers of their own
# room and of rooms on lower floors. So every circle among rooms passes through an include that is listed in UPWARD.
FLOORS = (
    ("cpp/bindings",),
    ("cpp/engine",),
    ("cpp/layers", "cpp/hardware", "cpp/planning"),
    ("cuda/backend",),
    ("cuda/transfers",),
    ("cpp/cpu/share",),
    ("cpp/cpu/kernels",),  # above its callers, which know only the table of functions
    ("cpp/cpu",),
    ("cuda/plan",),
    ("cpp/operations",),
    ("cpp/placement",),
    ("cpp/experts",),
    ("cuda/kernels/blocks", "cuda/kernels/delta", "cuda/kernels/experts", "cuda/kernels/heads", "cuda/kernels/streams"),
    ("cuda/kernels/prefill",),
    ("cuda/kernels/attention",),
    ("cuda/kernels/matmul",),
    ("cuda/kernels/matvec",),
    ("cuda/kernels/sampling",),
    ("cuda/kernels/rows",),
    ("cuda/kernels/formats",),
    ("cuda/device",),
    ("cpp/memory",),
    ("cpp/model",),
    ("cpp/core",),
)

GENERATED = ("families.inc",)  # by CMake, from the names of sources

UPWARD = {
    "cpp/placement/model_weights.cpp -> cpu/kernels.h": "loading expands float rows with the CPU's kernels",
    "cuda/device/cuda_probe.cpp -> kernels/formats/packed.h": "the probe times the product's own kernels",
    "cuda/device/cuda_probe.cpp -> kernels/matmul/matmul.h": "the probe times the product's own kernels",
    "cuda/device/cuda_probe.cpp -> kernels/matvec/matvec.h": "the probe times the product's own kernels",
    "cuda/device/cuda_probe.h -> hardware/hardware_probe.h": "the probe fills in the hardware's own types",
}
LARGE_CLASSES: dict[str, str] = {}
LONG_FUNCTIONS: dict[str, str] = {}
FULL_FOLDERS: dict[str, str] = {}
LONG_LINES: dict[str, str] = {}


def compare(found: Iterable[str], excepted: Mapping[str, str]) -> None:
    """Fails for what is found and not excepted, and for what is excepted and not found."""
    found = set(found)
    new, gone = sorted(found - set(excepted)), sorted(set(excepted) - found)
    assert not new, "\n".join(["against the rule:", *new])
    assert not gone, "\n".join(["exceptions that are no longer needed:", *gone])


# --- C++: includes and classes ------------------------------------------------------------------------------------

CPP = (".h", ".cuh", ".cpp", ".cu")
_QUOTED = re.compile(r'^\s*#\s*include\s*"([^"]+)"', re.MULTILINE)
_TOOLKIT = re.compile(r"^\s*#\s*include\s*<(cuda|cublas|nv|mma)[\w/]*(\.h|\.hpp)?>", re.MULTILINE)


@cache
def sources(*folders: str, suffixes: tuple[str, ...]) -> tuple[Path, ...]:
    return tuple(sorted(path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in suffixes))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix() if path.is_relative_to(ROOT) else ""


def included(path: Path, header: str) -> Path:
    """The file that `header` names in `path`; the build searches these folders."""
    places = [folder / header for folder in (ROOT / "cpp", ROOT / "cuda", path.parent)]
    found = next((place for place in places if place.exists()), None)
    assert found is not None, f"{name_of(path)} includes {header}, which is nowhere"
    return found


def room_of(path: Path) -> str:
    rooms = {room for floor in FLOORS for room in floor}
    found = next((name_of(folder) for folder in path.parents if name_of(folder) in rooms), None)
    assert found is not None, f"{name_of(path)} is on no floor: add its folder to FLOORS"
    return found


def upward_includes() -> Iterator[str]:
    floor_of = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
    for path in sources("cpp", "cuda", suffixes=CPP):
        room = room_of(path)
        for header in set(_QUOTED.findall(path.read_text(encoding="utf-8"))) - set(GENERATED):
            other = room_of(included(path, header))
            if other != room and floor_of[other] <= floor_of[room]:
                yield f"{name_of(path)} -> {header}"


def test_includes_point_down() -> None:
    compare(upward_includes(), UPWARD)


def test_every_floor_has_sources() -> None:
    rooms = {room_of(path) for path in sources("cpp", "cuda", suffixes=CPP)}
    assert {room for floor in FLOORS for room in floor} == rooms


def test_the_toolkits_headers_stay_in_cuda() -> None:
    outside = [name_of(path) for path in sources("cpp", suffixes=CPP)
               if _TOOLKIT.search(path.read_text(encoding="utf-8"))]
    assert not outside


_COMMENT_OR_TEXT = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
_CLASS = re.compile(r"(?<!enum )\b(?:class|struct)\s+(?:\[\[\w+\]\]\s*)?(\w+)\s*(?:final\s*)?(?::[^;{}()]*)?\{")
_TEMPLATE_ARGUMENTS = re.compile(r"(?<=\w)<[^<>;{}]*>")
_METHOD = re.compile(r"(?:^|[\s*&~])(~?\w+|operator\W{1,3})\s*\(")
_NO_METHOD = re.compile(r"^\s*(?:using|typedef|friend|static_assert)\b|=\s*(?:default|delete)\b")


def classes(text: str) -> Iterator[tuple[str, int]]:
    """Each class with a body, and how many methods it declares, without those that are `default` or `delete`."""
    text = _COMMENT_OR_TEXT.sub(lambda match: "''" if match[0][0] in "\"'" else " ", text)
    for found in _CLASS.finditer(text):
        yield found[1], sum(map(is_method, members(text[found.end() :])))


def members(body: str) -> Iterator[str]:
    """The declarations of a class, given what follows its opening brace; without the bodies of its functions."""
    depth, piece = 1, ""
    for character in body:
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return
        if depth == 1 and character in ";}":
            yield piece
            piece = ""
        elif depth == 1:
            piece += character


def is_method(declaration: str) -> bool:
    declaration = re.sub(r"\b(public|protected|private)\s*:(?!:)", "", declaration)
    before = None
    while before != declaration:
        before, declaration = declaration, _TEMPLATE_ARGUMENTS.sub("", declaration)
    if _NO_METHOD.search(declaration):
        return False
    return _METHOD.search(declaration.split("=")[0] if "operator" not in declaration else declaration) is not None


def test_the_parser_of_classes_counts_methods() -> None:
    text = """
    class A final : public B<int>, C {  // class D { void no(); };
    public:
        explicit A(int x) : _x(x) { if (x) { y(); } }
        A(const A&) = delete;
        ~A() override;
        std::function<void(int, float)> member;
        [[nodiscard]] const std::vector<std::pair<int, int>>& pairs() const { return _pairs; }
        bool operator==(const A& other) const;
        friend void other(A&);
        using Call = std::function<void()>;
    private:
        int _x = f(3);
        struct Inner { int a; void b(); };
        Inner* make(int, int = g());
    };
    enum class E { One };
    """
    assert dict(classes(text)) == {"A": 5, "Inner": 1}


def large_cpp_classes() -> Iterator[str]:
    for path in sources("cpp", "cuda", suffixes=(".h", ".cuh")):
        for name, count in classes(path.read_text(encoding="utf-8")):
            if count > MOST_METHODS:
                yield f"{name_of(path)}: {name}"


# --- Python: imports, classes and functions -----------------------------------------------------------------------


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def module_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(tree: ast.Module, modules: set[str]) -> Iterator[str]:
    """The modules that one imports, wherever it does: in a function, or for type checkers alone, is no way around."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in modules)
        elif isinstance(node, ast.ImportFrom) and node.module in modules:
            yield from (inner if (inner := f"{node.module}.{alias.name}") in modules else node.module
                        for alias in node.names)


def circles(arrows: Mapping[str, set[str]]) -> set[str]:
    """What is left when all is taken away that leads to nothing, or that nothing leads to: the circles, and ways from
    one to another."""
    left = set(arrows)
    while True:
        leading = {name for name in left if arrows[name] & left}
        kept = {name for name in leading if any(name in arrows[other] for other in leading)}
        if kept == left:
            return left
        left = kept


def test_only_serve_needs_the_servers_packages() -> None:
    """Others may not import the server: what it imports may not be installed."""
    allowed = (ROOT / "python/sharpi/serve", ROOT / "python/sharpi/cli/commands/serve.py")
    found = {name_of(path) for path in python_sources() if ROOT / "python/sharpi" in path.parents
             and not any(path == each or each in path.parents for each in allowed)
             and re.search(r"^\s*(from|import) sharpi\.serve", path.read_text(encoding="utf-8"), re.MULTILINE)}
    assert not found


def test_imports_form_no_circle() -> None:
    paths = {module_of(path): path for path in PACKAGE.rglob("*.py*") if path.suffix in (".py", ".pyi")}
    assert len(paths) > 50
    arrows = {name: set(imports(parsed(path), set(paths))) for name, path in paths.items()}
    assert not circles(arrows)


def test_circles_are_found() -> None:
    assert circles({"a": {"b"}, "b": {"c"}, "c": set()}) == set()
    assert circles({"a": {"b"}, "b": {"c"}, "c": {"b", "d"}, "d": set()}) == {"b", "c"}


Function = (ast.FunctionDef, ast.AsyncFunctionDef)


def python_sources() -> tuple[Path, ...]:
    return sources("python", "tests", "benchmarks", suffixes=(".py",))


def large_python_classes() -> Iterator[str]:
    for path in python_sources():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef):
                names = {
                    part.name for part in node.body if isinstance(part, Function)
                }  # a property and its setter: one
                if len(names) > MOST_METHODS:
                    yield f"{name_of(path)}: {node.name}"


def test_classes_are_small() -> None:
    compare([*large_cpp_classes(), *large_python_classes()], LARGE_CLASSES)


def code_lines(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """The lines of a function without its docstring."""
    first = function.body[0]
    docstring = first if ast.get_docstring(function) is not None else None
    length = (function.end_lineno or 0) - function.lineno + 1
    return length - ((docstring.end_lineno or 0) - docstring.lineno + 1 if docstring else 0)


def test_python_functions_are_short() -> None:
    long = (f"{name_of(path)}: {node.name}" for path in python_sources() for node in ast.walk(parsed(path))
            if isinstance(node, Function) and code_lines(node) > MOST_LINES)
    compare(long, LONG_FUNCTIONS)


# --- Folders and lines --------------------------------------------------------------------------------------------


def test_folders_are_small() -> None:
    every = sources("cpp", "cuda", "python", "tests", "benchmarks", suffixes=(*CPP, ".py", ".pyi"))
    folders = [name_of(path.parent) for path in every]
    compare((name for name in set(folders) if folders.count(name) > MOST_FILES), FULL_FOLDERS)


def test_lines_are_short() -> None:
    every = sources("cpp", "cuda", "python", "tests", "benchmarks", suffixes=(*CPP, ".py", ".pyi", ".cmake", ".txt"))
    found = (name_of(path) for path in (*every, ROOT / "CMakeLists.txt", ROOT / "pyproject.toml")
             if "data" not in path.parts
             and any(len(line) > MOST_CHARACTERS for line in path.read_text(encoding="utf-8").splitlines()))
    compare(found, LONG_LINES)
