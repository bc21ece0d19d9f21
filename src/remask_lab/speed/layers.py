"""Parts of a layer beside their like: attention beside PyTorch's, a mixture of experts beside a dense MLP."""

import argparse
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from remask import LLM, SamplingParams
from remask.errors import ConfigError, IntegrityError
from remask.families import preset
from remask.machine.device import resolve_device, resolve_dtype
from remask.model.arithmetic import Arithmetic
from remask.model.attention_torch import TorchAttention
from remask.model.config import Mixture, ModelConfig
from remask.model.mixture import feed, route
from remask.model.weights import MixtureWeights
from remask.model.work_list import WorkList, WorkListBuilder
from remask_lab.ops.clock import time_call
from remask_lab.records.machine import commit, host
from remask_lab.speed.command import in_turns, ratios, report, thread_seconds
from remask_lab.speed.runs import engine_of, open_random, random_requests

Figures = Mapping[str, float | list[float]]


def attention(args: argparse.Namespace) -> dict[str, Any]:
    """Attention beside PyTorch's fused attention of the same shape, and what a leased prefix costs a cached step.

    Everything is a ratio of CPU times of one thread that takes turns with itself:

    - `one_run`, `behind_a_prefix`: the rows of a block attend to a canvas that lies in one run of slots, and to one
      whose leading part is leased, over fused attention to one run.
    - `capped`: a whole canvas with capped scores and a sink, over fused attention without either.
    - `leased_step`: a cached step under `bicache+block-dual` over one under `block-dual`. Both compute one block.
    """
    length, block = args.canvas, args.block_length
    if block < 4 or length < 4 * block:
        raise ConfigError(f"--canvas must be at least four blocks of {block}, got {length}, and a block 4 positions")
    torch.set_num_threads(1)
    llm = open_random(args, max_num_seqs=1, max_model_len=length, store_budget_tokens=length)
    dtype, prefix = llm.model.dtype, (length - 2 * block) * 9 // 10
    plain, capped = llm.loaded.config, preset(args.capped)
    found = {
        "one_run": over_fused(plain, block, [length], dtype, args.turns),
        "behind_a_prefix": over_fused(plain, block, [prefix, length - prefix], dtype, args.turns),
        "capped": over_fused(capped, 2 * length, [2 * length], dtype, args.turns),
        "leased_step": leased_step(llm, prefix, length, block, args.turns),
    }
    return report(llm, ratios=found)


def over_fused(config: ModelConfig, rows: int, runs: list[int], dtype: torch.dtype, turns: int) -> Figures:
    """Times of attention of `rows` rows to runs of slots, with a gap between them, over those of fused attention."""
    slots = sum(runs) + len(runs)
    q = torch.randn(rows, config.heads, config.head_dim, dtype=dtype)
    k, v = (torch.randn(slots, config.kv_heads, config.head_dim, dtype=dtype) for _ in range(2))
    ours, sink = TorchAttention(config.score_cap), (k[0], v[0]) if config.sink else None
    a, b, c = (x.transpose(0, 1)[None] for x in (q, k[: sum(runs)], v[: sum(runs)]))
    fused = partial(F.scaled_dot_product_attention, a, b, c, enable_gqa=config.heads != config.kv_heads)
    return _beside({"ours": partial(ours, q, k, v, work_of(rows, runs), sink), "beside": fused}, turns)


def work_of(rows: int, runs: list[int]) -> WorkList:
    """All rows see all of `runs`, which stand one slot apart from each other."""
    starts = np.cumsum([0, *(count + 1 for count in runs[:-1])])
    slots = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, runs, strict=True)])
    builder = WorkListBuilder()
    builder.add(0, rows, builder.slots(slots), len(slots), None)
    return builder.list()


