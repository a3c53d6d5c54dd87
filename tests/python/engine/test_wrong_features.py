"""A feature that is off, or off by one, shows.

The engine is near to the golden logits (test_reference.py). Here it is far from a numpy model that computes one thing
wrongly, so an engine that did the same would be noticed. The golden models' first tokens are enough: windows, caps,
clamps and temperatures act on them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_families import WIDTH
from golden_models import GOLDEN, LOGITS, LONG_LLAMA4, write_golden
from numpy_model import NumpyModel, relative_error
from numpy_model.description import Activation, Attention, Delta, Description, Layer, Mamba, Rotation, Temperature

from sharpi import Model

Change = Callable[[Description], Description]
Right = Callable[[str], tuple[list[int], np.ndarray, NumpyModel]]

NEAR, FAR = 1e-5, 1e-3
FAINT = 1e-4  # how far GELU by tanh is from that by the error function, at least: they differ by 5e-4 themselves
COUNT = 100


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Right:
    """A golden model's first tokens, the engine's logits of them, and numpy's model."""
    @cache
    def of(name: str) -> tuple[list[int], np.ndarray, NumpyModel]:
        path = write_golden(name, tmp_path_factory.mktemp("golden"))
        tokens = tokens_of(name)
        return tokens, logits(path, tokens), NumpyModel(path)

    return of


def tokens_of(name: str) -> list[int]:
    return np.load(LOGITS / f"{name}.npz")["tokens"][:COUNT].tolist()


def logits(path: Path, tokens: list[int]) -> np.ndarray:
    with Model.load(path, device="cpu", kv_dtype="fp32", batch=64, context=len(tokens)) as model:
        return model.logits(tokens)


# --- Changes ----------------------------------------------------------------------------------------------------------


def attention(change: Callable[[Attention], Attention]) -> Change:
    """Changes the attention of every layer that has it."""
    return lambda model: model.changed(
        lambda layer: replace(layer, mixer=change(layer.mixer)) if isinstance(layer.mixer, Attention) else layer)


def attention_with(**fields: Any) -> Change:
    return attention(lambda part: replace(part, **fields))


def layers_with(**fields: Any) -> Change:
    return lambda model: model.changed(lambda layer: replace(layer, **fields))


def experts_with(**fields: Any) -> Change:
    def change(layer: Layer) -> Layer:
        return layer if layer.experts is None else replace(layer, experts=replace(layer.experts, **fields))

    return lambda model: model.changed(change)


def delta_with(**fields: Any) -> Change:
    def change(layer: Layer) -> Layer:
        return replace(layer, mixer=replace(layer.mixer, **fields)) if isinstance(layer.mixer, Delta) else layer

    return lambda model: model.changed(change)


def mamba_with(**fields: Any) -> Change:
    def change(layer: Layer) -> Layer:
        if layer.mamba is not None:
            return replace(layer, mamba=replace(layer.mamba, **fields))
        return replace(layer, mixer=replace(layer.mixer, **fields)) if isinstance(layer.mixer, Mamba) else layer

    return lambda model: model.changed(change)


def latent_with(**fields: Any) -> Change:
    def change(part: Attention) -> Attention:
        return part if part.latent is None else replace(part, latent=replace(part.latent, **fields))

    return attention(change)


def window(more: int) -> Change:
    return attention(lambda part: replace(part, window=part.window + more) if part.window else part)


def rotation_with(chosen: Callable[[Attention], bool] = lambda _: True, **fields: Any) -> Change:
    """Changes the rotary embedding of the layers chosen."""
    def change(part: Attention) -> Attention:
        if part.rotation is None or not chosen(part):
            return part
        return replace(part, rotation=replace(part.rotation, **fields))

    return attention(change)


def model_with(**fields: Any) -> Change:
    return lambda model: replace(model, **fields)


def rotated_like_the_others(model: Description) -> Description:
    """Layers that embed no positions embed them."""
    mixers = [layer.mixer for layer in model.layers]
    rotation = next(part.rotation for part in mixers if isinstance(part, Attention) and part.rotation is not None)
    return attention_with(rotation=rotation)(model)


def earlier_source(part: Attention) -> Attention:
    """The windowed layer before the right one."""
    return part if part.source is None or not part.window else replace(part, source=part.source - 1)


def is_windowed(part: Attention) -> bool:
    return part.window > 0


