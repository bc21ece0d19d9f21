"""Times of cache policies on random weights: step by step, by blocks, and in the setting of BiCache's paper."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import truediv
from typing import Any

import numpy as np
from numpy.typing import NDArray

from remask import LLM, SamplingParams
from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.plan.canvas import Ledger
from remask.plan.plan import Plan
from remask.policies import CachePolicy, UniformCache, policy_names, settings_of
from remask_lab.bench.contenders import COMPOSITIONS, settings_text
from remask_lab.bench.workload import Workload, random_workload
from remask_lab.observe import CacheMeter, observe_cache
from remask_lab.ops.clock import OPERATIONS, time_operations
from remask_lab.ops.operations import touch_memory
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, about
from remask_lab.speed.command import Printout, report
from remask_lab.speed.runs import bare_pass, engine_of, on_device, open_random

MANY = 64  # rows a layer from which products take more time than the reading of weights


@dataclass(slots=True)
class RowCount(CacheMeter):
    """Counts the rows that a pass computes in each layer and predicts, over all its canvases."""

    rows: list[int] = field(default_factory=list)
    predicted: int = 0

    def note(self, ledger: Ledger, plan: Plan) -> None:  # noqa: ARG002
        per_layer = [span.cost // len(span.layers) for span in plan.spans for _ in span.layers]
        self.rows = [total + rows for total, rows in zip(self.rows or [0] * len(per_layer), per_layer, strict=True)]
        self.predicted += int(plan.predict.sum())


@dataclass(slots=True)
class PolicySteps:
    """The steps of one policy on its engine.

    Attributes:
        seconds, row_layers: time and work of each step.
        bare: seconds of the bare products and attention of each step's rows; NaN for steps with many rows.
    """

    name: str
    settings: dict[str, Any]
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    row_layers: list[int] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def step(self, llm: LLM, keys: int, batch: int) -> None:
        """Take one step. If it computes few rows, time the bare pass of as many rows over `keys` positions after it."""
        count, seconds = RowCount(), on_device(llm)
        observer = observe_cache(self.engine, count)
        self.seconds.append(seconds(self.engine.step))
        self.engine.detach(observer)
        self.row_layers.append(sum(count.rows))
        few_rows = sum(count.rows) < MANY * len(count.rows)
        self.bare.append(seconds(bare_pass(llm, count.rows, count.predicted, keys, batch)) if few_rows else np.nan)

    def result(self, baseline: "PolicySteps", layers: int) -> dict[str, Any]:
        """The row of results, with the gains over the steps of `baseline`, the policy `none`."""
        bare, seconds, work = np.array(self.bare), np.array(self.seconds), np.array(self.row_layers)
        many = work >= MANY * layers

        def gains(steps: NDArray[np.bool_]) -> tuple[float, float]:
            time = np.array(baseline.seconds)[steps].sum() / seconds[steps].sum()
            return float(time), float(np.array(baseline.row_layers)[steps].sum() / work[steps].sum())

        gain, work_gain = gains(np.ones_like(many))
        return {
            "cache": self.name,
            "settings": self.settings,
            "step_ms": 1e3 * float(np.median(seconds)),
            "gain": gain,
            "work_gain": work_gain,
            "rows_a_layer": [float(work.min() / layers), float(work.max() / layers)],
            "steps_with_many_rows": int(many.sum()),
            "quotient": truediv(*gains(many)) if many.any() else None,
            "times_bare_with_few_rows": None if many.all() else float(seconds[~many].sum() / bare[~many].sum()),
        }


def policies(args: argparse.Namespace) -> Printout:
    """How much time each cache policy's saved work saves, step by step beside `none`.

    Every policy has an engine of its own with the same requests, and the engines take turns, one step each. A policy's
    gain in time, divided by its gain in row-layers, is the share of the saved work that becomes saved time. It counts
    the steps with 64 or more computed rows a layer. With fewer rows, reading the weights takes most of the time; such
    steps are compared with the bare matrix products and attention of the same rows, run right after the step.
    """
    length = args.prompt + args.response
    llm = open_random(args, max_num_seqs=args.batch, max_model_len=length, store_budget_tokens=args.prompt)
    # Nearly every policy can run with positions drawn at random, and `none` takes the same time with any order.
    sampling = SamplingParams(
        max_tokens=args.response, block_length=args.block_length, remasking="random", seed=0, ignore_eos=True
    )
    workload = random_workload(
        llm, requests=args.batch, sampling=sampling, prefix_tokens=args.prefix, prompt_tokens=args.prompt - args.prefix
    )
    runs = [run for name in (*policy_names(), *COMPOSITIONS) if (run := _start_policy(llm, name, workload)) is not None]
    for _ in range(args.steps):
        for run in runs:
            run.step(llm, length, args.batch)
    results = [run.result(runs[0], llm.loaded.config.layers) for run in runs]
    return Printout(report(llm, results=results), policies_table(results))


def _start_policy(llm: LLM, name: str, workload: Workload) -> PolicySteps | None:
    """A policy's engine with the requests added and their prefix in the store; None where the policy cannot run.

    A policy that cannot run with positions drawn at random transfers the most confident position in each step.
    """
    layers = llm.loaded.config.layers
    policy = llm.session.policy(name, {"depth": layers // 2} if name.startswith("bicache") else None)
    try:
        llm.engine.check(workload.tasks[0].request.with_policy(policy))
    except ConfigError:
        workload = workload.under(replace(workload.tasks[0].request.params, remasking="low_confidence"))
    try:
        engine = engine_of(llm, [task.request.with_policy(policy) for task in workload.tasks])
    except ConfigError as error:
        print(f"left out: {name}: {error}")
        return None
    touch_memory(engine, [policy])
    request = workload.tasks[0].request
    canvas = len(request.prompt_token_ids) + request.params.max_tokens
    if request.prefix_length and policy.boundary(request.prefix_length, canvas, layers):
        engine.step()  # the prefix-only pass, for which the requests wait
        assert engine.stats.prefix_passes == 1
    return PolicySteps(name, settings_of(policy), engine)


def policies_table(results: Sequence[Mapping[str, Any]]) -> str:
    """The results of `policies` in Markdown."""
    header = ["cache", "settings", "ms a step (median)", "gain", "work gain", "rows a layer"]
    rows = []
    for row in results:
        (low, high), quotient, bare = row["rows_a_layer"], row["quotient"], row["times_bare_with_few_rows"]
        gains = [f"{row['step_ms']:.0f}", f"{row['gain']:.2f}x", f"{row['work_gain']:.2f}x", f"{low:.0f} to {high:.0f}"]
        comparisons = ["-" if quotient is None else f"{quotient:.2f}", "-" if bare is None else f"{bare:.2f}x"]
        rows.append([row["cache"], settings_text(row["settings"]), *gains, *comparisons])
    return markdown_table([*header, "quotient, 64 rows or more", "times bare, fewer"], rows)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The lengths of a canvas, of its prompt and of the block behind it, in positions, and the block's steps."""

    canvas: int
    prompt: int
    block: int
    steps: int