def leased_step(llm: LLM, prefix: int, length: int, block: int, turns: int) -> Figures:
    """Times of steps that compute one block behind a leased prefix, over those of such steps without one."""
    params = SamplingParams(max_tokens=2 * block, block_length=block, ignore_eos=True)
    depth = {"depth": llm.loaded.config.layers // 2, "refresh_interval": None}
    calls: dict[str, Callable[[], object]] = {}
    for name, cache, settings in (("ours", "bicache+block-dual", depth), ("beside", "block-dual", None)):
        policy = llm.session.policy(cache, settings)
        engine = engine_of(llm, random_requests(llm, 1, params, policy, length - 2 * block, prefix))
        while engine.stats.steps - engine.stats.prefix_passes < 2:  # the pass that fills the cache, and a cached one
            before = engine.stats.row_layers
            engine.step()
        if engine.stats.row_layers - before != block * llm.loaded.config.layers:
            raise IntegrityError(f"{cache}: a cached step computes {engine.stats.row_layers - before} row-layers")
        calls[name] = engine.step
    return _beside(calls, min(turns, block - 3))


def _beside(calls: Mapping[str, Callable[[], object]], turns: int) -> Figures:
    with torch.inference_mode():
        times = in_turns(calls, turns, thread_seconds)
    medians = {f"{name}_ms": 1e3 * statistics.median(seconds) for name, seconds in times.items()}
    found = ratios(times["ours"], times["beside"])
    return {"ratio": statistics.median(found), "range": [min(found), max(found)], **medians}


@dataclass(frozen=True, slots=True)
class MoeLayer:
    """A mixture, and the dense MLP [2 I, D] and [D, I] of equal active size."""

    mixture: Mixture
    weights: MixtureWeights
    gate_up: Tensor
    down: Tensor
    arithmetic: Arithmetic

    def chosen(self, x: Tensor) -> Any:
        """The experts of rows `x` [N, D] and their weights."""
        return route(x, self.mixture.router, self.mixture.active, self.weights, self.arithmetic)

    def routed(self, x: Tensor) -> Tensor:
        """The experts' output of rows `x` [N, D]."""
        return feed(x, self.chosen(x), self.weights, self.arithmetic)

    def dense(self, x: Tensor) -> Tensor:
        """The MLP's output of rows `x` [N, D]."""
        gate, up = self.arithmetic.linear(x, self.gate_up).chunk(2, dim=-1)
        return self.arithmetic.linear(self.arithmetic.activate_(gate).mul_(up), self.down)


def random_layer(hidden: int, mixture: Mixture, dtype: torch.dtype, device: torch.device) -> MoeLayer:
    """A layer of random weights. Raises `ConfigError` where more experts are active than there are."""
    if mixture.active > mixture.experts:
        raise ConfigError(
            f"--active {mixture.active} is more than --experts {mixture.experts}; a row goes to different experts"
        )

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=dtype, device=device) / math.sqrt(shape[-1])

    inner, wide, count = mixture.intermediate, mixture.active * mixture.intermediate, mixture.experts
    weights = MixtureWeights(
        router=drawn(count, hidden),
        bias=None,
        gate_up=drawn(count, 2 * inner, hidden),
        down=drawn(count, hidden, inner),
    )
    return MoeLayer(mixture, weights, drawn(2 * wide, hidden), drawn(hidden, wide), Arithmetic())


def mixture(args: argparse.Namespace) -> dict[str, Any]:
    """What a mixture of experts takes beside a dense MLP of equal active size, by the number of rows.

    One layer of random weights. The mixture chooses experts, groups the rows and computes them; the MLP is as wide as
    the experts that compute a row are together, so both take the same FLOPs for the rows. Both take turns in one run,
    with the choice of experts alone. Few rows go to as many experts as they are rows, so more weights are read than the
    MLP has.
    """
    device = resolve_device(args.device)
    dtype, _ = resolve_dtype(args.dtype, device, 0)
    layer = random_layer(args.hidden, Mixture(args.experts, args.active, args.intermediate), dtype, device)
    with torch.inference_mode():
        results = [_rows_of_mixture(layer, count, args.turns) for count in args.rows]
    about = {"machine": host(), "threads": torch.get_num_threads(), "commit": commit()}
    return {**about, "results": results}


def _rows_of_mixture(layer: MoeLayer, count: int, turns: int) -> dict[str, Any]:
    """The mixture's time over the MLP's, and how much of it the choice of experts is, for `count` rows."""
    x = torch.randn(count, layer.gate_up.shape[1], dtype=layer.gate_up.dtype, device=layer.gate_up.device)
    calls = {name: partial(getattr(layer, name), x) for name in ("routed", "dense", "chosen")}
    times = in_turns(calls, turns, lambda call: time_call(call, x.device), first=2)
    found = ratios(times["routed"], times["dense"])
    return {
        "rows": count,
        "experts_used": len(set(layer.chosen(x).experts.flatten().tolist())),
        "ratio_to_dense": statistics.median(found),
        "ratio_range": [min(found), max(found)],
        "choice_share": statistics.median(ratios(times["chosen"], times["routed"])),
    }
