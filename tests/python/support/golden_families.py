"""The golden models whose layers are not Llama's: Gemma, gpt-oss, Llama 4, and others with something of their own.

A family is its metadata keys and the list of its tensors, layer by layer, in the order in which they are drawn.
Windows, caps and clamps are so low that they act within the 300 tokens of the logits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gguf
import numpy as np

__all__ = ["FAMILIES", "SEED", "VOCABULARY", "WIDTH", "Family", "add_keys"]

SEED = 7
WIDTH, VOCABULARY = 256, 512
_HIDDEN, _EXPERT = 384, 96  # the widths of dense layers and of experts


@dataclass(frozen=True)
class Draw:
    """A tensor of normally distributed numbers, of which `made` makes others. With no spread nothing is drawn: `made`
    gets the elements' places."""

    name: str
    shape: tuple[int, ...]
    spread: float = 1.0
    center: float = 0.0
    made: Callable[[np.ndarray], np.ndarray] | None = None


_Draws = Iterator[Draw]


@dataclass(frozen=True)
class Family:
    """A model. `keys` lack the architecture's name. `layer` gives the tensors of a layer by its number, their names
    without its prefix; `whole` those that the model has besides embedding, last norm and head."""

    architecture: str
    digest: str
    keys: Mapping[str, Any]
    layer: Callable[[int], _Draws]
    whole: Callable[[], _Draws] = lambda: iter(())
    tied: bool = False
    embedding: float = 0.7  # the standard deviation of an embedding's elements
    maker: str = "make_tiny_families.py"  # the program that wrote the original, if one did

    def describe(self, writer: gguf.GGUFWriter) -> None:
        """Adds the metadata."""
        add_keys(writer, {"vocab_size": VOCABULARY, "context_length": 16384, **self.keys})

    def weights(self) -> Iterator[tuple[str, np.ndarray]]:
        """All tensors, in the order in which they are drawn."""
        generator = np.random.RandomState(SEED)
        for draw in self._draws():
            if draw.spread:
                numbers = draw.center + draw.spread * generator.standard_normal(draw.shape)
            else:
                numbers = np.arange(draw.shape[0])
            yield draw.name, (numbers if draw.made is None else draw.made(numbers)).astype(np.float32)

    def _draws(self) -> _Draws:
        yield _matrix("token_embd", VOCABULARY, WIDTH, gain=self.embedding * math.sqrt(WIDTH))
        yield _vector("output_norm.weight", WIDTH)
        if not self.tied:
            yield _matrix("output", VOCABULARY, WIDTH, gain=2.0)
        yield from self.whole()
        for number in range(self.keys["block_count"]):
            for draw in self.layer(number):
                yield Draw(f"blk.{number}.{draw.name}", draw.shape, draw.spread, draw.center, draw.made)


def add_keys(writer: gguf.GGUFWriter, keys: Mapping[str, Any]) -> None:
    """Adds metadata below the architecture's name, each in the type that its Python type suggests."""
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}
    for key, value in keys.items():
        add[type(value)](f"{writer.arch}.{key}", value)


# --- Tensors ----------------------------------------------------------------------------------------------------------


def _matrix(name: str, *shape: int, gain: float = 1.0) -> Draw:
    """`gain`: how large its product with a vector of size 1 is."""
    return Draw(f"{name}.weight", shape, gain / math.sqrt(shape[-1]))


def _vector(name: str, *shape: int, center: float = 1.0, spread: float = 0.2) -> Draw:
    return Draw(name, shape, spread, center)


def _formula(name: str, size: int, values: Callable[[np.ndarray], np.ndarray]) -> Draw:
    """A function of the elements' numbers."""
    return Draw(name, (size,), 0.0, made=values)


def _norms(*names: str) -> _Draws:
    for name in names:
        yield _vector(f"{name}.weight", WIDTH)


@dataclass(frozen=True)
class _Heads:
    """The geometry of attention: query heads, heads of keys and values, and their size."""

    queries: int
    keys: int
    size: int

    @property
    def described(self) -> dict[str, Any]:
        return {"attention.head_count": self.queries, "attention.head_count_kv": self.keys,
                "attention.key_length": self.size, "attention.value_length": self.size,
                "rope.dimension_count": self.size}


