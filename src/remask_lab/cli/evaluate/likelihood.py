"""`remask eval likelihood`: log-likelihoods of given responses under a model, and multiple choice."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from remask.cli.options import add_model_options, check_folder, open_llm
from remask.cli.parser import examples
from remask.request.uniform_presets import ANCESTRAL
from remask_lab.arguments.common import check_least
from remask_lab.likelihood.choices import Question, read_items, score_questions, score_responses
from remask_lab.likelihood.draws import StratifiedDraws
from remask_lab.likelihood.estimator import open_estimator
from remask_lab.likelihood.noised import SCHEDULES
from remask_lab.likelihood.pairs import Pair, encode_pair, encode_reply
from remask_lab.likelihood.uncached_pass import MAX_ROWS
from remask_lab.records.jsonl import field_names, read_lines
from remask_lab.records.record import Record, about, write_record

FIELDS = ("prompt", "response", "choices", "answer")


def add_parser(subjects: Any) -> None:
    """Add the subject and its options."""
    parser = subjects.add_parser(
        "likelihood",
        help="log-likelihoods of responses, and multiple choice by them",
        epilog=examples(
            "remask eval likelihood --model GSAI-ML/LLaDA-8B-Base --prompts pairs.jsonl --output likelihood.json",
            "remask eval likelihood --model GSAI-ML/LLaDA-8B-Instruct --prompts questions.jsonl --chat --mc-samples 32",
        ),
    )
    parser.add_argument(
        "--prompts",
        required=True,
        metavar="FILE",
        help="JSONL of prompt and response, or of prompt, choices and answer for multiple choice",
    )
    parser.add_argument("--fields", metavar="FIELD=NAME,...", help=f"names in FILE of {', '.join(FIELDS)}")
    parser.add_argument("--limit", type=int, metavar="N", help="the first N lines only")
    parser.add_argument("--chat", action="store_true", help="the prompt is a user's turn, the response its answer")
    add_draw_options(parser)
    parser.add_argument(
        "--max-rows", type=int, default=MAX_ROWS, metavar="N", help="most rows of a pass (default 4096)"
    )
    parser.add_argument("--output", metavar="FILE", help="write every response and its likelihood to FILE, as JSON")
    add_model_options(parser)
    parser.set_defaults(run=run)


def add_draw_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of how noise is drawn."""
    parser.add_argument(
        "--mc-samples",
        type=int,
        default=128,
        metavar="N",
        help="draws for each response: sets of masks, or noise of a uniform model (default 128)",
    )
    parser.add_argument(
        "--mc-strata",
        type=int,
        default=8,
        metavar="N",
        help="spread the levels of noise of N draws evenly (default 8); 1: independent draws",
    )
    parser.add_argument(
        "--mc-no-exact",
        action="store_true",
        help="masked models: draw sets of masks even where all of them could be computed",
    )
    parser.add_argument(
        "--mc-levels", type=int, metavar="N", help="uniform models: steps of the chain of noise (default 1000)"
    )
    parser.add_argument(
        "--mc-schedule", choices=SCHEDULES, help="uniform models: how noise falls along the chain (default cosine)"
    )
    parser.add_argument(
        "--mc-sampler",
        choices=ANCESTRAL,
        help="uniform models: the sampler whose reverse step the bound is of (default ancestral)",
    )
    parser.add_argument(
        "--canvas-length",
        type=int,
        metavar="N",
        help="uniform models: positions of the canvas, noise behind the response (default: none behind it)",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default 0)")


def draws_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options of `add_draw_options` as fields of draws, None where one is left to the kind of model.

    Raises `ConfigError` on values that no kind can use.
    """
    StratifiedDraws(args.mc_samples, args.mc_strata, args.seed)  # a wrong value fails before a model is loaded
    return {
        "samples": args.mc_samples,
        "strata": args.mc_strata,
        "seed": args.seed,
        "exact": False if args.mc_no_exact else None,
        "levels": args.mc_levels,
        "schedule": args.mc_schedule,
        "sampler": args.mc_sampler,
        "canvas_length": args.canvas_length,
    }


def run(args: argparse.Namespace) -> int:
    """Score, print, and write the record where `--output` asks for it."""
    check_least(args, limit=1, max_rows=1)
    check_folder("--output", args.output)
    draws = draws_of(args)
    lines = list(read_lines(args.prompts, field_names("--fields", args.fields, FIELDS), args.limit))
    llm = open_llm(args)
    estimator = open_estimator(llm, draws, args.max_rows)

    def encode(prompt: str, response: str) -> Pair:
        pair = (encode_reply if args.chat else encode_pair)(llm, prompt, response)
        estimator.check(pair)
        return pair

    items = read_items(lines, encode)
    if isinstance(items[0], Question):
        data = score_questions(estimator, items, llm.progress)
    else:
        data = score_responses(estimator, items, llm.progress)
    print(text(data))
    if args.output is not None:
        settings = {"prompts": args.prompts, "lines": len(lines), "chat": args.chat, "draws": asdict(estimator.draws)}
        write_record(args.output, Record("eval likelihood", about(llm, seed=args.seed, settings=settings), data))
        print(f"\nSaved as {args.output}")
    return 0


def text(data: Mapping[str, Any]) -> str:
    """The result as text."""
    if "questions" in data:
        shown = [f"Multiple choice by likelihood, {len(data['questions'])} questions", ""]
        for name, title in (("accuracy", "as it is"), ("accuracy_norm", "a character")):
            low, high = data[f"{name}_interval"]
            shown.append(f"accuracy, {title:<12} {data[name]:7.1%} ({low:.1%} to {high:.1%})")
        return "\n".join(shown)
    rows = data["responses"]
    shown = [f"{'log-likelihood':>15}{'+-':>9}{'tokens':>8}  response"]
    shown += [
        f"{row['log_likelihood']:>15.3f}{row['standard_error']:>9.3f}{row['tokens']:>8}  {row['text'][:60]!r}"
        for row in rows
    ]
    mean, error = data["log_likelihood_per_token"], data["standard_error"]
    shown.append(
        f"\n{mean:.4f} +- {error:.4f} nats a token, {data['tokens']} tokens of {len(rows)} responses (lower bound)"
    )
    return "\n".join(shown)
