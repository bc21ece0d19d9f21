"""Measures the depths that the BiCache paper's rule gives a model, by how similar K and V of a prefix stay.

    python -m remask_lab papers profile --model MODEL [--output FILE] [--plot FILE]

The table is what `python -m remask_lab papers bicache-4 --similarities FILE` reads; an engine reads none of it.
"""

import argparse
from collections.abc import Sequence

from remask.cli.logs import DEFAULTS
from remask.cli.options import check_folder
from remask.cli.parser import Parser
from remask.cli.shared_options import add_model_options
from remask_lab.arguments import open_without_pool
from remask_lab.similarity.options import add_rule_options, add_similarity_options, add_system_prompt_option, rule_of
from remask_lab.similarity.plot import depth_picture
from remask_lab.similarity.profile import profile
from remask_lab.similarity.prompts import default_prompts, read_prompts, under_system_prompt
from remask_lab.similarity.rule import ProfileSettings
from remask_lab.similarity.table import SimilarityTable

_DEFAULTS = ProfileSettings()
NAMES = ("tau", "samples", "max_samples", "official", "joint", "needed_layers", "canvas", "response", "seed")
"""Options that are settings of the same names."""


def run(argv: Sequence[str]) -> None:
    """Measure, print the table, and write the files that were asked for. Raises `RemaskError` on what cannot be."""
    args = _parser().parse_args(argv)
    args.banner, args.progress = None, not args.quiet
    ratios = None if args.ratios is None else tuple(args.ratios)
    settings = ProfileSettings(rule=rule_of(args), ratios=ratios, **{name: getattr(args, name) for name in NAMES})
    draw = None if args.plot is None else depth_picture(args.plot)
    check_folder("--output", args.output)
    llm = open_without_pool(args, "tokens" if args.system_prompt is None else "text")
    prompts = default_prompts(llm.loaded) if args.prompts is None else read_prompts(args.prompts, llm.loaded)
    if args.system_prompt is not None:
        prompts = under_system_prompt(args.system_prompt, prompts, llm.loaded)
    table = profile(llm.session, prompts, settings, progress=llm.session.progress)
    print(report(table))
    if args.output is not None:
        options = {name: getattr(args, name) for name in (*NAMES, "ratios") if name != "seed"}
        table.save(args.output, llm, options | {"rule": str(settings.rule)}, args.seed)
        print(f"\nSaved as {args.output}")
    if draw is not None:
        draw(table)
        print(f"Picture: {args.plot}")


def _parser() -> argparse.ArgumentParser:
    """The parser of the command, with the log options at their defaults."""
    parser = Parser(
        prog="python -m remask_lab papers profile",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prompts", metavar="FILE", help="JSONL of messages, prompt or prompt_token_ids a line")
    add_system_prompt_option(parser)
    parser.add_argument("--output", metavar="FILE", help="write the table to this file, as a record")
    parser.add_argument("--plot", metavar="FILE", help="picture of the table, PNG or SVG")
    group = parser.add_argument_group("measurement")
    group.add_argument(
        "--tau", type=float, default=_DEFAULTS.tau, help=f"similarity to exceed (default {_DEFAULTS.tau})"
    )
    group.add_argument("--ratios", type=int, nargs="+", metavar="R", help="prefix ratios in percent")
    group.add_argument(
        "--samples", type=int, metavar="N", help="requests per ratio (default: until the table is stable)"
    )
    group.add_argument(
        "--max-samples",
        type=int,
        default=_DEFAULTS.max_samples,
        metavar="N",
        help=f"most requests per ratio (default {_DEFAULTS.max_samples})",
    )
    add_similarity_options(group)
    group.add_argument(
        "--needed-layers",
        action="store_true",
        help="compute no layer that cannot change the depths at this tau: the same depths sooner, none at a lower tau",
    )
    group.add_argument("--canvas", type=int, metavar="N", help="tokens of prompt and masks together")
    group.add_argument("--response", type=int, metavar="N", help="masks at the end of the canvas")
    group.add_argument("--seed", type=int, default=_DEFAULTS.seed, help="seed of the choice of prompts (default 0)")
    add_rule_options(parser)
    add_model_options(parser, depths=False)
    parser.set_defaults(**DEFAULTS)
    return parser


def report(table: SimilarityTable) -> str:
    """Return the table as text: for each ratio the depth of a lookup, and the mean of the depths of single requests."""
    lookup = table.lookup
    lines = [
        f"{table.model}: {table.layers} layers, tau {table.tau:g}, {table.definition} similarity, "
        f"{table.samples} requests per ratio",
        f"({table.source})",
        f"rule: {table.rule}",
        "",
        "ratio %  depth" + ("  mean per request" if table.request_depths else ""),
    ]
    for ratio in sorted(table.limits):
        mean = f"  {table.request_depths[ratio]:>16.2f}" if table.request_depths else ""
        lines.append(f"{ratio:>7}  {lookup.depth(ratio, 100):>5}{mean}")
    if table.growth:
        steps = ", ".join(f"{step.distance:.2f} at {step.samples}" for step in table.growth)
        lines += ["", f"Mean change of depth as N grew: {steps}"]
    return "\n".join(lines)
