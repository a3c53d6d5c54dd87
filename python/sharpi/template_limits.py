"""Runs the Jinja programs of model files within limits: of steps, of memory, of nesting.

Jinja's sandbox keeps a template from reaching anything but its variables. It does not keep one from running forever or
from taking all memory: `"a" * 5000000000` is one step. `MeteredEnvironment` counts both while a template runs:

- *Steps* stand for time. Each run of a loop's or macro's body costs as many as the body has nodes, each call a few, and
  an operation on text or on a list one for a number of its characters or elements.
- *Made bytes* stand for memory: of every text and list that comes to be, whether it is still needed or not.

Both are counted, not measured, so a template ends alike on every machine. What could be large is refused before it
is made. Counts are charged by rewriting the parsed template (`_Instrument`), by the sandbox's hooks for operators and
calls, and by wrapping filters and tests. A method or filter not known to be harmless takes small values only.
"""

from __future__ import annotations

import functools
import re
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import Namespace, pass_eval_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

__all__ = ["Limits", "MeteredEnvironment", "TemplateLimitError"]

MAX_SOURCE, MAX_NODES = 128 << 10, 12_000  # the largest templates of real models have 17 KB and 1,300 nodes
MAX_STEPS, MAX_MADE = 20_000_000, 128 << 20
PER_CHARACTER = 32  # beyond both, for each character of the conversation
MAX_DEPTH, MAX_BITS, MAX_DIGITS, MAX_RARE = 200, 4096, 5, 10_000

_PIECE, _ELEMENT = 56, 64  # bytes that a text and an element of a list take beside their characters
_PER_STEP = 64  # characters that are read or written in the time of a step
_LONGEST_REPR = 10  # characters that repr or JSON may write for one: \U0001f600


class TemplateLimitError(Exception):
    """A template went beyond its limits. The message goes on from "the chat template ..."."""