_WRONG_MAMBA: dict[str, Change] = {
    "bias of the convolution off": mamba_with(biased=False),
    "convolution a token late": mamba_with(delay=1),
    "B and C exchanged": mamba_with(order="xCB"),
    "x after B and C": mamba_with(order="BCx"),
    "heads grouped otherwise": mamba_with(grouped=False),
    "bias of steps off": mamba_with(step_biased=False),
    "steps not made positive": mamba_with(softplus=False),
    "x not multiplied by steps": mamba_with(scaled=False),
    "no decay": mamba_with(decays=False),
    "x left out of the answer": mamba_with(skips=False),
    "gate off": mamba_with(gate="none"),
}
_WRONG_MAMBA_NORM: dict[str, Change] = {
    "gate after the norm": mamba_with(gate="after the norm"),
    "norm of the whole row": mamba_with(norm_groups=1),
    "norm of each half group": mamba_with(norm_groups=4),
    "no norm": mamba_with(norm_groups=0),
}
WRONG: dict[str, dict[str, Change]] = {
    "gemma2": {
        "window + 1": window(1),
        "window - 1": window(-1),
        "score softcap off": attention_with(softcap=0.0),
        "score softcap x 1.1": attention(lambda part: replace(part, softcap=1.1 * part.softcap)),
        "logit softcap off": model_with(logit_softcap=0.0),
        "embedding not scaled": model_with(embedding_scale=1.0),
        "SiLU for GELU": layers_with(activation=Activation("silu")),
        "GELU by erf": layers_with(activation=Activation("gelu by erf")),
    },
    "gemma3": {
        "window + 1": window(1),
        "window - 1": window(-1),
        "window on every layer": attention_with(window=16),
        "base of windowed layers": rotation_with(is_windowed, base=1e6),
        "windowed layers scaled": rotation_with(is_windowed, slower=8.0),
        "the others not scaled": rotation_with(lambda part: not part.window, slower=1.0),
        "norms after parts off": layers_with(post_norms=False),
        "norms of q and k off": attention_with(norm=""),
        "norm after rotation": attention_with(norm_last=True),
    },
    "gemma4": {
        "window + 1": window(1),
        "window - 1": window(-1),
        "value norm off": attention_with(value_norm=False),
        "scale by head size": attention(lambda part: replace(part, scale=part.size**-0.5)),
        "frequency factors off": rotation_with(factors=""),
        "layer scale on the addition": layers_with(scales="the addition"),
        "layer scale off": layers_with(scales=""),
        "logit softcap x 1.1": model_with(logit_softcap=5.5),
    },
    "gemma4-moe": {
        "router on the normed stream": experts_with(router="the normed stream"),
        "router without a scale": experts_with(router="what experts read"),
        "expert scale off": experts_with(scaled=False),
        "experts for the dense part": layers_with(beside=False),
    },
    "gemma4-e": {
        "keys of an earlier source": attention(earlier_source),
        "layer embeddings off": layers_with(inputs=False),
    },
    "gpt-oss": {
        "window + 1": window(1),
        "window - 1": window(-1),
        "sinks off": attention_with(sinks=False),
        "clamp off": layers_with(activation=Activation("clamped", np.inf)),
        "clamp x 1.1": layers_with(activation=Activation("clamped", 7.7)),
        "softmax over all": experts_with(scores="softmax"),
        "magnitude of YaRN off": rotation_with(magnitude=1.0),
        "YaRN off": rotation_with(yarn=None),
    },
    "llama4": {
        "weight on the output": experts_with(weighs="output"),
        "weight by softmax": experts_with(scores="softmax"),
        "shared expert off": experts_with(shared=""),
        "norms of q and k off": attention_with(norm=""),
        "positions on every layer": rotated_like_the_others,
        "pairs of halves": rotation_with(adjacent=False),
    },
    "llama4-maverick": {
        "norms of q and k": attention(lambda part: replace(part, norm="head without weights")),
    },
    "granite": {
        "embedding scale off": model_with(embedding_scale=1.0),
        "residual scale off": layers_with(factor=1.0),
        "scale by head size": attention(lambda part: replace(part, scale=part.size**-0.5)),
        "logit scale off": model_with(logit_scale=1.0),
        "logits multiplied": model_with(logit_scale=2.0),
    },
    "cohere2": {
        "RMS norms": model_with(centered=False),
        "feed-forward part after attention": layers_with(pre_norms="each", ffn_norm="attn_norm"),
        "window + 1": window(1),
        "window - 1": window(-1),
        "window on every layer": attention_with(window=16),
        "positions on every layer": rotated_like_the_others,
        "logit scale off": model_with(logit_scale=1.0),
    },
    "olmo3": {
        "window + 1": window(1),
        "window - 1": window(-1),
        "norms of q and k off": attention_with(norm=""),
        "magnitude of YaRN off": rotation_with(magnitude=1.0),
        "magnitude as its files have it, once more": rotation_with(
            lambda part: not part.window, magnitude=1.2079441541679836 * (1 + 0.1 * np.log(8.0))),
        "YaRN off": rotation_with(yarn=None),
    },
    "mistral3": {
        "temperature off": attention_with(temperature=None),
        "temperature off by one position": attention_with(temperature=Temperature(0.1, 64, 1)),
        "magnitude of YaRN": rotation_with(magnitude=1 + 0.1 * np.log(16.0)),
    },
    "phi3": {
        "long factors": rotation_with(factors="rope_factors_long.weight"),
        "magnitude off": rotation_with(magnitude=1.0),
    },
    "arcee": {
        "ReLU for its square": layers_with(activation=Activation("relu")),
        "SiLU": layers_with(activation=Activation("silu")),
        "pairs of halves": rotation_with(adjacent=False),
    },
    "glm4moe": {
        "choice without a bias": experts_with(biased=False),
        "weights by softmax": experts_with(scores="softmax"),
        "weights not normalized": experts_with(normalized=False),
        "factor of weights off": experts_with(factor=1.0),
        "shared expert off": experts_with(shared=""),
        "all of a head turned": rotation_with(dims=32),
        "adjacent pairs": rotation_with(adjacent=True),
    },
    "glm4moe-norm": {
        "norms of q and k off": attention_with(norm=""),
    },
    "deepseek2": {
        "latent not normalized": latent_with(normed=False),
        "groups off": experts_with(groups=(1, 1)),
        "one group more": experts_with(groups=(4, 3)),
        "choice without a bias": experts_with(biased=False),
        "scale without YaRN": attention_with(scale=48**-0.5),
        "scale by the cached row": attention(lambda part: replace(part, scale=part.scale * math.sqrt(48 / 80))),
        "magnitude of YaRN": rotation_with(magnitude=1 + 0.1 * np.log(40.0)),
        "pairs of halves": rotation_with(adjacent=False),
        "YaRN off": rotation_with(yarn=None),
        "shared expert off": experts_with(shared=""),
    },
    "deepseek2-flash": {
        "weights not normalized": experts_with(normalized=False),
        "weights by softmax": experts_with(scores="softmax"),
        "factor of weights off": experts_with(factor=1.0),
    },
    "deepseek2-lite": {
        "weights normalized": experts_with(normalized=True),
        "weights by sigmoid": experts_with(scores="sigmoid"),
    },
    "mistral4": {
        "temperature off": attention_with(temperature=None),
        "temperature off by one position": attention_with(temperature=Temperature(0.1, 64, 1)),
    },
    "falcon-h1": {
        **_WRONG_MAMBA,
        "no Mamba 2": layers_with(mamba=None),
        "no attention": lambda model: model.changed(lambda layer: replace(layer, mixer=layer.mamba, mamba=None)),
        "no positions": attention_with(rotation=None),
        "adjacent pairs": rotation_with(adjacent=True),
    },
    "granitehybrid": {
        **_WRONG_MAMBA,
        **_WRONG_MAMBA_NORM,
        "embedding scale off": model_with(embedding_scale=1.0),
        "residual scale off": layers_with(factor=1.0),
        "scale by head size": attention_with(scale=32**-0.5),
        "logit scale off": model_with(logit_scale=1.0),
        "positions": attention_with(rotation=Rotation(32, 10000.0, adjacent=True)),
        "shared expert off": experts_with(shared=""),
        "weights not normalized": experts_with(normalized=False),
    },
    "nemotron_h": {
        **_WRONG_MAMBA,
        **_WRONG_MAMBA_NORM,
        "ReLU for its square": layers_with(activation=Activation("relu")),
        "positions": attention_with(rotation=Rotation(32, 10000.0)),
    },
    "nemotron_h_moe": {
        **_WRONG_MAMBA,
        **_WRONG_MAMBA_NORM,
        "ReLU for its square": layers_with(activation=Activation("relu")),
        "choice without a bias": experts_with(biased=False),
        "weights by softmax": experts_with(scores="softmax"),
        "weights not normalized": experts_with(normalized=False),
        "factor of weights off": experts_with(factor=1.0),
        "shared expert off": experts_with(shared=""),
    },
    "nemotron_h_moe-latents": {
        "shared expert off": experts_with(shared=""),
        "ReLU for its square": layers_with(activation=Activation("relu")),
        "factor of weights off": experts_with(factor=1.0),
    },
    "qwen3next": {
        "heads grouped otherwise": delta_with(grouped=False),
        "weights not normalized": experts_with(normalized=False),
        "shared expert not gated": experts_with(shared="plain"),
    },
}


