"""`profile_operations`: where the time of a policy's steps goes, beside what they compute."""

import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from tqdm import tqdm

from remask.core.cost import OPERATIONS as COSTED
from remask.core.cost import PassCost
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask_lab.ops.clock import Clock
from remask_lab.ops.flops import Executed, counted_flops
from remask_lab.ops.report import Profile, StepProfile
from remask_lab.ops.timed import OPERATIONS, timed


@dataclass(frozen=True, slots=True)
class _Costs:
    """What one step computes."""

    row_layers: int
    cost: PassCost
    executed: int


def profile_operations(
    llm: LLM,
    work: Sequence[Request],
    *,
    steps: int | None = None,
    rounds: int = 3,
    progress: bool = False,
) -> Profile:
    """Run the requests of `work` together, and time the operations of the first `steps` steps (None: of all).

    An engine with instruments and one without take turns, step by step, so that the report can say what instruments
    cost. Each step's parts are those of the round whose time is the median. One turn before counts FLOPs and warms up.
    Nothing of `llm` is changed, and its engine does not run.

    Raises `ConfigError`, before anything runs, where a request cannot run or is not enough for a step.
    """
    costs, counted = _costs(llm, work, steps)
    if not costs:
        raise ConfigError("there is no step to profile; ask for one request and one token at least")
    plain: list[list[float]] = [[] for _ in costs]
    parts: list[list[Mapping[str, float]]] = [[] for _ in costs]
    for turn in tqdm(range(rounds), desc="rounds", unit="round", disable=not progress):
        bare, watched = _engine(llm, work), _engine(llm, work)
        clock = timed(watched)
        for number in range(len(costs)):
            # Whoever comes second finds the weights in the machine's caches; so each does every other time.
            if (turn + number) % 2:
                parts[number].append(_parts(watched, clock))
                plain[number].append(_seconds(bare))
            else:
                plain[number].append(_seconds(bare))
                parts[number].append(_parts(watched, clock))
        for engine in (bare, watched):
            _end(engine, work)
    ratios = [
        sum(sum(step[turn].values()) for step in parts) / sum(step[turn] for step in plain) for turn in range(rounds)
    ]
    return Profile(
        steps=tuple(map(_step, costs, plain, parts)),
        overhead=statistics.median(ratios) - 1,
        counted=counted,
    )


def touch_memory(engine: Engine, policies: Iterable[CachePolicy]) -> None:
    """Write all memory that `policies` need once, so that no timed step is the first to."""
    if any("outputs" in policy.traits.keeps for policy in policies):
        engine.pool.keep_outputs()
    for tensor in (*engine.pool.k, *engine.pool.v, *(kept for pair in engine.pool.outputs for kept in pair)):
        tensor.zero_()


def _engine(llm: LLM, work: Sequence[Request]) -> Engine:
    """An engine with the requests queued."""
    engine = llm.new_engine()
    touch_memory(engine, [item.policy for item in work])
    for item in work:
        engine.add(item)
    return engine


def _end(engine: Engine, work: Sequence[Request]) -> None:
    """What still runs is cancelled, and its memory is free."""
    for item in work:
        engine.cancel(item.id)
    while engine.busy:
        engine.step()


def _costs(llm: LLM, work: Sequence[Request], steps: int | None) -> tuple[list[_Costs], int]:
    """What each step computes, up to `steps` of them, and the FLOPs of all as PyTorch counts them."""
    engine = _engine(llm, work)
    executed, costs, before = Executed(engine), list[_Costs](), 0
    with counted_flops() as counted:
        while engine.busy and (steps is None or len(costs) < steps):
            row_layers = engine.stats.row_layers
            engine.step()
            costs.append(_Costs(engine.stats.row_layers - row_layers, executed.meter.last, executed.flops - before))
            before = executed.flops
    _end(engine, work)
    return costs, counted.flops


def _seconds(engine: Engine) -> float:
    """Seconds of one step, device work included."""
    start = time.perf_counter()
    engine.step()
    if engine.model.device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - start


def _parts(engine: Engine, clock: Clock) -> Mapping[str, float]:
    """Seconds of one step by operation."""
    clock.start()
    engine.step()
    spent = clock.stop()
    return {name: spent.get(name, 0.0) for name in OPERATIONS}


def _step(costs: _Costs, plain: Sequence[float], parts: Sequence[Mapping[str, float]]) -> StepProfile:
    by_time = sorted(parts, key=lambda each: sum(each.values()))
    operations = costs.cost.operations
    return StepProfile(
        row_layers=costs.row_layers,
        seconds=statistics.median(plain),
        parts=by_time[(len(by_time) - 1) // 2],
        flops={name: operations[name].flops for name in COSTED},
        bytes={name: operations[name].bytes for name in COSTED},
        executed=costs.executed,
    )
