"""`measure_steps`: certainty, token changes, drift and cost of every pass, under `none` and under cache policies."""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy, settings_of
from remask_lab.subjects.series import Floats, by_pass, mean
from remask_lab.subjects.steps_report import StepCurves, StepsReport
from remask_lab.subjects.watch import Watcher, certainty, check_ends, check_uncached, denoises, distance, units


@dataclass(slots=True)
class StepTrace:
    """What the passes over one canvas showed; each list has an entry a pass, but `drift` one a pair of passes.

    `drift` holds the step within the block of the later pass, and the mean cosine distance of the block's K and V; it
    leaves out pairs that lead from one block to another. `probability` are [predicted], at the response positions in
    `places`.
    """

    length: int
    entropy: list[float] = field(default_factory=list)
    probability: list[Floats] = field(default_factory=list)
    places: list[NDArray[np.int64]] = field(default_factory=list)
    change_rate: list[float] = field(default_factory=list)
    row_layers: list[int] = field(default_factory=list)
    drift: list[tuple[int, float, float]] = field(default_factory=list)


class StepTracer:
    """Runs requests of one model one at a time under any policy, and watches their passes."""

    def __init__(self, llm: LLM) -> None:
        self._watcher = Watcher(llm)
        self._trace: StepTrace | None = None
        self._prompt = 0
        self._before: tuple[range, list[Tensor]] | None = None  # the block, and its K and V as unit vectors a layer

    def trace(self, item: Request) -> StepTrace:
        """Run a request to its end. Raises `ConfigError` where it cannot run."""
        self._trace, self._before = None, None
        self._watcher.run(item, self._look, self._changed)
        assert self._trace is not None
        return self._trace

    def time(self, item: Request) -> Floats:
        """Seconds of each pass of the request, with nobody looking on, [passes]; of those that denoise."""
        engine, seconds, ran = self._watcher.engine, [], []
        engine.probe = lambda requests, _: ran.append(denoises(requests))
        engine.add(item)
        while engine.busy:
            ran.clear()
            start = time.perf_counter()
            check_ends(engine.step())
            if any(ran):
                seconds.append(time.perf_counter() - start)
        return np.array(seconds)

    def _changed(self, changed: NDArray[np.bool_]) -> None:
        assert self._trace is not None
        self._trace.change_rate.append(float(changed[self._prompt : self._prompt + self._trace.length].mean()))

    def _look(self, running: RunningRequest, hidden: Tensor) -> None:
        canvas, decoder = running.branches[0].canvas, running.decoder
        if self._trace is None:
            self._prompt, self._trace = canvas.prompt, StepTrace(canvas.end - canvas.prompt)
        trace = self._trace
        entropy, probability = certainty(self._watcher.engine.model, hidden)
        trace.entropy.append(mean(entropy))
        trace.probability.append(probability)
        trace.places.append(np.flatnonzero(running.plan.predict) - canvas.prompt)
        trace.row_layers.append(running.cost)
        after = self._block_states(running, decoder.block)
        if self._before is not None and self._before[0] == decoder.block:
            moved = torch.stack([distance(*pair) for pair in zip(self._before[1], after, strict=True)])
            k, v = moved.double().mean(dim=(0, 2)).cpu().tolist()
            trace.drift.append((decoder.block_step, k, v))
        self._before = decoder.block, after

    def _block_states(self, running: RunningRequest, block: range) -> list[Tensor]:
        """K and V of the block as unit vectors, [2, rows, D] a layer, wherever its rows live."""
        pool, found = self._watcher.engine.pool, []
        for table in running.branches[0].tables:
            slots = torch.from_numpy(table.slots[block.start : block.stop]).to(self._watcher.engine.model.device)
            found += [torch.stack([units(pool.k[layer][slots]), units(pool.v[layer][slots])]) for layer in table.layers]
        return found


