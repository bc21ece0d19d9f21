"""Times of cache policies on random weights: step by step, by blocks, and in the setting of BiCache's paper."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

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
from remask_lab.speed.command import Shown, report
from remask_lab.speed.runs import bare_pass, engine_of, on_device, open_random

MANY = 64  # rows a layer above which the products take most of the time, and not the reading of weights


@dataclass(slots=True)
class RowCount(CacheMeter):
    """Counts the rows computed in each layer of a pass, over all its canvases."""

    rows: list[int] = field(default_factory=list)
    predicted: int = 0

    def note(self, ledger: Ledger, plan: Plan) -> None:  # noqa: ARG002
        per_layer = [span.cost // len(span.layers) for span in plan.spans for _ in span.layers]
        self.rows = [a + b for a, b in zip(self.rows or [0] * len(per_layer), per_layer, strict=True)]
        self.predicted += int(plan.predict.sum())


@dataclass(slots=True)
class PolicySteps:
    """One policy: its engine, and the time and work of its steps. `bare` is nan for steps with many rows."""

    name: str
    settings: dict[str, Any]
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    row_layers: list[int] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)

    def step(self, llm: LLM, keys: int, batch: int) -> None:
        """Take one step, and where it computes few rows the bare pass of these after it."""
        count, seconds = RowCount(), on_device(llm)
        attached = observe_cache(self.engine, count)
        self.seconds.append(seconds(self.engine.step))
        self.engine.detach(attached)
        self.row_layers.append(sum(count.rows))
        few = sum(count.rows) < MANY * len(count.rows)
        self.bare.append(seconds(bare_pass(llm, count.rows, count.predicted, keys, batch)) if few else float("nan"))

    def result(self, none: "PolicySteps", layers: int) -> dict[str, Any]:
        """The gains over the steps of `none`."""
        ours, theirs, bare = np.array(self.seconds), np.array(none.seconds), np.array(self.bare)
        work, reference = np.array(self.row_layers), np.array(none.row_layers)
        many = work >= MANY * layers
        gain, saved = theirs.sum() / ours.sum(), reference.sum() / work.sum()
        share = (
            theirs[many].sum() / ours[many].sum() / (reference[many].sum() / work[many].sum()) if many.any() else None
        )
        return {
            "cache": self.name,
            "settings": self.settings,
            "step_ms": 1e3 * float(np.median(ours)),
            "gain": float(gain),
            "work_gain": float(saved),
            "rows_a_layer": [float(work.min() / layers), float(work.max() / layers)],
            "steps_with_many_rows": int(many.sum()),
            "quotient": None if share is None else float(share),
            "times_bare_with_few_rows": None if many.all() else float(ours[~many].sum() / bare[~many].sum()),
        }


def policies(args: argparse.Namespace) -> Shown:
    """How much time each cache policy's saved work saves, step by step beside `none`.

    Every policy has an engine of its own with the same requests. The engines take turns, one step each. A policy's gain
    in time, divided by its gain in row-layers, is the share of the saved work that becomes saved time. It counts the
    steps with 64 or more computed rows a layer. With fewer rows, reading the weights takes most of the time. There the
    time is compared with the bare matrix products and attention of the same rows, run right after the step.
    """
    length = args.prompt + args.response
    llm = open_random(args, max_num_seqs=args.batch, max_model_len=length, store_budget_tokens=args.prompt)
    # Nearly every policy can run with positions drawn at random, and `none` takes the same time with any order.
    sampling = SamplingParams(
        max_tokens=args.response, block_length=args.block_length, remasking="random", seed=0, ignore_eos=True
    )
    workload = random_workload(llm, args.batch, 1, 0, sampling, args.prefix, args.prompt - args.prefix)
    found = [own for name in (*policy_names(), *COMPOSITIONS) if (own := _admitted(llm, name, workload)) is not None]
    for _ in range(args.steps):
        for own in found:
            own.step(llm, length, args.batch)
    results = [own.result(found[0], llm.loaded.config.layers) for own in found]
    return Shown(report(llm, results=results), policies_table(results))


def _admitted(llm: LLM, name: str, workload: Workload) -> PolicySteps | None:
    """The policy with its requests admitted and their prefix in the store. None where it cannot run.

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
    header = ["cache", "settings", "ms a step (median)", "gain", "work gain", "rows a layer"]
    rows = []
    for row in results:
        (low, high), quotient, bare = row["rows_a_layer"], row["quotient"], row["times_bare_with_few_rows"]
        times = [f"{row['step_ms']:.0f}", f"{row['gain']:.2f}x", f"{row['work_gain']:.2f}x", f"{low:.0f} to {high:.0f}"]
        last = ["-" if quotient is None else f"{quotient:.2f}", "-" if bare is None else f"{bare:.2f}x"]
        rows.append([row["cache"], settings_text(row["settings"]), *times, *last])
    return markdown_table([*header, "quotient, 64 rows or more", "times bare, fewer"], rows)


@dataclass(frozen=True, slots=True)
class BlockShape:
    """The positions of a canvas, of its clean part and of a block behind that, and the block's steps."""

    canvas: int
    prompt: int
    block: int
    steps: int


