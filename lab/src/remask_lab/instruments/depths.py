"""Measurements for studies of depth: tasks to profile, K/V of prefixes, and predictions at each depth."""

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
    """The tasks on which `model` can be profiled, by name, those of its default prompts first.

    They are arithmetic (GSM8K) for a tokenizer of English, the kinds of questions or numbers of hops of a bundled
    model's task, and random token ids for every model.
    """
    sets: dict[str, PromptSet] = {}
    tokenizer, default = model.tokenizer, default_prompts(model)
    if tokenizer is not None and isinstance(default, TaskPrompts):
        if default.task == "tariff":
            sets = {kind: tariff_prompts(tokenizer, kind) for kind in tariff.KINDS}
        elif default.task == "transit":
            counts = range(1, transit.MAX_HOPS + 1)
            sets = {f"{count} hop{'s' * (count > 1)}": transit_prompts(tokenizer, count) for count in counts}
        else:
            sets = {default.task: default}
    elif tokenizer is not None and isinstance(default, ChatPrompts):
        sets["arithmetic"] = default
    return {**sets, "random tokens": RandomPrompts(model.config, "random token ids")}


@torch.inference_mode()
def states(probe: PrefixProbe, tokens: Sequence[int], count: int | None = None) -> KV:
    """Copies of K and V of the first `count` positions of `tokens`, computed without a cache; None takes all.

    The tokens may be a prefix, or a canvas at any step. Raises `ConfigError` where they exceed the probe's
    `max_tokens`.
    """
    probe.check_length(len(tokens))
    probe.model.forward(pack_uncached(probe.model, [Canvas(tokens, (), 0)]), probe.pool)
    keys, values = probe.kv(0, len(tokens) if count is None else count)
    return tuple(k.clone() for k in keys), tuple(v.clone() for v in values)


def row_cosines(kv: KV, other_kv: KV, share: float) -> NDArray[np.float64]:
    """The quantile `share` of the cosines of a prefix's rows, of K and V layer by layer, float64 [2, layers]."""
    cosines = [
        torch.cosine_similarity(a.float().flatten(1), b.float().flatten(1)).quantile(share)
        for side in range(2)
        for a, b in zip(kv[side], other_kv[side], strict=True)
    ]
    return torch.stack(cosines).view(2, -1).cpu().numpy().astype(np.float64)


@torch.inference_mode()
def first_predictions(
    passes: AuditPasses, canvas: Canvas, prefix: int, depths: Iterable[int], adapter: str | None = None
) -> Iterator[tuple[int, Tensor]]:
    """Yield each of `depths`, and what a pass over `canvas` predicts at it, as audits compute that.

    Predictions are log-probabilities, float32 [noisy positions, V]. Depth 0 is `none`, and the depth of all layers
    `reuse`. Raises `ConfigError` where the engine's memory has no room for the canvas.
    """
    model = passes.model
    pass_input = PassInput(canvas, np.flatnonzero(canvas.noisy), None, model.config.shift, adapter)
    for depth in depths:
        hidden = passes.run_reusing(pass_input, prefix, depth)
        if hidden is None:
            raise ConfigError(f"a canvas of {len(canvas)} tokens finds no room in the engine's memory")
        yield depth, model.head(hidden).float().log_softmax(-1)


@dataclass(frozen=True, slots=True)
class Shift:
    """How far predictions at one depth are from those at depth 0. Intervals are 95 % intervals over prefixes.

    Attributes:
        depth: leading layers that read the prefix from the store.
        nats: KL divergence from depth 0 to this one at the position where it is largest; mean over requests.
        mean_nats: KL divergence averaged over a request's positions; mean over requests.
        same: share of positions with the same most probable token.
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
    on_states: Callable[[KV, KV], None] | None = None,
) -> tuple[Shift, ...]:
    """Compare what the first step of each of `requests` predicts at `depths` with what it predicts without a cache.

    Requests with equal `clusters` share a prefix. All noisy positions of the first canvas are compared. `on_states` is
    called with K and V of each request's prefix, alone and on the canvas. Raises `ConfigError`, before anything runs,
    where `Passes` refuses a request or the model does not have a depth.
    """
    depths = sorted(set(depths))
    passes = Passes(llm, requests)
    for depth in depths:
        passes.check(requests, llm.session.policy("bicache", {"depth": depth}))
    probe = PrefixProbe(llm.model, passes.max_tokens)
    differences: list[list[tuple[float, float, float]]] = []  # [requests][depths]
    for request in requests:
        canvas, prefix = passes.canvas(request), passes.prefix(request)
        (_, exact), *reused = first_predictions(passes.audits, canvas, prefix, (0, *depths), request.adapter)
        differences.append([_difference(exact, log_probs) for _, log_probs in reused])
        if on_states is not None:
            alone = states(probe, request.prompt_token_ids[:prefix])
            on_states(alone, states(probe, canvas.tokens.tolist(), prefix))
    shifts = []
    for depth, of_requests in zip(depths, zip(*differences, strict=True), strict=True):
        nats, mean_nats, same = zip(*of_requests, strict=True)
        means = _mean(nats, clusters), _mean(mean_nats, clusters), _mean(same, clusters, largest=1.0)
        shifts.append(Shift(depth, *means[0], *means[1], *means[2]))
    return tuple(shifts)


def _difference(exact: Tensor, reused: Tensor) -> tuple[float, float, float]:
    """Largest and mean KL divergence of rows of log-probabilities [N, V] in nats, and the share with equal argmax."""
    nats = (exact.exp() * (exact - reused)).sum(-1).clamp(min=0)  # rounding makes it negative
    same = exact.argmax(-1) == reused.argmax(-1)
    return float(nats.max()), float(nats.mean()), float(same.float().mean())


def _mean(
    values: Sequence[float], clusters: Sequence[Hashable], largest: float = math.inf
) -> tuple[float, tuple[float, float]]:
    """The mean of `values`, which lie between 0 and `largest`, and its interval, clipped to these bounds."""
    low, high = np.clip(mean_interval(values, clusters), 0.0, largest).tolist()
    return float(np.mean(values)), (low, high)