def _attention(heads: _Heads, *, own: str = "qkv", norm: float = 0.0, biased: str = "",
               gated: bool = False) -> _Draws:
    """`own`: which of queries, keys and values have a matrix. `norm`: around what the norms of q and k lie. `biased`:
    which of them have a bias, o being the output."""
    rows = {"q": heads.queries * heads.size, "k": heads.keys * heads.size, "v": heads.keys * heads.size}
    for part in own:
        yield _matrix(f"attn_{part}", rows[part] * (2 if gated and part == "q" else 1), WIDTH,
                      gain=1.0 if part == "v" else 1.5)
    yield _matrix("attn_output", WIDTH, rows["q"], gain=2.0)
    for part, size in (*rows.items(), ("output", WIDTH)):
        if part[0] in biased:
            yield _vector(f"attn_{part}.bias", size, center=0.0)
    if norm:
        for part in own.replace("v", ""):
            yield _vector(f"attn_{part}_norm.weight", heads.size, center=norm)


def _dense(hidden: int = _HIDDEN, suffix: str = "", *, gated: bool = True) -> _Draws:
    if gated:
        yield _matrix(f"ffn_gate{suffix}", hidden, WIDTH)
    yield _matrix(f"ffn_up{suffix}", hidden, WIDTH)
    yield _matrix(f"ffn_down{suffix}", WIDTH, hidden, gain=2.0)


def _experts(count: int, width: int = _EXPERT, *, fused: bool = False, router: float = 2.0, inner: float = 1.0,
             shared: int = 0, bias: float = 0.0, gated: bool = True, latents: int = 0) -> _Draws:
    """`shared`: how wide the expert is that all tokens use. `bias`: how much the choice's spreads. `latents`: how wide
    the rows are that the others read."""
    yield _matrix("ffn_gate_inp", count, WIDTH, gain=router)
    if bias:
        yield _vector("exp_probs_b.bias", count, center=0.0, spread=bias)
    outer = latents or WIDTH
    if latents:
        yield _matrix("ffn_latent_down", latents, WIDTH)
        yield _matrix("ffn_latent_up", WIDTH, latents)
    for part in ("gate_up",) if fused else ("gate", "up") if gated else ("up",):
        yield _matrix(f"ffn_{part}_exps", count, 2 * width if fused else width, outer, gain=inner)
    yield _matrix("ffn_down_exps", count, outer, width, gain=3.0)
    if shared:
        yield from _dense(shared, "_shexp", gated=gated)


def _plain_layer(heads: _Heads) -> _Draws:
    yield from _norms("attn_norm")
    yield from _attention(heads)
    yield from _norms("ffn_norm")
    yield from _dense()


