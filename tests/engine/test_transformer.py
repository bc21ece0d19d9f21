"""Whole passes of the one transformer against a forward written from the papers, a canvas and a layer at a time."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, new_states, prefix_canvas
from remask.engine.pack import pack
from remask.model.config import ModelConfig
from remask.model.pool import Pool
from remask.model.transformer import Transformer
from remask.model.weights import LayerWeights, Weights
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from tests.engine import test_pack
from tests.engine.support import CPU, lively_weights, small_config
from tests.engine.test_pack import LAYERS, Memory


def config_of(family: str) -> ModelConfig:
    return replace(small_config(family), layers=LAYERS)


def norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight


def rope(x: Tensor, position: int, theta: float) -> Tensor:
    """One row [heads, Dh]: channels j and j + Dh/2 turn by position * theta ** (-2j / Dh)."""
    half = x.shape[-1] // 2
    out = x.clone()
    for j in range(half):
        angle = torch.tensor(position * theta ** (-2 * j / x.shape[-1]), dtype=torch.float32).double()
        a, b = x[:, j], x[:, j + half]
        out[:, j], out[:, j + half] = a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()
    return out


@dataclass
class Naive:
    """A model that is given, layer by layer, the live rows and whatever K/V and states it does not compute."""

    config: ModelConfig
    weights: Weights

    def qkv(self, w: LayerWeights, x: Tensor, position: int) -> tuple[Tensor, Tensor, Tensor]:
        c = self.config
        out = w.qkv @ x if w.qkv_bias is None else w.qkv @ x + w.qkv_bias
        q, k, v = torch.split(out, [c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim])
        q, k, v = (part.view(-1, c.head_dim) for part in (q, k, v))
        return rope(q, position, c.rope_theta), rope(k, position, c.rope_theta), v

    def forward(
        self,
        tokens: Sequence[int],
        live: Callable[[int], list[int]],
        kv: list[dict[int, tuple[Tensor, Tensor]]],
        restore: Mapping[tuple[int, int], Tensor] | None = None,
        frozen: Callable[[int, int], bool] = lambda *_: False,
    ) -> tuple[dict[int, Tensor], list[dict[int, Tensor]]]:
        """Final normed hidden states by position, and the states leaving each layer. `kv` is read and written."""
        c = self.config
        h = {p: self.weights.embed[token] for p, token in enumerate(tokens)}
        leaving: list[dict[int, Tensor]] = []
        for layer, w in enumerate(self.weights.layers):
            rows = live(layer)
            h = {p: h[p] if p in h else (restore or {})[layer, p] for p in rows}
            queries = {}
            for p in rows:
                queries[p], k, v = self.qkv(w, norm(h[p], w.attn_norm, c.norm_eps), p)
                if not frozen(layer, p):
                    kv[layer][p] = (k, v)
            for p in rows:
                parts = []
                for head in range(c.heads):
                    group = head // (c.heads // c.kv_heads)
                    keys = [kv[layer][t] for t in range(len(tokens))]
                    scores = torch.stack([queries[p][head] @ k[group] for k, _ in keys]) / math.sqrt(c.head_dim)
                    parts.append(torch.stack([v[group] for _, v in keys]).T @ scores.softmax(0))
                h[p] = h[p] + w.out @ torch.cat(parts)
                x = norm(h[p], w.ffn_norm, c.norm_eps)
                gate, up = (w.gate_up @ x).chunk(2)
                h[p] = h[p] + w.down @ (gate * torch.sigmoid(gate) * up)
            leaving.append(dict(h))
        return {p: norm(x, self.weights.norm, c.norm_eps) for p, x in h.items()}, leaving


def empty() -> list[dict[int, tuple[Tensor, Tensor]]]:
    return [{} for _ in range(LAYERS)]


class Bench:
    """A pool full of NaN, a model, and canvases with random tokens."""

    def __init__(self, family: str) -> None:
        self.config = config_of(family)
        self.weights = lively_weights(self.config)
        self.model = Transformer(self.config, self.weights)
        self.naive = Naive(self.config, self.weights)
        self.memory = Memory()
        self.memory.store.new_states = lambda tokens: new_states(
            LAYERS, self.config.hidden, torch.float64, CPU, tokens
        ).fill_(torch.nan)
        self.pool = Pool(self.config, 200, self.memory.page_size, torch.float64, CPU)
        for tensor in (*self.pool.k, *self.pool.v):
            tensor.fill_(torch.nan)
        self.generator = np.random.default_rng(1)

    def branch(self, prompt: int, response: int, prefix: int = 0, boundary: int = 0) -> CanvasState:
        branch = self.memory.branch(prompt, response, prefix, boundary, self.config.shift)
        branch.canvas.tokens[prefix:] = self.generator.integers(0, self.config.vocab, len(branch.canvas) - prefix)
        return branch

    def run(self, branches: list[CanvasState], policies: list[CachePolicy], step: int) -> list[Tensor]:
        plans = [policy.plan(test_pack.view(b, step)) for b, policy in zip(branches, policies, strict=True)]
        for branch, plan in zip(branches, plans, strict=True):
            branch.admit(plan)
        out = self.model.forward(pack(list(zip(branches, plans, strict=True)), CPU), self.pool)
        return list(torch.split(out, [int(plan.predict.sum()) for plan in plans]))

    def predicted(self, branch: CanvasState, hidden: dict[int, Tensor]) -> Tensor:
        return torch.stack([hidden[p - self.config.shift] for p in range(branch.canvas.prompt, len(branch.canvas))])


def close(a: Tensor, b: Tensor) -> bool:
    # A cascade's softmax is float32, and so are the angles.
    return torch.allclose(a, b, atol=2e-5, rtol=2e-5)


FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])


@FAMILIES
def test_dense_passes_over_canvases_of_any_length(family: str) -> None:
    bench = Bench(family)
    branches = [bench.branch(2, 3), bench.branch(5, 1), bench.branch(1, 4)]
    outs = bench.run(branches, [Dense()] * 3, 0)
    for branch, out in zip(branches, outs, strict=True):
        tokens = branch.canvas.tokens.tolist()
        everything = list(range(len(tokens)))
        hidden, _ = bench.naive.forward(tokens, lambda _, rows=everything: rows, empty())  # type: ignore[misc]
        expected = bench.predicted(branch, hidden)
        assert close(out, expected)
        assert torch.allclose(bench.model.head(out), expected @ bench.weights.head.T, atol=1e-3)


@pytest.mark.few(3)
@FAMILIES
@pytest.mark.parametrize("state", ["stored", "recomputed"])
def test_bicache_over_several_steps(family: str, state: str) -> None:
    """Two canvases on one prefix at different depths, refreshed at steps 0 and 2, beside reuse and a dense canvas."""
    bench = Bench(family)
    prefix = 4
    depths = [2, 3, LAYERS]
    branches = [bench.branch(5 + i, 2 + i, prefix, depth) for i, depth in enumerate(depths)]
    lease = branches[0].lease
    assert lease is not None
    lone, plan = prefix_canvas(lease.entry, LAYERS)
    bench.model.forward(pack([(lone, plan)], CPU), bench.pool)
    stored = empty()
    _, leaving = bench.naive.forward([7] * prefix, lambda _: list(range(prefix)), stored)
    for layer in range(LAYERS - 1):
        assert close(lease.entry.states[layer], torch.stack([leaving[layer][p] for p in range(prefix)]))
    branches.append(bench.branch(3, 2))
    make = [BiCache(depth=d, refresh_interval=2, boundary_state=state) for d in depths[:2]]  # type: ignore[arg-type]
    policies: list[CachePolicy] = [*make, Reuse(), Dense()]
    memories = [[{p: stored[layer][p] for p in range(prefix)} for layer in range(LAYERS)] for _ in depths] + [empty()]
    for step in range(4):
        outs = bench.run(branches, policies, step)
        refresh = step % 2 == 0
        for index, (branch, out) in enumerate(zip(branches, outs, strict=True)):
            length = len(branch.canvas)
            depth = depths[index] if index < 3 else 0
            suffix = list(range(prefix if index < 3 else 0, length))

            joining = refresh and index < 2

            def live(layer: int, depth: int = depth, suffix: list[int] = suffix, joining: bool = joining) -> list[int]:
                joined = joining and (layer >= depth or state == "recomputed")
                return [*range(prefix), *suffix] if joined else suffix

            hidden, _ = bench.naive.forward(
                branch.canvas.tokens.tolist(),
                live,
                memories[index],
                {(depth, p): leaving[depth - 1][p] for p in range(prefix)} if 0 < depth < LAYERS else None,
                lambda layer, p, depth=depth, index=index: index < 3 and layer < depth and p < prefix,  # type: ignore[misc]
            )
            assert close(out, bench.predicted(branch, hidden)), (step, index)
            first = branch.canvas.prompt
            branch.canvas.tokens[first + step % 2] = int(bench.generator.integers(0, bench.config.vocab))


def test_leased_pages_are_never_written() -> None:
    bench = Bench("llada")
    branches = [bench.branch(6, 3, 4, 2), bench.branch(6, 3, 4, 3)]
    lease = branches[0].lease
    assert lease is not None
    lone, plan = prefix_canvas(lease.entry, LAYERS)
    bench.model.forward(pack([(lone, plan)], CPU), bench.pool)
    slots = lease.entry.extent.slots()
    before = [tensor[slots].clone() for tensor in (*bench.pool.k, *bench.pool.v)]
    states = lease.entry.states.clone()
    for step in range(3):
        policy = BiCache(depth=2, refresh_interval=1, boundary_state="recomputed")
        bench.run(branches, [policy, replace(policy, depth=3)], step)
    for tensor, old in zip((*bench.pool.k, *bench.pool.v), before, strict=True):
        assert torch.equal(tensor[slots], old)
    assert torch.equal(lease.entry.states, states)
