"""`remask analyze drift`: what changes from pass to pass in a model without a cache."""

import argparse
from typing import Any

from remask.analysis.drift import measure_drift
from remask.analysis.report import DriftReport
from remask.cli.lines import Defaults, as_work, read_work
from remask.cli.options import add_model_options, check_folder, open_llm, sampling_option
from remask.engine.config import EngineConfig
from remask.evals.record import Record, about, write_record
from remask.llm import LLM, Work
from remask.plots.drift import plot_drift


def add_parser(subjects: Any) -> None:
    """Register the subject."""
    drift = subjects.add_parser("drift", help="K/V drift, attention mass, entropy and token changes by region and pass")
    source = drift.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", metavar="TEXT", help="one prompt, as plain text")
    source.add_argument("--input", metavar="FILE", help="JSONL of requests, as 'generate' takes it, without a cache")
    drift.add_argument("--sampling", metavar="JSON", help="sampling parameters; a line's own come on top")
    drift.add_argument("--output", metavar="FILE", help="where the numbers go, as JSON")
    drift.add_argument("--plots", metavar="FOLDER", help="where pictures go; made if it is not there")
    drift.add_argument("--max-model-len", type=int, help="longest prompt plus response, in tokens")
    add_model_options(drift)
    drift.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Measure, print the table, and save what was asked for."""
    check_folder("--output", args.output)
    check_folder("--plots", args.plots)
    defaults = Defaults(sampling_option(args), "none", {})
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=args.max_model_len, store_budget_tokens=0))
    work = _work(llm, args, defaults)
    report = measure_drift(llm, work, progress=llm.progress)
    print(text(report))
    if args.output is not None:
        settings = {"requests": len(work), "sampling": defaults.sampling}
        write_record(args.output, Record("analyze drift", about(llm, settings=settings), report))
        print(f"\nSaved as {args.output}")
    if args.plots is not None:
        for path in plot_drift(report, args.plots):
            print(f"Picture: {path}")
    return 0


def _work(llm: LLM, args: argparse.Namespace, defaults: Defaults) -> list[Work]:
    if args.prompt is not None:
        return [as_work(llm, {"prompt": args.prompt}, "0", defaults)]
    return read_work(llm, args.input, defaults)


def text(report: DriftReport) -> str:
    """The means by region and the correlations, for people."""
    subject = report.subject
    lines = [
        f"{subject.model}: {subject.family}, {subject.layers} layers, {subject.dtype}; {len(subject.passes)} requests, "
        f"{sum(subject.passes)} passes, blocks of {subject.block_length}",
        "",
        "             drift, cosine distance a pass       within a block",
        f"{'region':<12}{'K':>12}{'V':>12}{'K':>12}{'V':>12}{'attention %':>13}",
    ]
    for name, means in report.regions.items():
        drifts = (means.k_drift, means.v_drift, means.k_within, means.v_within)
        lines.append(f"{name:<12}" + "".join(f"{value:>12.2e}" for value in drifts) + f"{100 * means.attention:>13.1f}")
    lines += [
        "",
        f"tokens changed a pass: {100 * sum(report.change_rate) / len(report.change_rate):.2f} % of the response",
        f"entropy: {report.entropy[0]:.2f} nats in the first pass, {report.entropy[-1]:.2f} in the last",
        f"correlation of K and V drift: {report.kv_correlation:.2f}; between layers: K {report.k_layers_mean:.2f}, "
        f"V {report.v_layers_mean:.2f}",
    ]
    return "\n".join(lines)
