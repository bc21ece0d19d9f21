"""`remask profile`: measure how deep a shared prefix may be reused, and keep the result."""

import argparse
from collections.abc import Callable
from typing import TypeAlias

from remask.checks.plugins import Plugin, Registry
from remask.cli.options import add_model_options, check_folder, open_llm
from remask.depth.find import DepthTable
from remask.depth.profile import ProfileSettings, profile
from remask.depth.prompts import default_prompts, read_prompts, under_system_prompt
from remask.depth.rule import AT_BOUNDARY, OVER_LAYERS, OVER_REQUESTS, DepthRule
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, UnknownNameError

_DEFAULTS = ProfileSettings()

Drawing: TypeAlias = Callable[[str], Callable[[DepthTable], None]]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    parser.add_argument("--prompts", metavar="FILE", help="JSONL of messages, prompt or prompt_token_ids a line")
    add_system_prompt_option(parser)
    parser.add_argument("--output", metavar="FILE", help="write the table to this file, as JSON")
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
    group.add_argument("--canvas", type=int, metavar="N", help="tokens of prompt and masks together")
    group.add_argument("--response", type=int, metavar="N", help="masks at the end of the canvas")
    group.add_argument("--seed", type=int, default=_DEFAULTS.seed, help="seed of the choice of prompts (default 0)")
    add_rule_options(parser)
    add_model_options(parser)


def add_system_prompt_option(parser: argparse.ArgumentParser) -> None:
    """Add `--system-prompt`."""
    parser.add_argument(
        "--system-prompt",
        metavar="FILE",
        help="text that is the prefix of every request, before diverse prompts, as the paper profiles (default: each "
        "conversation's own head)",
    )


def add_similarity_options(group: argparse._ActionsContainer) -> None:
    """Add the definitions of similarity."""
    either = group.add_mutually_exclusive_group()
    either.add_argument("--official", action="store_true", help="the authors' profiler: no masks, cosine per token")
    either.add_argument(
        "--joint",
        action="store_true",
        help="one cosine over K and V as one vector, as the paper's equation 3 reads (default: the mean of two)",
    )


def add_rule_options(parser: argparse.ArgumentParser) -> None:
    """Add the three parts of a depth table's rule."""
    rule = DepthRule()
    group = parser.add_argument_group("how depths follow from similarities")
    group.add_argument(
        "--over-layers",
        choices=OVER_LAYERS,
        default=rule.layers,
        help=f"layers that must exceed tau: all up to the depth, or the last alone (default {rule.layers})",
    )
    group.add_argument(
        "--over-requests",
        choices=OVER_REQUESTS,
        default=rule.requests,
        help=f"the least depth of the requests, the mean of their depths, or that of their mean similarities (default "
        f"{rule.requests})",
    )
    group.add_argument(
        "--at-boundary",
        choices=AT_BOUNDARY,
        default=rule.boundary,
        help=f"safe: the layer above the depth must exceed tau too (default {rule.boundary})",
    )


def rule_of(args: argparse.Namespace) -> DepthRule:
    """The rule that these options name."""
    return DepthRule(args.over_layers, args.over_requests, args.at_boundary)


def run(args: argparse.Namespace) -> int:
    """Profile the model, print the table, and write the files that were asked for."""
    settings = ProfileSettings(
        tau=args.tau,
        rule=rule_of(args),
        ratios=None if args.ratios is None else tuple(args.ratios),
        samples=args.samples,
        max_samples=args.max_samples,
        official=args.official,
        joint=args.joint,
        canvas=args.canvas,
        response=args.response,
        seed=args.seed,
    )
    draw = None if args.plot is None else _picture(args.plot)
    check_folder("--output", args.output)
    # Profiling allocates its own K/V memory, so the engine's is made as small as possible.
    llm = open_llm(args, engine=EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0))
    prompts = default_prompts(llm.loaded) if args.prompts is None else read_prompts(args.prompts, llm.loaded)
    if args.system_prompt is not None:
        prompts = under_system_prompt(args.system_prompt, prompts, llm.loaded)
    table = profile(llm, prompts, settings, progress=llm.progress)
    print(report(table))
    if args.output is not None:
        table.save(args.output)
        print(f"\nSaved as {args.output}; use it with --depth-table {args.output}")
    else:
        print("\nNot saved; --output FILE keeps it.")
    if draw is not None:
        draw(table)
        print(f"Picture: {args.plot}")
    return 0


def _checked(plugin: Plugin, value: object) -> Drawing:
    if not callable(value):
        raise plugin.error(f"it provides an object of type {type(value).__name__}", "a function of a file's path")
    return value


DRAWINGS: Registry[Drawing] = Registry("drawing", "remask.drawings", {}, _checked)
"""What draws into a file, by name. The laboratory registers it by an entry point."""


def _picture(path: str) -> Callable[[DepthTable], None]:
    """Return a function that draws a table into the file `path`."""
    try:
        return DRAWINGS.get("depth-table")(path)
    except UnknownNameError as error:
        raise ConfigError(
            "--plot: no installed package draws depth tables; install remask again, or leave --plot out"
        ) from error


def report(table: DepthTable) -> str:
    """Return the table as text: for each ratio the depth of a lookup, and the mean of the depths of single requests."""
    lookup = table.lookup
    lines = [
        f"{table.model}: {table.layers} layers, tau {table.tau:g}, {table.definition} similarity, "
        f"{table.samples} requests per ratio",
        f"({table.source})",
        f"rule: {'not published' if table.rule is None else table.rule}",
        "",
        "ratio %  depth  mean per request",
    ]
    lines += [f"{r:>7}  {lookup.depth(r, 100):>5}  {b:>16.2f}" for r, b in sorted(table.request_depths.items())]
    if table.growth:
        steps = ", ".join(f"{step.distance:.2f} at {step.samples}" for step in table.growth)
        lines += ["", f"Mean change of depth as N grew: {steps}"]
    return "\n".join(lines)
