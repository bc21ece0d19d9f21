"""How much time each cache policy's saved work saves, step by step beside `none`.

    python -m remask_lab.speed.policies [--model llada-100m] [--steps 32] [--batch 4]

Every policy has an engine of its own with the same requests. The engines take turns, one step each. A policy's gain in
time, divided by its gain in row-layers, is the share of the saved work that becomes saved time. It counts the steps
with 64 or more computed rows a layer. With fewer rows, reading the weights takes most of the time. There the time is
compared with the bare matrix products and attention of the same rows, run right after the step.
"""

import json
import sys
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.machine.disk import write_whole
from remask.observe import observe_cache
from remask.plan.ledger import Ledger
from remask.plan.meter import CacheMeter
from remask.plan.plan import Plan
from remask.policies import policy_names, settings_of
from remask_lab.bench.contenders import COMPOSITIONS, described
from remask_lab.bench.workload import Workload, random_workload
from remask_lab.ops.clock import time_call
from remask_lab.ops.operations import touch_memory
from remask_lab.records.machine import commit, machine
from remask_lab.records.markdown import markdown_table
from remask_lab.speed.bare import bare_pass
from remask_lab.speed.command import add_model_options, command_parser, open_random, run_command

MANY = 64  # rows a layer above which the products take most of the time, and not the reading of weights


@dataclass(slots=True)
class RowCount(CacheMeter):
    """Counts the rows computed in each layer of a pass, over all its canvases."""

    rows: list[int] = field(default_factory=list)
    predicted: int = 0

    def note(self, ledger: Ledger, plan: Plan) -> None:  # noqa: ARG002
        """Add one canvas."""
        per_layer = [span.cost // len(span.layers) for span in plan.spans for _ in span.layers]
        self.rows = [a + b for a, b in zip(self.rows or [0] * len(per_layer), per_layer, strict=True)]
        self.predicted += int(plan.predict.sum())


@dataclass(slots=True)
class PolicySteps:
    """One policy: its engine, and the time and work of its steps."""

    name: str
    settings: dict[str, Any]
    engine: Engine
    seconds: list[float] = field(default_factory=list)
    row_layers: list[int] = field(default_factory=list)
    bare: list[float] = field(default_factory=list)  # of steps with few rows; nan for the others


def main() -> None:
    """Measure, print the table, and write one JSON object where `--json` asks for it."""
    parser = command_parser(__doc__)
    parser.add_argument("--batch", type=int, default=4, help="requests that run at a time")
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--prefix", type=int, default=480, help="leading tokens of the prompt that all requests share")
    parser.add_argument("--response", type=int, default=256, help="response tokens, one a step")
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32, help="steps timed, from the first on")
    parser.add_argument("--json", metavar="FILE", help="write the full result here")
    add_model_options(parser, "llada-100m")
    args = parser.parse_args()
    limits = EngineConfig(
        max_num_seqs=args.batch, max_model_len=args.prompt + args.response, store_budget_tokens=args.prompt
    )
    llm = open_random(args, limits)
    # Nearly every policy can run with positions drawn at random, and `none` takes the same time with any order.
    sampling = SamplingParams(
        max_tokens=args.response, block_length=args.block_length, remasking="random", seed=0, ignore_eos=True
    )
    own = args.prompt - args.prefix
    workload = random_workload(llm, args.batch, 1, 0, sampling, args.prefix, own)
    all_steps = [
        own for name in (*policy_names(), *COMPOSITIONS) if (own := _admitted(llm, name, workload)) is not None
    ]
    for _ in range(args.steps):
        for own in all_steps:
            _step(llm, own, args.prompt + args.response, args.batch)
    layers = llm.loaded.config.layers
    results = [_result(own, all_steps[0], layers) for own in all_steps]
    shape = {"batch": args.batch, "prompt": args.prompt, "prefix": args.prefix, "response": args.response}
    shape |= {"block_length": args.block_length, "steps": args.steps}
    report = {"machine": machine(llm), "commit": commit(), "model": args.model, **shape, "results": results}
    if args.json:
        write_whole("the result", args.json, json.dumps(report, indent=2) + "\n")
    print(table(results))


def _admitted(llm: LLM, name: str, workload: Workload) -> PolicySteps | None:
    """Returns the policy with its requests admitted and their prefix in the store. None where it cannot run.

    A policy that cannot run with positions drawn at random transfers the most confident position in each step.
    """
    layers = llm.loaded.config.layers
    policy = llm.policy(name, {"depth": layers // 2} if name.startswith("bicache") else None)
    engine = llm.new_engine()
    confident = workload.under(replace(workload.tasks[0].request.params, remasking="low_confidence"))
    try:
        llm.engine.check(workload.tasks[0].request.with_policy(policy))
    except ConfigError:
        workload = confident
    try:
        for task in workload.tasks:
            engine.add(task.request.with_policy(policy))
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


def _step(llm: LLM, own: PolicySteps, keys: int, batch: int) -> None:
    count = RowCount()
    attached = observe_cache(own.engine, count)
    own.seconds.append(time_call(own.engine.step, llm.model.device))
    own.engine.detach(attached)
    own.row_layers.append(sum(count.rows))
    few = sum(count.rows) < MANY * len(count.rows)
    own.bare.append(
        time_call(bare_pass(llm, count.rows, count.predicted, keys, batch), llm.model.device) if few else float("nan")
    )


def _result(own: PolicySteps, none: PolicySteps, layers: int) -> dict[str, Any]:
    ours, theirs, bare = np.array(own.seconds), np.array(none.seconds), np.array(own.bare)
    work, reference = np.array(own.row_layers), np.array(none.row_layers)
    many = work >= MANY * layers

    def gain(chosen: Any) -> tuple[float, float]:
        return theirs[chosen].sum() / ours[chosen].sum(), reference[chosen].sum() / work[chosen].sum()

    speed, saved = gain(slice(None))
    quotient = None
    if many.any():
        with_many = gain(many)
        quotient = with_many[0] / with_many[1]
    return {
        "cache": own.name,
        "settings": own.settings,
        "step_ms": 1e3 * float(np.median(ours)),
        "gain": float(speed),
        "work_gain": float(saved),
        "rows_a_layer": [float(work.min() / layers), float(work.max() / layers)],
        "steps_with_many_rows": int(many.sum()),
        "quotient": None if quotient is None else float(quotient),
        "times_bare_with_few_rows": None if many.all() else float(ours[~many].sum() / bare[~many].sum()),
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results as a Markdown table."""
    header = ["cache", "settings", "ms a step (median)", "gain", "work gain", "rows a layer"]
    rows = []
    for row in results:
        low, high = row["rows_a_layer"]
        quotient, bare = row["quotient"], row["times_bare_with_few_rows"]
        rows.append(
            [
                row["cache"],
                described(row["settings"]),
                f"{row['step_ms']:.0f}",
                f"{row['gain']:.2f}x",
                f"{row['work_gain']:.2f}x",
                f"{low:.0f} to {high:.0f}",
                "-" if quotient is None else f"{quotient:.2f}",
                "-" if bare is None else f"{bare:.2f}x",
            ]
        )
    return markdown_table([*header, "quotient, 64 rows or more", "times bare, fewer"], rows)


if __name__ == "__main__":
    sys.exit(run_command(main))
