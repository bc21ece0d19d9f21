"""The shape of a model: sizes and a few switches."""

from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal, TypeAlias

from remask.checks import ModelKind
from remask.denoising.indel import EditTokens
from remask.denoising.noise import Noise
from remask.plan.cost import FeedForward, Widths
from remask.request.sampling_params import SamplingDefaults

# Functions of a gate; the last one is GELU by its approximation with a hyperbolic tangent.
Activation: TypeAlias = Literal["silu", "gelu", "gelu_tanh"]


@dataclass(frozen=True, slots=True)
class Router:
    """How a row's experts are chosen and weighted. Its logits are one product of the row with a matrix [experts, D]."""

    # Scores are a softmax of the logits over all experts, or a sigmoid of each
    score: Literal["softmax", "sigmoid"] = "softmax"
    # Each expert has a learned number that is added to its score for the choice, but not to its weight
    bias: bool = False
    groups: int = 1  # number of groups of equal size that consecutive experts form
    # Number of groups that experts are chosen from: those whose two best experts have the largest sum of scores
    kept_groups: int = 1
    normalise: bool = False  # the weights of a row are divided by their sum
    scale: float = 1.0
    # Logits, weights and the weighted sum of the experts' outputs are float32 whatever the model's dtype. Else scores
    # alone are.
    float32: bool = False
    # Number of experts that the rows of a routing block choose from, those with the largest score in any of its rows;
    # 0: all. If it is not 0, every pass holds whole routing blocks.
    pool: int = 0
    block: int = 1  # rows of a routing block, at consecutive positions that begin at a multiple of it


@dataclass(frozen=True, slots=True)
class Mixture:
    """A feed-forward of routed SwiGLU experts, and of a shared SwiGLU that computes every row."""

    experts: int  # routed experts of a layer
    active: int  # number of them that compute a row
    intermediate: int  # width of each
    shared: int = 0  # width of the shared expert; 0: none
    # Layers, ascending, that have an MLP of `ModelConfig.intermediate` in place of the mixture
    dense_layers: tuple[int, ...] = ()
    router: Router = field(default_factory=Router)
    # Router and routed experts have norms of their own for the feed-forward's input. The routed experts' sum and the
    # shared expert's output are normed, and each expert's weight has a learned factor (Gemma 4).
    normed: bool = False


@dataclass(frozen=True, slots=True)
class Sliding:
    """Sliding layers: those in which a row attends to a window of positions around it."""

    layers: tuple[int, ...]  # numbers of the sliding layers, ascending
    reach: int  # positions to each side that a row attends to, of those that it would see with full attention
    rope_theta: float  # base of RoPE in sliding layers, which do not scale positions
    # The window has `reach` positions before the row's block, and all after these that the row would see with full
    # attention. Rows of a block are those that see equally far; a causal row is a block of its own.
    behind: bool = False
    kv_heads: int | None = None  # of sliding layers; None: as in full ones
    head_dim: int | None = None  # of sliding layers; None: as in full ones


