"""Damaged inputs for the fuzzer, each made from a seed alone: headers, metadata, tokenizers, templates and plans."""

from __future__ import annotations

import json
import random
import struct
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from container import ARRAY, BOOL, F32, FORMATS, I32, STRING, U32, U64, Container, Tensor, array, scalar, text

sys.path.append(str(Path(__file__).parents[1] / "python" / "support"))

INTEGERS = [0, 1, 2, 3, 4, 7, 8, 9, 13, 31, 32, 63, 64, 96, 255, 512, 4096, 65537, (1 << 24) + 1, (1 << 31) - 1,
            1 << 31, (1 << 32) - 1, 1 << 32, 1 << 40, (1 << 62) - 1, 1 << 63, (1 << 64) - 8, (1 << 64) - 1]
FLOATS = [0.0, -0.0, 1.0, -1.0, 1e-6, 0.5, 1e4, 1e38, 1e-45, float("inf"), float("-inf"), float("nan")]
TEXTS = ["", "a", "llama", "gpt2", "none", "qwen2", "gpt-2", "linear", "yarn", "<s>", "</s>", "<0x0A>", "<0xZZ>",
         "\u2581", "é", "日本", "🚀", "a b", "x" * 300, "\0", "\n", "\x1b[31m", "{{ messages }}", "1"]
TOKEN_PARTS = ["a", "b", "c", "ab", "\u2581", "\u2581a", "Ġ", "Ġa", "é", "Ã", "©", "<", ">", "<s>", "</s>",
               "<|im_end|>", "🚀", "0", "12", "'", "s", "\n", "Ċ", "<0x41>", "<unk>", "."]


@dataclass(frozen=True)
class Input:
    """What the fuzzer gives to the code: the content of a file, and what kind of file it is. `zeros` follow the
    content, for weights, which are not read here."""

    kind: str  # "model", "template" or "plan"
    content: bytes
    zeros: int = 0

    def write(self, path: Path) -> None:
        """The file."""
        with open(path, "wb") as stream:
            stream.write(self.content)
            stream.truncate(len(self.content) + self.zeros)


@cache
def originals() -> list[Container]:
    """Sound models with a tokenizer and a chat template each."""
    from tiny_models import HYBRIDS, MODELS, write

    every = MODELS | HYBRIDS
    found = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("llama", "llama-yarn-set", "qwen2", "qwen3moe", "olmoe", "qwen35", "qwen35moe"):
            small = replace(every[name], width=32, hidden=32, vocab=300, head_dim=8, layers=min(every[name].layers, 2))
            if small.delta:
                small = replace(small, delta=replace(small.delta, head_dim=4, interval=2), rope_dims=8)
            file = Container.read(write(Path(folder) / "model.gguf", small)).without("tokenizer.")
            found.append(with_tokenizer(file, ("llama", "gpt2", "gemma4")[len(found) % 3]))
    return found


def with_tokenizer(file: Container, kind: str) -> Container:
    """The file with a small vocabulary: all bytes, some words, some control tokens."""
    if kind == "llama":
        tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + TOKEN_PARTS[:8]
        types = [2, 3, 3] + [6] * 256 + [1] * 8
        merges = []
    elif kind == "gemma4":
        tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
        tokens += ["a", "b", "c", "\u2581", "ab", "abc", "\u2581a", "<tool>"]
        types = [2, 3, 3] + [6] * 256 + [1] * 7 + [4]
        merges = ["a b", "ab c", "\u2581 a"]
    else:
        from sharpi.text.vocabulary import BYTE_OF_CHAR

        tokens = sorted(BYTE_OF_CHAR, key=BYTE_OF_CHAR.__getitem__) + ["ab", "abc", "Ġa", "<|im_end|>", "<tool>"]
        types = [1] * 259 + [3, 4]
        merges = ["a b", "ab c", "Ġ a"]
    values = {
        "model": (STRING, text(kind)), "pre": (STRING, text("gpt-2")),
        "tokens": (ARRAY, array(STRING, tokens)), "token_type": (ARRAY, array(I32, types)),
        "scores": (ARRAY, array(F32, [-float(index) for index in range(len(tokens))])),
        "merges": (ARRAY, array(STRING, merges)),
        "bos_token_id": (U32, scalar(U32, 1)), "eos_token_id": (U32, scalar(U32, 2)),
        "add_bos_token": (BOOL, b"\1"), "add_eos_token": (BOOL, b"\0"), "add_space_prefix": (BOOL, b"\1"),
    }
    metadata = {f"tokenizer.ggml.{key}".encode(): value for key, value in values.items()}
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    metadata[b"tokenizer.chat_template"] = STRING, text(template)
    return replace(file, metadata={**file.metadata, **metadata})