@dataclass(frozen=True, slots=True)
class BlockTime:
    """The steps of a block that were run: seconds and computed rows of each. `steps` is the number of all steps."""

    seconds: tuple[float, ...]
    rows: tuple[int, ...]
    steps: int

    @property
    def block_s(self) -> float:
        """Seconds of all steps, of which those that were not run are estimated."""
        return _extrapolated_sum(self.seconds, self.steps)

    @property
    def block_rows(self) -> float:
        """Computed rows of all steps, in the same way."""
        return _extrapolated_sum(self.rows, self.steps)


def _extrapolated_sum(values: tuple[Any, ...], steps: int) -> float:
    """The sum over `steps` steps, of which those without a value count as the mean of all values but the first."""
    later_mean = np.mean(values[1:]) if len(values) > 1 else values[0]
    return float(sum(values) + (steps - len(values)) * later_mean)


def time_block(
    llm: LLM, shape: BlockShape, caches: Mapping[str, CachePolicy], full_steps: int, cached_steps: int
) -> dict[str, BlockTime]:
    """Time one block of a request under every cache, on engines that take turns step by step.

    Steps that compute the same rows take the same time, so not all are run: `full_steps` of `none` and `block-prefix`,
    whose steps compute nearly the whole canvas, and of `uniform-cache` the first and `cached_steps` more.
    """
    step_counts = {
        name: min(shape.steps, 1 + cached_steps if isinstance(policy, UniformCache) else full_steps)
        for name, policy in caches.items()
    }
    engines = {name: block_engine(llm, shape, policy) for name, policy in caches.items()}
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    rows: dict[str, list[int]] = {name: [] for name in caches}
    for step in range(shape.steps):
        for name, engine in engines.items():
            if step < step_counts[name]:
                row_layers = engine.stats.row_layers
                seconds[name].append(on_device(llm)(engine.step))
                rows[name].append((engine.stats.row_layers - row_layers) // llm.loaded.config.layers)
    return {name: BlockTime(tuple(seconds[name]), tuple(rows[name]), shape.steps) for name in caches}


def block_engine(llm: LLM, shape: BlockShape, policy: CachePolicy) -> Engine:
    """An engine with one request, whose next step is the first of the block. Another block follows it."""
    params = SamplingParams(
        max_tokens=2 * shape.block,
        block_length=shape.block,
        steps_per_block=shape.steps,
        uniform={"tokens_per_step": 1, "canvas_length": shape.canvas},
        ignore_eos=True,
    )
    workload = random_workload(llm, requests=1, sampling=params, prompt_tokens=shape.prompt).seeded
    engine = engine_of(llm, [task.request.with_policy(policy) for task in workload.tasks])
    touch_memory(engine, [policy])
    return engine


CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "block-prefix": ("block-prefix", {}),
    **{f"uniform-cache r={number}": ("uniform-cache", {"refresh_next": number}) for number in (0, 1, 4)},
}