@pytest.mark.parametrize(("name", "feature"), [(name, feature) for name in WRONG for feature in WRONG[name]])
def test_a_wrong_feature_is_noticed(name: str, feature: str, right: Right) -> None:
    tokens, found, model = right(name)
    distance = relative_error(found, model.changed(WRONG[name][feature]).logits(tokens))
    assert distance > (FAINT if feature == "GELU by erf" else FAR)


@pytest.mark.parametrize("name", WRONG)
def test_the_right_features_are_near(name: str, right: Right) -> None:
    tokens, found, model = right(name)
    assert relative_error(found, model.logits(tokens)) < NEAR


# --- What the file says is what is computed ---------------------------------------------------------------------------

KEYS: dict[str, dict[str, Any]] = {
    "gemma2": {"attention.sliding_window": 17, "attn_logit_softcapping": 2.2, "final_logit_softcapping": 5.5},
    "gemma3": {"attention.sliding_window": 15, "rope.freq_base_swa": 11000.0, "rope.freq_base": 5e5,
               "rope.scaling.factor": 9.0},
    "gemma4": {"attention.sliding_window": 17, "rope.freq_base_swa": 11000.0, "rope.freq_base": 5e5,
               "rope.dimension_count_swa": 16, "final_logit_softcapping": 5.5},
    "gemma4-moe": {"expert_used_count": 3},
    "gemma4-e": {"attention.sliding_window": 15},
    "gpt-oss": {"attention.sliding_window": 17, "rope.scaling.factor": 16.0, "expert_used_count": 3,
                "rope.scaling.original_context_length": 1024},
    "llama4": {"rope.freq_base": 1e6, "attention.layer_norm_rms_epsilon": 1e-2},
    "granite": {"embedding_scale": 2.0, "residual_scale": 0.6, "attention.scale": 0.15, "logit_scale": 3.0,
                "rope.scaling.finetuned": False},
    "cohere2": {"attention.sliding_window": 17, "logit_scale": 0.5, "attention.layer_norm_epsilon": 1e-2},
    "olmo3": {"attention.sliding_window": 17, "attention.sliding_window_pattern": [True, False, True, False],
              "rope.scaling.factor": 4.0},
    "mistral3": {"attention.temperature_scale": 0.2, "rope.scaling.yarn_beta_fast": 32.0,
                 "rope.scaling.original_context_length": 50},
    "phi3": {"rope.scaling.attn_factor": 1.3, "rope.scaling.original_context_length": COUNT - 1},
    "qwen3next": {"expert_used_count": 3},
    "falcon-h1": {"rope.freq_base": 1e4, "rope.dimension_count": 16, "attention.layer_norm_rms_epsilon": 1e-2},
    "granitehybrid": {"embedding_scale": 2.0, "residual_scale": 0.6, "attention.scale": 0.15, "logit_scale": 3.0,
                      "rope.scaling.finetuned": True, "expert_used_count": 3,
                      "attention.layer_norm_rms_epsilon": 1e-2},
    "nemotron_h_moe": {"expert_weights_norm": False, "expert_weights_scale": 1.5, "expert_used_count": 3,
                       "expert_gating_func": 1, "attention.layer_norm_rms_epsilon": 1e-2},
    "glm4moe": {"expert_gating_func": 1, "expert_weights_norm": False, "expert_weights_scale": 1.5,
                "expert_used_count": 3, "rope.dimension_count": 8},
    "deepseek2": {"expert_group_used_count": 3, "rope.scaling.factor": 20.0, "rope.scaling.yarn_log_multiplier": 0.0707,
                  "attention.layer_norm_rms_epsilon": 1e-2},
    "mistral4": {"attention.temperature_scale": 0.2, "attention.temperature_length": 50},
}


