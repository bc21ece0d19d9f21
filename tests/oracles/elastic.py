"""Elastic-Cache, as docs/policies.md describes it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.blocks import unconditional
from tests.oracles.canvas import Canvas
from tests.oracles.dense import DenseModel
from tests.oracles.sampling import Sampler


class CanvasState:
    """One canvas' cached K, V and layer inputs, and per layer the tracked token and what it attended to last."""

    def __init__(self, model: DenseModel, canvas: Canvas, window: int, threshold: float) -> None:
        self.model, self.canvas, self.window, self.threshold = model, canvas, window, threshold
        empty = model.empty_kv(canvas.length)
        self.k, self.v = empty.k.clone(), empty.v.clone()
        self.inputs = torch.full((model.layers, canvas.length, model.width), torch.nan, dtype=model.dtype)
        self.noisy_before: Tensor | None = None
        self.tracked: dict[int, int] = {}
        self.attended: dict[int, Tensor] = {}

    def reach(self) -> Tensor:
        """The window: the first noisy positions."""
        return self.canvas.noisy & (self.canvas.noisy.cumsum(0) <= self.window)

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[int]]:
        """Raw logits of one pass, NaN for rows that the last layer did not compute, and the rows of each layer."""
        model = self.model
        self.inputs[0] = model.embedding[tokens]
        live = self._live()
        h = self.inputs[0]
        rows: list[int] = []
        for layer in range(model.layers):
            self.inputs[layer, live] = h[live]
            x = model.norm(h[live], model.weights[layer]["attn_norm"])
            self.k[layer, live] = model.project(layer, "k", x)
            self.v[layer, live] = model.project(layer, "v", x)
            out = h[live] + model.attention(layer, x, live.nonzero()[:, 0], self.k[layer], self.v[layer])
            h = torch.full_like(h, torch.nan)
            h[live] = out + model.feed_forward(layer, out)
            rows.append(int(live.sum()))
            if layer == model.layers - 1:
                break
            if self._drifted(layer) and not live.all():
                # The other rows go on from what entered the next layer when they were last computed there.
                h = h.where(live[:, None], self.inputs[layer + 1])
                live = torch.ones_like(live)
            self._track(layer)
        self.noisy_before = self.canvas.noisy.clone()
        return model.head(h), rows

    def _live(self) -> Tensor:
        """Everything at first; then the window, the rows that predict it, what was just decoded, what is tracked."""
        if self.noisy_before is None:
            return torch.ones_like(self.canvas.noisy)
        live = self.reach() | (self.noisy_before & ~self.canvas.noisy)
        if self.model.dream:
            live |= self.reach().roll(-1)
        live[list(self.tracked.values())] = True
        return live

    def _drifted(self, layer: int) -> bool:
        """Whether the tracked token attends to other things than in the last pass."""
        if layer not in self.tracked:
            return False
        now = self._attention(layer, [self.tracked[layer]])[0]
        similarity = float(F.cosine_similarity(self.attended[layer], now, dim=0, eps=0.0))
        self.canvas.decided(abs(similarity - self.threshold))
        return similarity < self.threshold

    def _track(self, layer: int) -> None:
        """From here on the decoded token to which the window attends most."""
        mass = self._attention(layer, self.reach().nonzero()[:, 0].tolist()).sum(0)
        best = mass.where(self.canvas.known, -1.0).topk(2)
        self.canvas.decided(float(best.values[0] - best.values[1]))
        self.tracked[layer] = int(best.indices[0])
        self.attended[layer] = self._attention(layer, [self.tracked[layer]])[0]

    def _attention(self, layer: int, positions: list[int]) -> Tensor:
        """Attention probabilities [n, positions], the mean over heads, by the inputs that the layer last had."""
        model = self.model
        places = torch.tensor(positions)
        x = model.norm(self.inputs[layer, places], model.weights[layer]["attn_norm"])
        q = model.rotate(model.project(layer, "q", x), places)
        k = model.rotate(self.k[layer], torch.arange(self.canvas.length))
        k = k.repeat_interleave(model.heads // model.kv_heads, 1)
        scores: Tensor = torch.einsum("nhd,thd->hnt", q, k) / model.head_size**0.5
        return scores.softmax(-1).mean(0)


def elastic_cache(
    model: DenseModel, canvas: Canvas, sampler: Sampler, window: int, threshold: float, cfg_scale: float = 0.0
) -> None:
    """One canvas, or with guidance two, which are watched apart from each other and make one pass."""
    told = CanvasState(model, canvas, window, threshold)
    blind = CanvasState(model, canvas, window, threshold) if cfg_scale > 0 else None
    while not sampler.done:
        canvas.reachable = told.reach()
        logits, rows = told.forward(canvas.tokens)
        if blind is not None:
            other, more = blind.forward(unconditional(model, canvas))
            logits = other + (cfg_scale + 1) * (logits - other)
            rows = [a + b for a, b in zip(rows, more, strict=True)]
        canvas.ran(rows)
        sampler.commit(model.predictions(logits))