def uniform(args: argparse.Namespace) -> Printout:
    """The gain of the caches of uniform models on a long canvas, and the time of each operation in a step.

    Times one block under every policy. Each policy has its own engine, and the engines take turns step by step. Steps
    that compute the same rows take the same time. So of the steps that compute nearly the whole canvas (`none`,
    `block-prefix`) only the first `--full-steps` run and stand for the rest. The first table has the gain in time and
    its bound by the number of rows. The second has the time of each operation in a full and in a cached step, without
    the operations inside it.
    """
    llm = open_random(args, max_num_seqs=1, max_model_len=args.canvas, store_budget_tokens=0)
    block = BlockShape(canvas=args.canvas, prompt=args.prompt, block=args.block_length, steps=args.steps)
    caches = {name: llm.session.policy(*cache) for name, cache in CACHES.items()}
    times = time_block(llm, block, caches, args.full_steps, args.steps)
    operations: dict[str, dict[str, float]] = {}
    for kind, name in (("full", "none"), ("cached", "uniform-cache r=0")):
        engine = block_engine(llm, block, caches[name])
        engine.step()
        clock = time_operations(engine)
        clock.start()
        engine.step()
        seconds = clock.stop()
        operations[kind] = {operation: 1e3 * seconds[operation] for operation in OPERATIONS if operation in seconds}
    results = [
        {
            "cache": name,
            "first_step_ms": 1e3 * time.seconds[0],
            "later_steps_ms": 1e3 * float(np.median(time.seconds[1:])),
            "block_s": time.block_s,
            "gain": times["none"].block_s / time.block_s,
            "bound_by_rows": times["none"].block_rows / time.block_rows,
        }
        for name, time in times.items()
    ]
    settings = {name: getattr(args, name) for name in ("canvas", "prompt", "block_length", "steps", "full_steps")}
    data = {"results": results, "operations_ms": operations}
    return Printout(Record("uniform block", about(llm, seed=0, settings=settings), data), uniform_table(data))


def uniform_table(data: Mapping[str, Any]) -> str:
    """The two tables of `uniform` in Markdown."""
    operations = data["operations_ms"]
    header = ["cache", "first step, ms", "later steps, ms", "gain over a block", "bound by rows"]
    rows = [
        [row["cache"], *(f"{row[f'{name}_ms']:.0f}" for name in ("first_step", "later_steps"))]
        + [f"{row[name]:.2f}x" for name in ("gain", "bound_by_rows")]
        for row in data["results"]
    ]
    names = list(dict.fromkeys(name for milliseconds in operations.values() for name in milliseconds))
    times = [[kind, *(f"{milliseconds[name]:.1f}" for name in names)] for kind, milliseconds in operations.items()]
    return f"{markdown_table(header, rows)}\n\n{markdown_table(['ms of a step', *names], times)}"