@pytest.mark.parametrize(("name", "key"), [(name, key) for name in KEYS for key in KEYS[name]])
def test_a_key_is_heeded(name: str, key: str, right: Right, tmp_path: Path) -> None:
    tokens, before, model = right(name)
    path = write_golden(name, tmp_path, keys={key: KEYS[name][key]})
    found, said = logits(path, tokens), NumpyModel(path, context=COUNT).description
    assert relative_error(found, model.changed(lambda _: said).logits(tokens)) < NEAR
    assert relative_error(found, before) > FAR


def test_sinks_that_take_nothing_are_none(right: Right, tmp_path: Path) -> None:
    tokens, _, model = right("gpt-oss")
    path = write_golden("gpt-oss", tmp_path, change=lambda name, data: np.full_like(data, -1e30) if "sinks" in name
                        else data)
    assert relative_error(logits(path, tokens), model.changed(attention_with(sinks=False)).logits(tokens)) < NEAR


def test_scales_that_are_zero_are_none(right: Right, tmp_path: Path) -> None:
    scales = ("embedding_scale", "residual_scale", "attention.scale", "logit_scale")
    tokens, _, model = right("granite")
    none = model_with(embedding_scale=1.0, logit_scale=1.0)
    expected = model.changed(none).changed(layers_with(factor=1.0)).changed(
        attention(lambda part: replace(part, scale=part.size**-0.5))).logits(tokens)
    path = write_golden("granite", tmp_path, keys=dict.fromkeys(scales, 0.0))
    assert relative_error(logits(path, tokens), expected) < NEAR