def _llama3_factors(size: int) -> Draw:
    return _formula("rope_freqs.weight", size // 2, lambda pair: 1.0 + 7.0 * (pair / (size // 2)) ** 2)


def _keys(layers: int, heads: _Heads, epsilon: float, base: float) -> dict[str, Any]:
    return {"embedding_length": WIDTH, "block_count": layers, "feed_forward_length": _HIDDEN,
            "attention.layer_norm_rms_epsilon": epsilon, "rope.freq_base": base, **heads.described}


def _expert_keys(count: int, used: int, width: int = _EXPERT) -> dict[str, Any]:
    return {"expert_count": count, "expert_used_count": used, "expert_feed_forward_length": width}


def _yarn_keys(factor: float, original: int) -> dict[str, Any]:
    return {"rope.scaling.type": "yarn", "rope.scaling.factor": factor,
            "rope.scaling.original_context_length": original}


# --- Families ---------------------------------------------------------------------------------------------------------

_CHOSEN_BY_SIGMOID = {"expert_gating_func": 2, "expert_weights_norm": True, "expert_weights_scale": 2.5,
                      "leading_dense_block_count": 1}

# Gemma multiplies an embedding by the root of the width.
_GEMMA: dict[str, Any] = {"tied": True, "embedding": 1 / math.sqrt(WIDTH)}
_WINDOW = {"attention.sliding_window": 16}
_GRANITE_SCALES = {"embedding_scale": 3.0, "residual_scale": 0.5, "attention.scale": 0.1, "logit_scale": 2.0}


def _gemma(architecture: str, digest: str, heads: _Heads, *, layers: int, base: float, norm: float,
           keys: Mapping[str, Any]) -> Family:
    """Gemma 2 and 3."""
    def layer(_: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from _attention(heads, norm=norm)
        yield from _norms("post_attention_norm", "ffn_norm", "post_ffw_norm")
        yield from _dense()

    return Family(architecture, digest, _keys(layers, heads, 1e-6, base) | _WINDOW | keys, layer, **_GEMMA)


@dataclass(frozen=True)
class _Gemma4:
    """Every `period`-th layer sees all, with larger heads. `inputs`: the width of the embeddings for each layer.
    `sharing`: how many of the last layers take the keys and values of an earlier one; they are twice as wide."""

    layers: int = 6
    period: int = 6
    keys: tuple[int, int] = (4, 2)  # heads of keys and values with a window and without
    experts: int = 0
    inputs: int = 0
    sharing: int = 0

    def windowed(self, layer: int) -> bool:
        return (layer + 1) % self.period != 0

    def shares(self, layer: int) -> bool:
        return layer >= self.layers - self.sharing

    def heads(self, layer: int) -> _Heads:
        return _Heads(8, self.keys[0], 32) if self.windowed(layer) else _Heads(8, self.keys[1], 64)

    def hidden(self, layer: int) -> int:
        return 2 * _HIDDEN if self.shares(layer) else _HIDDEN

    def family(self, digest: str) -> Family:
        every = range(self.layers)
        keys = _keys(self.layers, _Heads(8, 0, 64), 1e-6, 1e6) | _WINDOW | {
            "attention.head_count_kv": [self.heads(layer).keys for layer in every],
            "attention.sliding_window_pattern": [self.windowed(layer) for layer in every],
            "attention.key_length_swa": 32, "attention.value_length_swa": 32, "rope.dimension_count_swa": 32,
            "rope.freq_base_swa": 10000.0, "attention.shared_kv_layers": self.sharing,
            "embedding_length_per_layer_input": self.inputs, "final_logit_softcapping": 5.0}
        if self.sharing:
            keys["feed_forward_length"] = [self.hidden(layer) for layer in every]
        if self.experts:
            keys |= _expert_keys(self.experts, 4)
        return Family("gemma4", digest, keys, self._layer, self._whole, **_GEMMA)

    def _whole(self) -> _Draws:
        # A quarter of the pairs turns; the others hardly do.
        yield _formula("rope_freqs.weight", 32, lambda pair: np.where(pair < 8, 1.0, 1e30))
        if self.inputs:
            all_layers = self.inputs * self.layers
            yield _matrix("per_layer_token_embd", VOCABULARY, all_layers,
                          gain=math.sqrt(all_layers) / math.sqrt(self.inputs))
            yield _matrix("per_layer_model_proj", all_layers, WIDTH, gain=math.sqrt(WIDTH))
            yield _vector("per_layer_proj_norm.weight", self.inputs)

    def _layer(self, layer: int) -> _Draws:
        own = "q" if self.shares(layer) else "qkv" if self.windowed(layer) or self.inputs else "qk"
        yield from _norms("attn_norm")
        yield from _attention(self.heads(layer), own=own, norm=0.5)
        yield from _norms("post_attention_norm", "ffn_norm")
        yield from _dense(self.hidden(layer))
        yield from _norms("post_ffw_norm")
        yield _vector("layer_output_scale.weight", 1, center=0.8)
        if self.experts:
            # What the router reads is divided by the root of the width.
            yield from _experts(self.experts, fused=True, router=2.0 * math.sqrt(WIDTH))
            yield _vector("ffn_gate_inp.scale", WIDTH)
            yield _vector("ffn_down_exps.scale", self.experts)
            yield from _norms("pre_ffw_norm_2", "post_ffw_norm_1", "post_ffw_norm_2")
        if self.inputs:
            yield _matrix("inp_gate", self.inputs, WIDTH)
            yield _matrix("proj", WIDTH, self.inputs)
            yield from _norms("post_norm")


def _gpt_oss(digest: str) -> Family:
    heads, experts = _Heads(8, 2, 64), 16

    def layer(_: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from _attention(heads, biased="qkvo")
        yield _vector("attn_sinks.weight", heads.queries, spread=1.0)
        yield from _norms("post_attention_norm")
        yield from _experts(experts, inner=4.0)  # some gates lie beyond the clamp at 7
        yield _vector("ffn_gate_inp.bias", experts, center=0.0)
        for part, size in (("gate", _EXPERT), ("up", _EXPERT), ("down", WIDTH)):
            yield _vector(f"ffn_{part}_exps.bias", experts, size, center=0.0)

    keys = _keys(4, heads, 1e-5, 150000.0) | _yarn_keys(32.0, 64) | _expert_keys(experts, 4) | _WINDOW
    return Family("gpt-oss", digest, keys | {"feed_forward_length": _EXPERT}, layer)


def _llama4(digest: str, experts: int, width: int, step: int) -> Family:
    """Every `step`-th layer has experts; with 128 of them (Maverick) q and k have no norm."""
    heads = _Heads(8, 2, 32)

    def layer(number: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from _attention(heads)
        yield from _norms("ffn_norm")
        yield from _dense() if (number + 1) % step else _experts(experts, width, shared=width)

    keys = _keys(4, heads, 1e-5, 500000.0) | _expert_keys(experts, 1, width) | {"interleave_moe_layer_step": step}
    return Family("llama4", digest, keys, layer, lambda: iter([_llama3_factors(heads.size)]))


def _mistral3(digest: str) -> Family:
    heads = _Heads(8, 2, 32)

    scaling = {"rope.scaling.yarn_log_multiplier": 1.0, "rope.scaling.yarn_beta_fast": 4.0,
               "rope.scaling.yarn_beta_slow": 1.0, "attention.temperature_scale": 0.1}
    return Family("mistral3", digest, _keys(4, heads, 1e-5, 1e6) | _yarn_keys(16.0, 64) | scaling,
                  lambda _: _plain_layer(heads))


def _granite(digest: str) -> Family:
    heads = _Heads(8, 2, 32)

    return Family("granite", digest, _keys(4, heads, 1e-5, 10000.0) | _GRANITE_SCALES,
                  lambda _: _plain_layer(heads), tied=True, embedding=0.1)


def _cohere2(digest: str) -> Family:
    heads = _Heads(8, 2, 32)

    def layer(_: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from _attention(heads)
        yield from _dense()

    keys = _keys(4, heads, 1e-5, 50000.0) | _WINDOW | {"logit_scale": 0.25}
    keys["attention.layer_norm_epsilon"] = keys.pop("attention.layer_norm_rms_epsilon")
    return Family("cohere2", digest, keys, layer, tied=True, embedding=0.5)


def _olmo3(digest: str) -> Family:
    heads = _Heads(8, 8, 32)

    def layer(_: int) -> _Draws:
        yield from _attention(heads)
        for part, count in (("q", heads.queries), ("k", heads.keys)):
            yield _vector(f"attn_{part}_norm.weight", count * heads.size)
        yield from _norms("post_attention_norm")
        yield from _dense()
        yield from _norms("post_ffw_norm")

    return Family("olmo2", digest, _keys(4, heads, 1e-6, 500000.0) | _yarn_keys(8.0, 64) | _WINDOW | {
        "rope.scaling.yarn_attn_factor": 1.2079441541679836,  # its files hold the whole magnitude here
        "attention.sliding_window_pattern": [True, True, True, False]}, layer)


def _phi3(digest: str) -> Family:
    heads, turned = _Heads(8, 2, 32), 24

    def whole() -> _Draws:
        yield _formula("rope_factors_long.weight", turned // 2, lambda pair: 1.0 + pair**1.5)
        yield _formula("rope_factors_short.weight", turned // 2, lambda pair: 1.0 + 0.1 * pair)

    def layer(_: int) -> _Draws:
        yield from _norms("attn_norm")
        yield _matrix("attn_qkv", (heads.queries + 2 * heads.keys) * heads.size, WIDTH, gain=1.5)
        yield _matrix("attn_output", WIDTH, heads.queries * heads.size, gain=2.0)
        yield from _norms("ffn_norm")
        yield _matrix("ffn_up", 2 * _HIDDEN, WIDTH)
        yield _matrix("ffn_down", WIDTH, _HIDDEN, gain=2.0)

    scaling = {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 4096,
               "rope.scaling.attn_factor": 1.19, "rope.dimension_count": turned}
    return Family("phi3", digest, _keys(3, heads, 1e-5, 10000.0) | scaling, layer, whole, tied=True, embedding=0.12)


def _arcee(digest: str) -> Family:
    heads = _Heads(8, 2, 32)

    def layer(_: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from _attention(heads)
        yield from _norms("ffn_norm")
        yield _matrix("ffn_up", _HIDDEN, WIDTH)
        yield _matrix("ffn_down", WIDTH, _HIDDEN)

    return Family("arcee", digest, _keys(3, heads, 1e-5, 10000.0), layer, maker="")


def _qwen3next(digest: str) -> Family:
    heads, experts = _Heads(4, 2, 64), 16
    state, keys, values, convolution = 32, 2, 6, 4
    channels = (2 * keys + values) * state

    def delta() -> _Draws:
        yield _matrix("attn_qkv", channels, WIDTH)
        yield _matrix("attn_gate", values * state, WIDTH)
        yield _matrix("ssm_conv1d", channels, convolution)
        yield _vector("ssm_dt.bias", values, center=0.0)
        yield Draw("ssm_a", (values,), made=lambda numbers: -np.exp(numbers * 0.5 - 1.0))
        yield _matrix("ssm_ba", 2 * values, WIDTH)
        yield _vector("ssm_norm.weight", state)
        yield _matrix("ssm_out", WIDTH, values * state, gain=1.5)

    def layer(number: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from delta() if (number + 1) % 4 else _attention(heads, norm=1.2, gated=True)
        yield from _norms("post_attention_norm")
        yield from _experts(experts, shared=_EXPERT)
        yield _matrix("ffn_gate_inp_shexp", WIDTH)

    return Family("qwen3next", digest, _keys(4, heads, 1e-6, 1e7) | _expert_keys(experts, 4) | {
        "rope.dimension_count": heads.size // 4, "expert_shared_feed_forward_length": _EXPERT,
        "ssm.conv_kernel": convolution, "ssm.state_size": state, "ssm.group_count": keys,
        "ssm.time_step_rank": values, "ssm.inner_size": values * state, "full_attention_interval": 4}, layer)


def _glm4moe(digest: str, norm: float = 0.0) -> Family:
    """The last block predicts the token after the next."""
    heads, experts, last = _Heads(8, 2, 32), 16, 4

    def layer(number: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from _attention(heads, norm=norm, biased="qkv")
        yield from _norms("post_attention_norm")
        yield from _experts(experts, shared=_EXPERT, bias=0.3) if number else _dense()
        if number == last:
            yield _matrix("nextn.eh_proj", WIDTH, 2 * WIDTH)
            yield from _norms("nextn.enorm", "nextn.hnorm", "nextn.shared_head_norm")

    keys = _keys(last + 1, heads, 1e-5, 1e6) | _expert_keys(experts, 4) | _CHOSEN_BY_SIGMOID
    return Family("glm4moe", digest, keys | {"rope.dimension_count": heads.size // 2, "expert_shared_count": 1,
                                             "nextn_predict_layers": 1}, layer)


def _latent(architecture: str, digest: str, keys: Mapping[str, Any], *, groups: bool = False, narrow: bool = True,
            maker: str = "make_tiny_families.py") -> Family:
    """`narrow`: queries come through a row of low rank."""
    mistral = architecture == "mistral4"
    heads, experts, query_rank, rank, plain, turned, value = 8, 16, 96, 64, 32, 16, 24

    def up(name: str, *shape: int, gain: float = 1.0) -> Draw:
        """A matrix for each head. `gain` as if its inputs were of the latent's size."""
        return Draw(f"{name}.weight", shape, gain / math.sqrt(rank))

    def layer(number: int) -> _Draws:
        yield from _norms("attn_norm")
        if narrow:
            yield _matrix("attn_q_a", query_rank, WIDTH)
            yield _vector("attn_q_a_norm.weight", query_rank)
        yield _matrix("attn_q_b" if narrow else "attn_q", heads * (plain + turned), query_rank if narrow else WIDTH,
                      gain=1.5)
        yield _matrix("attn_kv_a_mqa", rank + turned, WIDTH, gain=1.5)
        yield _vector("attn_kv_a_norm.weight", rank)
        yield up("attn_k_b", heads, rank, plain, gain=1.5)
        yield up("attn_v_b", heads, value, rank)
        yield _matrix("attn_output", WIDTH, heads * value, gain=2.0)
        yield from _norms("ffn_norm")
        if mistral or number:
            yield from _experts(experts, shared=2 * _EXPERT, bias=0.0 if mistral else 0.3, fused=mistral)
        else:
            yield from _dense()

    all_keys = _keys(4, _Heads(heads, 1, rank + turned), 1e-6, 10000.0) | _expert_keys(experts, 4) | {
        "rope.dimension_count": turned, "attention.value_length": rank, "attention.key_length_mla": plain + turned,
        "attention.value_length_mla": value, "attention.kv_lora_rank": rank, "expert_shared_count": 2}
    if narrow:
        all_keys["attention.q_lora_rank"] = query_rank
    if groups:
        all_keys |= {"expert_group_count": 4, "expert_group_used_count": 2}
    return Family(architecture, digest, all_keys | keys, layer, maker=maker)


@dataclass(frozen=True)
class _Mamba:
    """Mamba 2: its inner width, and how many heads and groups that has."""

    inner: int
    heads: int
    groups: int = 2
    state: int = 32
    convolution: int = 4
    normed: bool = True  # what its heads give

    @property
    def described(self) -> dict[str, Any]:
        return {"ssm.conv_kernel": self.convolution, "ssm.inner_size": self.inner, "ssm.state_size": self.state,
                "ssm.time_step_rank": self.heads, "ssm.group_count": self.groups}

    def draws(self) -> _Draws:
        channels = self.inner + 2 * self.groups * self.state
        yield _matrix("ssm_in", self.inner + channels + self.heads, WIDTH)
        yield _matrix("ssm_conv1d", channels, self.convolution)
        yield _vector("ssm_conv1d.bias", channels, center=0.0)
        yield _vector("ssm_dt.bias", self.heads, center=-0.5, spread=0.5)
        yield Draw("ssm_a", (self.heads, 1), made=lambda numbers: -np.exp(numbers * 0.5 - 1.0))
        yield _vector("ssm_d", self.heads, 1)
        if self.normed:
            yield _vector("ssm_norm.weight", self.groups, self.inner // self.groups)
        yield _matrix("ssm_out", WIDTH, self.inner, gain=2.0)


def _granitehybrid(digest: str) -> Family:
    heads, mamba, shared, attention = _Heads(8, 2, 32), _Mamba(2 * WIDTH, 16), 128, (2,)

    def layer(number: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from _attention(heads) if number in attention else mamba.draws()
        yield from _norms("ffn_norm")
        yield from _experts(16, shared=shared)

    keys = _keys(4, heads, 1e-5, 10000.0) | mamba.described | _expert_keys(16, 4) | _GRANITE_SCALES | {
        "attention.head_count_kv": [heads.keys if layer in attention else 0 for layer in range(4)],
        "expert_shared_feed_forward_length": shared, "rope.scaling.finetuned": False}
    return Family("granitehybrid", digest, keys, layer, tied=True, embedding=0.1)


def _falcon(digest: str) -> Family:
    """Attention and Mamba 2 side by side in every layer."""
    heads, mamba = _Heads(8, 2, 32), _Mamba(384, 12, normed=False)

    def layer(_: int) -> _Draws:
        yield from _norms("attn_norm")
        yield from _attention(heads)
        yield from mamba.draws()
        yield _vector("ffn_norm", WIDTH)  # so its files name it
        yield from _dense()

    keys = _keys(3, heads, 1e-5, 1e11) | mamba.described
    del keys["rope.dimension_count"]  # its files do without
    return Family("falcon-h1", digest, keys, layer, maker="")


def _nemotron(digest: str, *, experts: int, latents: int = 0) -> Family:
    """A layer is one of three: Mamba 2, attention, or a feed-forward part."""
    heads, mamba, shared, parts = _Heads(8, 2, 32), _Mamba(384, 12), 128, "MFM*FM"

    def layer(number: int) -> _Draws:
        yield from _norms("attn_norm")
        if parts[number] == "M":
            yield from mamba.draws()
        elif parts[number] == "*":
            yield from _attention(heads)
        elif experts:
            yield from _experts(experts, shared=shared, bias=0.3, gated=False, latents=latents)
        else:
            yield from _dense(gated=False)

    keys = _keys(len(parts), heads, 1e-5, 10000.0) | mamba.described | {
        "attention.head_count_kv": [heads.keys if part == "*" else 0 for part in parts],
        "feed_forward_length": [_HIDDEN if part == "F" else 0 for part in parts]}
    if not experts:
        return Family("nemotron_h", digest, keys, layer, maker="")
    maker = Family.maker
    if latents:
        keys, maker = keys | {"moe_latent_size": latents}, ""
    return Family("nemotron_h_moe", digest, keys | _expert_keys(experts, 4) | {
        "expert_shared_feed_forward_length": shared, "expert_shared_count": 1, "expert_weights_norm": True,
        "expert_weights_scale": 2.5, "expert_gating_func": 2}, layer, maker=maker)


_DEEPSEEK_YARN = _yarn_keys(40.0, 64) | {"rope.scaling.yarn_log_multiplier": 0.1}
FAMILIES = {
    "gemma2": _gemma("gemma2", "9cf706fa4dcb7d56", _Heads(8, 4, 32), layers=4, base=10000.0, norm=0.0, keys={
        "attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0}),
    "gemma3": _gemma("gemma3", "21d83d5f174eebf1", _Heads(8, 2, 32), layers=7, base=1e6, norm=1.2, keys={
        "rope.freq_base_swa": 10000.0, "rope.scaling.type": "linear", "rope.scaling.factor": 8.0}),
    "gemma4": _Gemma4().family("3f5eee6038053a9e"),
    "gemma4-moe": _Gemma4(experts=16).family("3a7ac858a67787c7"),
    "gemma4-e": _Gemma4(layers=10, period=5, keys=(1, 1), inputs=32, sharing=5).family("2262dd2be1b2028f"),
    "gpt-oss": _gpt_oss("4d9f6248758a0467"),
    "llama4": _llama4("f8dc0c4f314d3dcc", 16, _EXPERT, 1),
    "llama4-maverick": _llama4("95e1892f8154e842", 128, 32, 2),
    "mistral3": _mistral3("2d68371a46027830"),
    "granite": _granite("77cce71df08d30ea"),
    "cohere2": _cohere2("f901f2072b9eb5e9"),
    "olmo3": _olmo3("bce2fd0543a22771"),
    "phi3": _phi3("fd143e22aae32652"),
    "arcee": _arcee("4a4833c70171fb82"),
    "qwen3next": _qwen3next("c9b9b0362024aa57"),
    "glm4moe": _glm4moe("a8a2cdb80da21736"),
    "glm4moe-norm": _glm4moe("2a9d9591fdbaf02d", norm=1.2),
    "deepseek2": _latent("deepseek2", "0466ea5c18c61ff1", _CHOSEN_BY_SIGMOID | _DEEPSEEK_YARN, groups=True),
    "deepseek2-flash": _latent("deepseek2", "0466ea5c18c61ff1", _CHOSEN_BY_SIGMOID),
    "deepseek2-lite": _latent("deepseek2", "5aadb0fe9078d304", {"leading_dense_block_count": 1}, narrow=False,
                              maker=""),
    "mistral4": _latent("mistral4", "36e01ce70dea4c60", _DEEPSEEK_YARN | {
        "expert_gating_func": 1, "expert_weights_norm": True, "attention.temperature_scale": 0.1,
        "attention.temperature_length": 64}),
    "granitehybrid": _granitehybrid("fac20f02809f494d"),
    "falcon-h1": _falcon("f49b26d15802234d"),
    "nemotron_h": _nemotron("de89e111d4dde434", experts=0),
    "nemotron_h_moe": _nemotron("b2ddfbb8cb8dbd68", experts=16),
    "nemotron_h_moe-latents": _nemotron("202cb45ae158b554", experts=16, latents=64),
}
