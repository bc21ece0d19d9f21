"""Uniform diffusion of a whole canvas (Sumi): dense passes, and a sampler that goes place by place.

Draws are given: a number between 0 and 1 for each step and place, below which a token's cumulated probability ends.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.oracles.sdar import SdarModel

Uniform = Callable[[int, int], float]


class SumiModel(SdarModel):
    """Llama whose rows see all rows, and whose softmax has one more 1 in the denominator."""

    def weighed(self, scores: Tensor) -> Tensor:
        """The shares of the keys, which sum to less than 1."""
        return torch.cat([torch.zeros_like(scores[..., :1]), scores], -1).softmax(-1)[..., 1:]

    def predict(self, tokens: Sequence[int]) -> Tensor:
        """Logits of all rows."""
        length = len(tokens)
        return self.under(torch.ones(length, length, dtype=torch.bool), torch.tensor(tokens)).logits


@cache
def load(folder: Path) -> SumiModel:
    """The model of a checkpoint folder in float64."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return SumiModel(config, load_file(folder / "model.safetensors"))


def alphas(run: Mapping[str, Any]) -> list[float]:
    """The probability that a token is clean, before each step and after the last."""
    found, steps = [], run["steps"]
    for index in range(steps + 1):
        share = index / steps
        if run.get("schedule", "linear") == "linear":
            alpha = 1e-4 + (1 - 2e-4) * share
        else:
            alpha = 0.5 + math.cos(math.pi * (0.999 - 0.998 * share)) / 2
        alpha = min(max(alpha, 1e-6), 1 - 1e-6)
        level = math.log(alpha) - math.log(1 - alpha)
        level = min(max(level, run.get("min_log_snr", -9.0)), run.get("max_log_snr", 9.0))
        found.append(1 / (1 + math.exp(-level)))
    return found


def drawn(chances: Tensor, u: float) -> int:
    """The first token whose cumulated share is above `u`."""
    shares = (chances / chances.sum()).cumsum(0)
    return int((shares > u).nonzero()[0, 0])


def posterior(clean: Tensor, current: int, before: float, after: float) -> Tensor:
    """p(next token | current one) of one place, [V]."""
    size, ratio = len(clean), before / after
    stays = torch.zeros(size, dtype=clean.dtype)
    stays[current] = ratio
    evidence = max(before * float(clean[current]) + (1 - before) / size, 1e-12)
    return (after * clean + (1 - after) / size) * (stays + (1 - ratio) / size) / evidence


def decode(
    model: SumiModel, run: Mapping[str, Any], noise: Sequence[int], u: Uniform
) -> tuple[list[int], list[dict[int, int]]]:
    """The answer, and what each step changed, of a run on a canvas that begins with `noise` behind the prompt."""
    prompt, config = list(run["prompt"]), model.config
    canvas = [*prompt, *noise]
    length, reserved, begin = len(canvas), 2 if run.get("anchor", True) else 0, len(prompt)
    end, start = config["eos_token_id"], config["bos_token_id"]
    budget = max(1, min(run["max_new_tokens"], length - begin - reserved))
    closed = set(range(begin))
    own = [(begin + budget, end), (begin + budget + 1, start)] if reserved else []
    for place, token in run.get("frozen") or own:
        if place < length and place not in closed:
            canvas[place] = token
            closed.add(place)
    closed |= set(range(run.get("denoise_end", length), length))
    levels, trace, temperature = alphas(run), [], max(run["temperature"], 1e-6)
    for step in range(run["steps"]):
        logits, new = model.predict(canvas), list(canvas)
        plain, warm = logits.softmax(-1), (logits / temperature).softmax(-1)
        places = [place for place in range(length) if place not in closed]
        if run["sampler"] == "adaptive":
            gain = {place: float(plain[place].max() - plain[place, canvas[place]]) for place in places}
            places = sorted(places, key=lambda place: (-gain[place], place))[: run["tokens_per_step"]]
        for place in places:
            if run["sampler"] == "ancestral":
                new[place] = drawn(posterior(warm[place], canvas[place], *levels[step : step + 2]), u(step, place))
            elif run["sampler"] == "adaptive" and run["temperature"] > 0:
                new[place] = drawn(warm[place], u(step, place))
            else:
                new[place] = int(logits[place].argmax())
        trace.append({place: new[place] for place in range(length) if new[place] != canvas[place]})
        canvas = new
    answer = canvas[begin:]
    if run.get("trim", True) and end in answer:
        answer = answer[: answer.index(end)]
    return answer, trace
