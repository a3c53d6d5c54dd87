"""What a model computes, as data. A test makes a wrong model by replacing a field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

__all__ = ["Activation", "Attention", "Blocks", "Delta", "Description", "Experts", "Indexer", "Latent", "Layer",
           "Mamba", "Rotation", "Streams", "Temperature", "Yarn"]


@dataclass(frozen=True)
class Yarn:
    """Peng et al., 2023. Pairs that turn more than `fast` times within the original context keep their frequency, pairs
    that turn fewer than `slow` times have it divided by `factor`, and those in between have a mixture. `mix` scales the
    share that is kept."""

    factor: float
    original: float
    fast: float = 32.0
    slow: float = 1.0
    mix: float = 1.0


@dataclass(frozen=True)
class Rotation:
    """A rotary embedding. A pair is two elements beside each other (`adjacent`), or one of each half. Frequencies are
    divided by the tensor `factors` and by the number `slower`; the turned elements are multiplied by `magnitude`."""

    dims: int
    base: float
    adjacent: bool = False
    factors: str = ""
    slower: float = 1.0
    yarn: Yarn | None = None
    magnitude: float = 1.0


@dataclass(frozen=True)
class Temperature:
    """Multiplies the query at position p by 1 + slope ln(floor((p + offset) / length) + 1)."""

    slope: float
    length: float
    offset: int = 0


@dataclass(frozen=True)
class Latent:
    """Keys and values of all heads come from one row of `rank` elements, which is normalized, and one rotated key. Of a
    head's query the first `plain` elements are not rotated. Queries come through a narrow row, or from x at once."""

    rank: int
    plain: int
    narrow_queries: bool
    normed: bool = True


@dataclass(frozen=True)
class Attention:
    """Attention of a layer. Without `rotation` no positions are embedded.

    norm: of queries and keys; by head or over the whole row, with the file's weights or without. norm_last: after the
    rotation. window: how many tokens a token sees, itself among them. chunk: a token sees those of its own chunk.
    source: the layer whose keys and values are used.
    """

    heads: int
    kv_heads: int
    size: int
    scale: float
    rotation: Rotation | None = None
    norm: Literal["", "head", "row", "head without weights"] = ""
    norm_last: bool = False
    value_norm: bool = False
    gated: bool = False
    window: int = 0
    chunk: int = 0
    sinks: bool = False
    softcap: float = 0.0
    temperature: Temperature | None = None
    source: int | None = None
    latent: Latent | None = None


@dataclass(frozen=True)
class Indexer:
    """Chooses the `best` blocks for each token."""

    heads: int
    size: int
    best: int


@dataclass(frozen=True)
class Blocks:
    """DeepSeek V4's attention. All heads see the same keys, which are their values too: those of `window` tokens, and
    one for each finished block of `block` tokens, if that is not 0; all of them, or those that the indexer chooses.
    What heads see is turned back by the token's own position, and goes through a product for each of `groups` groups.
    The other fields are here for wrong models.

    compressed: blocks are seen. turns_back: what heads see is. grouped: a group's heads stand beside each other.
    """

    heads: int
    size: int
    rotation: Rotation
    window: int
    block: int
    groups: int
    indexer: Indexer | None = None
    compressed: bool = True
    turns_back: bool = True
    grouped: bool = True


@dataclass(frozen=True)
class Delta:
    """Gated DeltaNet. `grouped`: value heads that share a key head stand beside each other; otherwise value head h goes
    with key head h modulo their number. `joined`: betas and alphas are rows of one matrix, by key head."""

    key_heads: int
    value_heads: int
    size: int
    grouped: bool = False
    joined: bool = False


@dataclass(frozen=True)
class Mamba:
    """Mamba 2. Heads that share B and C stand beside each other (`grouped`), or head h goes with group h modulo their
    number. What heads give is normalized in `norm_groups` parts of a row, each by itself; in none if that is 0. The
    other fields are here for wrong models.

    biased: the convolution has a bias. softplus: steps are positive. skips: x itself joins what a head gives. gate:
    whether the gate comes before the norm, after it, or is left out. order: of what the convolution gives. scaled: x
    is multiplied by the step. decays: states fade.
    """

    heads: int
    groups: int
    inner: int
    state: int
    norm_groups: int
    grouped: bool = True
    biased: bool = True
    step_biased: bool = True
    softplus: bool = True
    skips: bool = True
    scaled: bool = True
    decays: bool = True
    gate: Literal["before the norm", "after the norm", "none"] = "before the norm"
    order: Literal["xBC", "xCB", "BCx"] = "xBC"
    delay: int = 0  # of the convolution, in tokens


