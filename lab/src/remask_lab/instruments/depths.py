"""What studies of depth ask beyond what serving needs: tasks to profile, other definitions, and rows one by one."""

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.checkpoint.loaded import LoadedModel
from remask.engine.audit_passes import AuditPasses, PassInput
from remask.engine.pack import pack_uncached
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.canvas import Canvas
from remask.tasks import tariff, transit
from remask_lab.instruments.watch import Passes
from remask_lab.records.interval import mean_interval
from remask_lab.similarity.conversations import (
    ChatPrompts,
    PromptSet,
    RandomPrompts,
    TaskPrompts,
    tariff_prompts,
    transit_prompts,
)
from remask_lab.similarity.probe import KV, PrefixProbe
from remask_lab.similarity.prompts import default_prompts
from remask_lab.similarity.rule import AT_BOUNDARY, OVER_LAYERS, OVER_REQUESTS, DepthRule

RULES = tuple(DepthRule(*parts) for parts in product(OVER_LAYERS, OVER_REQUESTS, AT_BOUNDARY))
"""All rules, the default one first."""


def run_depth(similarity: Sequence[float], tau: float) -> int:
    """Number of leading layers whose similarity is strictly above `tau`."""
    return sum(1 for _ in takewhile(lambda value: value > tau, similarity))


def task_prompts(model: LoadedModel) -> dict[str, PromptSet]:
    """Return the tasks on which `model` can be profiled, by name. The task of its default prompts comes first.

    Arithmetic (GSM8K) for a tokenizer that reads it; the kinds of questions or hops of a bundled model's task; random
    token ids for every model.
    """
    sets: dict[str, PromptSet] = {}
    tokenizer, default = model.tokenizer, default_prompts(model)
    if tokenizer is not None and isinstance(default, TaskPrompts):
        if default.task == "tariff":
            sets = {kind: tariff_prompts(tokenizer, kind) for kind in tariff.KINDS}
        elif default.task == "transit":
            hops = range(1, transit.MAX_HOPS + 1)
            sets = {f"{n} hop{'s' * (n > 1)}": transit_prompts(tokenizer, n) for n in hops}
        else:
            sets = {default.task: default}
    elif tokenizer is not None and isinstance(default, ChatPrompts):
        sets["arithmetic"] = default
    return {**sets, "random tokens": RandomPrompts(model.config, "random token ids")}


@torch.inference_mode()
def states(probe: PrefixProbe, tokens: Sequence[int], count: int | None = None) -> KV:
    """Copies of K and V of the first `count` positions (default: of all) of a canvas of `tokens`, without a cache.

    The tokens may be a prefix, or a canvas at any step. Raises `ConfigError` where they exceed the probe's.
    """
    probe.check_length(len(tokens))
    probe.model.forward(pack_uncached(probe.model, [Canvas(tokens, (), 0)]), probe.pool)
    keys, values = probe.kv(0, len(tokens) if count is None else count)
    return tuple(k.clone() for k in keys), tuple(v.clone() for v in values)


def row_cosines(these: KV, those: KV, share: float) -> NDArray[np.float64]:
    """The cosine below which a `share` of a prefix's rows are, of K and V layer by layer: [2, layers]."""
    found = [
        torch.cosine_similarity(a.float().flatten(1), b.float().flatten(1)).quantile(share)
        for side in range(2)
        for a, b in zip(these[side], those[side], strict=True)
    ]
    return torch.stack(found).view(2, -1).cpu().numpy().astype(np.float64)


@torch.inference_mode()
def first_predictions(
    passes: AuditPasses, canvas: Canvas, prefix: int, depths: Iterable[int], adapter: str | None = None
) -> Iterator[tuple[int, Tensor]]:
    """What a pass over `canvas` predicts at each of `depths`, as audits compute it.

    Yields a depth and log-probabilities, float32 [noisy positions, vocabulary]. At depth 0 that is `none`, and at all
    layers `reuse`. Raises `ConfigError` where memory has no room.
    """
    model = passes.model
    pass_input = PassInput(canvas, np.flatnonzero(canvas.noisy), None, model.config.shift, adapter)
    for depth in depths:
        rows = passes.run_reusing(pass_input, prefix, depth)
        if rows is None:
            raise ConfigError(f"a canvas of {len(canvas)} tokens finds no room in the engine's memory")
        yield depth, model.head(rows).float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Shift:
    """How far predictions at one depth are from those at depth 0. Intervals are 95 % over prefixes.

    Attributes:
        depth: leading layers that read the prefix from the store.
        nats: KL divergence of the position that moves most, from depth 0 to this one; mean over requests.
        mean_nats: the same of the mean over a request's positions.
        same: share of positions whose most probable token is the same.
    """

    depth: int
    nats: float
    nats_interval: tuple[float, float]
    mean_nats: float
    mean_nats_interval: tuple[float, float]
    same: float
    same_interval: tuple[float, float]


def measure_predictions(
    llm: LLM,
    requests: Sequence[Request],
    clusters: Sequence[Hashable],
    depths: Sequence[int],
    seen: Callable[[KV, KV], None] | None = None,
) -> tuple[Shift, ...]:
    """Compare what the first step of each of `requests` predicts at `depths` with what it predicts without a cache.

    Requests of one of `clusters` share a prefix. The canvas is the one with which the engine begins; all of its noisy
    positions are compared. `seen` is given K and V of each request's prefix, alone and on the canvas. Raises
    `ConfigError`, before anything runs, where `Passes` refuses a request or the model does not have a depth.
    """
    depths, passes = sorted(set(depths)), Passes(llm, requests)
    for depth in depths:
        passes.check(requests, llm.session.policy("bicache", {"depth": depth}))
    probe = PrefixProbe(llm.model, passes.max_tokens)
    moved: list[list[tuple[float, float, float]]] = []  # [requests][depths]
    for request in requests:
        canvas, count = passes.canvas(request), passes.prefix(request)
        (_, none), *others = first_predictions(passes.audits, canvas, count, (0, *depths), request.adapter)
        moved.append([_moved(none, rows) for _, rows in others])
        if seen is not None:
            seen(
                states(probe, request.prompt_token_ids[:count]),
                states(probe, canvas.tokens.tolist(), count),
            )
    shifts = []
    for depth, rows in zip(depths, zip(*moved, strict=True), strict=True):
        nats, mean_nats, same = zip(*rows, strict=True)
        means = _mean(nats, clusters), _mean(mean_nats, clusters), _mean(same, clusters, most=1.0)
        shifts.append(Shift(depth, *means[0], *means[1], *means[2]))
    return tuple(shifts)


def _moved(none: Tensor, rows: Tensor) -> tuple[float, float, float]:
    """Greatest and mean KL divergence of rows [N, V] of log-probabilities, and how many keep their best token."""
    nats = (none.exp() * (none - rows)).sum(-1).clamp(min=0)  # rounding makes it negative
    same = none.argmax(-1) == rows.argmax(-1)
    return float(nats.max()), float(nats.mean()), float(same.float().mean())


def _mean(
    values: Sequence[float], clusters: Sequence[Hashable], most: float = math.inf
) -> tuple[float, tuple[float, float]]:
    """The mean of `values` from 0 to `most`, and its interval, as far as it lies there."""
    low, high = np.clip(mean_interval(values, clusters), 0.0, most).tolist()
    return float(np.mean(values)), (low, high)
