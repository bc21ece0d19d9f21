"""What the transformer needs to know of a checkpoint: sizes and a few switches."""

from dataclasses import dataclass, field
from typing import Literal

from remask.core.cost import Widths
from remask.core.kinds import ModelKind
from remask.core.noise import Noise
from remask.core.sampling import SamplingDefaults


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a pre-norm transformer.

    Attributes:
        family: name of the model's family.
        max_length: positions of the longest canvas.
        stop_ids: tokens that end a response when they settle.
        qkv_bias: the projections to queries, keys and values have a bias.
        tied: the output matrix is the embedding.
        shift: the row p - shift predicts position p: 0 for LLaDA, 1 for Dream.
        kind: how the model is denoised, and what a row attends to.
        qk_norm: RMS norm of queries and keys before RoPE: of each head ("head"), or of all heads together ("whole").
        sink: every layer has a learned key and value that all rows attend to, without RoPE.
        score_cap: attention scores s become cap * tanh(s / cap).
        mlp: "swiglu", or "relu2" for a squared ReLU without a gate.
        mlp_bias: both matrices of the MLP have a bias; "relu2" only.
        block_length: the block that a block-causal model was trained with, where its checkpoint says so.
        noise: the noise process of a uniform model.
        sampling: what the family chooses where a request leaves it open.
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
    sink: bool = False
    score_cap: float | None = None
    mlp: Literal["swiglu", "relu2"] = "swiglu"
    mlp_bias: bool = False
    block_length: int | None = None
    noise: Noise | None = None
    sampling: SamplingDefaults = field(default_factory=SamplingDefaults)

    @property
    def parameters(self) -> int:
        """Number of weights. A tied matrix counts once."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer = self.hidden * (2 * q + 2 * kv + self.up_rows + self.intermediate + 2)
        if self.qkv_bias:
            layer += q + 2 * kv
        if self.qk_norm is not None:
            layer += 2 * self.head_dim if self.qk_norm == "head" else q + kv
        if self.sink:
            layer += 2 * kv
        if self.mlp_bias:
            layer += self.intermediate + self.hidden
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)

    @property
    def up_rows(self) -> int:
        """Rows of the first matrix of the MLP: gate and up, or up alone."""
        return self.intermediate * (2 if self.mlp == "swiglu" else 1)

    def widths(self, item: int) -> Widths:
        """The sizes that decide the cost of a pass, with `item` bytes per number."""
        return Widths(
            layers=self.layers,
            hidden=self.hidden,
            queries=self.heads * self.head_dim,
            keys=self.kv_heads * self.head_dim,
            up=self.up_rows,
            intermediate=self.intermediate,
            vocab=self.vocab,
            sink=self.sink,
            item=item,
        )
