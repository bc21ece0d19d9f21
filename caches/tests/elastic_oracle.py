"""Elastic-Cache, as docs/lab/methods.md describes it."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.blocks import unconditional
from tests.oracles.canvas import Canvas
from tests.oracles.dense import DenseModel
from tests.oracles.sampling import Sampler


@dataclass(frozen=True)
class Elastic:
    """The settings, as docs/lab/methods.md describes them."""

    window: int
    threshold: float
    track_num: int = 1
    block_caching: bool = True
    similarity: str = "heads"
    queries: str = "window"


class CanvasState:
    """One canvas' cached K, V and layer inputs, and the tokens that its layers track."""

    def __init__(self, model: DenseModel, canvas: Canvas, knobs: Elastic, stops: Collection[int]) -> None:
        self.model, self.canvas, self.knobs, self.stops = model, canvas, knobs, stops
        empty = model.empty_kv(canvas.length)
        self.k, self.v = empty.k.clone(), empty.v.clone()
        self.inputs = torch.full((model.layers, canvas.length, model.width), torch.nan, dtype=model.dtype)
        self.noisy_before: Tensor | None = None
        self.tracked: list[int] = []

    def masked(self) -> Tensor:
        """What is still to be decoded: nothing after a stop token."""
        known = self.canvas.known & torch.tensor([int(token) in self.stops for token in self.canvas.tokens])
        known[: self.canvas.prompt_length] = False
        return self.canvas.noisy & (known.cumsum(0) == 0)

    def reach(self) -> Tensor:
        """The window: the first noisy positions."""
        masked = self.masked()
        return masked & (masked.cumsum(0) <= self.knobs.window)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[int]]:
        """Raw logits of one pass, NaN for rows that the last layer did not compute, and the rows of each layer."""
        model = self.model
        self.inputs[0] = model.embed(tokens)
        live = self._live()
        h = self.inputs[0]
        rows: list[int] = []
        refreshed = False
        found: set[int] = set()
        for layer in range(model.layers):
            compares = bool(self.tracked) and not refreshed and layer < model.layers - 1
            before = self._attention(layer, self.tracked) if compares else None
            self.inputs[layer, live] = h[live]
            x = model.entering(layer, h[live])
            self.k[layer, live] = model.project(layer, "k", x)
            self.v[layer, live] = model.project(layer, "v", x)
            out = h[live] + model.attention(layer, x, live.nonzero()[:, 0], self.k[layer], self.v[layer])
            h = torch.full_like(h, torch.nan)
            h[live] = out + model.feed_forward(layer, out)
            rows.append(int(live.sum()))
            found |= self._most_attended(layer)
            if before is not None and self._drifted(before, self._attention(layer, self.tracked)):
                # The other rows go on from what entered the next layer when they were last computed there.
                h = h.where(live[:, None], self.inputs[layer + 1])
                live = torch.ones_like(live)
                refreshed = True
        self.noisy_before = self.canvas.noisy.clone()
        self.tracked = sorted(found)
        return model.head(h), rows

    def _live(self) -> Tensor:
        """Everything at first; then the window, the rows that predict it, what was just decoded, what is tracked."""
        if self.noisy_before is None:
            return torch.ones_like(self.canvas.noisy)
        reach = self.reach() if self.knobs.block_caching else self.masked()
        live = reach | (self.noisy_before & ~self.canvas.noisy)
        if self.model.dream:
            live |= reach.roll(-1)
        live[self.tracked] = True
        return live

    def _drifted(self, before: Tensor, now: Tensor) -> bool:
        """Whether the tracked tokens attend to other things than in the last pass; both are [n, heads, positions]."""
        if self.knobs.similarity == "heads":
            seen = before.sum(1) > 0  # what no head attends to has no direction
            similarity = float(F.cosine_similarity(before, now, dim=1, eps=0.0)[seen].mean())
        else:
            similarity = float(F.cosine_similarity(before.mean(1), now.mean(1), dim=-1, eps=0.0).mean())
        self.canvas.decided(abs(similarity - self.knobs.threshold))
        return similarity < self.knobs.threshold

    def _most_attended(self, layer: int) -> set[int]:
        """The tokens, of all that are not to be decoded, to which the window, or all masks, attend most."""
        asking = self.reach() if self.knobs.queries == "window" else self.masked()
        mass = self._attention(layer, asking.nonzero()[:, 0].tolist()).sum((0, 1))
        open_ = ~self.masked()
        ranks = mass.where(open_, -1.0).argsort(descending=True, stable=True)[: int(open_.sum())].tolist()
        count = self.knobs.track_num
        if len(ranks) > count:
            self.canvas.decided(float(mass[ranks[count - 1]] - mass[ranks[count]]))
        return set(ranks[:count])

    def _attention(self, layer: int, positions: list[int]) -> Tensor:
        """Attention probabilities [n, heads, positions], by the inputs that the layer last had."""
        places = torch.tensor(positions)
        x, every = self.model.entering(layer, self.inputs[layer, places]), torch.arange(self.canvas.length)
        return self.model.scores(layer, x, places, self.k[layer], every).softmax(-1)


def elastic_cache(
    model: DenseModel,
    canvas: Canvas,
    sampler: Sampler,
    knobs: Elastic,
    cfg_scale: float = 0.0,
    stops: Collection[int] = (),
) -> None:
    """One canvas, or with guidance two, which are watched apart from each other and make one pass.

    Ends where nothing is left to decode before a token of `stops`.
    """
    told = CanvasState(model, canvas, knobs, stops)
    blind = CanvasState(model, canvas, knobs, stops) if cfg_scale > 0 else None
    while not sampler.done and told.masked().any():
        canvas.reachable = told.reach()
        logits, rows = told.forward(canvas.tokens)
        if blind is not None:
            other, more = blind.forward(unconditional(model, canvas))
            logits = other + (cfg_scale + 1) * (logits - other)
            rows = [a + b for a, b in zip(rows, more, strict=True)]
        canvas.ran(rows)
        sampler.commit(model.predictions(logits))
