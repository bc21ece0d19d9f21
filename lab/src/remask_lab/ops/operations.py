"""`profile_operations`: the time of each operation in a policy's steps, and what each computes."""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from tqdm import tqdm

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.cost import OPERATIONS as COSTED
from remask.plan.cost import PassCost
from remask.policies import CachePolicy
from remask_lab.ops.clock import OPERATIONS, Clock, time_call, time_operations
from remask_lab.ops.flops import Executed, flop_counter


@dataclass(frozen=True, slots=True)
class StepProfile:
    """One step of the engine.

    Attributes:
        row_layers: rows computed in it, times layers.
        seconds: its time without instruments.
        parts: seconds by operation, with instruments; they add up to the step.
        flops, bytes: by operation, as the plans ask for them.
        executed: FLOPs that the machine ran, padding and repeated projections included.
    """

    row_layers: int
    seconds: float
    parts: Mapping[str, float]
    flops: Mapping[str, int]
    bytes: Mapping[str, int]
    executed: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return _ratio(sum(self.flops.values()), sum(self.bytes.values()))

    @property
    def flops_s(self) -> float:
        """FLOPs a second, without instruments."""
        return _ratio(sum(self.flops.values()), self.seconds)


@dataclass(frozen=True, slots=True)
class OperationProfile:
    """One operation over all steps: seconds with instruments, and their `share` of all.

    `flops` and `bytes` are those that the plans ask for, 0 for operations that are no matrix products.
    """

    seconds: float
    share: float
    flops: int
    bytes: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return _ratio(self.flops, self.bytes)

    @property
    def flops_s(self) -> float:
        """FLOPs a second."""
        return _ratio(self.flops, self.seconds)


def _ratio(work: float, over: float) -> float:
    return work / over if over else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """The time of a policy's steps.

    Attributes:
        steps: in order.
        overhead: the time that the instruments add, as a share of the time without them.
        counted: FLOPs of all steps as PyTorch counts them.
    """

    steps: tuple[StepProfile, ...]
    overhead: float
    counted: int

    @property
    def operations(self) -> dict[str, OperationProfile]:
        """Every operation by its name, in the order of the steps' parts."""
        spent = _sums([step.parts for step in self.steps])
        flops, moved = _sums([step.flops for step in self.steps]), _sums([step.bytes for step in self.steps])
        whole = sum(spent.values())
        return {
            name: OperationProfile(seconds, seconds / whole, int(flops.get(name, 0)), int(moved.get(name, 0)))
            for name, seconds in spent.items()
        }


@dataclass(frozen=True, slots=True)
class _StepCost:
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

    An engine with instruments and one without take turns, step by step, which tells what the instruments cost. The
    parts of a step are those of the round whose time is the median. An earlier run counts FLOPs and warms up. `llm`
    stays unchanged.

    Raises `ConfigError`, before anything runs, where a request cannot run or takes no step.
    """
    costs, counted = _costs(llm, work, steps)
    if not costs:
        raise ConfigError("there is no step to profile; ask for one request and one token at least")
    plain: list[list[float]] = [[] for _ in costs]
    parts: list[list[Mapping[str, float]]] = [[] for _ in costs]
    for turn in tqdm(range(rounds), desc="rounds", unit="round", disable=not progress):
        bare, watched = _engine(llm, work), _engine(llm, work)
        clock = time_operations(watched)
        for number in range(len(costs)):
            # The second engine finds the weights in the machine's caches, so the two take turns in being second.
            if (turn + number) % 2:
                parts[number].append(_parts(watched, clock))
                plain[number].append(time_call(bare.step, bare.model.device))
            else:
                plain[number].append(time_call(bare.step, bare.model.device))
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
    """Write once to all memory that `policies` need, so that no timed step pays for the first write."""
    if any("outputs" in policy.traits.keeps for policy in policies):
        engine.pool.allocate_outputs()
    for tensor in (*engine.pool.k, *engine.pool.v, *(kept for pair in engine.pool.outputs for kept in pair)):
        tensor.zero_()


def _engine(llm: LLM, work: Sequence[Request]) -> Engine:
    engine = llm.session.new_engine()
    touch_memory(engine, [item.policy for item in work])
    for item in work:
        engine.add(item)
    return engine


def _end(engine: Engine, work: Sequence[Request]) -> None:
    """Cancel what still runs, which frees its memory."""
    for item in work:
        engine.cancel(item.id)
    while engine.busy:
        engine.step()


def _costs(llm: LLM, work: Sequence[Request], steps: int | None) -> tuple[list[_StepCost], int]:
    """The cost of each of the first `steps` steps, and the FLOPs of all of them as PyTorch counts them."""
    engine = _engine(llm, work)
    executed, costs, before = Executed(engine), list[_StepCost](), 0
    with flop_counter() as counter:
        while engine.busy and (steps is None or len(costs) < steps):
            row_layers = engine.stats.row_layers
            engine.step()
            costs.append(_StepCost(engine.stats.row_layers - row_layers, executed.meter.last, executed.flops - before))
            before = executed.flops
    _end(engine, work)
    return costs, counter.get_total_flops()


def _parts(engine: Engine, clock: Clock) -> Mapping[str, float]:
    clock.start()
    engine.step()
    spent = clock.stop()
    return {name: spent.get(name, 0.0) for name in OPERATIONS}


def _step(costs: _StepCost, plain: Sequence[float], parts: Sequence[Mapping[str, float]]) -> StepProfile:
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


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}
