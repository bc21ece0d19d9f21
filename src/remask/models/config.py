"""What the one transformer needs to know of a checkpoint: shapes and a few switches, no behaviour."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a bidirectional pre-norm transformer (LLaDA, Dream).

    `shift` is how far left of a position its predicting row stands: 0 for LLaDA (row p predicts p), 1 for Dream
    (row p - 1 predicts p). `stop_ids` end a response when they settle.
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

    @property
    def parameters(self) -> int:
        """Number of weights, the tied matrix counted once."""
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        layer = self.hidden * (qkv + self.heads * self.head_dim + 3 * self.intermediate + 2)
        if self.qkv_bias:
            layer += qkv
        return self.layers * layer + self.hidden + self.vocab * self.hidden * (1 if self.tied else 2)
