"""Random tiny uniform (GIDD) and block-causal (SDAR, LLaDA2) checkpoints, for the product and for the oracles alike."""

import random
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from remask.checkpoint.loaded import find_model
from tests.checkpoint import checkpoints
from tests.engine.support import CPU, CheckedTransformer
from tests.leftovers import lasting_folder

VOCAB, MASK = checkpoints.VOCAB, 39
SDAR = checkpoints.SDAR | {"max_position_embeddings": 128, "eos_token_id": 38}
GIDD = checkpoints.GIDD | {"mask_token_id": MASK, "eos_token_id": 38}

RAW: dict[str, dict[str, Any]] = {
    "sdar": SDAR,
    "sdar, blocks of 3": SDAR | {"block_size": 3, "num_attention_heads": 6, "num_key_value_heads": 1},
    "sdar, any block": SDAR | {"block_size": None, "num_key_value_heads": 4, "num_hidden_layers": 3},
    "sdar-moe": checkpoints.SDAR_MOE | {"max_position_embeddings": 128, "num_hidden_layers": 3},
    "llada2": checkpoints.LLADA2 | {"max_position_embeddings": 128, "num_hidden_layers": 3, "block_size": 4},
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
BLOCK_CAUSAL = tuple(name for name in RAW if not name.startswith("gidd"))
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
    """One of `RAW`, written once."""
    folder = checkpoints.write(lasting_folder() / "model", RAW[name], checkpoints.random_tensors(RAW[name]))
    loaded = find_model(str(folder), dummy=False).load(torch.float64, CPU, progress=False)
    return Checkpoint(folder, CheckedTransformer(loaded.config, loaded.weights), loaded.fingerprint)


def tokens(rng: random.Random, count: int) -> list[int]:
    """Random token ids, MASK not among them."""
    return [rng.randrange(MASK) for _ in range(count)]
