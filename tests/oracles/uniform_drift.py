"""Uniform-Cache that computes, in each layer, only rows whose V has moved; as docs/lab/methods.md describes it."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tests.oracles.dense import KV
from tests.oracles.gidd import GiddModel, GiddPass


class KeptOutputs:
    """What attention and MLP of every layer last added to every row, [layers, positions, width]; NaN before.

    `narrowest` is how close any row came to the other side of the threshold.
    """

    def __init__(self, model: GiddModel, length: int, threshold: float) -> None:
        self.model, self.threshold, self.narrowest = model, threshold, 1.0
        self.attended = torch.full((model.layers, length, model.width), torch.nan, dtype=model.dtype)
        self.fed = self.attended.clone()

    def forward(
        self, tokens: Tensor, rows: Tensor, given: KV | None, visible: Tensor | None, compares: bool
    ) -> GiddPass:
        """One pass over `rows` (a mask). Where it `compares`, layers from the second on compute what has moved."""
        model, length = self.model, len(tokens)
        seen = torch.ones(length, length, dtype=torch.bool) if visible is None else visible
        kv = given or model.empty_kv(length)
        keys, values = kv.k.clone(), kv.v.clone()
        places = torch.arange(length)
        x = torch.full((length, model.width), torch.nan, dtype=model.dtype)
        x[rows] = model.embedding[tokens[rows]]
        states, counts = [x.clone()], []
        for layer, weights in enumerate(model.weights):
            live = rows.clone()
            normed = model.norm(x, weights["attn_layernorm.weight"])
            if compares and layer:
                new = model.project(layer, "v", normed[rows], places[rows]).flatten(1)
                apart = 1 - F.cosine_similarity(new, values[layer, rows].flatten(1), dim=-1)
                self.narrowest = min(self.narrowest, float((apart - self.threshold).abs().min()))
                live[rows] = apart > self.threshold
            if live.any():
                q, keys[layer, live], values[layer, live] = (
                    model.project(layer, name, normed[live], places[live]) for name in "qkv"
                )
                mixed, _ = model.mix(layer, q, keys[layer], values[layer], seen[live])
                self.attended[layer, live] = model.residual * model.linear(layer, "self_attn.o_proj", mixed)
            x = x + self.attended[layer]
            if live.any():
                up = model.linear(layer, "mlp.up_proj", model.norm(x[live], weights["mlp_layernorm.weight"]))
                self.fed[layer, live] = model.residual * model.linear(layer, "mlp.down_proj", up.relu().square())
            x = x + self.fed[layer]
            states.append(x.clone())
            counts.append(int(live.sum()))
        logits = F.linear(model.norm(x, model.last_norm), model.output)
        return GiddPass(torch.stack(states), KV(keys, values), logits, torch.empty(0), counts)
