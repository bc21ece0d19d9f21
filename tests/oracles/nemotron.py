"""Nemotron-Labs-Diffusion as a dense loop: the whole sequence anew in every pass, from the description of its modes."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.sdar import SdarModel


class Model(SdarModel):
    """A model of three modes, with its adapter for drafts beside the output of attention."""

    def __init__(self, folder: Path) -> None:
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "model.safetensors")
        rope = config["rope_parameters"]
        told = {"rope_theta": rope["rope_theta"], "tie_word_embeddings": "diffusion_head.weight" not in tensors}
        super().__init__(config | told, tensors)
        self.length, self.beta = rope["original_max_position_embeddings"], rope["llama_4_scaling_beta"]
        self.lora: dict[str, Tensor] = {}
        self.drafted: Tensor | None = None  # 1 for the rows that the adapter changes, else 0
        adapter = folder / "linear_spec_lora"
        if adapter.is_dir():
            facts = json.loads((adapter / "adapter_config.json").read_text(encoding="utf-8"))
            factors = {name: x.double() for name, x in load_file(adapter / "adapter_model.safetensors").items()}
            for name, up in factors.items():
                if ".lora_B." in name:
                    stem = name.removeprefix("base_model.model.").replace("lora_B.", "")
                    scale = facts["lora_alpha"] / facts["r"]
                    self.lora[stem] = scale * up @ factors[name.replace("lora_B", "lora_A")]
        width = self.head_size

        def channel(turns: float) -> float:
            return float(width * math.log(self.length / (turns * 2 * math.pi)) / (2 * math.log(rope["rope_theta"])))

        low = max(math.floor(channel(rope["beta_fast"])), 0)
        high = min(math.ceil(channel(rope["beta_slow"])), width - 1)
        for i in range(width // 2):
            slowed = min(max((i - low) / (high - low), 0), 1)
            frequency = rope["rope_theta"] ** (-2 * i / width)
            self.frequencies[i] = frequency * (1 - slowed) + frequency / rope["factor"] * slowed

    def names(self, tensors: dict[str, Tensor], config: Mapping[str, Any]) -> dict[str, Tensor]:  # noqa: ARG002
        """The encoder's tensors, and the head."""
        return {n.replace("encoder.", "model.").replace("diffusion_head", "lm_head"): x for n, x in tensors.items()}

    def project(self, layer: int, name: str, x: Tensor) -> Tensor:
        """Queries beyond the original context grow with the logarithm of how often it fits before them."""
        heads = super().project(layer, name, x)
        growth = 1 + self.beta * torch.log1p((torch.arange(len(x)) // self.length).double())[:, None, None]
        return heads * growth if name == "q" else heads

    def attended(self, layer: int, x: Tensor) -> Tensor:
        """With what the adapter adds for its rows."""
        out = super().attended(layer, x)
        if self.drafted is None:
            return out
        return out + F.linear(x, self.lora[f"encoder.layers.{layer}.self_attn.o_proj.weight"]) * self.drafted

    def logits(self, tokens: Sequence[int], block: range = range(0), *, lora: bool = False) -> Tensor:
        """All rows. Each sees what is before it, and those of `block` all of it; `lora` changes those."""
        at = torch.arange(len(tokens))
        inside = (at >= block.start) & (at < block.stop)
        self.drafted = inside[:, None].double() if lora else None
        seen = (at[None] <= at[:, None]) | (inside[None] & inside[:, None])
        return self.under(seen, torch.tensor(tokens)).logits


@cache
def load(folder: Path) -> Model:
    """The model of a checkpoint folder."""
    return Model(folder)


@dataclass
class Done:
    """An answer, and what its passes did: see the README of `tests/goldens/nemotron`."""

    tokens: list[int] = field(default_factory=list)
    trace: list[list[int]] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


def decode(model: Model, prompt: Sequence[int], sampling: dict[str, Any]) -> Done:
    """The answer to `prompt` under sampling parameters as a request names them."""
    done, limit = Done(), sampling["max_tokens"]
    mode = {"ar": _ar, "diffusion": _diffusion, "linear_speculation": _speculation}[sampling["mode"]]
    mode(model, list(prompt), limit, sampling, done)
    end = model.config["eos_token_id"]
    kept = min(done.tokens.index(end) + 1 if end in done.tokens else limit, limit)
    if done.accepted:
        done.accepted[-1] -= len(done.tokens) - kept
    del done.tokens[kept:]
    return done


def _next(model: Model, tokens: list[int]) -> int:
    return int(model.logits(tokens)[-1].argmax())


def _ended(model: Model, done: Done, limit: int) -> bool:
    return len(done.tokens) >= limit or model.config["eos_token_id"] in done.tokens


def _ar(model: Model, prompt: list[int], limit: int, sampling: dict[str, Any], done: Done) -> None:
    while not _ended(model, done, limit):
        done.tokens.append(_next(model, prompt + done.tokens))


def _diffusion(model: Model, prompt: list[int], limit: int, sampling: dict[str, Any], done: Done) -> None:
    mask = model.config["mask_token_id"]
    rule, threshold = sampling.get("remasking", "threshold"), sampling["threshold"]
    ends_early = sampling.get("blocks", {}).get("early_stop", True)
    while not _ended(model, done, limit):
        before = prompt + done.tokens
        size = min(model.config["block_size"], limit - len(done.tokens))
        block, span = [_next(model, before)] + [mask] * (size - 1), range(len(before), len(before) + size)
        if ends_early and block[0] == model.config["eos_token_id"]:
            block = block[:1]
        masked, most = set(range(1, len(block))), min(sampling["steps_per_block"], size)
        for number in range(most):
            if not masked:
                break
            rows = model.logits(before + block, span)[span.start :]
            chances = rows.softmax(-1)
            rows[:, mask] = -torch.inf
            best = {p: int(rows[p].argmax()) for p in masked}
            sure = {p: float(chances[p, best[p]]) for p in masked}
            order = sorted(masked, key=lambda p: (-sure[p], p))
            chosen, product = [], 1.0
            for rank, p in enumerate(order):
                product *= sure[p]
                good = {
                    "threshold": sure[p] >= threshold,
                    "bound": sure[p] >= threshold or (sure[p] >= 0.45 and (rank == 0 or sure[p] >= 1 - 2 / (rank + 2))),
                    "cumulative": product >= threshold,
                }[rule]
                if not good:
                    break
                chosen.append(p)
            chosen = chosen or order[:1]
            if number + 1 == most or len(masked) == 1:
                chosen = order
            for p in chosen:
                block[p] = best[p]
            masked -= set(chosen)
            done.trace.append(sorted(chosen))
            final = block[: min(masked)] if masked else block
            if ends_early and model.config["eos_token_id"] in final:
                block = final
                break
        done.tokens += block


def _speculation(model: Model, prompt: list[int], limit: int, sampling: dict[str, Any], done: Done) -> None:
    mask, asked = model.config["mask_token_id"], sampling["speculation"]
    window = asked["draft_window"]
    done.tokens.append(_next(model, prompt))
    while not _ended(model, done, limit):
        before, size = prompt + done.tokens[:-1], min(window, limit - len(done.tokens))
        block = [done.tokens[-1]] + [mask] * (size - 1)
        rows = model.logits(before + block, range(len(before), len(before) + size), lora=asked["lora"])[len(before) :]
        rows[:, mask] = -torch.inf
        block[1:] = rows[1:].argmax(-1).tolist()
        truth = model.logits(before + block)[len(before) :].argmax(-1).tolist()
        taken = 1
        while taken < size and truth[taken - 1] == block[taken]:
            taken += 1
        done.tokens += truth[:taken]
        done.accepted.append(taken)
        if taken == size:
            window = min(2 * window, asked["max_draft_window"])
        elif 2 * taken <= size:
            window = max(window // 2, asked["draft_window"])
