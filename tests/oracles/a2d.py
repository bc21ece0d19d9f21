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
from safetensors.torch import load
from torch import Tensor

from tests.goldens.archive import unpacked
from tests.oracles.sdar import SdarModel

Run = Mapping[str, Any]


def slowed(plain: Tensor, scaling: Mapping[str, Any]) -> Tensor:
    """RoPE's frequencies, scaled as Llama 3 does.

    Waves longer than the original context over `low_freq_factor` are stretched by `factor`, those shorter than it over
    `high_freq_factor` are kept, and between the two the frequency is mixed of both.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = scaling["original_max_position_embeddings"] * plain / (2 * math.pi)  # within the original context
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    scaled: Tensor = plain * (kept + (1 - kept) / scaling["factor"])
    return scaled


@cache
def model(folder: Path) -> SdarModel:
    """The model of a checkpoint folder, whose files may be compressed."""
    config: dict[str, Any] = {"mask_token_id": 5} | json.loads(unpacked(folder / "config.json"))
    made = SdarModel(config, load(unpacked(folder / "model.safetensors")))
    if scaling := config.get("rope_scaling"):
        made.frequencies = slowed(made.frequencies, scaling)
    return made


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


def decode(loaded: SdarModel, run: Run) -> Decoded:
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
            visible = blocks[:, None] >= blocks[None, :]
            logits = loaded.under(visible, seen).logits
            if run.get("cfg_scale"):
                without = seen.clone()
                without[:given] = loaded.mask_id
                free = loaded.under(visible, without).logits
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
