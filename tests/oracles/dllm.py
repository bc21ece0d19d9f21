"""dLLM-Cache (section 4)."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.blocks import unconditional
from tests.oracles.canvas import Canvas
from tests.oracles.dense import DenseModel
from tests.oracles.sampling import Sampler


@dataclass(frozen=True)
class Intervals:
    """The knobs: refresh intervals of prompt and response, and the share of response rows renewed in between.

    `select` says which: those whose "value" or "key" moved most, or "random" ones, drawn from `seed`. `total` is K
    where steps count down to 1, as in the paper; else they count up from 0. `layers` from the second on share a choice,
    that of the first of them.
    """

    prompt: int
    response: int
    ratio: float
    select: str = "value"
    seed: int = 0
    total: int | None = None
    layers: int = 1

    def due(self, step: int, interval: int) -> bool:
        """Whether the pass of 0-based `step` renews what has this interval."""
        return step == 0 or (step if self.total is None else self.total - step) % interval == 0


class CanvasState:
    """One canvas' cached K, V, attention and MLP outputs of all layers, and its step counter."""

    def __init__(self, model: DenseModel, canvas: Canvas, knobs: Intervals) -> None:
        self.model, self.canvas, self.knobs = model, canvas, knobs
        self.step = 0
        empty = model.empty_kv(canvas.length)
        self.k, self.v = empty.k.clone(), empty.v.clone()
        self.attention = torch.full((model.layers, canvas.length, model.width), torch.nan, dtype=model.dtype)
        self.mlp = self.attention.clone()
        self.shared = torch.zeros(canvas.length, dtype=torch.bool)  # rows that the last choice took

    def forward(self, tokens: Tensor) -> Tensor:
        """The raw logits of one pass; every layer yields values for all rows, from fresh or cached outputs."""
        model = self.model
        h = model.embed(tokens)
        rows = []
        for layer, due in enumerate(self._due_rows()):
            x = model.entering(layer, h)
            live = due | self._moved(layer, x, due)
            rows.append(int(live.sum()))
            self.k[layer, live] = model.project(layer, "k", x[live])
            self.v[layer, live] = model.project(layer, "v", x[live])
            positions = live.nonzero()[:, 0]
            if len(positions):
                self.attention[layer, live] = model.attention(layer, x[live], positions, self.k[layer], self.v[layer])
            h = h + self.attention[layer]
            self.mlp[layer, live] = model.feed_forward(layer, h[live])
            h = h + self.mlp[layer]
        self.step += 1
        self.canvas.ran(rows)
        return model.head(h)

    def _due_rows(self) -> Iterator[Tensor]:
        """Per layer the rows that are due by the clock; layer 0 is always due."""
        prompt = self.canvas.span(0, self.canvas.prompt_length)
        prompt_due = self.knobs.due(self.step, self.knobs.prompt)
        response_due = self.knobs.due(self.step, self.knobs.response)
        for layer in range(self.model.layers):
            yield (prompt & (prompt_due or layer == 0)) | (~prompt & (response_due or layer == 0))

    def _moved(self, layer: int, x: Tensor, due: Tensor) -> Tensor:
        """Between response refreshes: the share of response rows that are renewed beside the due ones.

        Whichever of V and K is compared is renewed for all response rows.
        """
        start = self.canvas.prompt_length
        moved = torch.zeros_like(due)
        count = int((self.canvas.length - start) * self.knobs.ratio)
        if due[start] or not count:
            return moved
        if self.knobs.select == "random":
            first = layer - (layer - 1) % self.knobs.layers
            drawn = np.random.default_rng([self.knobs.seed, self.step, first]).permutation(range(len(due) - start))
            moved[start + torch.from_numpy(drawn[:count])] = True
            return moved
        if (layer - 1) % self.knobs.layers:
            self.canvas.picks.append((len(self.canvas.rows), layer, self.shared[start:].nonzero()[:, 0].tolist()))
            return self.shared
        cache = self.v if self.knobs.select == "value" else self.k
        fresh = self.model.project(layer, self.knobs.select[0], x[start:])
        similarity = F.cosine_similarity(fresh.flatten(1), cache[layer, start:].flatten(1), dim=-1)
        offsets = similarity.argsort()[:count].sort().values
        self.canvas.picks.append((len(self.canvas.rows), layer, offsets.tolist()))
        cache[layer, start:] = fresh
        moved[start + offsets] = True
        self.shared = moved
        return moved


def dllm_cache(model: DenseModel, canvas: Canvas, sampler: Sampler, knobs: Intervals) -> None:
    """Section 4 without guidance."""
    branch = CanvasState(model, canvas, knobs)
    while not sampler.done:
        sampler.commit(model.predictions(branch.forward(canvas.tokens)))


def dllm_cache_cfg(
    model: DenseModel, canvas: Canvas, sampler: Sampler, knobs: Intervals, cfg_scale: float, cfg_interval: int
) -> None:
    """Section 4 with guidance: two branches with a clock each; the residual is renewed every `cfg_interval` steps."""
    told, blind = CanvasState(model, canvas, knobs), CanvasState(model, canvas, knobs)
    while not sampler.done:
        logits = told.forward(canvas.tokens)
        if sampler.step % cfg_interval == 0 or sampler.step < 5:
            residual = logits - blind.forward(unconditional(model, canvas))
        sampler.commit(model.predictions(logits + cfg_scale * residual))