# --- files --------------------------------------------------------------------------------------------------------


def damaged_header(dice: random.Random) -> Input:
    """A model whose bytes suffer one to four accidents, most of them in the header."""
    file = dice.choice(originals())
    header = bytearray(file.header())
    for _ in range(dice.randint(1, 4)):
        damage_bytes(header, dice)
    return Input("model", bytes(header), dice.choice([file.data_bytes] * 9 + [0]))


def damage_bytes(content: bytearray, dice: random.Random) -> None:
    place, length = dice.randrange(len(content) or 1), dice.randint(1, 64)
    accident = dice.randrange(8)
    if accident <= 2:
        width = dice.choice([1, 4, 8])
        content[place:place + width] = (dice.choice(INTEGERS) & ((1 << 8 * width) - 1)).to_bytes(width, "little")
    elif accident == 3:
        content[place:place + 1] = bytes([dice.randrange(256)])
    elif accident == 4:
        del content[place:place + length]
    elif accident == 5:
        content[place:place] = content[place:place + length]
    elif accident == 6:
        content[place:place + length] = bytes(len(content[place:place + length]))
    elif dice.random() < 0.3:
        del content[place:]


def damaged_metadata(dice: random.Random) -> Input:
    """A sound container with one to three values, tensors or counts that are not what they should be."""
    file = dice.choice(originals())
    for _ in range(dice.randint(1, 3)):
        accident = dice.randrange(10)
        if accident < 6:
            file = file.with_value(dice.choice(list(file.metadata)).decode(), *any_value(dice))
        elif accident == 6:
            file = file.without(dice.choice(list(file.metadata)).decode())
        elif accident == 7:
            file = file.with_value(dice.choice(OPTIONAL_KEYS), *any_value(dice))
        else:
            file = replace(file, tensors=damaged_tensors(file.tensors, dice))
    if dice.random() < 0.02:
        file = replace(file, counts=(dice.choice(INTEGERS), dice.choice(INTEGERS)))
    return Input("model", file.header(), file.data_bytes)


OPTIONAL_KEYS = [f"{arch}.{key}" for arch in ("llama", "qwen3moe", "qwen35") for key in (
    "rope.scaling.type", "rope.scaling.factor", "rope.scale_linear", "rope.scaling.original_context_length",
    "rope.scaling.yarn_ext_factor", "attention.key_length", "attention.value_length", "expert_count",
    "expert_used_count", "expert_weights_scale", "expert_weights_norm", "nextn_predict_layers",
    "full_attention_interval")] + [
    "general.alignment", "split.count", "split.no", "split.tensors.count", "general.name",
    *(f"tokenizer.ggml.{key}" for key in ("eot_token_id", "eom_token_id", "unknown_token_id", "pre", "merges"))]


def any_value(dice: random.Random) -> tuple[int, bytes]:
    """A value of any type, of a telling size."""
    kind = dice.choice([*FORMATS, STRING, ARRAY, ARRAY])
    if kind != ARRAY:
        return kind, any_scalar(kind, dice)
    inner = dice.choice([*FORMATS, STRING])
    count = dice.choice([0, 1, 1, 2, 3, 8, 261, 267])
    raw = struct.pack("<IQ", inner, count) + b"".join(any_scalar(inner, dice) for _ in range(count))
    for _ in range(dice.choice([0] * 6 + [1, 5])):
        raw = struct.pack("<IQ", ARRAY, 1) + raw
    return ARRAY, raw


