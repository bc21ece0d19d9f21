"""What the caches of uniform models gain on a long canvas, and where the time of a step goes.

    python -m benchmarks.uniform [--model gidd-100m] [--canvas 2048] [--block-length 32] [--json FILE]

Times one block of every policy, engines of their own taking turns step by step. Steps that compute the same rows cost
the same, so of those that compute nearly the whole canvas (`none`, `block-prefix`) only the first `--full-steps` are
run and stand for the rest. Beside the gain in time stands the bound by the number of rows; exclusive times of a full
and of a cached step say what keeps the one from the other.
"""

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from remask import LLM, EngineConfig, SamplingParams
from remask.core.request import Request
from remask.engine.engine import Engine
from remask.evals.machine import commit, machine
from remask.profiling.timed import OPERATIONS, timed

CACHES: dict[str, tuple[str, dict[str, Any]]] = {
    "none": ("none", {}),
    "block-prefix": ("block-prefix", {}),
    "uniform-cache r=0": ("uniform-cache", {"refresh_next": 0}),
    "uniform-cache r=1": ("uniform-cache", {"refresh_next": 1}),
    "uniform-cache r=4": ("uniform-cache", {"refresh_next": 4}),
}


def main() -> None:
    """Measure, print two tables, and write where asked one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="gidd-100m")
    parser.add_argument("--canvas", type=int, default=2048)
    parser.add_argument("--prompt", type=int, default=128)
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--steps", type=int, default=32, help="steps a block")
    parser.add_argument("--full-steps", type=int, default=4, help="steps of none and block-prefix that are run")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--json", metavar="FILE", help="write the full result here")
    args = parser.parse_args()
    limits = EngineConfig(max_num_seqs=1, max_model_len=args.canvas, store_budget_tokens=0)
    llm = LLM(args.model, load_format="dummy", dtype=args.dtype, device=args.device, engine=limits)
    engines = {name: _engine(llm, args, *cache) for name, cache in CACHES.items()}
    seconds: dict[str, list[float]] = {name: [] for name in CACHES}
    rows: dict[str, list[int]] = {name: [] for name in CACHES}
    operations: dict[str, dict[str, float]] = {}
    for step in range(args.steps):
        for name, engine in engines.items():
            if step < args.full_steps or name.startswith("uniform-cache"):
                before = engine.stats.row_layers
                start = time.perf_counter()
                engine.step()
                seconds[name].append(time.perf_counter() - start)
                rows[name].append((engine.stats.row_layers - before) // llm.loaded.config.layers)
    for kind, name in (("full", "none"), ("cached", "uniform-cache r=0")):
        operations[kind] = _operations(_second(llm, args, name))
    results = [_result(name, seconds, rows, args.steps) for name in CACHES]
    shape = {name: getattr(args, name) for name in ("model", "canvas", "prompt", "block_length", "steps", "full_steps")}
    report = {"machine": machine(llm), "commit": commit(), **shape, "results": results, "operations_ms": operations}
    if args.json:
        Path(args.json).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    print(table(results, operations))


def _engine(llm: LLM, args: argparse.Namespace, cache: str, settings: dict[str, Any]) -> Engine:
    engine = llm.new_engine()
    for tensor in (*engine.pool.k, *engine.pool.v):
        tensor.zero_()  # so that no timed step is the first to touch the memory
    prompt = np.random.default_rng(0).integers(0, llm.loaded.config.vocab, args.prompt).tolist()
    params = SamplingParams(
        max_tokens=2 * args.block_length,
        block_length=args.block_length,
        steps_per_block=args.steps,
        canvas_length=args.canvas,
        seed=0,
        ignore_eos=True,
    )
    engine.add(Request("0", prompt, params), llm.policy(cache, settings))
    return engine


def _second(llm: LLM, args: argparse.Namespace, name: str) -> Engine:
    """An engine whose next step is a block's second one."""
    engine = _engine(llm, args, *CACHES[name])
    engine.step()
    return engine


def _result(name: str, seconds: dict[str, list[float]], rows: dict[str, list[int]], steps: int) -> dict[str, Any]:
    block, reference = _block(seconds[name], steps), _block(seconds["none"], steps)
    return {
        "cache": name,
        "first_step_ms": 1e3 * seconds[name][0],
        "later_steps_ms": 1e3 * float(np.median(seconds[name][1:])),
        "block_s": block,
        "gain": reference / block,
        "bound_by_rows": _block(rows["none"], steps) / _block(rows[name], steps),
    }


def _block(values: list[Any], steps: int) -> float:
    """The sum over a block; steps that were not run count as the median of those that were, the first left out."""
    return float(sum(values) + (steps - len(values)) * np.median(values[1:]))


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
