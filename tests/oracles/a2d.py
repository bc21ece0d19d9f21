"""A2D and Stable-DiffCoder as their authors sample them: each pass computes the whole canvas under a dense mask."""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load
from torch import Tensor

from tests.goldens.archive import unpacked

Run = Mapping[str, Any]


class A2dModel:
    """Weights of one checkpoint folder, of Llama, Qwen2 or Qwen3, and its forward pass in float64."""

    def __init__(self, config: Mapping[str, Any], weights: Mapping[str, Tensor]) -> None:
        self.config, self.weights = config, {name: tensor.double() for name, tensor in weights.items()}
        self.heads: int = config["num_attention_heads"]
        self.head_size: int = config.get("head_dim") or config["hidden_size"] // self.heads
        self.mask_id: int = config.get("mask_token_id", 5)
        self.embedding = self.weights["model.embed_tokens.weight"]
        self.output = self.embedding if config["tie_word_embeddings"] else self.weights["lm_head.weight"]
        self.frequencies = frequencies(config, self.head_size)

    def norm(self, x: Tensor, name: str) -> Tensor:
        """RMS norm over the last dimension; no norm where the checkpoint has none of this name."""
        weight = self.weights.get(f"{name}.weight")
        scaled = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.config["rms_norm_eps"])
        return x if weight is None else scaled * weight

    def linear(self, x: Tensor, name: str) -> Tensor:
        """A projection, with its bias if there is one."""
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def rotated(self, x: Tensor) -> Tensor:
        """Heads [T, heads, size] turned by their positions from 0 on."""
        angles = torch.arange(len(x)).double()[:, None, None] * self.frequencies
        cos, sin = angles.cos(), angles.sin()
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    def logits(self, tokens: Tensor, blocks: Tensor) -> Tensor:
        """Logits [T, vocabulary]; a row sees the rows of its own of `blocks` [T] and of those before it."""
        hidden = blocks[:, None] < blocks[None, :]
        x = self.embedding[tokens]
        for layer in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{layer}."
            normed = self.norm(x, f"{at}input_layernorm")
            q, k, v = (
                self.linear(normed, f"{at}self_attn.{name}_proj").view(len(x), -1, self.head_size) for name in "qkv"
            )
            q, k = (self.rotated(self.norm(y, f"{at}self_attn.{n}_norm")) for n, y in (("q", q), ("k", k)))
            k, v = (y.repeat_interleave(self.heads // y.shape[1], 1) for y in (k, v))
            scores = torch.einsum("nhd,thd->hnt", q, k) / self.head_size**0.5
            weighed = scores.masked_fill(hidden, -torch.inf).softmax(-1)
            attended = torch.einsum("hnt,thd->nhd", weighed, v).flatten(1)
            x = x + self.linear(attended, f"{at}self_attn.o_proj")
            normed = self.norm(x, f"{at}post_attention_layernorm")
            gate, up = (self.linear(normed, f"{at}mlp.{name}_proj") for name in ("gate", "up"))
            x = x + self.linear(F.silu(gate) * up, f"{at}mlp.down_proj")
        return F.linear(self.norm(x, "model.norm"), self.output)


def frequencies(config: Mapping[str, Any], size: int) -> Tensor:
    """RoPE's frequencies [size / 2], scaled as Llama 3 does where the configuration says so.

    Waves longer than the original context over `low_freq_factor` are stretched by `factor`, those shorter than it over
    `high_freq_factor` are kept, and between the two the frequency is mixed of both.
    """
    plain: Tensor = 1.0 / config["rope_theta"] ** (torch.arange(0, size, 2, dtype=torch.float64) / size)
    scaling = config.get("rope_scaling")
    if scaling is None:
        return plain
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = plain * (kept + (1 - kept) / scaling["factor"])
    return scaled


@cache
def model(folder: Path) -> A2dModel:
    """The model of a checkpoint folder, whose files may be compressed."""
    config = json.loads(unpacked(folder / "config.json"))
    return A2dModel(config, load(unpacked(folder / "model.safetensors")))


@dataclass
class Decoded:
    """A finished decode: the answer, and what each step settled, counted from the end of the prompt."""

    tokens: list[int] = field(default_factory=list)
    trace: list[list[list[int]]] = field(default_factory=list)
    narrowest: float = 1.0  # how near a choice of tokens or of positions came to another one


def linear_counts(masks: int, steps: int) -> list[int]:
    """How many of `masks` each of so many steps settles, under A2D's linear schedule; idle steps are left out."""
    counts = []
    for left in range(steps, 0, -1):
        now, later = (np.float32(1) - np.float32(t / steps) for t in (left, left - 1))  # alpha, before and after
        share = np.float32(1) - (np.float32(1) - later) / (np.float32(1) - now)
        count = min(masks, int(np.rint(np.float64(masks) * np.float64(share))))
        masks -= count
        counts += [count] * (count > 0)
    return counts


def even_counts(masks: int, steps: int) -> list[int]:
    """As many each step, and one more in the first ones."""
    return [masks // steps + (step < masks % steps) for step in range(steps)]


def decode(loaded: A2dModel, run: Run) -> Decoded:
    """Decode a run by `mdlm` or `bd3lm` of A2D's authors, or by Stable-DiffCoder's rules where it names no sampler."""
    sampler, prompt, length, block = run.get("sampler"), run["prompt"], run["max_new_tokens"], run["block_size"]
    done, given = Decoded(), len(prompt)
    canvas = torch.tensor([*prompt, *[loaded.mask_id] * length])
    places = torch.arange(len(canvas))
    numbers = (places - (given % block if sampler else 0)).div(block, rounding_mode="floor")  # of the grid of blocks
    grid = numbers if sampler != "mdlm" else (places - given).clamp(min=0) // block
    steps = -(-run["steps"] // -(-length // block))
    for number in grid[given:].unique().tolist():
        inside = (grid == number) & (places >= given)
        end = int(places[inside].max()) + 1
        masks = inside.clone()
        masked = int(masks.sum())
        counts = linear_counts(masked, steps) if sampler else even_counts(masked, steps)
        step = 0
        while masks.any():
            if sampler == "mdlm":
                seen, blocks = canvas, torch.zeros_like(canvas)
            else:
                seen, blocks = canvas[:end], numbers[:end]
            logits = loaded.logits(seen, blocks)
            if run.get("cfg_scale"):
                without = seen.clone()
                without[:given] = loaded.mask_id
                free = loaded.logits(without, blocks)
                logits = free + (run["cfg_scale"] + 1) * (logits - free)
            if run.get("right_shift_logits"):
                logits = torch.cat([logits[:1], logits[:-1]])
            open_ = masks.nonzero().flatten()
            probability, best = logits[open_].softmax(-1).topk(2)
            confidence = probability[:, 0]
            order = sorted(range(len(open_)), key=lambda i: (-float(confidence[i]), i))
            if run.get("threshold") is None:
                count = counts[step]
            else:
                count = max(1, int((confidence >= run["threshold"]).sum()))
                edges = (confidence - run["threshold"]).abs()
                done.narrowest = min(done.narrowest, float(edges.min()))
            chosen = sorted(order[:count])
            ranked = confidence[order]
            done.narrowest = min([done.narrowest, *(ranked[count - 1] - ranked[count : count + 1]).tolist()])
            done.narrowest = min(done.narrowest, float((probability[chosen, 0] - probability[chosen, 1]).min()))
            at = open_[chosen]
            canvas[at] = best[chosen, 0]
            masks[at] = False
            done.trace.append([[int(p) - given, int(canvas[p])] for p in at])
            step += 1
        stop = run.get("stop")
        if stop is not None and (canvas[given:end] == stop).any():
            break
    answer = canvas[given:end].tolist()
    done.tokens = answer[: answer.index(run["stop"]) + 1] if run.get("stop") in answer else answer
    return done
