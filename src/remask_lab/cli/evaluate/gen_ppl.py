"""`remask eval gen-ppl`: the perplexity of a model's responses under an external judge."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers.utils import logging as transformers_logging

from remask.cli.options import (
    add_engine_options,
    add_model_options,
    check_folder,
    engine_config,
    open_llm,
    sampling_option,
)
from remask.cli.parser import examples
from remask.errors import ConfigError, UnknownNameError
from remask_lab.arguments.common import check_least, compared_policies
from remask_lab.likelihood.judge import Judge
from remask_lab.likelihood.perplexity import RESAMPLES, Perplexity, cut_prompts, measure, read_texts
from remask_lab.records.record import Record, about, write_record

_DTYPES = ("auto", "float32", "bfloat16", "float16")


def add_parser(subjects: Any) -> None:
    """Add the subject and its options."""
    perplexity = subjects.add_parser(
        "gen-ppl",
        help="generative perplexity under an external judge",
        epilog=examples(
            "remask eval gen-ppl --model GSAI-ML/LLaDA-8B-Base --judge gpt2-large --prompts texts.txt",
            "remask eval gen-ppl --model bundled --judge JUDGE --prompts texts.txt --caches none,bicache",
        ),
    )
    perplexity.add_argument("--judge", required=True, metavar="MODEL", help="causal language model: folder or hub id")
    perplexity.add_argument(
        "--judge-dtype", default="auto", metavar="|".join(_DTYPES), help="dtype of the judge (default auto)"
    )
    perplexity.add_argument(
        "--prompts", required=True, metavar="FILE", help="one text a line, or JSONL of text or prompt"
    )
    perplexity.add_argument(
        "--prompt-tokens", type=int, default=128, metavar="N", help="cut prompts to N tokens (default 128)"
    )
    perplexity.add_argument("--requests", type=int, default=64, metavar="N", help="number of prompts (default 64)")
    perplexity.add_argument("--caches", default="none", help="policies, separated by commas (default none)")
    perplexity.add_argument("--cache-config", metavar="JSON", help="settings, as one object per policy")
    perplexity.add_argument("--sampling", metavar="JSON", help="sampling parameters; each request has its own seed")
    perplexity.add_argument("--seed", type=int, default=0, help="seed of the first request and of the intervals")
    perplexity.add_argument("--output", metavar="FILE", help="write every response and its score to FILE, as JSON")
    add_model_options(perplexity)
    add_engine_options(perplexity)
    perplexity.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Generate, score, print the table, and write the record where `--output` asks for it."""
    check_least(args, requests=1, prompt_tokens=1)
    if args.judge_dtype not in _DTYPES:
        raise UnknownNameError("--judge-dtype", args.judge_dtype, _DTYPES)
    check_folder("--output", args.output)
    sampling = sampling_option(args)
    if (seed := sampling.get("seed")) is not None:
        raise ConfigError(
            f"sampling: seed={seed} would be the same for every request; use --seed, from which the seeds count"
        )
    policies = compared_policies(args)
    if args.quiet:
        bars: Any = transformers_logging  # it has no types
        bars.disable_progress_bar()
    llm = open_llm(args, engine=engine_config(args))
    params = llm.params(sampling, prompt_tokens=args.prompt_tokens)
    prompts = cut_prompts(llm, read_texts(args.prompts), args.prompt_tokens, args.requests)
    judge = Judge(args.judge, args.judge_dtype, llm.model.device)
    rows = measure(llm, judge, prompts, policies, params, args.seed, progress=llm.progress)
    print(text(judge.name, rows))
    if args.output is not None:
        settings = {
            "judge": judge.name,
            "judge_dtype": judge.dtype,
            "prompts": args.prompts,
            "prompt_tokens": args.prompt_tokens,
            "requests": args.requests,
            "sampling": {name: value for name, value in asdict(params).items() if value is not None},
            "resamples": RESAMPLES,
        }
        write_record(args.output, Record("eval gen-ppl", about(llm, seed=args.seed, settings=settings), {"rows": rows}))
        print(f"\nSaved as {args.output}")
    return 0


def text(judge: str, rows: Sequence[Perplexity]) -> str:
    """The result as text."""
    lines = [
        f"Generative perplexity under {judge}, {len(rows[0].scores)} responses",
        "",
        f"{'cache':<28}{'perplexity':>12}{'95 % interval':>22}{'tokens':>9}{'empty':>7}",
    ]
    for row in rows:
        interval = f"{row.low:.2f} to {row.high:.2f}"
        lines.append(f"{row.cache:<28}{row.perplexity:>12.2f}{interval:>22}{row.tokens:>9}{row.empty:>7}")
    return "\n".join(lines)