def any_scalar(kind: int, dice: random.Random) -> bytes:
    if kind == STRING:
        return text(dice.choice(TEXTS))
    if kind == BOOL:
        return bytes([dice.choice([0, 1, 1, 2])])
    form = FORMATS[kind]
    if form in "fd":
        return struct.pack("<" + form, dice.choice(FLOATS))
    size = struct.calcsize(form)
    return (dice.choice(INTEGERS) & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def damaged_tensors(tensors: list[Tensor], dice: random.Random) -> list[Tensor]:
    changed, index = list(tensors), dice.randrange(len(tensors))
    tensor, accident = tensors[index], dice.randrange(6)
    if accident == 0:
        del changed[index]
    elif accident == 1 and tensor.shape:
        shape = list(tensor.shape)
        shape[dice.randrange(len(shape))] = dice.choice(INTEGERS)
        changed[index] = replace(tensor, shape=tuple(shape))
    elif accident == 2:
        changed[index] = replace(tensor, shape=tuple(dice.choice(INTEGERS[:12]) for _ in range(dice.randint(0, 5))))
    elif accident == 3:
        changed[index] = replace(tensor, type=dice.choice([0, 1, 2, 8, 12, 14, 20, 30, 39, 99, 1 << 31]))
    elif accident == 4:
        changed[index] = replace(tensor, offset=dice.choice(INTEGERS))
    else:
        names = [dice.choice(tensors).name, b"", b"blk.0.odd", b"\xff", b"x" * 500]
        changed[index] = replace(tensor, name=dice.choice(names))
    return changed


def damaged_tokenizer(dice: random.Random) -> Input:
    """A sound model with a vocabulary of odd tokens, types, scores, merges and roles."""
    file = with_tokenizer(dice.choice(originals()), dice.choice(["llama", "gpt2", "gemma4"]))
    count = dice.choice([0, 1, 5, 40, 40, 261, 267])
    tokens = ["".join(dice.choices(TOKEN_PARTS, k=dice.randint(0, 3))) + dice.choice(["", str(n)])
              for n in range(count)]
    if dice.random() < 0.9:
        tokens = list(dict.fromkeys(tokens))
    few = [1] * 12 + [2, 3, 4, 5, 0, -1, 99] + [6] * (dice.random() < 0.1)
    values = {
        "tokens": array(STRING, tokens),
        "token_type": array(I32, dice.choices(few, k=max(0, len(tokens) + dice.choice([0] * 9 + [-1, 1])))),
        "scores": array(F32, dice.choices(FLOATS[:9] if dice.random() < 0.9 else FLOATS, k=len(tokens))),
        "merges": array(STRING, [" ".join(dice.choices(tokens or ["a"], k=dice.choice([2] * 9 + [1, 3])))
                                 for _ in range(dice.choice([0] * 9 + [1, 5]))]),
    }
    for key, raw in values.items():
        if dice.random() < 0.97:
            file = file.with_value(f"tokenizer.ggml.{key}", ARRAY, raw)
    for key in ("bos_token_id", "eos_token_id", "eot_token_id", "unknown_token_id"):
        if dice.random() < 0.5:
            role = dice.choice(INTEGERS) if dice.random() < 0.1 else dice.randrange(max(1, count // 2))
            file = file.with_value(f"tokenizer.ggml.{key}", U64, scalar(U64, role))
    if dice.random() < 0.3:
        pre = dice.choice(["gpt-2", "llama-bpe", "qwen2", "tekken", "deepseek-v3", "deepseek-coder", "gpt-4o", "none"])
        file = file.with_value("tokenizer.ggml.pre", STRING, text(pre))
    if dice.random() < 0.2:
        keys = [key.decode() for key in file.metadata if b"tokenizer" in key]
        file = file.with_value(dice.choice(keys), *any_value(dice))
    return Input("model", file.header(), file.data_bytes)


# --- templates ----------------------------------------------------------------------------------------------------


@cache
def _templates() -> list[str]:
    from hostile_templates import HOSTILE, MARKED

    return [MARKED] * 10 + [source for source in HOSTILE.values() if len(source) < 2000]


WORDS = ["x", "messages", "messages[0]", "messages[0].content", "n.x", "loop.index", "range(99999)", "range(9)", "'a'",
         "1", "99999", "10 ** 9", "[]", "[x, x]", "(x,)", "{'a': x}", "{x: 1}", "none", "true", "namespace(x=x)",
         "namespace", "loop", "cycler(1, x)", "self", "caller", "varargs", "dict(a=x)", "strftime_now(x)", "joiner(x)",
         "m(x)", "m", "loop.changed(x)", "-x", "not x"]
OPERATORS = [" + ", " - ", " * ", " / ", " // ", " % ", " ** ", " ~ ", " == ", " < ", " in ", " not in ", " and ",
             " or ", " is "]
CALLS = [f".{name}({given})" for name, given in (
    ("join", "x"), ("center", "99999"), ("ljust", "x"), ("replace", "'a', x"), ("split", "x"), ("rsplit", "'a', 1"),
    ("format", "x, a=x"), ("format_map", "x"), ("items", ""), ("get", "x"), ("strip", "x"), ("expandtabs", "9999"),
    ("zfill", "x"), ("encode", ""), ("count", "x"), ("index", "x"), ("append", "x"), ("update", "x"), ("__class__", ""),
    ("translate", "x"), ("to_bytes", "99"), ("copy", ""))]


def _expression(dice: random.Random, depth: int = 0) -> str:
    from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS

    inner = lambda: _expression(dice, depth + 1)  # noqa: E731
    shape = dice.randrange(9) if depth < 4 else 0
    if shape <= 1:
        return dice.choice(WORDS)
    if shape <= 3:
        return f"({inner()}{dice.choice(OPERATORS[:-1])}{inner()})"
    if shape <= 5:
        name = dice.choice([*DEFAULT_FILTERS, "tojson"])
        given = ", ".join(inner() for _ in range(dice.choice([0, 0, 1, 2])))
        return f"({inner()} | {name}{'(' + given + ')' if given else ''})"
    if shape == 6:
        return f"({inner()}){dice.choice(CALLS)}"
    if shape == 7:
        return f"({inner()})[{dice.choice([inner(), inner() + ':', '::' + inner()])}]"
    test, given = dice.choice([name for name in DEFAULT_TESTS if name.isalpha()]), dice.choice(["", f"({inner()})"])
    return f"({inner()} is {test}{given})"


def _statement(dice: random.Random, depth: int = 0) -> str:
    body = "".join(_statement(dice, depth + 1) for _ in range(dice.randint(0, 3))) if depth < 4 else "a"
    value = _expression(dice)
    return dice.choice([
        f"{{{{ {value} }}}}", f"{{% set x = {value} %}}", f"{{% set n.x = {value} %}}",
        f"{{% set x %}}{body}{{% endset %}}",
        f"{{% for x in {value} %}}{body}{{% endfor %}}", f"{{% for x in range(99999) %}}{body}{{% endfor %}}",
        f"{{% for x in {value} if {value} recursive %}}{body}{{{{ loop(x) }}}}{{% else %}}{body}{{% endfor %}}",
        f"{{% if {value} %}}{body}{{% else %}}{body}{{% endif %}}",
        f"{{% macro m(x, y={value}) %}}{body}{{% endmacro %}}",
        f"{{% call m({value}) %}}{body}{{% endcall %}}", f"{{% filter upper %}}{body}{{% endfilter %}}",
        f"{{% with x = {value} %}}{body}{{% endwith %}}", "{% raw %}{{{% endraw %}", "text ", f"{{# {value} #}}",
        f"{{% block b{dice.randrange(1000)} %}}{body}{{% endblock %}}",
        f"{{% for x in {value} %}}{body}{{% if {value} %}}{{% break %}}{{% endif %}}{{% endfor %}}",
        f"{{% generation %}}{body}{{% endgeneration %}}",
    ])


def odd_template(dice: random.Random) -> Input:
    """A template made of random statements, or a known one with pieces cut out, doubled or replaced."""
    if dice.random() < 0.6:
        source = "{% set x = " + dice.choice(WORDS[2:8]) + " %}{% set n = namespace(x=x) %}"
        source += "".join(_statement(dice) for _ in range(dice.randint(1, 5)))
    else:
        source = dice.choice(_templates())
        for _ in range(dice.randint(1, 3)):
            start = dice.randrange(len(source) + 1)
            end = min(len(source), start + dice.randint(0, 30))
            piece = dice.choice(["", source[start:end] * 2, dice.choice(WORDS), dice.choice(OPERATORS),
                                 dice.choice("{}%()[]|'\"\\")])
            source = source[:start] + piece + source[end:]
    return Input("template", source.encode("utf-8", "replace"))


# --- plans --------------------------------------------------------------------------------------------------------


@cache
def _plan() -> str:
    from fake_weights import FakeWeights
    from saved_files import CARD, plan_of

    import sharpi.planning.planner

    there, sharpi.planning.planner.gpu = sharpi.planning.planner.gpu, lambda: CARD
    try:
        return json.dumps(plan_of(FakeWeights()).to_dict())
    finally:
        sharpi.planning.planner.gpu = there


def damaged_plan(dice: random.Random) -> Input:
    """A saved plan with one to three values replaced, or bytes damaged."""
    if dice.random() < 0.2:
        content = bytearray(_plan().encode())
        damage_bytes(content, dice)
        return Input("plan", bytes(content))
    plan = json.loads(_plan())
    for _ in range(dice.randint(1, 3)):
        place: Any = plan
        while True:
            key = dice.choice(list(place) if isinstance(place, dict) else range(len(place)))
            if not isinstance(place[key], (dict, list)) or not place[key] or dice.random() < 0.3:
                break
            place = place[key]
        if dice.random() < 0.15:
            del place[key]
        else:
            place[key] = dice.choice([None, True, [], {}, "", "vram", "slots", "cpu", "cuda", [[]], {"a": 1}, -1, 0.5,
                                      1e308, dice.choice(INTEGERS), -dice.choice(INTEGERS), 10 ** 400, float("nan"),
                                      float("inf"), "x" * 300, "\ud800", "\x1b", [None] * 3, place[key]])
        if not plan:
            break
    return Input("plan", json.dumps(plan).encode())


TARGETS: dict[str, Callable[[random.Random], Input]] = {
    "header": damaged_header, "metadata": damaged_metadata, "tokenizer": damaged_tokenizer, "template": odd_template,
    "plan": damaged_plan,
}


def make(target: str, seed: int, index: int) -> Input:
    """Input number `index` of a run."""
    return TARGETS[target](random.Random(f"{seed} {target} {index}"))
