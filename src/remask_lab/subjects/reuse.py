"""Three ways to reuse a shared prefix's K/V in deep layers, each against a full recompute (BiCache figure 5, O3)."""

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.depth.similarity import Measure, PrefixProbe, layer_cosines
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask_lab.subjects.passes import Look, Passes
from remask_lab.subjects.reuse_report import ANOTHER, ONCE, PERIODIC, SETTINGS, ReuseReport

Floats = NDArray[np.float64]


def measure_reuse(
    llm: LLM,
    requests: Sequence[Request],
    depth: int | None = None,
    refresh_interval: int = 8,
    measure: Measure = "flat",
    progress: bool = False,
) -> ReuseReport:
    """Run `requests` in three settings and compare, step by step, the prefix K/V that were read with fresh ones.

    "another request" is `reuse`: the K/V of the prefix alone. "once" and "periodic" are `bicache` at `depth` (None: the
    depth table's) that refreshes at step 0 only, or every `refresh_interval` steps. Fresh K/V are those of a pass over
    the same canvas, as that request has come to it, without any cache.

    Raises `ConfigError`, before anything runs, where `Passes` refuses a request, one cannot run, or has no deep layers.
    """
    passes = Passes(llm, requests)
    own = {} if depth is None else {"depth": depth}
    periodic = llm.policy("bicache", {**own, "refresh_interval": refresh_interval})
    policies = {
        ANOTHER: llm.policy("reuse"),
        ONCE: llm.policy("bicache", {**own, "refresh_interval": None}),
        PERIODIC: periodic,
    }
    for policy in policies.values():
        passes.check(requests, policy)
    depths = [_depth(passes, request, periodic, llm.model.config.layers) for request in requests]
    probe = PrefixProbe(llm.model, passes.max_tokens)
    seen: dict[str, list[Floats]] = {name: [] for name in SETTINGS}
    for request in tqdm(requests, desc="requests", unit="req", disable=not progress):
        for name, policy in policies.items():
            steps: list[Floats] = []
            passes.run(request, policy, _look(passes, probe, passes.prefix(request), measure, steps))
            seen[name].append(np.stack(steps, axis=-1))  # [layers, steps]
    return summarise(seen, depths, refresh_interval)


def summarise(seen: Mapping[str, Sequence[Floats]], depths: Sequence[int], refresh_interval: int) -> ReuseReport:
    """The report of one array [layers, steps] a request and setting; they are not changed."""
    steps = max(trace.shape[1] for traces in seen.values() for trace in traces)
    similarity, deep, mean = {}, {}, {}
    for name, traces in seen.items():
        every = np.full((len(traces), len(traces[0]), steps), np.nan)
        for row, trace in zip(every, traces, strict=True):
            row[:, : trace.shape[1]] = trace
        similarity[name] = tuple(tuple(row) for row in _mean(every).tolist())
        below = np.stack([request[depth:].mean(axis=0) for request, depth in zip(every, depths, strict=True)])
        deep[name] = tuple(_mean(below).tolist())
        mean[name] = float(np.nanmean(below))
    layers = len(next(iter(similarity.values())))
    return ReuseReport(len(depths), steps, layers, tuple(depths), refresh_interval, similarity, deep, mean)


def _depth(passes: Passes, request: Request, policy: CachePolicy, layers: int) -> int:
    canvas = len(request.prompt_token_ids) + request.params.max_tokens
    depth = policy.boundary(passes.prefix(request), canvas, layers)
    if not 0 < depth < layers:
        what = "no shallow layers" if depth == 0 else "no deep ones"
        raise ConfigError(
            f"at depth {depth} of {layers} layers, request {request.id!r} has {what}; give a depth of 1 to {layers - 1}"
        )
    return depth


def _mean(values: Floats) -> Floats:
    """Mean over the first axis of what is known; NaN where a setting's requests have all ended."""
    known = ~np.isnan(values)
    count = known.sum(axis=0)
    mean: Floats = np.where(known, values, 0.0).sum(axis=0) / np.where(count, count, np.nan)
    return mean


def _look(passes: Passes, probe: PrefixProbe, count: int, measure: Measure, steps: list[Floats]) -> Look:
    def look(running: RunningRequest) -> None:
        fresh = probe.states(running.branches[0].canvas.tokens.tolist(), count)
        steps.append(layer_cosines(passes.kv(running, count), fresh, measure).mean(axis=0))

    return look
