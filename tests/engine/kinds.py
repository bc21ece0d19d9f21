"""Random tiny checkpoints, uniform (GIDD), block-causal (SDAR, ...) and A2D's, for product and oracles alike."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from tests.checkpoint import checkpoints
from tests.engine.support import CPU, CheckedTransformer
from tests.leftovers import lasting_folder

VOCAB, EOS, MASK = checkpoints.VOCAB, 38, 39
SDAR = checkpoints.SDAR | {"max_position_embeddings": 128, "eos_token_id": EOS}
A2D = checkpoints.A2D | {"max_position_embeddings": 128, "eos_token_id": EOS, "right_shift_logits": False}
GIDD = checkpoints.GIDD | {"mask_token_id": MASK, "eos_token_id": EOS}

RAW: dict[str, dict[str, Any]] = {
    "sdar": SDAR,
    "sdar, blocks of 3": SDAR | {"block_size": 3, "num_attention_heads": 6, "num_key_value_heads": 1},
    "sdar, any block": SDAR | {"block_size": None, "num_key_value_heads": 4, "num_hidden_layers": 3},
    "sdar-moe": checkpoints.SDAR_MOE | {"max_position_embeddings": 128, "num_hidden_layers": 3},
    "llada2": checkpoints.LLADA2 | {"max_position_embeddings": 128, "num_hidden_layers": 3, "block_size": 4},
    "a2d": A2D,
    "a2d, shifted": A2D | {"right_shift_logits": True},
    "a2d, blocks": A2D | {"block_size": 4, "model_type": "a2d-qwen3", "head_dim": 8},
    "a2d, shifted blocks": A2D | {"block_size": 3, "model_type": "a2d-qwen2", "right_shift_logits": True},
    "stable-diffcoder": checkpoints.STABLE_DIFFCODER
    | {"max_position_embeddings": 128, "eos_token_id": EOS, "mask_token_id": MASK},
    "gidd": GIDD | {"weight_scaling": "fan_in"},
    "gidd, hybrid": GIDD
    | {
        "noise_type": 1.5,
        "weight_scaling": "fan_out",
        "use_qk_norm": False,
        "attention_bias": False,
        "mlp_bias": False,
        "attn_soft_cap": 3.0,
        "num_hidden_layers": 3,
    },
    "gidd, open": GIDD | {"structured_attention": False, "weight_scaling": "fan_in"},
    "gidd, masks": GIDD | {"noise_type": -1000.0, "weight_scaling": 0.25},
}
BLOCK_CAUSAL = tuple(name for name in RAW if name.startswith(("sdar", "llada2")))
"""Those whose blocks are filled up, decoded by `tests.oracles.block_causal`."""
CUT = tuple(name for name in RAW if name.startswith(("a2d", "stable")))
"""Those whose last block is cut, decoded by `tests.oracles.a2d`; two of them see everything."""
BLOCKS = (*BLOCK_CAUSAL, *(name for name in CUT if name not in ("a2d", "a2d, shifted")))
UNIFORM = tuple(name for name in RAW if name.startswith("gidd"))


@dataclass(frozen=True)
class Checkpoint:
    """A folder that both sides read, and the product's model in float64."""

    folder: Path
    model: CheckedTransformer
    fingerprint: str

    @property
    def block(self) -> int:
        """The block that it was trained with; 1 where it does not say."""
        return self.model.config.block_length or 1


@cache
def checkpoint(name: str) -> Checkpoint:
    folder = checkpoints.write(lasting_folder() / "model", RAW[name], checkpoints.random_tensors(RAW[name]))
    loaded = find_model(ModelSettings(str(folder))).load(torch.float64, CPU)
    return Checkpoint(folder, CheckedTransformer(loaded.config, loaded.weights), loaded.fingerprint)


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids, MASK not among them."""
    return [rng.randrange(MASK) for _ in range(count)]
