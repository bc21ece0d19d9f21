"""Measures the speed of the uniform thesis's tables at its shapes, from one block of a response on random weights.

    python -m remask_lab paper-shapes thesis-6-9 [--model gidd-100m] [--json FILE]

Rows, lengths and batches are those of `python -m remask_lab papers TABLE --scale paper`, which generates whole
responses. This command times only the middle block of a response. Some steps of each kind stand for all
(`--full-steps`, `--cached-steps`), and rows take turns with their baseline step by step. So random weights show in
minutes how a table's times compare. With `--json` a baseline and its rows are written as soon as they are measured, and
a second call resumes there.
"""

import sys
from dataclasses import asdict
from functools import partial
from typing import Any

from remask import LLM
from remask.errors import ConfigError
from remask_lab.papers.definition import PaperTable, ResolvedRow, load_table, resolve
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Sweep, about
from remask_lab.speed.command import ON, add_options, command_parser, run_command
from remask_lab.speed.policies import BlockShape, time_block
from remask_lab.speed.runs import open_random

TABLES = ("thesis-6-1", "thesis-6-9", "thesis-6-10", "thesis-6-11", "thesis-figure-6-4")
"""The tables of speed under the adaptive sampler. Only there a block stands for a whole response."""

Json = dict[str, Any]


def main() -> None:
    """Measure one table, print it, and write its rows where `--json` asks for it."""
    parser = command_parser(__doc__)
    parser.add_argument("table", choices=TABLES)
    add_options(parser, f"--model gidd-100m {ON}")
    parser.add_argument("--full-steps", type=int, default=3, help="steps of none and block-prefix that a block runs")
    parser.add_argument("--cached-steps", type=int, default=32, help="steps of uniform-cache, beside the first")
    parser.add_argument("--divide", type=int, default=1, help="divide the thesis's lengths, for shorter canvases")
    parser.add_argument("--json", metavar="FILE", help="keep rows here, and resume from here")
    args = parser.parse_args()
    llm = open_random(args, max_num_seqs=1, store_budget_tokens=0)
    if llm.loaded.config.kind != "uniform":
        raise ConfigError(f"the tables are of uniform models, and {llm.loaded.name!r} is none; name one with --model")
    given = {name: getattr(args, name) for name in ("table", "full_steps", "cached_steps", "divide")}
    sweep = Sweep(args.json, "uniform shapes", about(llm, seed=0, settings=given))
    results: dict[str, Json] = {}
    for rows in groups(load_table(args.table)):
        point = {name: row.point for name, row in rows.items()}
        results |= sweep.row(point, partial(result, llm, rows, args.divide, args.full_steps, args.cached_steps))
    print(text(results))


def groups(table: PaperTable) -> list[dict[str, ResolvedRow]]:
    """Returns the measurements at the paper's scale by the row's name, each baseline in one group with its rows."""
    found: dict[str, dict[str, ResolvedRow]] = {}
    for row in table.rows:
        found.setdefault(table.baseline(row).name, {})[row.name] = resolve(table, row, "paper", table.scales["paper"])
    return list(found.values())


def result(llm: LLM, rows: dict[str, ResolvedRow], divide: int, full_steps: int, cached_steps: int) -> Json:
    """Returns the times of every row of a group, by its name. The block stands for whole responses to all requests.

    It is the middle block, where `block-prefix` saves its mean. The positions before it count as prompt.

    Raises `ConfigError` where the model's canvas is too short.
    """
    baseline = next(name for name, row in rows.items() if row.baseline is None)
    shape, blocks, batches = shape_of(llm, rows[baseline], divide)
    policies = {name: llm.session.policy(row.cache, row.settings) for name, row in rows.items()}
    times = time_block(llm, shape, policies, full_steps, cached_steps)
    none = times[baseline]
    return {
        name: {
            "shape": asdict(shape),
            "seconds": own.block_s * blocks * batches,
            "tokens_per_s": shape.batch * shape.block / own.block_s,
            "gain": none.block_s / own.block_s,
            "gain_in_work": none.block_rows / own.block_rows,
        }
        for name, own in times.items()
    }


def shape_of(llm: LLM, row: ResolvedRow, divide: int) -> tuple[BlockShape, int, int]:
    """Returns the middle block of a response, the number of blocks in it, and the number of batches of all requests."""
    params, asked = row.params, row.workload
    canvas = params.uniform.canvas_length
    assert canvas is not None
    assert params.block_length is not None
    assert params.steps_per_block is not None
    longest = llm.loaded.config.max_length
    if longest < canvas // divide:
        raise ConfigError(
            f"the thesis's canvas has {canvas} positions and {llm.loaded.name!r} takes {longest}; divide "
            f"all lengths with --divide {-(-canvas // longest)}"
        )
    prompt, response, block, steps = (
        max(1, length // divide)
        for length in (asked["prompt_tokens"], params.max_tokens, params.block_length, params.steps_per_block)
    )
    shape = BlockShape(
        canvas=canvas // divide,
        prompt=prompt + (response - block) // 2,
        block=block,
        steps=steps,
        per_step=params.uniform.tokens_per_step or 1,
        batch=min(row.concurrency, asked["requests"]),
        next_block=response > block,
    )
    return shape, -(-response // block), -(-asked["requests"] // shape.batch)


def text(results: dict[str, Json]) -> str:
    """The table as Markdown."""
    rows = [
        [
            name,
            str(own["shape"]["batch"]),
            f"{own['seconds']:.1f}",
            f"{own['tokens_per_s']:.1f}",
            f"{own['gain']:.2f}x",
            f"{own['gain_in_work']:.2f}x",
        ]
        for name, own in results.items()
    ]
    return markdown_table(["row", "batch", "time, s", "tok/s", "gain", "gain in work"], rows)


if __name__ == "__main__":
    sys.exit(run_command(main))
