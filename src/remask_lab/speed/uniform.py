"""The gain of the caches of uniform models on a long canvas, and the time of each operation in a step.

    python -m remask_lab.speed.uniform [--model gidd-100m] [--canvas 2048] [--block-length 32] [--json FILE]

Times one block under every policy. Each policy has its own engine, and the engines take turns step by step. Steps that
compute the same rows take the same time. So of the steps that compute nearly the whole canvas (`none`, `block-prefix`)
only the first `--full-steps` run and stand for the rest. The first table has the gain in time and its bound by the
number of rows. The second has the time of each operation in a full and in a cached step, without the operations inside
it.
"""

import sys
from typing import Any

import numpy as np

from remask import EngineConfig
from remask.engine.engine import Engine
from remask_lab.ops.clock import OPERATIONS, time_operations
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, about, write_record
from remask_lab.speed.command import add_model_options, command_parser, open_random, run_command
from remask_lab.speed.uniform_blocks import BlockShape, BlockTime, block_engine, time_block

CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "block-prefix": ("block-prefix", {}),
    "uniform-cache r=0": ("uniform-cache", {"refresh_next": 0}),
    "uniform-cache r=1": ("uniform-cache", {"refresh_next": 1}),
    "uniform-cache r=4": ("uniform-cache", {"refresh_next": 4}),
}


def main() -> None:
    """Measure, print two tables, and write one record where `--json` asks for it."""
    parser = command_parser(__doc__)
    parser.add_argument("--canvas", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32, help="steps a block")
    parser.add_argument("--full-steps", type=int, default=4, help="steps of none and block-prefix that are run")
    parser.add_argument("--json", metavar="FILE", help="write the full result here, as a record")
    add_model_options(parser, "gidd-100m")
    args = parser.parse_args()
    limits = EngineConfig(max_num_seqs=1, max_model_len=args.canvas, store_budget_tokens=0)
    llm = open_random(args, limits)
    block = BlockShape(args.canvas, args.prompt, args.block_length, args.steps)
    caches = {name: llm.policy(*cache) for name, cache in CACHES.items()}
    times = time_block(llm, block, caches, args.full_steps, args.steps)
    operations: dict[str, dict[str, float]] = {}
    for kind, name in (("full", "none"), ("cached", "uniform-cache r=0")):
        engine = block_engine(llm, block, caches[name])
        engine.step()
        operations[kind] = _operations(engine)
    results = [_result(name, times[name], times["none"]) for name in CACHES]
    if args.json:
        settings = {name: getattr(args, name) for name in ("canvas", "prompt", "block_length", "steps", "full_steps")}
        data = {"results": results, "operations_ms": operations}
        write_record(args.json, Record("uniform block", about(llm, seed=0, settings=settings), data))
    print(table(results, operations))


def _result(name: str, own: BlockTime, none: BlockTime) -> dict[str, Any]:
    return {
        "cache": name,
        "first_step_ms": 1e3 * own.seconds[0],
        "later_steps_ms": 1e3 * float(np.median(own.seconds[1:])),
        "block_s": own.block_s,
        "gain": none.block_s / own.block_s,
        "bound_by_rows": none.block_rows / own.block_rows,
    }


def _operations(engine: Engine) -> dict[str, float]:
    """Milliseconds of each operation in one step, without the operations inside it."""
    clock = time_operations(engine)
    clock.start()
    engine.step()
    spent = clock.stop()
    return {name: 1e3 * spent[name] for name in OPERATIONS if name in spent}


def table(results: list[dict[str, Any]], operations: dict[str, dict[str, float]]) -> str:
    """Both tables as Markdown."""
    gains = markdown_table(
        ["cache", "first step, ms", "later steps, ms", "gain over a block", "bound by rows"],
        [
            [
                row["cache"],
                f"{row['first_step_ms']:.0f}",
                f"{row['later_steps_ms']:.0f}",
                f"{row['gain']:.2f}x",
                f"{row['bound_by_rows']:.2f}x",
            ]
            for row in results
        ],
    )
    names = list(dict.fromkeys(name for spent in operations.values() for name in spent))
    times = [[kind, *(f"{spent[name]:.1f}" for name in names)] for kind, spent in operations.items()]
    return f"{gains}\n\n{markdown_table(['ms of a step', *names], times)}"


if __name__ == "__main__":
    sys.exit(run_command(main))
