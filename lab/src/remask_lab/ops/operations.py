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
        parts: seconds by operation, with instruments; their sum is the step's time.
        flops, bytes: by operation, as plans require them.
        executed: FLOPs that the machine executed, padding and repeated projections included.
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
    """One operation over all steps.

    Attributes:
        seconds: with instruments.
        share: of the seconds of all operations.
        flops, bytes: as plans require them; 0 for operations that are no matrix products.
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


def _ratio(amount: float, divisor: float) -> float:
    """`amount / divisor`; 0 where the divisor is 0."""
    return amount / divisor if divisor else 0.0


@dataclass(frozen=True, slots=True)
class Profile:
    """The time of a policy's steps.

    Attributes:
        steps: in order.
        overhead: time that the instruments add, as a share of the time without them.
        counted: FLOPs of all steps, as PyTorch counts them.
    """

    steps: tuple[StepProfile, ...]
    overhead: float
    counted: int

    @property
    def operations(self) -> dict[str, OperationProfile]:
        """Every operation by its name, in the order of the steps' parts."""
        seconds_by_name = _sums([step.parts for step in self.steps])
        flops, bytes_moved = _sums([step.flops for step in self.steps]), _sums([step.bytes for step in self.steps])
        total = sum(seconds_by_name.values())
        return {
            name: OperationProfile(seconds, seconds / total, int(flops.get(name, 0)), int(bytes_moved.get(name, 0)))
            for name, seconds in seconds_by_name.items()
        }


@dataclass(frozen=True, slots=True)
class _StepCost:
    """What one step computes."""

    row_layers: int
    cost: PassCost
    executed: int


def profile_operations(
    llm: LLM, requests: Sequence[Request], *, steps: int | None = None, rounds: int = 3, progress: bool = False
) -> Profile:
    """Run all `requests` together, and time the operations of the first `steps` steps; None times all steps.

    A first run counts FLOPs and warms up. Then an engine with instruments and one without take turns step by step, so
    that their difference is the overhead. The parts of a step are those of its round with the median time. The engine
    of `llm` is not used.

    Raises `ConfigError`, before anything runs, where a request cannot run or takes no step.
    """
    costs, counted = _costs(llm, requests, steps)
    if not costs:
        raise ConfigError("there is no step to profile; ask for one request and one token at least")
    plain_seconds: list[list[float]] = [[] for _ in costs]
    parts: list[list[Mapping[str, float]]] = [[] for _ in costs]
    for turn in tqdm(range(rounds), desc="rounds", unit="round", disable=not progress):
        plain_engine, timed_engine = _engine(llm, requests), _engine(llm, requests)
        clock = time_operations(timed_engine)
        for number in range(len(costs)):
            # The second engine finds the weights in the machine's caches, so the order alternates.
            if (turn + number) % 2:
                parts[number].append(_parts(timed_engine, clock))
                plain_seconds[number].append(time_call(plain_engine.step, plain_engine.model.device))
            else:
                plain_seconds[number].append(time_call(plain_engine.step, plain_engine.model.device))
                parts[number].append(_parts(timed_engine, clock))
        for engine in (plain_engine, timed_engine):
            _end(engine, requests)
    timed = [sum(sum(step[turn].values()) for step in parts) for turn in range(rounds)]
    ratios = [timed[turn] / sum(step[turn] for step in plain_seconds) for turn in range(rounds)]
    return Profile(
        steps=tuple(map(_step, costs, plain_seconds, parts)), overhead=statistics.median(ratios) - 1, counted=counted
    )


def touch_memory(engine: Engine, policies: Iterable[CachePolicy]) -> None:
    """Write once to all memory that `policies` need, as the first write to memory takes longer."""
    if any("outputs" in policy.traits.keeps for policy in policies):
        engine.pool.allocate_outputs()
    for tensor in (*engine.pool.k, *engine.pool.v, *(output for pair in engine.pool.outputs for output in pair)):
        tensor.zero_()


def _engine(llm: LLM, requests: Sequence[Request]) -> Engine:
    engine = llm.session.new_engine()
    touch_memory(engine, [request.policy for request in requests])
    for request in requests:
        engine.add(request)
    return engine


def _end(engine: Engine, requests: Sequence[Request]) -> None:
    """Cancel the requests that still run, so that their memory is freed."""
    for request in requests:
        engine.cancel(request.id)
    while engine.busy:
        engine.step()


def _costs(llm: LLM, requests: Sequence[Request], steps: int | None) -> tuple[list[_StepCost], int]:
    """The cost of each of the first `steps` steps, and the FLOPs of all of them as PyTorch counts them."""
    engine = _engine(llm, requests)
    executed = Executed(engine)
    costs: list[_StepCost] = []
    with flop_counter() as counter:
        while engine.busy and (steps is None or len(costs) < steps):
            row_layers, flops = engine.stats.row_layers, executed.flops
            engine.step()
            row_layers = engine.stats.row_layers - row_layers
            costs.append(_StepCost(row_layers, executed.meter.last, executed.flops - flops))
    _end(engine, requests)
    return costs, counter.get_total_flops()


def _parts(engine: Engine, clock: Clock) -> Mapping[str, float]:
    """Take a step, and return its seconds by operation."""
    clock.start()
    engine.step()
    seconds = clock.stop()
    return {name: seconds.get(name, 0.0) for name in OPERATIONS}


def _step(cost: _StepCost, plain_seconds: Sequence[float], parts: Sequence[Mapping[str, float]]) -> StepProfile:
    """The profile of one step, of its seconds and parts in every round."""
    by_time = sorted(parts, key=lambda round_parts: sum(round_parts.values()))
    operations = cost.cost.operations
    return StepProfile(
        row_layers=cost.row_layers,
        seconds=statistics.median(plain_seconds),
        parts=by_time[(len(by_time) - 1) // 2],
        flops={name: operations[name].flops for name in COSTED},
        bytes={name: operations[name].bytes for name in COSTED},
        executed=cost.executed,
    )


def _sums(parts: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The sum of each key's values over all mappings, of which some may lack a key."""
    names = dict.fromkeys(name for part in parts for name in part)
    return {name: sum(part.get(name, 0) for part in parts) for name in names}
