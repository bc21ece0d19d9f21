"""`remask analyze precision`: how many tokens other dtypes, batch sizes, kernels and exact caches change."""

import argparse
from dataclasses import asdict
from typing import Any

from remask.cli.options import add_model_options, object_option, open_llm
from remask.core.checks import whole
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask_lab.arguments.results import add_result_options, check_result_options, keep
from remask_lab.bench.workload import usual_workload
from remask_lab.records.record import Record, about
from remask_lab.subjects.plots.precision import plot_precision
from remask_lab.subjects.precision import Divergence, measure_precision, reading

DTYPES = "float32,bfloat16"


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    parser = subjects.add_parser("precision", help="tokens that change where only rounding does: dtype, batch, kernel")
    parser.add_argument("--dtypes", default=DTYPES, metavar="D,...", help=f"the first is compared with ({DTYPES})")
    parser.add_argument("--batch", type=int, default=8, metavar="N", help="requests at a time, against one (default 8)")
    parser.add_argument("--requests", type=int, default=32, metavar="N", help="of the model's usual workload")
    parser.add_argument("--prompt-tokens", type=int, metavar="N", help="random prompts of this length, on any model")
    parser.add_argument("--sampling", metavar="JSON", help="sampling parameters")
    parser.add_argument("--seed", type=int, default=2024, help="of the workload and of its requests")
    add_result_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print table and reading, and save what was asked for."""
    for name in ("requests", "batch"):
        whole(f"--{name}", getattr(args, name), low=1)
    whole("--prompt-tokens", args.prompt_tokens, low=1, optional=True)
    check_result_options(args)
    dtypes = list(dict.fromkeys(name.strip() for name in args.dtypes.split(",")))
    if args.dtype != "auto":
        raise ConfigError(f"--dtype {args.dtype}: precision compares several; name them in --dtypes")
    models = []
    for dtype in dtypes:
        args.dtype = dtype
        models.append(open_llm(args, engine=EngineConfig(max_num_seqs=args.batch)))
    first = models[0]
    sampling = object_option("--sampling", args.sampling)
    random = {} if args.prompt_tokens is None else {"prefix_tokens": 0, "prompt_tokens": args.prompt_tokens}
    workload = usual_workload(first, args.requests, args.seed, sampling, **random).seeded
    rows = measure_precision(models, workload, args.batch, progress=first.progress)
    told = reading(rows)
    print(text(rows), told, sep="\n\n")
    settings = {"requests": args.requests, "batch": args.batch, "dtypes": dtypes, "sampling": sampling, **random}
    data = {"rows": [asdict(row) for row in rows], "reading": told}
    record = Record("analyze precision", about(first, seed=args.seed, settings=settings), data)
    shown = {str(row.arithmetic): (row.tokens, row.responses) for row in rows if row.arithmetic != row.reference}
    keep(args, record, lambda: plot_precision(shown, args.plots, first.loaded.name))
    return 0


def text(rows: list[Divergence]) -> str:
    """The rows for people."""
    width = max(len(str(row.arithmetic)) for row in rows) + 2
    lines = [f"{'':<{width}}{'tokens %':>10}{'responses %':>13}{'accuracy %':>12}  compared with"]
    for row in rows:
        right = "-" if row.accuracy is None else f"{100 * row.accuracy:.1f}"
        against = "" if row.arithmetic == row.reference else str(row.reference)
        lines.append(
            f"{row.arithmetic!s:<{width}}{100 * row.tokens:>10.2f}{100 * row.responses:>13.1f}{right:>12}  {against}"
        )
    return "\n".join(lines)