def measure_steps(
    llm: LLM, work: Sequence[Request], policies: Sequence[tuple[str, CachePolicy]], rounds: int, progress: bool = False
) -> StepsReport:
    """Run requests one at a time under `none` and under each of `policies`, and tell what every pass did and cost.

    Every request is timed `rounds` times, the policies taking turns, after a run that is watched. A request without a
    seed gets one, so that every policy begins with the same canvas.
    Raises `ConfigError`, before anything runs, where there is no request, or one cannot run, is guided, or names a
    cache of its own.
    """
    if not work:
        raise ConfigError("there is no request whose steps could be watched")
    none = llm.policy("none")
    rows = [("none", none), *((name, policy) for name, policy in policies if policy != none)]
    work = [_seeded(item, index) for index, item in enumerate(work)]
    for item in work:
        check_uncached(item, none, "the baseline of the steps")
        for name, policy in rows:
            try:
                llm.engine.check(item.with_policy(policy))
            except ConfigError as error:
                raise ConfigError(f"{name}: {error}") from error
    tracers = [StepTracer(llm) for _ in rows]
    traces: list[list[StepTrace]] = [[] for _ in rows]
    seconds: list[list[Floats]] = [[] for _ in rows]
    with tqdm(total=len(work) * len(rows) * (1 + rounds), desc="steps", unit="run", disable=not progress) as bar:
        for item in work:
            turns: list[list[Floats]] = [[] for _ in rows]
            for index, (tracer, (_, policy)) in enumerate(zip(tracers, rows, strict=True)):
                traces[index].append(tracer.trace(replace(item, policy=policy)))
                bar.update()
            for _ in range(rounds):
                for turn, tracer, (_, policy) in zip(turns, tracers, rows, strict=True):
                    turn.append(tracer.time(replace(item, policy=policy)))
                    bar.update()
            for own, turn in zip(seconds, turns, strict=True):
                own.append(np.median(np.stack(turn), axis=0))
    return StepsReport(
        model=llm.loaded.name,
        kind=llm.loaded.config.kind,
        requests=len(work),
        rounds=rounds,
        policies=tuple(
            _curves(name, policy, watched, timed)
            for (name, policy), watched, timed in zip(rows, traces, seconds, strict=True)
        ),
    )


def _seeded(item: Request, seed: int) -> Request:
    params = item.params
    if params.seed is not None:
        return item
    return replace(item, params=replace(params, seed=seed))


def _curves(name: str, policy: CachePolicy, traces: Sequence[StepTrace], seconds: Sequence[Floats]) -> StepCurves:
    first = traces[0]
    trajectories = np.full((first.length, len(first.places)), np.nan)
    for number, (places, values) in enumerate(zip(first.places, first.probability, strict=True)):
        inside = (places >= 0) & (places < first.length)
        trajectories[places[inside], number] = values[inside]
    drifts = [_by_block_step(traces, side) for side in (1, 2)]
    return StepCurves(
        cache=name,
        settings=settings_of(policy),
        passes=tuple(len(trace.row_layers) for trace in traces),
        entropy=by_pass([np.array(trace.entropy) for trace in traces]),
        probability=by_pass([np.array([mean(values) for values in trace.probability]) for trace in traces]),
        change_rate=by_pass([np.array(trace.change_rate) for trace in traces]),
        row_layers=by_pass([np.array(trace.row_layers, dtype=np.float64) for trace in traces]),
        milliseconds=by_pass([1e3 * own for own in seconds]),
        k_drift=drifts[0],
        v_drift=drifts[1],
        trajectories=tuple(tuple(row) for row in trajectories.tolist()),
    )


def _by_block_step(traces: Sequence[StepTrace], side: int) -> tuple[float, ...]:
    """Mean drift towards each step of a block, over all blocks of all requests."""
    every = [pair for trace in traces for pair in trace.drift]
    steps = 1 + max((pair[0] for pair in every), default=0)
    return tuple(mean(np.array([pair[side] for pair in every if pair[0] == step])) for step in range(steps))
