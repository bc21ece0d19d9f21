"""The shape of a model: sizes and a few switches."""

from dataclasses import dataclass, field, replace
from typing import Literal

from remask.checks import ModelKind
from remask.plan.cost import FeedForward, Widths
from remask.request.sampling_params import SamplingDefaults
from remask.sampling.noise import Noise


@dataclass(frozen=True, slots=True)
class Router:
    """How a row's experts are chosen and weighted. Its logits are one product of the row with a matrix [experts, D].

    Attributes:
        score: how logits become scores: a softmax over all experts, or a sigmoid of each.
        bias: each expert has a learned number that is added to its score for the choice, and not in its weight.
        groups: number of groups of equal size that consecutive experts form.
        kept_groups: number of groups that experts are chosen from: those whose two best experts have the largest sum.
        normalise: the weights of a row are divided by their sum.
        scale: factor of the weights.
        float32: logits, weights and the weighted sum of the experts' outputs are float32 whatever the model's dtype.
            Else scores alone are.
    """

    score: Literal["softmax", "sigmoid"] = "softmax"
    bias: bool = False
    groups: int = 1
    kept_groups: int = 1
    normalise: bool = False
    scale: float = 1.0
    float32: bool = False


@dataclass(frozen=True, slots=True)
class Mixture:
    """A feed-forward of routed experts, each a SwiGLU, and of a shared one that computes every row.

    Attributes:
        experts: routed experts of a layer.
        active: how many of them compute a row.
        intermediate: width of each.
        shared: width of the shared expert; 0: none.
        dense_layers: layers, ascending, that have an MLP of `ModelConfig.intermediate` in place of the mixture.
        router: how experts are chosen.
    """

    experts: int
    active: int
    intermediate: int
    shared: int = 0
    dense_layers: tuple[int, ...] = ()
    router: Router = field(default_factory=Router)


