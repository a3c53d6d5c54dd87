"""Jinja's sandbox with limits: the surroundings in which the templates of model files run.

A parsed template is rewritten (`_Instrument`), so that bodies, comparisons, keys, slices and lists are charged to the
`Limits` (`template_limits` has the idea and the prices). The sandbox's hooks charge operators and calls; filters and
tests are wrapped. Nothing is computed while a template is compiled.
"""

from __future__ import annotations

import functools
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from typing import Any

from jinja2 import Template, TemplateSyntaxError, nodes
from jinja2.exceptions import SecurityError
from jinja2.runtime import BlockReference, LoopContext, Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedEscapeFormatter, SandboxedFormatter
from jinja2.utils import pass_eval_context
from jinja2.visitor import NodeTransformer
from markupsafe import Markup

from sharpi.text.template_limits import (
    COMPARING_TESTS,
    MAX_BITS,
    PER_STEP,
    PIECE,
    TEXT_CHECKS,
    VIEWS,
    Limits,
    TemplateLimitError,
    check_append,
    check_percent,
    check_product,
    check_widths,
    metered_filter,
    metered_test,
)

__all__ = ["MeteredEnvironment"]

MAX_SOURCE, MAX_NODES = 128 << 10, 12_000  # the largest templates of real models have 17 KB and 1,300 nodes


class _Own:
    """A function of ours that a rewritten template calls; no template can name one."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function


class OwnList(list[Any]):
    """A list that a template has written, the only kind that it may change: those of the conversation belong to the
    caller. It grows by texts and numbers, which cannot hold it, so that no list comes to hold itself."""


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with limits. One rendering at a time: `limits` is started before each."""

    intercepted_binops = frozenset({"+", "-", "*", "/", "//", "%", "**"})

    def __init__(self, **options: Any) -> None:
        # Without the optimizer, nothing is computed while a template is compiled.
        super().__init__(optimized=False, finalize=_finalize, **options)
        self.limits = limits = Limits()
        del self.globals["lipsum"]
        for name in ("spend", "body", "measured", "result", "container", "list", "concat"):
            setattr(self, f"own_{name}", _Own(getattr(self, f"_{name}")))
        self.filters = {name: metered_filter(limits, name, run) for name, run in self.filters.items()}
        self.tests = {name: metered_test(limits, run) if name in COMPARING_TESTS else run
                      for name, run in self.tests.items()}

    def add_filter(self, name: str, run: Callable[..., Any]) -> None:
        """A filter of ours, which charges for itself what it makes on its way."""
        self.filters[name] = metered_filter(self.limits, name, run)

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

    def _list(self, value: list[Any]) -> OwnList:
        return OwnList(self._container(value))

    def _concat(self, *values: Any) -> str:
        for value in values:
            self.limits.written(value)
        return self.limits.result("".join(map(str, values)))

    # --- the sandbox's hooks --------------------------------------------------------------------------------------

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return (isinstance(obj, OwnList) and attr in _METHODS[OwnList]) or super().is_safe_attribute(obj, attr, value)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self.limits.spend(1)
        if operator == "*":
            check_product(self.limits, left, right)
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            if left.bit_length() * abs(right) > MAX_BITS:
                raise TemplateLimitError(f"computes with numbers of more than {MAX_BITS} bits")
        elif operator == "%" and isinstance(left, str):
            check_percent(self.limits, left, right)
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
        self.limits.spend(1 + len(owner) // PER_STEP if isinstance(owner, Sized) else 1)
        for value in (*args, *options.values()):
            self.limits.measure(value)
        if isinstance(owner, str):
            check = TEXT_CHECKS.get(name)
            if check is not None:
                check(self.limits, owner, *args, **options)
            if name in ("format", "format_map"):
                return self.limits.result(self._format(owner, name, args, options))
        elif name in ("count", "index"):
            self.limits.measure(owner)
        elif name == "append":
            check_append(self.limits, *args)
        return self.limits.result(method(*args, **options))

    def _format(self, text: str, name: str, args: tuple[Any, ...], options: dict[str, Any]) -> str:
        if name == "format_map":
            options, args = args[0], ()
        if isinstance(text, Markup):
            return Markup(_EscapingFormatter(self, escape=text.escape).vformat(text, args, options))
        return _Formatter(self).vformat(text, args, options)


_BUILTIN = (str, bytes, int, float, list, tuple, dict, set, frozenset, *VIEWS)
_TEXT_METHODS = frozenset(
    "capitalize casefold center count endswith expandtabs find format format_map index isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle isupper join ljust lower "
    "lstrip partition removeprefix removesuffix replace rfind rindex rjust rpartition rsplit rstrip split "
    "splitlines startswith strip swapcase title upper zfill striptags unescape".split())
_METHODS: dict[type, frozenset[str]] = {
    str: _TEXT_METHODS,
    OwnList: frozenset({"append", "pop"}),
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
        check_widths(limits, format_spec)
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


# --- what is put out ----------------------------------------------------------------------------------------------


@pass_eval_context
def _finalize(context: Any, value: Any) -> str:
    """The text of an expression's value, on its way out. It asks for a context, so that nothing is put out while the
    template is compiled."""
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
        self.generic_visit(node)
        return _own("list", node, lineno=node.lineno)

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
            characters += PIECE + len(node.data)
        own = isinstance(node, (nodes.For, nodes.Macro, nodes.CallBlock, nodes.Block))
        rest.extend(node.iter_child_nodes(exclude=("body",) if own else None))
    return steps, characters


