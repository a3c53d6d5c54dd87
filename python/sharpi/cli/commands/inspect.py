"""``sharpi inspect``: what a GGUF file holds. Reads its header only, so it is quick for any size.

It also opens files that Sharpi cannot run, and says then why not: that is when one most wants to look inside.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import click

from sharpi.cli.help import Command
from sharpi.cli.logs import log_options
from sharpi.cli.model_names import described, named_as, not_here
from sharpi.cli.text import printable, say
from sharpi.interrupts import leaving_at_once
from sharpi.words import size

if TYPE_CHECKING:
    from sharpi.files.gguf import GgufFile, TensorInfo
    from sharpi.text.chat import ChatTemplate
    from sharpi.text.tokenizer import Tokenizer

_LONGEST_ARRAY = 8  # elements shown of an array, and characters × 10 of a string
_LONGEST_STRING = 80


@dataclass(frozen=True)
class _TypeTotal:
    """All tensors of one type, counted together."""

    type: str
    tensors: int
    elements: int
    bytes: int


@click.command("inspect", cls=Command, examples=(
    "sharpi inspect model.gguf",
    "sharpi inspect user/repo:Q4_K_M",
    "sharpi inspect model.gguf --tensors",
    "sharpi inspect model.gguf --json | jq .metadata"))
@click.argument("model", required=False, metavar="[MODEL]")
@click.option("-m", "--model", "-hf", "--hf-repo", "model_option", metavar="MODEL", help="The same as MODEL.")
@click.option("--tensors", "with_tensors", is_flag=True, help="List every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, with sizes in bytes.")
@log_options
def inspect_command(model: str | None, model_option: str | None, with_tensors: bool, as_json: bool) -> None:
    """Show what a model's file holds, and whether it runs here.

    MODEL is a file or a name such as user/repo:Q4_K_M; if it is not downloaded yet, only the header is read.
    Without MODEL, the bundled one is shown.
    """
    with leaving_at_once():
        from sharpi.files.gguf import GgufFile
        from sharpi.loading.description import BUNDLED_MODEL

    found = described(model, model_option)
    with named_as(found):
        file = GgufFile.open(BUNDLED_MODEL if found is None else found.path)
    verdict, files = _judge(file), [str(path) for path in file.paths]
    if found is not None and found.files:
        files = list(found.files)
        verdict = replace(verdict, obstacles={part: found.told(text) for part, text in verdict.obstacles.items()})
    if as_json:
        click.echo(json.dumps(_as_json(file, verdict, files), indent=2, ensure_ascii=False))
    else:
        click.echo(_as_text(file, verdict, files, with_tensors))
    if found is not None and found.missing:
        (say if as_json else click.echo)(not_here(found))


@dataclass(frozen=True)
class _Verdict:
    """What works with a file, found by reading each part as `sharpi run` and `sharpi chat` do. `spec`, `tokenizer` and
    `template` are `None` if they cannot be used; `obstacles` then says why, by part."""

    spec: Any
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    obstacles: dict[str, str]

    @property
    def runs(self) -> bool:
        """Whether `sharpi run` takes the file: it needs the model and the tokenizer."""
        return self.spec is not None and self.tokenizer is not None

    @property
    def obstacle(self) -> str | None:
        """Why it does not."""
        return None if self.runs else self.obstacles.get("model") or self.obstacles["tokenizer"]


def _judge(file: GgufFile) -> _Verdict:
    from sharpi.errors import SharpiError
    from sharpi.loading.description import read_chat_template, read_spec, read_tokenizer

    spec = tokenizer = template = None
    obstacles = {}
    try:
        spec = read_spec(file)
    except SharpiError as error:
        obstacles["model"] = str(error)
    try:
        tokenizer = read_tokenizer(file, spec)
        tokenizer.prepare()
    except SharpiError as error:
        tokenizer, obstacles["tokenizer"] = None, str(error)
    try:
        template = read_chat_template(file, tokenizer)
    except SharpiError as error:
        obstacles["chat_template"] = str(error)
    return _Verdict(spec, tokenizer, template, obstacles)


def _type_totals(tensors: Sequence[TensorInfo]) -> list[_TypeTotal]:
    """Sizes by tensor type, the largest first."""
    counts: Counter[str] = Counter()
    elements: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in tensors:
        counts[tensor.type_name] += 1
        elements[tensor.type_name] += math.prod(tensor.shape)
        sizes[tensor.type_name] += tensor.nbytes
    return [_TypeTotal(name, counts[name], elements[name], total) for name, total in sizes.most_common()]


def _as_text(file: GgufFile, verdict: _Verdict, files: list[str], with_tensors: bool) -> str:
    totals = _type_totals(file.tensors)
    parameters = sum(total.elements for total in totals)
    lines = [
        printable(file.name),
        f"  file           {printable(', '.join(files))}",
        f"  format         GGUF version {file.version}",
        f"  architecture   {printable(file.architecture)}",
        f"  parameters     {parameters:,}",
        f"  tensors        {len(file.tensors)}, {size(file.total_bytes)}",
        *_readiness(verdict),
        *_special_layers(verdict.spec),
        "",
        "metadata",
        *(f"  {printable(key)} = {_value_text(value)}" for key, value in file.metadata.items()),
        "",
        "size by type",
        f"  {'type':<10}{'tensors':>8}{'elements':>18}{'size':>12}{'bits each':>11}",
        *(f"  {t.type:<10}{t.tensors:>8}{t.elements:>18,}{size(t.bytes):>12}{8 * t.bytes / t.elements:>11.2f}"
          for t in totals),
    ]
    if with_tensors:
        width = max((len(printable(tensor.name)) for tensor in file.tensors), default=0)
        lines += ["", "tensors", *(_tensor_text(tensor, width) for tensor in file.tensors)]
    return "\n".join(lines)


def _readiness(verdict: _Verdict) -> list[str]:
    """What works with the file, and what stands in the way of the rest."""
    runs = "yes"
    if not verdict.runs:
        runs = "no: " + printable(verdict.obstacle or "")
    lines = [f"  runs here      {runs}"]
    if verdict.spec is not None and verdict.tokenizer is None:
        lines.append("                 token ids work: Model.generate([1, 2, 3]) in Python, sharpi plan, sharpi bench")
    if verdict.tokenizer is not None:
        lines.append(f"  tokenizer      {verdict.tokenizer.kind}, {verdict.tokenizer.vocab_size:,} tokens")
    elif verdict.spec is None:
        lines.append(f"  tokenizer      no: {printable(verdict.obstacles['tokenizer'])}")
    if verdict.template is not None:
        lines.append("  chat template  yes")
    elif "chat_template" in verdict.obstacles:
        lines.append(f"  chat template  no: {printable(verdict.obstacles['chat_template'])}")
    else:
        lines.append("  chat template  none, so sharpi chat does not take the file")
    return lines


def _special_layers(spec: Any) -> list[str]:
    """What a model has beside usual layers; nothing of one that cannot run."""
    lines = []
    if spec is not None and spec.prediction_layers:
        lines.append("  prediction     a layer that drafts tokens (--no-mtp leaves it in the file)")
    if spec is not None and spec.state_bytes:
        lines.append(f"  state          {size(spec.state_bytes)} for each sequence, in recurrent layers")
    return lines


def _tensor_text(tensor: TensorInfo, width: int) -> str:
    shape = " × ".join(map(str, tensor.shape))
    return f"  {printable(tensor.name):<{width}}  {tensor.type_name:<8}{size(tensor.nbytes):>12}   {shape}"


def _value_text(value: Any) -> str:
    """A metadata value on one line, long strings and arrays cut short and counted."""
    if isinstance(value, str):
        shown = printable(value[:_LONGEST_STRING])
        return shown if len(value) <= _LONGEST_STRING else f"{shown}… ({len(value):,} characters)"
    if isinstance(value, (bool, int, float)):
        return str(value)
    shown = ", ".join(_value_text(_plain(item)) for item in value[:_LONGEST_ARRAY])
    return f"[{shown}]" if len(value) <= _LONGEST_ARRAY else f"[{shown}, …] ({len(value):,} elements)"


def _plain(value: Any) -> Any:
    """A metadata value as JSON knows it: numpy's numbers and arrays become Python's."""
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    if isinstance(value, (bool, int, float, str)):
        return value
    return [_plain(item) for item in value]


def _as_json(file: GgufFile, verdict: _Verdict, files: list[str]) -> dict[str, Any]:
    totals, spec = _type_totals(file.tensors), verdict.spec
    return {
        "name": file.name,
        "files": files,
        "version": file.version,
        "architecture": file.architecture,
        "parameters": sum(total.elements for total in totals),
        "bytes": file.total_bytes,
        "runs": verdict.runs,
        "chats": verdict.runs and verdict.template is not None,
        "takes_token_ids": spec is not None,
        "obstacle": verdict.obstacle,
        "obstacles": verdict.obstacles,
        "prediction_layers": spec.prediction_layers if spec else 0,
        "state_bytes": spec.state_bytes if spec else 0,
        "metadata": {key: _json_value(value) for key, value in file.metadata.items()},
        "types": [vars(total) for total in totals],
        "tensors": [{"name": tensor.name, "type": tensor.type_name, "shape": list(tensor.shape),
                     "bytes": tensor.nbytes} for tensor in file.tensors],
    }


def _json_value(value: Any) -> Any:
    """A metadata value for JSON; a long array is given by its length and first elements."""
    if isinstance(value, (bool, int, float, str)) or len(value) <= _LONGEST_ARRAY:
        return _plain(value)
    return {"length": len(value), "first": _plain(value[:_LONGEST_ARRAY])}