@dataclass(frozen=True, slots=True)
class RopeScaling:
    """RoPE whose slow channels turn `factor` times slower, so that positions beyond `length` look like trained ones.

    A channel that turns more than `fast` times in `length` positions stays as it is, one that turns less than `slow`
    times is slowed, and those between are mixed.
    """

    # The mixture depends on the channel's number ("yarn") or its turns ("llama3"). "linear": all channels are slowed.
    # "proportional": all are slowed, and some do not turn at all.
    kind: Literal["linear", "yarn", "llama3", "proportional"]
    factor: float
    length: int = 0  # positions that the model was trained on before they were scaled
    slow: float = 1.0
    fast: float = 1.0
    whole: bool = True  # YaRN's mixture begins and ends at whole-numbered channels
    gain: float = 1.0  # factor of cosines and sines
    # Queries at position p are multiplied by 1 + growth ln(1 + floor(p / length)), as in Ministral 3
    growth: float = 0.0
    share: float = 1.0  # "proportional" only: share of the pairs of channels, the fastest ones, that turn at all


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a pre-norm transformer."""

    family: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int  # width of a dense layer's MLP; 0 where no layer is dense
    vocab: int
    max_length: int  # positions of the longest canvas
    rope_theta: float
    norm_eps: float
    mask_id: int  # the mask token; -1: the model has none
    stop_ids: tuple[int, ...]  # tokens that end a response when they settle
    qkv_bias: bool = False
    tied: bool = False  # the output matrix is the embedding
    shift: int = 0  # the row p - shift predicts position p: 0 for LLaDA, 1 for Dream
    kind: ModelKind = "masked"  # how the model is denoised, and what a row attends to
    # RMS norm of queries and keys before RoPE: of each head ("head"), or of all heads together ("whole")
    qk_norm: Literal["head", "whole"] | None = None
    rotary_dim: int | None = None  # leading channels of each head that RoPE turns; None: all
    rope_scaling: RopeScaling | None = None
    # RoPE is computed in float32 whatever the model's dtype, and rounded once. Else its cosines and sines are rounded
    # to that dtype first.
    rope_float32: bool = False
    # Every row of every layer also attends to a key and a value without RoPE, which are "learned", or "zero", so that
    # the softmax of its scores has one more 1 in its denominator
    sink: Literal["learned", "zero"] | None = None
    score_cap: float | None = None  # attention scores s become cap * tanh(s / cap)
    sliding: Sliding | None = None  # the sliding layers; None: every layer has full attention
    value_norm: bool = False  # RMS norm of each head of V, without a gain
    tied_values: bool = False  # in layers with full attention values are the keys before their norm and RoPE
    norm: Literal["rms", "layer"] = "rms"  # "rms", or "layer" for LayerNorm without a bias
    post_norms: bool = False  # what attention and feed-forward add to the residual stream is normed
    # A layer's output is multiplied by a number: one for final rows, one for rows that are denoised
    layer_scales: bool = False
    embed_norm: bool = False  # the embedding is normed, and the attention of the first layer has no norm of its own
    embed_scale: float | None = None  # factor of the embedding where it enters the first layer
    head_dense: bool = False  # predicted rows pass through a square matrix, GELU and a norm before the output matrix
    head_bias: bool = False
    logit_cap: float | None = None  # logits z become cap * tanh(z / cap), in float32 at least
    # "swiglu", "geglu", "geglu_tanh" (GELU by its approximation), or "relu2" for a squared ReLU without a gate
    mlp: Literal["swiglu", "geglu", "geglu_tanh", "relu2"] = "swiglu"
    mlp_bias: bool = False  # both matrices of the MLP have a bias; "relu2" only
    # The mixture of experts that layers have in place of an MLP; with a gate. None: all layers are dense.
    mixture: Mixture | None = None
    # Final rows of a block-causal model see themselves and what is before them, and predict the next token. So a
    # request chooses how it is decoded (`SamplingParams.mode`).
    causal_prefix: bool = False
    drafter: str | None = None  # the adapter in a checkpoint's folder that the drafts of such a model are computed with
    # A block-causal model whose final rows see themselves and what is before them, and whose block, of any tokens in
    # the beginning, is denoised as a whole: its rows take in what the last pass predicted, as the expected embedding,
    # through an MLP of `intermediate` (DiffusionGemma)
    self_conditioning: bool = False
    # The block that a block-causal model was trained with, where its checkpoint says so
    block_length: int | None = None
    # The tokens by which a block-causal model deletes and inserts places of its block (LLaDA2.2)
    edit_tokens: EditTokens | None = None
    noise: Noise | None = None
    # Clean rows of a uniform model attend to clean rows alone (GIDD). False: every row attends to everything.
    structured_attention: bool = True
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def parameters(self) -> int:
        """Number of weights. A tied matrix counts once."""
        feeds = map(self.feed_forward, range(self.layers))
        return self._other_parameters + self.hidden * sum(feed.weights_read(feed.experts) for feed in feeds)

    @property
    def active_parameters(self) -> int:
        """Number of weights that compute one row: `parameters` without the experts that are not chosen for it."""
        feeds = map(self.feed_forward, range(self.layers))
        return self._other_parameters + self.hidden * sum(feed.weights_per_row for feed in feeds)

    @property
    def _other_parameters(self) -> int:
        """Number of weights that are not in the matrices of feed-forwards."""
        mixtures = list(filter(None, map(self.mixture_of, range(self.layers))))
        routing = sum(mixture.experts for mixture in mixtures if mixture.router.bias)
        routing += sum(mixture.experts + 4 * self.hidden for mixture in mixtures if mixture.normed)
        head = self.head_dense * self.hidden * (self.hidden + 1) + self.head_bias * self.vocab
        # A norm of the embedding takes the place of the first layer's.
        outside = self.hidden + head + self.vocab * self.hidden * (1 if self.tied else 2)
        if self.self_conditioning:
            outside += self.hidden * (1 + 3 * self.intermediate)
        return sum(map(self._attention_parameters, range(self.layers))) + routing + outside

    def _attention_parameters(self, layer: int) -> int:
        """Number of weights of `layer` that are in no matrix of its feed-forward: attention, norms and biases."""
        shape = self.shape_of(layer)
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        keys_and_values = 1 if self.tied_values and not self.is_sliding(layer) else 2
        count = self.hidden * (2 * q + keys_and_values * kv + 2 + 2 * self.post_norms) + 2 * self.layer_scales
        if self.qkv_bias:
            count += q + 2 * kv
        if self.qk_norm is not None:
            count += 2 * shape.head_dim if self.qk_norm == "head" else q + kv
        if self.sink == "learned":
            count += 2 * kv
        if self.mlp_bias:
            count += self.intermediate + self.hidden
        return count

    @property
    def rewrites(self) -> bool:
        """Whether tokens of a block may change after they were written, whatever the sampler."""
        return self.kind == "uniform" or self.self_conditioning or self.edit_tokens is not None

    @property
    def routing_block(self) -> int:
        """Positions of a block whose rows choose from one pool of experts; 1: each row chooses on its own."""
        return 1 if self.mixture is None or not self.mixture.router.pool else self.mixture.router.block

    @property
    def whole_canvas(self) -> bool:
        """Whether a uniform model denoises its canvas as a whole, and not block by block (Sumi)."""
        return self.noise is not None and self.noise.anchor is not None

    @property
    def gated(self) -> bool:
        """Whether an MLP has a gate."""
        return self.mlp != "relu2"

    @property
    def activation(self) -> Activation:
        """The function of the gate, if the MLP has one."""
        gates: dict[str, Activation] = {"geglu": "gelu", "geglu_tanh": "gelu_tanh"}
        return gates.get(self.mlp, "silu")

    def is_sliding(self, layer: int) -> bool:
        """Whether `layer` is a sliding layer."""
        return self.sliding is not None and layer in self.sliding.layers

    @property
    def shapes(self) -> "tuple[ModelConfig, ...]":
        """The model with the heads and the RoPE of its full layers and, if there are any, of its sliding layers."""
        return (self,) if self.sliding is None else (self, _sliding_shape(self, self.sliding))

    def shape_of(self, layer: int) -> "ModelConfig":
        """The shape in `shapes` that `layer` has."""
        return self.shapes[self.is_sliding(layer)]

    @property
    def kv_numbers(self) -> int:
        """How many numbers of K and V a token has, in all layers together."""
        return 2 * sum(shape.kv_heads * shape.head_dim for shape in map(self.shape_of, range(self.layers)))

    def reach(self, layer: int) -> int | None:
        """How many positions a row of `layer` sees to each side; None: `layer` has full attention."""
        return self.sliding.reach if self.sliding is not None and self.is_sliding(layer) else None

    def mixture_of(self, layer: int) -> Mixture | None:
        """The mixture of experts of `layer`; None if the layer is dense."""
        return None if self.mixture is None or layer in self.mixture.dense_layers else self.mixture

    def feed_forward(self, layer: int) -> FeedForward:
        """The sizes of the matrices in the feed-forward of `layer`."""
        mixture = self.mixture_of(layer)
        if mixture is None:
            return FeedForward((2 if self.gated else 1) * self.intermediate, self.intermediate)
        return FeedForward(
            up=2 * mixture.shared,
            intermediate=mixture.shared,
            experts=mixture.experts,
            active=mixture.active,
            expert_up=2 * mixture.intermediate,
            expert_intermediate=mixture.intermediate,
        )

    def widths(self, itemsize: int) -> Widths:
        """The sizes that decide the cost of a pass whose numbers have `itemsize` bytes."""
        sliding = self.shapes[-1]
        return Widths(
            hidden=self.hidden,
            queries=self.heads * self.head_dim,
            keys=self.kv_heads * self.head_dim,
            feeds=tuple(map(self.feed_forward, range(self.layers))),
            vocab=self.vocab,
            sink=self.sink is not None,
            itemsize=itemsize,
            windows=tuple(map(self.reach, range(self.layers))),
            block_windows=self.sliding is not None and self.sliding.behind,
            sliding=(sliding.heads * sliding.head_dim, sliding.kv_heads * sliding.head_dim),
            dense=self.head_dense,
            tied=self.tied_values,
            signal=self.intermediate if self.self_conditioning else 0,
        )


# Cached by value: in a field it would be pickled, and be a part of `asdict`. A process has few models.
@lru_cache(maxsize=64)
def _sliding_shape(config: ModelConfig, sliding: Sliding) -> ModelConfig:
    """`config` with the heads and the RoPE of its sliding layers."""
    return replace(
        config,
        rope_theta=sliding.rope_theta,
        rope_scaling=None,
        kv_heads=sliding.kv_heads or config.kv_heads,
        head_dim=sliding.head_dim or config.head_dim,
        tied_values=False,
    )