def test_mamba_beside_attention_may_have_a_norm(right: Right, tmp_path: Path) -> None:
    tokens, without, model = right("falcon-h1")
    random = np.random.RandomState(3)
    norms = {f"blk.{layer}.ssm_norm.weight": (1 + 0.2 * random.standard_normal((2, 192))).astype(np.float32)
             for layer in range(len(model.description.layers))}
    path = write_golden("falcon-h1", tmp_path, extra=norms)
    found, normed = logits(path, tokens), NumpyModel(path)
    assert relative_error(found, normed.logits(tokens)) < NEAR
    assert relative_error(found, without) > FAR
    for wrong in _WRONG_MAMBA_NORM.values():
        assert relative_error(found, normed.changed(wrong).logits(tokens)) > FAR


@pytest.mark.parametrize("norm", ["blk.1.attn_norm", "output_norm"])
def test_a_layer_norm_may_have_a_bias(norm: str, right: Right, tmp_path: Path) -> None:
    tokens, without, _ = right("cohere2")
    bias = np.random.RandomState(3).standard_normal(WIDTH).astype(np.float32)
    path = write_golden("cohere2", tmp_path, extra={f"{norm}.bias": bias})
    found = logits(path, tokens)
    assert relative_error(found, NumpyModel(path).logits(tokens)) < NEAR
    assert relative_error(found, without) > FAR


def test_llama_4_norms_what_was_rotated(tmp_path: Path) -> None:
    """A rotation keeps lengths, so its order with a norm that has no weights shows if the file scales what it turns."""
    tokens, path = tokens_of("llama4"), write_golden("llama4", tmp_path, keys={"rope.scaling.attn_factor": 1.3})
    found, model = logits(path, tokens), NumpyModel(path)
    assert relative_error(found, model.logits(tokens)) < NEAR
    assert relative_error(found, model.changed(attention_with(norm_last=False)).logits(tokens)) > FAR


def test_a_chunk_is_no_window(tmp_path: Path) -> None:
    """Layers with chunks alone: what comes before a chunk changes nothing in it, to the bit."""
    path, chunk = write_golden("llama4", tmp_path, keys={"block_count": 3},
                               change=lambda name, data: None if name.startswith("blk.3.") else data), 8192
    tokens = np.load(LONG_LLAMA4)["tokens"][: chunk + 20].tolist()
    with Model.load(path, device="cpu", batch=512, context=len(tokens)) as model:
        one, other = (model.logits([*start, *tokens[chunk - 1 :]])[chunk - 1 :]
                      for start in (tokens[: chunk - 1], tokens[1:chunk]))
    assert relative_error(other[0], one[0]) > NEAR, "the last token of a chunk sees all of it"
    np.testing.assert_array_equal(other[1:], one[1:])


def test_keys_are_the_values_if_there_are_none(right: Right, tmp_path: Path) -> None:
    tokens, found, _ = right("gemma4")
    keys = {name: data for name, data in GOLDEN["gemma4"].weights() if name == "blk.5.attn_k.weight"}
    path = write_golden("gemma4", tmp_path, extra={"blk.5.attn_v.weight": keys["blk.5.attn_k.weight"]})
    np.testing.assert_array_equal(logits(path, tokens), found)


def test_a_layer_that_shares_keys_needs_none_of_its_own(right: Right, tmp_path: Path) -> None:
    """Files may hold them all the same."""
    tokens, found, _ = right("gemma4-e")
    own = {name.replace("blk.3.", "blk.8."): data + 1 for name, data in GOLDEN["gemma4-e"].weights()
           if name.startswith(("blk.3.attn_k", "blk.3.attn_v"))}
    assert len(own) == 3
    np.testing.assert_array_equal(logits(write_golden("gemma4-e", tmp_path, extra=own), tokens), found)
