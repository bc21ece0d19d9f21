"""What the caches of uniform models gain on a long canvas, and where the time of a step goes.

    python -m remask_lab.speed.uniform [--model gidd-100m] [--canvas 2048] [--block-length 32] [--json FILE]

Times one block of every policy, engines of their own taking turns step by step. Steps that compute the same rows cost
the same, so of those that compute nearly the whole canvas (`none`, `block-prefix`) only the first `--full-steps` are
run and stand for the rest. Beside the gain in time stands the bound by the number of rows; exclusive times of a full
and of a cached step say what keeps the one from the other.
"""

import argparse
from typing import Any

import numpy as np

from remask import LLM, EngineConfig
from remask.engine.engine import Engine
from remask_lab.ops.timed import OPERATIONS, timed
from remask_lab.records.record import Record, about, write_record
from remask_lab.speed.uniform_blocks import BlockShape, BlockTime, block_engine, time_block

CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "block-prefix": ("block-prefix", {}),
    "uniform-cache r=0": ("uniform-cache", {"refresh_next": 0}),
    "uniform-cache r=1": ("uniform-cache", {"refresh_next": 1}),
    "uniform-cache r=4": ("uniform-cache", {"refresh_next": 4}),
}


def main() -> None:
    """Measure, print two tables, and write where asked one record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gidd-100m")
    parser.add_argument("--canvas", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32, help="steps a block")
    parser.add_argument("--full-steps", type=int, default=4, help="steps of none and block-prefix that are run")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", metavar="FILE", help="write the full result here, as a record")
    args = parser.parse_args()
    limits = EngineConfig(max_num_seqs=1, max_model_len=args.canvas, store_budget_tokens=0)
    llm = LLM(args.model, load_format="dummy", dtype=args.dtype, device=args.device, engine=limits)
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
    """Milliseconds that one step spends in each operation, without what it calls in others."""
    clock = timed(engine)
    clock.start()
    engine.step()
    spent = clock.stop()
    return {name: 1e3 * spent[name] for name in OPERATIONS if name in spent}


def table(results: list[dict[str, Any]], operations: dict[str, dict[str, float]]) -> str:
    """Both tables as Markdown."""
    lines = [
        "| cache | first step, ms | later steps, ms | gain over a block | bound by rows |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {row['cache']} | {row['first_step_ms']:.0f} | {row['later_steps_ms']:.0f} | {row['gain']:.2f}x | "
        f"{row['bound_by_rows']:.2f}x |"
        for row in results
    ]
    names = list(dict.fromkeys(name for spent in operations.values() for name in spent))
    lines += ["", f"| ms of a step | {' | '.join(names)} |", "|---" * (len(names) + 1) + "|"]
    lines += [
        f"| {kind} | {' | '.join(f'{spent[name]:.1f}' for name in names)} |" for kind, spent in operations.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