@dataclass(frozen=True, slots=True)
class BlockTime:
    """The steps of a block that ran: their seconds, and rows computed for each request. `steps` counts all steps."""

    seconds: tuple[float, ...]
    rows: tuple[int, ...]
    steps: int

    @property
    def block_s(self) -> float:
        """Seconds of all steps. A step that did not run counts as the mean of those that did, the first left out."""
        return _whole(self.seconds, self.steps)

    @property
    def block_rows(self) -> float:
        """Rows of all steps, in the same way."""
        return _whole(self.rows, self.steps)


def _whole(values: tuple[Any, ...], steps: int) -> float:
    later = np.mean(values[1:]) if len(values) > 1 else values[0]
    return float(sum(values) + (steps - len(values)) * later)


def time_block(
    llm: LLM, shape: BlockShape, caches: Mapping[str, CachePolicy], full_steps: int, cached_steps: int
) -> dict[str, BlockTime]:
    """Time one block of a request under every cache, on engines that take turns step by step.

    Steps that compute the same rows take the same time. So only the first `full_steps` run under `none` and
    `block-prefix`, whose steps compute nearly the whole canvas, and under `uniform-cache` the first and `cached_steps`
    more.
    """
    run = {
        name: min(shape.steps, 1 + cached_steps if isinstance(policy, UniformCache) else full_steps)
        for name, policy in caches.items()
    }
    engines = {name: block_engine(llm, shape, policy) for name, policy in caches.items()}
    seconds: dict[str, list[float]] = {name: [] for name in caches}
    rows: dict[str, list[int]] = {name: [] for name in caches}
    for step in range(shape.steps):
        for name, engine in engines.items():
            if step < run[name]:
                before = engine.stats.row_layers
                seconds[name].append(on_device(llm)(engine.step))
                computed = engine.stats.row_layers - before
                rows[name].append(computed // llm.loaded.config.layers)
    return {name: BlockTime(tuple(seconds[name]), tuple(rows[name]), shape.steps) for name in caches}


def block_engine(llm: LLM, shape: BlockShape, policy: CachePolicy) -> Engine:
    """An engine whose next step is the first of the block, behind which another one follows, for one request."""
    params = SamplingParams(
        max_tokens=2 * shape.block,
        block_length=shape.block,
        steps_per_block=shape.steps,
        uniform={"tokens_per_step": 1, "canvas_length": shape.canvas},
        ignore_eos=True,
    )
    workload = random_workload(llm, 1, 1, 0, params, 0, shape.prompt).seeded
    engine = engine_of(llm, [task.request.with_policy(policy) for task in workload.tasks])
    touch_memory(engine, [policy])
    return engine


CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "block-prefix": ("block-prefix", {}),
    **{f"uniform-cache r={number}": ("uniform-cache", {"refresh_next": number}) for number in (0, 1, 4)},
}


def uniform(args: argparse.Namespace) -> Shown:
    """The gain of the caches of uniform models on a long canvas, and the time of each operation in a step.

    Times one block under every policy. Each policy has its own engine, and the engines take turns step by step. Steps
    that compute the same rows take the same time. So of the steps that compute nearly the whole canvas (`none`,
    `block-prefix`) only the first `--full-steps` run and stand for the rest. The first table has the gain in time and
    its bound by the number of rows. The second has the time of each operation in a full and in a cached step, without
    the operations inside it.
    """
    llm = open_random(args, max_num_seqs=1, max_model_len=args.canvas, store_budget_tokens=0)
    block = BlockShape(args.canvas, args.prompt, args.block_length, args.steps)
    caches = {name: llm.session.policy(*cache) for name, cache in CACHES.items()}
    times = time_block(llm, block, caches, args.full_steps, args.steps)
    operations: dict[str, dict[str, float]] = {}
    for kind, name in (("full", "none"), ("cached", "uniform-cache r=0")):
        engine = block_engine(llm, block, caches[name])
        engine.step()
        clock = time_operations(engine)
        clock.start()
        engine.step()
        spent = clock.stop()
        operations[kind] = {each: 1e3 * spent[each] for each in OPERATIONS if each in spent}
    results = [
        {
            "cache": name,
            "first_step_ms": 1e3 * own.seconds[0],
            "later_steps_ms": 1e3 * float(np.median(own.seconds[1:])),
            "block_s": own.block_s,
            "gain": times["none"].block_s / own.block_s,
            "bound_by_rows": times["none"].block_rows / own.block_rows,
        }
        for name, own in times.items()
    ]
    settings = {name: getattr(args, name) for name in ("canvas", "prompt", "block_length", "steps", "full_steps")}
    data = {"results": results, "operations_ms": operations}
    return Shown(Record("uniform block", about(llm, seed=0, settings=settings), data), uniform_table(data))


def uniform_table(found: Mapping[str, Any]) -> str:
    operations = found["operations_ms"]
    header = ["cache", "first step, ms", "later steps, ms", "gain over a block", "bound by rows"]
    rows = [
        [row["cache"], *(f"{row[f'{name}_ms']:.0f}" for name in ("first_step", "later_steps"))]
        + [f"{row[name]:.2f}x" for name in ("gain", "bound_by_rows")]
        for row in found["results"]
    ]
    names = list(dict.fromkeys(name for spent in operations.values() for name in spent))
    times = [[kind, *(f"{spent[name]:.1f}" for name in names)] for kind, spent in operations.items()]
    return f"{markdown_table(header, rows)}\n\n{markdown_table(['ms of a step', *names], times)}"
