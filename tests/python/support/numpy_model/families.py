"""Which layers each architecture has, by the metadata of a file."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from numpy_model.description import (
    Activation,
    Attention,
    Blocks,
    Delta,
    Description,
    Experts,
    Indexer,
    Latent,
    Layer,
    Mamba,
    Rotation,
    Streams,
    Temperature,
    Yarn,
)

__all__ = ["Keys", "describe"]

_GELU = Activation("gelu")


@dataclass(frozen=True)
class Keys:
    """Metadata by their names below the architecture's, and which tensors there are. `context` is the one in use."""

    architecture: str
    metadata: Mapping[str, Any]
    tensors: Collection[str]
    context: int = 0

    def __call__(self, name: str, default: Any = None) -> Any:
        value = self.metadata.get(f"{self.architecture}.{name}", default)
        assert value is not None, name
        return value

    def at(self, name: str, layer: int, default: Any = None) -> Any:
        """A key that is one value or one for each layer."""
        value = self(name, default)
        return value if np.isscalar(value) else value[layer]

    @property
    def layers(self) -> int:
        """Layers of the model, without those that predict further tokens."""
        return self("block_count") - self("nextn_predict_layers", 0)

    def has(self, tensor: str) -> bool:
        return f"{tensor}.weight" in self.tensors


# --- Parts ------------------------------------------------------------------------------------------------------------


def _yarn(keys: Keys) -> tuple[Yarn, float]:
    """And the length that turning gives. Only Mistral 3 takes the number of turns from the file."""
    turns = ("fast", "slow") if keys.architecture == "mistral3" else ()
    yarn = Yarn(keys("rope.scaling.factor"), keys("rope.scaling.original_context_length"),
                mix=keys("rope.scaling.yarn_ext_factor", 1.0),
                **{each: keys(f"rope.scaling.yarn_beta_{each}", getattr(Yarn, each)) for each in turns})
    has_length = f"{keys.architecture}.rope.scaling.yarn_log_multiplier" in keys.metadata
    return yarn, 1.0 if has_length else 1.0 + 0.1 * math.log(yarn.factor)