@dataclass(frozen=True)
class Activation:
    """`clamped`: gpt-oss's, with its limit; `clamped silu`: SiLU with one. `relu` is here for wrong models."""

    kind: Literal["silu", "gelu", "gelu by erf", "clamped", "clamped silu", "relu", "relu squared"] = "silu"
    limit: float = np.inf


@dataclass(frozen=True)
class Experts:
    """Routed experts. The chosen ones weigh by softmax over all or over them alone, or by the sigmoid of their logits,
    or by the root of their softplus; `normalized`: divided by the sum of the chosen.

    weighs: whether an expert's input or its output is multiplied by its weight. router: what it reads; the residual
    stream (or its norm) is scaled to a length of 1, and by `ffn_gate_inp.scale`. scaled: an expert's output has a
    factor of its own. shared: an expert that all tokens use, with or without a gate. biased: a bias is added to scores
    for the choice alone. groups: how many there are, and how many of them, by the sum of their two best scores, experts
    are chosen from. factor: of the weights. latents: routed experts read a row of lower rank, and their sum is one.
    named: each token has its experts. shared_activation: the shared expert's, if it is another one.
    """

    count: int
    used: int
    scores: Literal["softmax", "softmax of chosen", "sigmoid", "root of softplus"] = "softmax"
    normalized: bool = True
    weighs: Literal["input", "output"] = "output"
    router: Literal["what experts read", "the stream", "the normed stream"] = "what experts read"
    scaled: bool = False
    shared: Literal["", "plain", "gated"] = ""
    biased: bool = False
    groups: tuple[int, int] = (1, 1)
    factor: float = 1.0
    latents: bool = False
    named: bool = False
    shared_activation: Activation | None = None


@dataclass(frozen=True)
class Layer:
    """A layer. It may lack the mixer, or the feed-forward part (`feeds`). `beside`: the dense part and the experts read
    the same, and their results are added, each after a norm. `mamba`: beside the mixer; they read the same, and their
    results are added.

    gated: the feed-forward part has a gate. pre_norms: norms in front of attention and of the feed-forward part, or one
    for both. post_norms: norms behind these. factor: of what each part adds. inputs: an embedding of the token for this
    layer joins at its end. scales: what `layer_output_scale` multiplies.
    """

    mixer: Attention | Blocks | Delta | Mamba | None
    experts: Experts | None = None
    beside: bool = False
    activation: Activation = Activation()
    gated: bool = True
    ffn_norm: str = "ffn_norm"
    pre_norms: Literal["each", "one", "none"] = "each"
    factor: float = 1.0
    post_norms: bool = False
    inputs: bool = False
    scales: Literal["", "the stream", "the addition"] = ""
    feeds: bool = True
    mamba: Mamba | None = None


@dataclass(frozen=True)
class Streams:
    """Hyper-connections: `count` residual streams. A part reads a sum of them, and what it gives is added to each by a
    factor of its own, after they were mixed. The matrix that mixes is divided by the sums of its columns and rows, in
    turn. `mixes` is here for wrong models."""

    count: int
    epsilon: float
    iterations: int
    mixes: bool = True


@dataclass(frozen=True)
class Description:
    """A model. `prediction` is the layer that predicts a further token. centered: the norms in front of parts and of
    the output head subtract a row's mean."""

    layers: tuple[Layer, ...]
    epsilon: float
    embedding_scale: float = 1.0
    input_width: int = 0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0
    centered: bool = False
    prediction: Layer | None = None
    streams: Streams | None = None

    def changed(self, change: Callable[[Layer], Layer]) -> Description:
        """The same with other layers."""
        return replace(self, layers=tuple(map(change, self.layers)))
