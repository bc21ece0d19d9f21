"""One request under `none`, watched pass by pass: drift of K and V, attention, entropy, tokens that change."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.llm import LLM
from remask_lab.subjects.mass import QueryTap, attention_mass
from remask_lab.subjects.moments import Moments
from remask_lab.subjects.regions import REGIONS, Regions, regions
from remask_lab.subjects.series import Floats
from remask_lab.subjects.watch import Watcher, certainty, check_uncached, distance, leading_slots, units


@dataclass(slots=True)
class Trace:
    """What P passes over one canvas of T positions showed.

    Attributes:
        prompt, response, block: tokens of the prompt, of the response and of a block.
        region: of every position in every pass, P arrays int8 [T].
        starts: the current block's first position, P numbers.
        k_drift: how far each position's K moved between pass and next pass, P - 1 arrays [T]: the cosine distance with
            the heads concatenated, mean over layers. NaN where a position was not computed in both.
        v_drift: the same of V.
        attention: share of attention that the block's queries give to each of `REGIONS`, P arrays [8].
        entropy: of the predicted positions in nats, over all tokens but the mask; P arrays.
        change_rate: share of the response's tokens that each pass changed, P numbers.
        moments: of the drift by layer.
    """

    prompt: int
    response: int
    block: int
    moments: Moments
    region: list[Regions] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    k_drift: list[Floats] = field(default_factory=list)
    v_drift: list[Floats] = field(default_factory=list)
    attention: list[Floats] = field(default_factory=list)
    entropy: list[Floats] = field(default_factory=list)
    change_rate: list[float] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """Number of passes, which is that of the denoising steps that were run."""
        return len(self.starts)


class Tracer:
    """Runs requests of one model one at a time under `none`, on an engine of its own, and watches them."""

    def __init__(self, llm: LLM) -> None:
        self._none = llm.policy("none")
        self._tap = QueryTap(llm.model.attention)
        self._watcher = Watcher(llm, self._tap, store_budget_tokens=0)
        self._trace: Trace | None = None
        self._before: list[Tensor] = []  # K and V of the pass before, as unit vectors [2, rows, kv_heads * Dh] a layer

    def check(self, item: Request) -> None:
        """Raise `ConfigError` where `trace` would."""
        check_uncached(item, self._none, "drift")
        self._watcher.engine.check(replace(item, prefix_length=0, policy=self._none))

    def trace(self, item: Request) -> Trace:
        """Run a request to its end. Raises `ConfigError` where it cannot run, or asks for a cache or for guidance."""
        self.check(item)
        self._trace, self._before = None, []
        self._watcher.run(replace(item, prefix_length=0), self._look, self._changed)
        self._before = []
        assert self._trace is not None
        return self._trace

    def _changed(self, changed: NDArray[np.bool_]) -> None:
        assert self._trace is not None
        response = changed[self._trace.prompt : self._trace.prompt + self._trace.response]
        self._trace.change_rate.append(float(response.mean()))

    def _look(self, running: RunningRequest, hidden: Tensor) -> None:
        canvas, decoder = running.branches[0].canvas, running.decoder
        model = self._watcher.engine.model
        if self._trace is None:
            moments = Moments(model.config.layers)
            self._trace = Trace(canvas.prompt, canvas.end - canvas.prompt, running.pending.decoding.block, moments)
        trace, block = self._trace, decoder.block
        trace.starts.append(block.start)
        trace.region.append(regions(len(canvas), canvas.prompt, canvas.end, block.start, trace.block))
        trace.entropy.append(certainty(model, hidden)[0])
        queries, self._tap.queries = self._tap.queries, []
        self._states(trace, running, block, queries)

    def _states(self, trace: Trace, running: RunningRequest, block: range, queries: Sequence[Tensor]) -> None:
        """Take in the K and V of the pass that has just run, and where its block's queries looked."""
        model, pool, plan = self._watcher.engine.model, self._watcher.engine.pool, running.plan
        length = len(trace.region[-1])
        slots = leading_slots(running, model.device)
        reach = len(slots) if plan.sees is None else min(len(slots), int(plan.sees[block.start]))
        region = torch.from_numpy(trace.region[-1][:reach].astype(np.int64)).to(model.device)
        mass = torch.zeros(len(REGIONS), device=model.device)
        states, moved = [], []
        for layer, (weights, q) in enumerate(zip(model.weights.layers, queries, strict=True)):
            k = pool.k[layer][slots]
            mass += attention_mass(
                q[block.start : block.stop], k[:reach], region, weights.sink_k, model.config.score_cap
            )
            unit = torch.stack([units(k), units(pool.v[layer][slots])])
            if self._before:
                moved.append(distance(self._before[layer], unit))
            states.append(unit)
        trace.attention.append((mass / len(states)).cpu().double().numpy())
        if moved:
            k_moved, v_moved = torch.stack(moved, dim=1).cpu().double().numpy()
            trace.moments.add(k_moved, v_moved)
            for drifts, by_layer in ((trace.k_drift, k_moved), (trace.v_drift, v_moved)):
                drift = np.full(length, np.nan)
                drift[: by_layer.shape[1]] = by_layer.mean(axis=0)
                drifts.append(drift)
        self._before = states
