"""What changes from step to step in uncached block-wise generation: K/V drift, attention mass by region, entropy."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.dense import KV
from tests.oracles.uniform import Blocks

REGIONS = ("bias", "prompt", "rest_past", "previous", "current", "next", "rest_future", "trailing")


def drift(before: Tensor, after: Tensor) -> Tensor:
    """How far each position's K (or V) moved, [positions]: 1 - cosine with the heads concatenated, mean over layers.

    Both arguments are [layers, positions, heads, head size]. RoPE turns both alike, so rotated K give the same.
    """
    return (1 - F.cosine_similarity(before.flatten(2), after.flatten(2), dim=-1)).mean(0)


def kv_drift(before: KV, after: KV) -> tuple[Tensor, Tensor]:
    """`drift` of K and of V."""
    return drift(before.k, after.k), drift(before.v, after.v)


def regions(blocks: Blocks, block: int) -> Tensor:
    """The region of every canvas position [canvas] while a block is denoised, as an index into `REGIONS`.

    Past and future count whole blocks of the response; what lies beyond the last one is trailing noise.
    """
    own = (torch.arange(blocks.canvas) - blocks.prompt).div(blocks.length, rounding_mode="floor")
    region = torch.full((blocks.canvas,), REGIONS.index("rest_future"))
    region[own < block - 1] = REGIONS.index("rest_past")
    for name, distance in (("previous", -1), ("current", 0), ("next", 1)):
        region[own == block + distance] = REGIONS.index(name)
    region[own < 0] = REGIONS.index("prompt")
    region[own >= blocks.count] = REGIONS.index("trailing")
    return region


def attention_mass(attention: Tensor, blocks: Blocks, block: int) -> Tensor:
    """The share of attention that each of `REGIONS` gets from the current block, [8]: mean over layers, heads, queries.

    `attention` [layers, heads, canvas, keys] holds probabilities of a full pass; a bias token, if any, is key 0.
    """
    start, stop = blocks.window(block)
    per_key = attention[:, :, start:stop].mean((0, 1, 2))
    sinks = len(per_key) - blocks.canvas
    mass = torch.zeros(len(REGIONS), dtype=per_key.dtype)
    mass[0] = per_key[:sinks].sum()
    return mass.index_add(0, regions(blocks, block), per_key[sinks:])


def entropy(logits: Tensor, mask_id: int) -> Tensor:
    """The uncertainty of each row in nats, [n], over all tokens but MASK."""
    log_p = logits.index_fill(-1, torch.tensor([mask_id]), -torch.inf).log_softmax(-1)
    return -(log_p.exp() * log_p.nan_to_num(neginf=0.0)).sum(-1)
