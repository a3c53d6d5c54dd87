"""Where source can be changed in a small way that compiles: for Python by its syntax tree, for C++ by its tokens."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Site:
    """A change of lines: `before` is the text of whole lines from `line` on, `after` what takes its place. which: the
    number of such texts in the file before it."""

    file: str
    line: int
    kind: str
    before: str
    after: str
    which: int

    def __str__(self) -> str:
        def short(text: str) -> str:
            return " ".join(text.split())[:150]
        return f"{self.file}:{self.line} {self.kind}: {short(self.before)}  ->  {short(self.after)}"

    def applied(self, source: str) -> str | None:
        """The source with the change; `None` if it has no such place."""
        at = -1
        for _ in range(self.which + 1):
            at = source.find(self.before, at + 1)
            if at < 0:
                return None
        return source[:at] + self.after + source[at + len(self.before):]


def _site(path: Path, root: Path, kind: str, source: str, begin: int, end: int, text: str) -> Site:
    """The change that replaces source[begin:end], as whole lines."""
    first, last = source.rfind("\n", 0, begin) + 1, source.find("\n", end)
    before = source[first:last]
    which = 0
    at = source.find(before)
    while at < first:
        which, at = which + 1, source.find(before, at + 1)
    after = source[first:begin] + text + source[end:last]
    return Site(str(path.relative_to(root)), source.count("\n", 0, begin) + 1, kind, before, after, which)


# --- Python --------------------------------------------------------------------------------------------------------

_COMPARE = {ast.Lt: ("<", "<="), ast.LtE: ("<=", "<"), ast.Gt: (">", ">="), ast.GtE: (">=", ">"), ast.Eq: ("==", "!="),
            ast.NotEq: ("!=", "=="), ast.In: ("in", "not in"), ast.NotIn: ("not in", "in"), ast.Is: ("is", "is not"),
            ast.IsNot: ("is not", "is")}
_ARITHMETIC = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "//"),
    ast.FloorDiv: ("//", "*"),
    ast.Div: ("/", "*"),
    ast.Mod: ("%", "//"),
}


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)))


class _PythonSites:
    def __init__(self, path: Path, root: Path) -> None:
        self._path, self._root = path, root
        self._source = path.read_text(encoding="utf-8")
        starts = [0]
        for line in self._source.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        self._starts = starts
        self.sites: list[Site] = []

    def _offset(self, line: int, column: int) -> int:
        start = self._starts[line - 1]
        text = self._source[start:self._starts[line]]
        return start + len(text.encode()[:column].decode())

    def _span(self, node: ast.AST) -> tuple[int, int]:
        return self._offset(node.lineno, node.col_offset), self._offset(node.end_lineno, node.end_col_offset)

    def _add(self, kind: str, begin: int, end: int, text: str) -> None:
        self.sites.append(_site(self._path, self._root, kind, self._source, begin, end, text))

    def _between(self, kind: str, left: ast.AST, right: ast.AST, old: str, new: str) -> None:
        begin, end = self._span(left)[1], self._span(right)[0]
        at = re.search(rf"(?<![\w<>=!*/]){re.escape(old)}(?![\w<>=*/])", self._source[begin:end])
        if at:
            self._add(kind, begin + at.start(), begin + at.end(), new)

    def find(self) -> list[Site]:
        tree = ast.parse(self._source)
        skipped = set()
        for node in ast.walk(tree):  # what a type checker reads, and what a person does
            for part in (getattr(node, "annotation", None), getattr(node, "returns", None)):
                if part is not None:
                    skipped.update(map(id, ast.walk(part)))
        for node in ast.walk(tree):
            if id(node) not in skipped:
                self._visit(node)
        return self.sites

    def _visit(self, node: ast.AST) -> None:
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARE:
            self._between("comparison", node.left, node.comparators[0], *_COMPARE[type(node.ops[0])])
        elif isinstance(node, ast.BoolOp):
            old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            self._between("and/or", node.values[0], node.values[1], old, new)
        elif isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
            if not any(_is_text(side) for side in (node.left, node.right)):
                self._between("arithmetic", node.left, node.right, *_ARITHMETIC[type(node.op)])
        elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
            text = str(not node.value) if isinstance(node.value, bool) else str(node.value + 1)
            self._add("constant", *self._span(node), text)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            begin, end = self._span(node)
            self._add("not", begin, end, f"({self._source[slice(*self._span(node.operand))]})")
        elif isinstance(node, ast.Return) and node.value is not None and not (
                isinstance(node.value, ast.Constant) and node.value.value is None):
            self._add("return", *self._span(node), "return None")
        elif isinstance(node, ast.AugAssign) or (
                isinstance(node, ast.Expr) and isinstance(node.value, (ast.Call, ast.Yield))):
            self._add("statement", *self._span(node), "pass")
        elif isinstance(node, ast.Raise):
            self._add("raise", *self._span(node), "pass")
        if isinstance(node, ast.Call) and len(node.args) >= 2 and not any(
                isinstance(arg, (ast.Starred, ast.GeneratorExp)) for arg in node.args):
            (a, b), (c, d) = self._span(node.args[0]), self._span(node.args[1])
            if self._source[a:b] != self._source[c:d] and self._source[a - 1:a] != "f":
                self._add("arguments", a, d, self._source[c:d] + self._source[b:c] + self._source[a:b])


def python_sites(path: Path, root: Path) -> list[Site]:
    return _PythonSites(path, root).find()


# --- C++ -----------------------------------------------------------------------------------------------------------

# Operators stand between spaces, which brackets of templates and pointers do not.
_CPP = [(r" < ", " <= "), (r" <= ", " < "), (r" > ", " >= "), (r" >= ", " > "), (r" == ", " != "), (r" != ", " == "),
        (r" && ", " || "), (r" \|\| ", " && "), (r" \+ ", " - "), (r" - ", " + "), (r" \* ", " / "), (r" / ", " * "),
        (r" % ", " / "), (r" \+= ", " -= "), (r" -= ", " += "), (r"\+\+(?=\w)", "--"), (r"--(?=\w)", "++"),
        (r"std::min\b", "std::max"), (r"std::max\b", "std::min"), (r"\btrue\b", "false"), (r"\bfalse\b", "true"),
        (r"(?<=[(!&|] )!(?=\w)|(?<=[(])!(?=[\w*])", "")]
_NUMBER = re.compile(r"(?<![\w.'\"])\d+(?![\w.'\"])")
# A statement of one line that declares nothing and does not leave.
_STATEMENT = re.compile(r"^ +((?!return|throw|if|for|while|else|case|using|delete|const|auto|static)"
                        r"[\w.\->\[\]()*+]+(?:\(.*\)| [-+|&*]?= .*|\+\+|--));$", re.MULTILINE)
_SKIPPED = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'|^#[^\n]*|static_assert\([^;]*;'
                      r"|enum class[^;]*;", re.DOTALL | re.MULTILINE)


def _code_only(source: str) -> str:
    """The source with comments, strings and directives blanked, so that places stay where they are."""
    return _SKIPPED.sub(lambda found: re.sub(r"[^\n]", "\0", found[0]), source)


def _matches(code: str) -> Iterator[tuple[str, int, int, str]]:
    for pattern, text in _CPP:
        for found in re.finditer(pattern, code):
            line = code[code.rfind("\n", 0, found.start()) + 1:code.find("\n", found.end())]
            if text in (" + ", " - ") and "\0" in line:
                continue  # joined strings have no difference
            yield "operator", found.start(), found.end(), text
    for found in _NUMBER.finditer(code):
        yield "constant", found.start(), found.end(), str(int(found[0]) + 1)
    for found in _STATEMENT.finditer(code):
        if "{" not in found[1]:
            yield "statement", found.start(1), found.end(1), ""


def cpp_sites(path: Path, root: Path) -> list[Site]:
    source = path.read_text(encoding="utf-8")
    code = _code_only(source)
    return [_site(path, root, kind, source, begin, end, text) for kind, begin, end, text in _matches(code)
            if source[source.rfind("\n", 0, begin) + 1:begin].strip()[:8] != "template"]