class Limits:
    """What one rendering may take, and what it has taken."""

    def __init__(self) -> None:
        self.steps = self.made = 0
        self._most_steps, self._most_made = MAX_STEPS, MAX_MADE

    def start(self, variables: Mapping[str, Any]) -> None:
        """Begins a rendering of `variables`: a long conversation may take more."""
        self._most_steps, self._most_made = sys.maxsize, MAX_MADE
        more = PER_CHARACTER * self.measure(dict(variables))
        self._most_steps, self._most_made = MAX_STEPS + more, MAX_MADE + more
        self.steps = self.made = 0

    def spend(self, steps: int) -> None:
        """Charges steps."""
        self.steps += steps
        if self.steps > self._most_steps:
            raise TemplateLimitError(f"takes more than {self._most_steps:,} steps")

    def require(self, count: int) -> None:
        """Refuses to make `count` bytes more, if they are too many, before they are made."""
        if self.made + count > self._most_made:
            raise TemplateLimitError(f"makes more than {self._most_made >> 20} MiB of text and lists")

    def make(self, count: int) -> None:
        """Charges bytes that have been made."""
        self.require(count)
        self.made += count
        self.spend(count // _PER_STEP)

    def measure(self, value: Any) -> int:
        """Charges a walk through `value` and everything in it, as often as it is in it; returns the characters."""
        if isinstance(value, str):
            self.spend(1 + len(value) // _PER_STEP)
            return len(value)
        self.spend(5)
        characters, depth, level = 0, 0, [value]
        while level:
            depth += 1
            if depth > MAX_DEPTH:
                raise TemplateLimitError(f"nests lists more than {MAX_DEPTH} deep")
            following: list[Any] = []
            for item in level:
                if isinstance(item, str):
                    characters += len(item)
                    continue
                characters += 16 if not isinstance(item, int) else 8 + item.bit_length() // 3
                if isinstance(item, Namespace):
                    item = vars(item).get("_Namespace__attrs", ())
                if isinstance(item, _WALKED):
                    self.spend(2 * len(item))
                    following.extend(item)
                    if isinstance(item, Mapping):
                        following.extend(item.values())
            self.spend(len(level))
            level = following
        self.spend(characters // _PER_STEP)
        return characters

    def written(self, value: Any) -> None:
        """Charges what `str(value)` may take, in steps, and refuses it if its text could be too long."""
        if not isinstance(value, str):
            self.require(_LONGEST_REPR * self.measure(value))
        else:
            self.spend(1 + len(value) // _PER_STEP)

    def result(self, value: Any) -> Any:
        """Charges what an operation has made, and returns it; of an iterator, its elements as they come."""
        if isinstance(value, str):
            self.make(_PIECE + (len(value) if value.isascii() else 4 * len(value)))
        elif isinstance(value, int):
            if value.bit_length() > MAX_BITS:
                raise TemplateLimitError(f"computes with numbers of more than {MAX_BITS} bits")
        elif isinstance(value, (list, tuple, dict)):
            self.make(_PIECE + _ELEMENT * len(value))
        elif isinstance(value, Iterator):
            return self._counted(value)
        return value

    def _counted(self, values: Iterator[Any]) -> Iterator[Any]:
        for value in values:
            self.spend(5)
            if isinstance(value, tuple):
                self.measure(value)  # it may become a key, whose hash walks through it
            if isinstance(value, (str, list, tuple)):
                self.result(value)
            yield value


_VIEWS: Any = (type({}.keys()), type({}.values()), type({}.items()))
_WALKED: Any = (dict, list, tuple, set, frozenset, Mapping, *_VIEWS)


class _Own:
    """A function of ours that a rewritten template calls; no template can name one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. One rendering at a time: `limits` is started before each."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        # Without the optimizer, nothing is computed while a template is compiled.
        super().__init__(optimized=False, finalize=_finalize, **options)
        self.limits = limits = Limits()
        del self.globals["lipsum"]
        for name in ("spend", "body", "measured", "result", "container", "concat"):
            setattr(self, f"own_{name}", _Own(getattr(self, f"_{name}")))
        self.filters = {name: _metered_filter(limits, name, run) for name, run in self.filters.items()}
        self.tests = {name: _metered_test(limits, run) if name in _COMPARING_TESTS else run
                      for name, run in self.tests.items()}

    def add_filter(self, name: str, run: Callable[..., Any]) -> None:
        """A filter of ours, which charges for itself what it makes on its way."""
        self.filters[name] = _metered_filter(self.limits, name, run)

    def program(self, source: str) -> Template:
        """The compiled template. Raises TemplateSyntaxError, or TemplateLimitError for one that is too large."""
        if len(source) > MAX_SOURCE:
            raise TemplateLimitError(f"has {len(source):,} characters, more than {MAX_SOURCE:,}")
        tree = self.parse(source)
        if sum(1 for _ in tree.find_all(nodes.Node)) > MAX_NODES:
            raise TemplateLimitError(f"has more than {MAX_NODES:,} parts")
        tree = _Instrument().visit(tree)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python's, about `1[2]` and the like
            code = self.compile(tree)
        return Template.from_code(self, code, self.make_globals(None))

    # --- what rewritten templates call ----------------------------------------------------------------------------

    def _spend(self, steps: int) -> bool:
        self.limits.spend(steps)
        return True

    def _body(self, steps: int, characters: int) -> None:
        self.limits.spend(steps)
        self.limits.make(characters)

    def _measured(self, value: Any) -> Any:
        self.limits.measure(value)
        return value

    def _result(self, value: Any) -> Any:
        return self.limits.result(value)

    def _container(self, value: Any) -> Any:
        self.limits.measure(value)
        return self.limits.result(value)

    def _concat(self, *values: Any) -> str:
        for value in values:
            self.limits.written(value)
        return self.limits.result("".join(map(str, values)))

    # --- the sandbox's hooks --------------------------------------------------------------------------------------

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.limits.spend(1)
        if operator == "*":
            _check_product(self.limits, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS:
                raise TemplateLimitError(f"computes with numbers of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            _check_percent(self.limits, left, right)
        return self.limits.result(super().call_binop(context, operator, left, right))

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        return functools.partial(self._call_method, value, value.__self__)

    def call(self, context: Any, function: Any, /, *args: Any, **options: Any) -> Any:
        if function.__class__ is _Own:
            return function.function(*args)
        self.limits.spend(20)
        given = [*args, *(value for name, value in options.items() if not name.startswith("_"))]
        if isinstance(function, (Macro, LoopContext, BlockReference)):
            # Their arguments are only handed on. But tuples that grow this way are deep keys one day.
            for value in given:
                if isinstance(value, tuple):
                    self.limits.measure(value)
            return self.limits.result(super().call(context, function, *args, **options))
        owner = getattr(function, "__self__", None)
        if isinstance(function, (types.BuiltinMethodType, types.MethodType)) and isinstance(owner, _BUILTIN):
            own = {name: value for name, value in options.items() if name not in ("_loop_vars", "_block_vars")}
            return self._call_method(function, owner, *args, **own)
        for value in given:
            self.limits.measure(value)
        return self.limits.result(super().call(context, function, *args, **options))

    def _call_method(self, method: Any, owner: Any, /, *args: Any, **options: Any) -> Any:
        """A method of a text, number, list or dict: one that is known, with its cost charged before it is called."""
        name = method.__name__
        if not any(isinstance(owner, kind) and name in names for kind, names in _METHODS.items()):
            raise SecurityError(f"{type(owner).__name__}.{name} is not there for templates")
        args = tuple(list(self.limits.result(value)) if isinstance(value, Iterator) else value for value in args)
        self.limits.spend(1 + len(owner) // _PER_STEP if isinstance(owner, Sized) else 1)
        for value in (*args, *options.values()):
            self.limits.measure(value)
        if isinstance(owner, str):
            check = _TEXT_CHECKS.get(name)
            if check is not None:
                check(self.limits, owner, *args, **options)
            if name in ("format", "format_map"):
                return self.limits.result(self._format(owner, name, args, options))
        elif name in ("count", "index"):
            self.limits.measure(owner)
        return self.limits.result(method(*args, **options))

    def _format(self, text: str, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        if name == "format_map":
            options, args = args[0], ()
        if isinstance(text, Markup):
            return Markup(_EscapingFormatter(self, escape=text.escape).vformat(text, args, options))
        return _Formatter(self).vformat(text, args, options)


_BUILTIN = (str, bytes, int, float, list, tuple, dict, set, frozenset, *_VIEWS)
_TEXT_METHODS = frozenset(
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii isdecimal "
    "isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower lstrip partition "
    "removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split splitlines startswith strip "
    "swapcase title upper zfill striptags unescape".split())
_METHODS: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    list: frozenset({"copy", "count", "index"}),
    tuple: frozenset({"count", "index"}),
    dict: frozenset({"copy", "get", "items", "keys", "values"}),
    int: frozenset({"bit_length"}),
    float: frozenset({"is_integer"}),
}


# --- formats ------------------------------------------------------------------------------------------------------


class _Checked:
    """For a formatter of the sandbox: fields within the limits."""

    _env: MeteredEnvironment

    def format_field(self, value: Any, format_spec: str) -> Any:
        limits = self._env.limits
        _check_widths(limits, format_spec)
        limits.written(value)
        return limits.result(super().format_field(value, format_spec))  # type: ignore[misc]

    def convert_field(self, value: Any, conversion: Any) -> Any:
        if conversion is not None:
            self._env.limits.written(value)
        return super().convert_field(value, conversion)  # type: ignore[misc]


class _Formatter(_Checked, SandboxedFormatter):  # type: ignore[misc]
    pass


class _EscapingFormatter(_Checked, SandboxedEscapeFormatter):  # type: ignore[misc]
    pass


def _check_widths(limits: Limits, pattern: str) -> None:
    widths = re.findall(r"\d+", pattern)
    if any(len(width) > MAX_DIGITS for width in widths):
        raise TemplateLimitError(f"formats with a width of more than {MAX_DIGITS} digits")
    limits.spend(1 + len(pattern) // 8)
    limits.require(sum(map(int, widths)))


def _check_percent(limits: Limits, pattern: str, values: Any) -> None:
    _check_widths(limits, pattern)
    limits.written(values)
    if "*" in pattern and isinstance(values, tuple):  # widths that are values
        for value in values:
            if isinstance(value, int):
                _check_widths(limits, str(value))


def _check_product(limits: Limits, left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int):
        if left.bit_length() + right.bit_length() > MAX_BITS + 1:
            raise TemplateLimitError(f"computes with numbers of more than {MAX_BITS} bits")
        return
    for some, times in ((left, right), (right, left)):
        if isinstance(times, int) and isinstance(some, (str, bytes)):
            limits.require(4 * len(some) * times)
        elif isinstance(times, int) and isinstance(some, Sized):
            limits.require(_ELEMENT * len(some) * times)


# --- text ---------------------------------------------------------------------------------------------------------


def _check_width(limits: Limits, text: str, width: Any = 80, *_: Any, **__: Any) -> None:
    if isinstance(width, int):
        limits.require(4 * (len(text) + width))


def _check_tabs(limits: Limits, text: str, tabsize: Any = 8) -> None:
    if isinstance(tabsize, int):
        limits.require(4 * (len(text) + text.count("\t") * tabsize))


def _check_replace(limits: Limits, text: str, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        found = text.count(old)
        limits.require(4 * (len(text) + found * max(0, len(new) - len(old))))
        limits.spend(found)


def _check_join(limits: Limits, text: str, values: Any = (), *_: Any) -> None:
    count = len(values) if isinstance(values, Sized) else 0
    limits.require(4 * len(text) * count)
    if not isinstance(values, str):
        limits.require(limits.measure(values))


def _check_split(limits: Limits, text: str, separator: Any = None, *_: Any, **__: Any) -> None:
    """Text by text: searching from the end, and stripping, may take the product of the lengths."""
    parts = text.count(separator) if isinstance(separator, str) and separator else len(text) // 2
    limits.require(_ELEMENT * parts)
    _check_search(limits, text, separator)


def _check_search(limits: Limits, text: str, wanted: Any = None, *_: Any, **__: Any) -> None:
    if isinstance(wanted, str):
        limits.spend(len(text) * len(wanted) // _PER_STEP)


def _check_rare(limits: Limits, text: Any, *args: Any, **options: Any) -> None:
    """For what may take a high power of its text's length, and is seldom used."""
    if limits.measure([text, *args, *options.values()]) > MAX_RARE:
        raise TemplateLimitError(f"uses a filter that takes texts of up to {MAX_RARE:,} characters with a longer one")
    for value in (*args, *options.values()):
        if isinstance(value, (int, float)) and not -MAX_RARE <= value <= MAX_RARE:
            raise TemplateLimitError(f"uses a filter that takes numbers of up to {MAX_RARE:,} with a larger one")


_TEXT_CHECKS: dict[str, Callable[..., None]] = {
    "center": _check_width, "ljust": _check_width, "rjust": _check_width, "zfill": _check_width,
    "expandtabs": _check_tabs, "replace": _check_replace, "join": _check_join,
    "split": _check_split, "rsplit": _check_split, "splitlines": _check_split,
    **dict.fromkeys(("rfind", "rindex", "rpartition", "strip", "lstrip", "rstrip"), _check_search),
    "striptags": _check_rare, "unescape": _check_rare,
}


# --- filters and tests --------------------------------------------------------------------------------------------


def _check_text(limits: Limits, value: Any, *args: Any, **_: Any) -> None:
    limits.written(value)
    for argument in args:
        limits.measure(argument)


def _check_deep(limits: Limits, value: Any, *args: Any, **options: Any) -> None:
    """For filters that compare, hash or add up elements."""
    count = len(value) if isinstance(value, Sized) else 1
    before = limits.steps
    limits.require(_LONGEST_REPR * limits.measure([value, *args, *options.values()]))
    limits.spend((limits.steps - before) * count.bit_length())


def _check_sum(limits: Limits, value: Any, attribute: Any = None, start: Any = 0) -> None:
    _check_deep(limits, value, start)
    if isinstance(start, (list, tuple)) and isinstance(value, Sized):
        parts: Any = value
        limits.require(_ELEMENT * len(parts) * sum(len(part) for part in parts if isinstance(part, Sized)) // 2)


def _check_list(limits: Limits, value: Any, *_: Any, **__: Any) -> None:
    if isinstance(value, Sized):
        limits.require(_ELEMENT * len(value))


def _check_joined(limits: Limits, value: Any, d: Any = "", attribute: Any = None) -> None:
    if isinstance(value, Iterable):
        limits.require(_LONGEST_REPR * limits.measure(value))
        _check_join(limits, str(d), value)


def _check_replaced(limits: Limits, value: Any, old: Any = "", new: Any = "", count: Any = None) -> None:
    for part in (value, old, new):
        limits.written(part)
    _check_replace(limits, str(value), str(old), str(new))


def _check_indent(limits: Limits, value: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    limits.written(value)
    size = width if isinstance(width, int) else len(width) if isinstance(width, str) else 0
    limits.require(4 * size * (1 + len(str(value).splitlines())))


def _check_format(limits: Limits, value: Any, *args: Any, **options: Any) -> None:
    limits.written(value)
    _check_percent(limits, str(value), args or options)


def _check_trim(limits: Limits, value: Any, chars: Any = None) -> None:
    limits.written(value)
    _check_search(limits, str(value), chars)


def _check_batch(limits: Limits, value: Any, linecount: Any = 0, fill_with: Any = None) -> None:
    _check_list(limits, value)
    if fill_with is not None and isinstance(linecount, int):
        limits.require(_ELEMENT * linecount)


def _check_nothing(limits: Limits, value: Any, *args: Any, **options: Any) -> None:
    return None


_FILTER_CHECKS: dict[str, Callable[..., None]] = {
    **dict.fromkeys("abs attr count d default first float items last length map random reject rejectattr safe select "
                    "selectattr tojson".split(), _check_nothing),
    **dict.fromkeys("capitalize e escape forceescape int lower string title truncate upper urlencode wordcount".split(),
                    _check_text),
    **dict.fromkeys("dictsort groupby max min sort unique".split(), _check_deep),
    **dict.fromkeys(("list", "reverse", "slice"), _check_list),
    "batch": _check_batch, "center": _check_width, "format": _check_format, "indent": _check_indent,
    "join": _check_joined, "replace": _check_replaced, "sum": _check_sum,
    "trim": _check_trim,
}
_WALKING = frozenset(name for name, check in _FILTER_CHECKS.items()
                     if check in (_check_deep, _check_sum, _check_joined))
_COMPARING_TESTS = frozenset("== eq equalto != ne > gt greaterthan >= ge < lt lessthan <= le in upper lower".split())


def _metered_filter(limits: Limits, name: str, run: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, which charges for what it does; `functools.wraps` hands on what Jinja marks filters with."""
    check: Callable[..., None] = _FILTER_CHECKS.get(name, _check_rare)
    at = 1 if getattr(run, "jinja_pass_arg", None) is not None else 0  # behind the context, which some filters take

    @functools.wraps(run)
    def metered(*args: Any, **options: Any) -> Any:
        limits.spend(5)
        before, (value, *rest) = args[:at], args[at:]
        if name in _WALKING and isinstance(value, Iterator):
            value = list(limits.result(value))
        check(limits, value, *rest, **options)
        return limits.result(run(*before, value, *rest, **options))

    return metered


def _metered_test(limits: Limits, run: Any) -> Callable[..., Any]:
    @functools.wraps(run)
    def metered(*values: Any) -> Any:
        for value in values:
            limits.written(value)
        return run(*values)

    return metered


@pass_eval_context
def _finalize(context: Any, value: Any) -> str:
    """The text of an expression's value, on its way out. As it asks for a context, nothing is put out at compile time."""
    limits: Limits = context.environment.limits
    limits.written(value)
    return limits.result(str(value))


# --- rewriting ----------------------------------------------------------------------------------------------------


def _own(name: str, *args: nodes.Expr, lineno: int) -> nodes.Call:
    function = nodes.EnvironmentAttribute(f"own_{name}", lineno=lineno)
    return nodes.Call(function, list(args), [], None, None, lineno=lineno)


class _Instrument(NodeTransformer):
    """Puts the charges into a parsed template."""

    def visit_Template(self, node: nodes.Template) -> nodes.Node:
        return self._charge_body(node)

    def visit_Macro(self, node: nodes.Macro) -> nodes.Node:
        return self._charge_body(node)

    def visit_CallBlock(self, node: nodes.CallBlock) -> nodes.Node:
        return self._charge_body(node)

    def visit_Block(self, node: nodes.Block) -> nodes.Node:
        return self._charge_body(node)

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            steps = nodes.Const(_size_of([node.test])[0], lineno=node.lineno)
            node.test = nodes.And(_own("spend", steps, lineno=node.lineno), node.test, lineno=node.lineno)
        return self._charge_body(node)

    def _charge_body(self, node: Any) -> nodes.Node:
        sizes = [nodes.Const(size, lineno=node.lineno) for size in _size_of(node.body)]
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_own("body", *sizes, lineno=node.lineno), lineno=node.lineno))
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _own("concat", *node.nodes, lineno=node.lineno)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        if all(operand.op in ("eq", "ne") for operand in node.ops) and any(isinstance(s, nodes.Const) for s in sides):
            return node  # with something that is short
        node.expr = _measured(node.expr)
        for operand in node.ops:
            operand.expr = _measured(operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return _own("result", node, lineno=node.lineno)
        node.arg = _measured(node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _measured(node.key)
        return node

    def visit_List(self, node: nodes.List) -> nodes.Node:
        return self._charge_container(node, node.items)

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        return self._charge_container(node, node.items) if node.ctx == "load" else self.generic_visit(node)

    def visit_Dict(self, node: nodes.Dict) -> nodes.Node:
        return self._charge_container(node, node.items)

    def _charge_container(self, node: Any, items: list[Any]) -> nodes.Node:
        if all(isinstance(item, nodes.Const) for item in items):
            return node
        self.generic_visit(node)
        return _own("container", node, lineno=node.lineno)

    def visit_ScopedEvalContextModifier(self, node: nodes.ScopedEvalContextModifier) -> nodes.Node:
        raise TemplateSyntaxError("autoescape is not there for chat templates", node.lineno)


def _measured(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _own("measured", node, lineno=node.lineno)


def _size_of(body: Iterable[nodes.Node]) -> tuple[int, int]:
    """How many nodes and characters there are, without the bodies that are charged for themselves."""
    steps, characters = 5, 0  # an empty body takes its time too
    rest = list(body)
    while rest:
        node = rest.pop()
        steps += 1
        if isinstance(node, nodes.TemplateData):
            characters += _PIECE + len(node.data)
        own = isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        rest.extend(node.iter_child_nodes(exclude=("body",) if own else None))
    return steps, characters