@dataclass(frozen=True, slots=True)
class Sliding:
    """Layers whose rows attend to their neighbours alone.

    Attributes:
        layers: these layers, ascending.
        reach: a row attends to so many positions to each side, of those that it would see in another layer.
        rope_theta: base of RoPE in these layers, whose positions are not scaled.
    """

    layers: tuple[int, ...]
    reach: int
    rope_theta: float


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE of which slow channels turn `factor` times slower, so that positions beyond `length` look like known ones.

    A channel that turns more than `fast` times in `length` positions stays as it is, one that turns less than `slow`
    times is slowed, and those between are mixed.

    Attributes:
        kind: what says how much of which is mixed: the number of the channel ("yarn"), or its turns ("llama3").
            "linear": all channels are slowed.
        length: positions that the model was trained on before.
        whole: YaRN's mixture begins and ends at whole channels.
        gain: factor of cosines and sines.
        growth: queries at position p are multiplied by 1 + growth ln(1 + floor(p / length)), as in Ministral 3.
    """

    kind: Literal["linear", "yarn", "llama3"]
    factor: float
    length: int = 0
    slow: float = 1.0
    fast: float = 1.0
    whole: bool = True
    gain: float = 1.0
    growth: float = 0.0


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a pre-norm transformer.

    Attributes:
        family: name of the model's family.
        intermediate: width of a dense layer's MLP; 0 where no layer is dense.
        max_length: positions of the longest canvas.
        stop_ids: tokens that end a response when they settle.
        qkv_bias: the projections to queries, keys and values have a bias.
        tied: the output matrix is the embedding.
        shift: the row p - shift predicts position p: 0 for LLaDA, 1 for Dream.
        kind: how the model is denoised, and what a row attends to.
        qk_norm: RMS norm of queries and keys before RoPE: of each head ("head"), or of all heads together ("whole").
        rotary_dim: leading channels of each head that RoPE turns; None: all.
        rope_scaling: how RoPE is stretched to longer canvases; None: not at all.
        rope_float32: RoPE is computed in float32 whatever the model's dtype, and rounded once. Else its cosines and
            sines are rounded to that dtype first.
        sink: every layer has a learned key and value that all rows attend to, without RoPE.
        score_cap: attention scores s become cap * tanh(s / cap).
        sliding: layers with a window; None: every layer attends to all that a row sees.
        norm: "rms", or "layer" for LayerNorm without a bias.
        embed_norm: the embedding is normed, and the attention of the first layer has no norm of its own.
        head_dense: predicted rows pass through a square matrix, GELU and a norm before the output matrix.
        head_bias: the output matrix has a bias.
        mlp: "swiglu", "geglu", or "relu2" for a squared ReLU without a gate.
        mlp_bias: both matrices of the MLP have a bias; "relu2" only.
        mixture: the mixture of experts that layers have in place of an MLP; "swiglu" only. None: all layers are dense.
        causal_prefix: final rows of a block-causal model see themselves and what is before them, and predict the next
            token. So a request chooses how it is decoded (`SamplingParams.mode`).
        drafter: the adapter in a checkpoint's folder that the drafts of such a model are computed with.
        block_length: the block that a block-causal model was trained with, where its checkpoint says so.
        noise: the noise process of a uniform model.
        structured_attention: clean rows of a uniform model attend to clean rows alone (GIDD). False: every row attends
            to everything.
        sampling: the family's defaults of sampling parameters.
    """

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_length: int
    rope_theta: float
    norm_eps: float
    mask_id: int
    stop_ids: tuple[int, ...]
    qkv_bias: bool = False
    tied: bool = False
    shift: int = 0
    kind: ModelKind = "masked"
    qk_norm: Literal["head", "whole"] | None = None
    rotary_dim: int | None = None
    rope_scaling: RopeScaling | None = None
    rope_float32: bool = False
    sink: bool = False
    score_cap: float | None = None
    sliding: Sliding | None = None
    norm: Literal["rms", "layer"] = "rms"
    embed_norm: bool = False
    head_dense: bool = False
    head_bias: bool = False
    mlp: Literal["swiglu", "geglu", "relu2"] = "swiglu"
    mlp_bias: bool = False
    mixture: Mixture | None = None
    causal_prefix: bool = False
    drafter: str | None = None
    block_length: int | None = None
    noise: Noise | None = None
    structured_attention: bool = True
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def parameters(self) -> int:
        """Number of weights. A tied matrix counts once."""
        feeds = map(self.feed, range(self.layers))
        return self._outside_matrices + self.hidden * sum(feed.read(feed.experts) for feed in feeds)

    @property
    def active_parameters(self) -> int:
        """Number of weights that one row is computed with: `parameters` without the experts that do not compute it."""
        feeds = map(self.feed, range(self.layers))
        return self._outside_matrices + self.hidden * sum(feed.inner for feed in feeds)

    @property
    def _outside_matrices(self) -> int:
        """Number of weights that are not in the matrices of feed-forwards."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * q + 2 * kv + 2)
        if self.qkv_bias:
            layer += q + 2 * kv
        if self.qk_norm is not None:
            layer += 2 * self.head_dim if self.qk_norm == "head" else q + kv
        if self.sink:
            layer += 2 * kv
        if self.mlp_bias:
            layer += self.intermediate + self.hidden
        mixtures = filter(None, map(self.mixture_of, range(self.layers)))
        biases = sum(mixture.experts for mixture in mixtures if mixture.router.bias)
        head = self.head_dense * self.hidden * (self.hidden + 1) + self.head_bias * self.vocab
        # A norm of the embedding takes the place of the first layer's.
        return self.layers * layer + biases + self.hidden + head + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def gated(self) -> bool:
        """Whether an MLP has a gate."""
        return self.mlp != "relu2"

    def slides(self, layer: int) -> bool:
        """Whether rows of `layer` see their neighbours alone."""
        return self.sliding is not None and layer in self.sliding.layers

    @property
    def ropes(self) -> "tuple[ModelConfig, ...]":
        """Shapes with the RoPE of layers that see everything and, if there are some, of those that slide."""
        if self.sliding is None:
            return (self,)
        return self, replace(self, rope_theta=self.sliding.rope_theta, rope_scaling=None)

    def window(self, layer: int) -> int | None:
        """How many positions a row of `layer` sees to each side; None: all."""
        return self.sliding.reach if self.sliding is not None and self.slides(layer) else None

    def mixture_of(self, layer: int) -> Mixture | None:
        """The mixture of experts of `layer`; None where the layer is dense."""
        return None if self.mixture is None or layer in self.mixture.dense_layers else self.mixture

    def feed(self, layer: int) -> FeedForward:
        """The matrices of the feed-forward of `layer`."""
        mixture, gated = self.mixture_of(layer), 2 if self.gated else 1
        if mixture is None:
            return FeedForward(gated * self.intermediate, self.intermediate)
        return FeedForward(
            up=2 * mixture.shared,
            intermediate=mixture.shared,
            experts=mixture.experts,
            active=mixture.active,
            expert_up=2 * mixture.intermediate,
            expert_intermediate=mixture.intermediate,
        )

    def widths(self, item: int) -> Widths:
        """The sizes that decide the cost of a pass, with `item` bytes per number."""
        return Widths(
            hidden=self.hidden,
            queries=self.heads * self.head_dim,
            keys=self.kv_heads * self.head_dim,
            feeds=tuple(map(self.feed, range(self.layers))),
            vocab=self.vocab,
            sink=self.sink,
            item=item,
            windows=tuple(map(self.window, range(self.layers))),
            dense=self.head_dense,
        )