def _rotation(keys: Keys, **others: Any) -> Rotation:
    size = keys("attention.key_length", keys("embedding_length") // keys("attention.head_count"))
    plain = Rotation(keys("rope.dimension_count", size), keys("rope.freq_base", 10000.0),
                     factors="rope_freqs.weight" if keys.has("rope_freqs") else "",
                     magnitude=keys("rope.scaling.attn_factor", 1.0))
    kind = keys("rope.scaling.type", "none")
    if kind == "linear":
        plain = replace(plain, slower=keys("rope.scaling.factor"))
    elif kind == "yarn":
        yarn, length = _yarn(keys)
        plain = replace(plain, yarn=yarn, magnitude=plain.magnitude * length)
    return replace(plain, **others)


def _attention(keys: Keys, **others: Any) -> Attention:
    heads = keys("attention.head_count")
    size = keys("attention.key_length", keys("embedding_length") // heads)
    return replace(Attention(heads, keys("attention.head_count_kv", heads), size, size**-0.5), **others)


def _experts(keys: Keys, **others: Any) -> Experts | None:
    return Experts(keys("expert_count"), keys("expert_used_count"), **others) if keys("expert_count", 0) else None


def _mixture(keys: Keys, scores: Any) -> Experts | None:
    """With a shared expert. `scores`: unless the file says it."""
    scores = {0: scores, 1: "softmax", 2: "sigmoid"}[keys("expert_gating_func", 0)]
    return _experts(keys, scores=scores, normalized=keys("expert_weights_norm", False), shared="plain",
                    biased=any("exp_probs_b" in name for name in keys.tensors),
                    groups=(keys("expert_group_count", 1), keys("expert_group_used_count", 1)),
                    factor=keys("expert_weights_scale", 1.0))


def _description(keys: Keys, layer: Callable[[int], Layer], **others: Any) -> Description:
    epsilon = keys(f"attention.layer_norm_{'' if others.get('centered') else 'rms_'}epsilon")
    return Description(tuple(map(layer, range(keys.layers))), epsilon, **others)


# --- Families ---------------------------------------------------------------------------------------------------------


def _plain(keys: Keys, *, adjacent: bool = False, norm: Any = "", normalized: bool = True) -> Description:
    """Llama's layers."""
    layer = Layer(_attention(keys, rotation=_rotation(keys, adjacent=adjacent), norm=norm),
                  _experts(keys, normalized=normalized))
    return _description(keys, lambda _: layer)


def _smollm3(keys: Keys) -> Description:
    with_positions = _attention(keys, rotation=_rotation(keys, adjacent=True))
    without = replace(with_positions, rotation=None)
    return _description(keys, lambda layer: Layer(with_positions if (layer + 1) % 4 else without))


def _mistral3(keys: Keys) -> Description:
    slope = keys("attention.temperature_scale", 0.0)
    temperature = Temperature(slope, keys("rope.scaling.original_context_length")) if slope else None
    layer = Layer(_attention(keys, rotation=_rotation(keys, adjacent=True), temperature=temperature))
    return _description(keys, lambda _: layer)


def _arcee(keys: Keys) -> Description:
    layer = Layer(_attention(keys, rotation=_rotation(keys, adjacent=True)), _experts(keys), gated=False,
                  activation=Activation("relu squared"))
    return _description(keys, lambda _: layer)


def _mamba(keys: Keys) -> Mamba:
    groups = keys("ssm.group_count")
    return Mamba(keys("ssm.time_step_rank"), groups, keys("ssm.inner_size"), keys("ssm.state_size"),
                 groups if keys.has("blk.0.ssm_norm") else 0)


def _granite(keys: Keys) -> Description:
    """Without the key, positions are embedded. A layer without heads of keys has Mamba 2."""
    rotation = _rotation(keys, adjacent=True) if keys("rope.scaling.finetuned", True) else None
    mixer = _attention(keys, rotation=rotation)
    mixer = replace(mixer, scale=keys("attention.scale", mixer.scale))
    shared = "plain" if keys("expert_shared_feed_forward_length", 0) else ""

    def layer(number: int) -> Layer:
        heads = keys.at("attention.head_count_kv", number)
        return Layer(replace(mixer, kv_heads=heads) if heads else _mamba(keys), _experts(keys, shared=shared),
                     factor=keys("residual_scale", 1.0))

    return _description(keys, layer, embedding_scale=keys("embedding_scale", 1.0),
                        logit_scale=1 / keys("logit_scale", 1.0))


def _nemotron(keys: Keys) -> Description:
    """A layer is one part, behind the one norm that it has."""
    experts = _mixture(keys, "sigmoid") if keys("expert_count", 0) else None
    if keys("moe_latent_size", 0):
        experts = replace(experts, latents=True)

    def layer(number: int) -> Layer:
        heads = keys.at("attention.head_count_kv", number)
        if not heads and keys.at("feed_forward_length", number):
            return Layer(None, experts, activation=Activation("relu squared"), gated=False, ffn_norm="attn_norm")
        return Layer(replace(_attention(keys), kv_heads=heads) if heads else _mamba(keys), feeds=False)

    return _description(keys, layer)


def _falcon(keys: Keys) -> Description:
    layer = Layer(_attention(keys, rotation=_rotation(keys)), mamba=_mamba(keys))
    return _description(keys, lambda _: layer)


def _cohere2(keys: Keys) -> Description:
    every = _attention(keys)
    windowed = replace(every, rotation=_rotation(keys, adjacent=True), window=keys("attention.sliding_window"))
    return _description(keys, lambda layer: Layer(windowed if (layer + 1) % 4 else every, pre_norms="one"),
                        logit_scale=keys("logit_scale"), centered=True)


def _olmo2(keys: Keys) -> Description:
    every = _attention(keys, rotation=_rotation(keys), norm="row")
    plain = Rotation(every.size, keys("rope.freq_base"))
    windowed = replace(every, rotation=plain, window=keys("attention.sliding_window", 0))
    pattern = keys("attention.sliding_window_pattern", [False] * keys.layers)
    return _description(keys, lambda layer: Layer(windowed if pattern[layer] else every, pre_norms="none",
                                                  post_norms=True))


def _phi3(keys: Keys) -> Description:
    factors = ""
    if keys.has("rope_factors_long"):
        long = keys.context > keys("rope.scaling.original_context_length")
        factors = f"rope_factors_{'long' if long else 'short'}.weight"
    layer = Layer(_attention(keys, rotation=_rotation(keys, factors=factors)))
    return _description(keys, lambda _: layer)


def _hybrid(keys: Keys) -> Description:
    """Qwen 3.5 and Qwen3-Next, which groups its heads otherwise."""
    after_it = keys.architecture == "qwen3next"
    attention = _attention(keys, rotation=_rotation(keys), norm="head", gated=True)
    delta = Delta(keys("ssm.group_count"), keys("ssm.time_step_rank"), keys("ssm.state_size"), grouped=after_it,
                  joined=after_it)
    shared = "gated" if keys("expert_count", 0) and any("ffn_gate_inp_shexp" in name for name in keys.tensors) else ""

    def layer(mixer: Attention | Delta) -> Layer:
        return Layer(mixer, _experts(keys, shared=shared), ffn_norm="post_attention_norm")

    interval = keys("full_attention_interval", 4)
    return _description(keys, lambda number: layer(delta if (number + 1) % interval else attention),
                        prediction=layer(attention))


def _glm4moe(keys: Keys) -> Description:
    norm: Any = "head" if keys.has("blk.0.attn_q_norm") else ""
    mixer, dense = _attention(keys, rotation=_rotation(keys), norm=norm), keys("leading_dense_block_count", 0)
    mixture = Layer(mixer, _mixture(keys, "sigmoid"), ffn_norm="post_attention_norm")
    return _description(keys, lambda layer: replace(mixture, experts=None) if layer < dense else mixture,
                        prediction=mixture)


def _latent(keys: Keys) -> Description:
    """DeepSeek V2 and V3, and Mistral Small 4."""
    rotation, rank, size = _rotation(keys, adjacent=True), keys("attention.kv_lora_rank"), keys(
        "attention.key_length_mla")
    slope, stretch = keys("attention.temperature_scale", 0.0), 1.0
    if rotation.yarn is not None:
        stretch += 0.1 * keys("rope.scaling.yarn_log_multiplier", 0.1) / 0.1 * math.log(rotation.yarn.factor)
    mixer = Attention(keys("attention.head_count"), 1, rank + rotation.dims, stretch**2 / math.sqrt(size), rotation,
                      temperature=Temperature(slope, keys("attention.temperature_length")) if slope else None,
                      latent=Latent(rank, size - rotation.dims, keys("attention.q_lora_rank", 0) > 0))
    mixture = Layer(mixer, _mixture(keys, "softmax"))
    dense = keys("leading_dense_block_count", 0)
    return _description(keys, lambda layer: replace(mixture, experts=None) if layer < dense else mixture,
                        prediction=mixture)


def _deepseek4(keys: Keys) -> Description:
    """Blocks of four tokens are chosen by an indexer. Layers that see blocks have a rotation of their own."""
    plain = Rotation(keys("rope.dimension_count"), keys("rope.freq_base"), adjacent=True)
    slower = replace(plain, base=keys("attention.compress_rope_freq_base"), yarn=_yarn(keys)[0])
    indexer = Indexer(keys("attention.indexer.head_count"), keys("attention.indexer.key_length"),
                      keys("attention.indexer.top_k"))
    experts = _experts(keys, scores="root of softplus", normalized=keys("expert_weights_norm"), shared="plain",
                       factor=keys("expert_weights_scale"))
    assert experts is not None

    def layer(number: int) -> Layer:
        block = keys("attention.compress_ratios")[number]
        mixer = Blocks(keys("attention.head_count"), keys("attention.key_length"), slower if block else plain,
                       keys("attention.sliding_window"), block, keys("attention.output_group_count"),
                       indexer if block == 4 else None)
        named = keys.has(f"blk.{number}.ffn_gate_tid2eid")
        routed, shared = (Activation("clamped silu", keys(f"swiglu_clamp_{part}")[number]) for part in ("exp", "shexp"))
        return Layer(mixer, replace(experts, named=named, biased=not named, shared_activation=shared),
                     activation=routed)

    streams = Streams(keys("hyper_connection.count"), keys("hyper_connection.epsilon"),
                      keys("hyper_connection.sinkhorn_iterations"))
    return _description(keys, layer, streams=streams)


def _gemma(keys: Keys, windowed: Callable[[int], bool], **others: Any) -> Description:
    """Gemma 2 and 3. Only layers that see all have their rotation scaled."""
    every = _attention(keys, rotation=_rotation(keys), softcap=keys("attn_logit_softcapping", 0.0), **others)
    local = Rotation(every.size, keys("rope.freq_base_swa", 10000.0))
    windows = replace(every, rotation=local, window=keys("attention.sliding_window", 4096))
    return _description(keys, lambda layer: Layer(windows if windowed(layer) else every, activation=_GELU,
                                                  post_norms=True),
                        embedding_scale=keys("embedding_length") ** 0.5,
                        logit_softcap=keys("final_logit_softcapping", 0.0))


def _gemma4(keys: Keys) -> Description:
    pattern = keys("attention.sliding_window_pattern")
    own = keys.layers - keys("attention.shared_kv_layers", 0)
    inputs = keys("embedding_length_per_layer_input", 0)

    def attention(layer: int) -> Attention:
        windowed = pattern[layer]
        kind = "_swa" if windowed else ""
        rotation = Rotation(keys("rope.dimension_count" + kind), keys("rope.freq_base" + kind),
                            factors="" if windowed else "rope_freqs.weight")
        same = [earlier for earlier in range(own) if pattern[earlier] == windowed]
        return Attention(keys("attention.head_count"), keys.at("attention.head_count_kv", layer),
                         keys("attention.key_length" + kind), 1.0, rotation, norm="head", value_norm=True,
                         window=keys("attention.sliding_window") if windowed else 0,
                         source=None if layer < own else same[-1])

    def layer(number: int) -> Layer:
        experts = _experts(keys, router="the stream", scaled=True)
        return Layer(attention(number), experts, experts is not None, _GELU, post_norms=True, inputs=inputs > 0,
                     scales="the stream" if keys.has(f"blk.{number}.layer_output_scale") else "")

    return _description(keys, layer, embedding_scale=keys("embedding_length") ** 0.5, input_width=inputs,
                        logit_softcap=keys("final_logit_softcapping", 0.0))


def _gpt_oss(keys: Keys) -> Description:
    every = _attention(keys, rotation=_rotation(keys), sinks=True)
    windowed = replace(every, window=keys("attention.sliding_window"))
    experts = _experts(keys, scores="softmax of chosen", normalized=False)
    return _description(keys, lambda layer: Layer(every if layer % 2 else windowed, experts,
                                                  activation=Activation("clamped", 7.0),
                                                  ffn_norm="post_attention_norm"))


def _llama4(keys: Keys) -> Description:
    """No key gives its chunk and its temperature, or says that Maverick, with 128 experts, has no norms."""
    every = _attention(keys, temperature=Temperature(0.1, 8192, 1))
    chunked = replace(every, rotation=_rotation(keys, adjacent=True), chunk=8192, temperature=None)
    if keys("expert_count") != 128:
        chunked = replace(chunked, norm="head without weights", norm_last=True)
    experts = _experts(keys, scores="sigmoid", normalized=False, weighs="input", shared="plain")
    step = keys("interleave_moe_layer_step", 1)
    return _description(keys, lambda layer: Layer(chunked if (layer + 1) % 4 else every,
                                                  None if (layer + 1) % step else experts))


_FAMILIES: dict[str, Callable[[Keys], Description]] = {
    "llama": lambda keys: _plain(keys, adjacent=True),
    "qwen2": _plain,
    **dict.fromkeys(("qwen3", "qwen3moe", "qwen3vl", "qwen3vlmoe"), lambda keys: _plain(keys, norm="head")),
    "olmoe": lambda keys: _plain(keys, norm="row", normalized=False),
    "smollm3": _smollm3,
    **dict.fromkeys(("granite", "granitehybrid"), _granite),
    **dict.fromkeys(("nemotron_h", "nemotron_h_moe"), _nemotron),
    "falcon-h1": _falcon,
    "cohere2": _cohere2,
    "olmo2": _olmo2,
    "mistral3": _mistral3,
    "phi3": _phi3,
    "arcee": _arcee,
    **dict.fromkeys(("qwen35", "qwen35moe", "qwen3next"), _hybrid),
    "glm4moe": _glm4moe,
    **dict.fromkeys(("deepseek2", "mistral4"), _latent),
    "deepseek4": _deepseek4,
    "gemma2": lambda keys: _gemma(keys, lambda layer: layer % 2 == 0),
    "gemma3": lambda keys: _gemma(keys, lambda layer: (layer + 1) % 6 != 0, norm="head"),
    "gemma4": _gemma4,
    "gpt-oss": _gpt_oss,
    "llama4": _llama4,
}


def describe(keys: Keys) -> Description:
    """What a file's model computes."""
    return _FAMILIES[keys.architecture](keys)
