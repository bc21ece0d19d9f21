"""`remask analyze leakage`: attention from a shared prefix to the rest, and the depth that it guarantees."""

import argparse
from typing import Any

from remask.cli.options import add_model_options, open_llm
from remask.depth.profile import ProfileSettings
from remask.depth.prompts import default_prompts, read_prompts
from remask.engine.config import EngineConfig
from remask_lab.arguments.common import tau_option
from remask_lab.arguments.results import add_result_options, check_result_options, tell
from remask_lab.instruments.passes import check_masked
from remask_lab.records.record import Record, about
from remask_lab.subjects.leakage import SAMPLES, measure_leakage
from remask_lab.subjects.leakage_report import LeakageReport, reading
from remask_lab.subjects.plots.leakage import plot_leakage

RATIOS = (10, 30, 50, 70, 80, 90, 95)


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    parser = subjects.add_parser(
        "leakage", help="attention from a shared prefix to the rest over the ratio, and the depth that it guarantees"
    )
    parser.add_argument("--prompts", metavar="FILE", help="JSONL of messages, prompt or prompt_token_ids a line")
    tau_option(parser)
    parser.add_argument("--ratios", type=int, nargs="+", metavar="R", default=RATIOS, help="prefix ratios in percent")
    parser.add_argument("--samples", type=int, default=SAMPLES, metavar="N", help=f"requests per ratio ({SAMPLES})")
    parser.add_argument("--steps", type=int, default=4, metavar="S", help="denoising steps of a request (default 4)")
    parser.add_argument("--canvas", type=int, metavar="N", help="tokens of prompt and masks together")
    parser.add_argument("--response", type=int, metavar="N", help="masks at the end of the canvas")
    parser.add_argument("--seed", type=int, default=0, help="of the choice of prompts (default 0)")
    add_result_options(parser)
    add_model_options(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table and its reading, and save what was asked for."""
    check_result_options(args)
    names = ("tau", "samples", "canvas", "response", "seed")
    own = {name: getattr(args, name) for name in names}
    settings = ProfileSettings(ratios=tuple(args.ratios), **own)
    # The measurement brings memory of its own; the engine's is kept as small as it can be.
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0))
    check_masked(llm)
    prompts = default_prompts(llm.loaded) if args.prompts is None else read_prompts(args.prompts, llm.loaded)
    report = measure_leakage(llm, prompts, settings, args.steps, progress=llm.progress)
    print(f"{llm.loaded.name}: {report.layers} layers, tau {report.tau:g} ({report.source})\n")
    print(text(report))
    measurement = own | {"ratios": list(settings.ratios or ()), "steps": args.steps, "prompts": args.prompts}
    record = Record("analyze leakage", about(llm, seed=args.seed, settings=measurement), report)
    tell(args, record, reading(report), lambda folder: plot_leakage(report, folder, llm.loaded.name))
    return 0


def text(report: LeakageReport) -> str:
    """One line a ratio, then the constants by layer."""
    lines = ["ratio %  leakage %  greatest %  least depth  mean depth  bound from leakage  from deviation"]
    for ratio, row in report.ratios.items():
        leakage = 100 * sum(row.leakage) / report.layers
        lines.append(
            f"{ratio:>7}{leakage:>11.1f}{100 * max(row.greatest_leakage):>12.1f}{row.depth:>13}{row.mean_depth:>12.2f}"
            f"{row.guaranteed_depth:>20}{row.deviation_depth:>16}"
        )
    constants = report.constants
    lines += ["", "layer   V (values)   m (K/V norm)   C (stability)"]
    rows = zip(constants.value_norm, constants.least_norm, constants.stability, strict=True)
    lines += [f"{layer:>5}{v:>13.3f}{m:>15.3f}{c:>16.3f}" for layer, (v, m, c) in enumerate(rows, start=1)]
    return "\n".join(lines)
