"""`remask eval gen-ppl`: the perplexity of a model's responses under an external judge."""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from transformers.utils import logging as transformers_logging

from remask.cli.options import engine_config, open_llm, sampling_option
from remask.errors import ConfigError
from remask.request.sampling_params import merge_sampling
from remask_lab.arguments import check_least, compared_policies
from remask_lab.likelihood.perplexity import RESAMPLES, Judge, Perplexity, cut_prompts, measure, read_texts
from remask_lab.records.record import Record, about, write_record


def run(args: argparse.Namespace) -> int:
    """Generate, score, print the table, and write the record where `--output` asks for it."""
    check_least(args, requests=1, prompt_tokens=1)
    sampling = sampling_option(args)
    if (seed := sampling.get("seed")) is not None:
        raise ConfigError(
            f"sampling: seed={seed} would be the same for every request; use --seed, from which the seeds count"
        )
    policies = compared_policies(args)
    if not args.progress:
        bars: Any = transformers_logging  # it has no types
        bars.disable_progress_bar()
    llm = open_llm(args, engine=engine_config(args), reads="text")
    params = llm.session.params(sampling, prompt_tokens=args.prompt_tokens)
    prompts = cut_prompts(llm, read_texts(args.prompts), args.prompt_tokens, args.requests)
    judge = Judge(args.judge, args.judge_dtype, llm.model.device)
    rows = measure(llm, judge, prompts, policies, params, args.seed, progress=llm.session.progress)
    print(text(judge.name, rows))
    if args.output is not None:
        settings = {
            "judge": judge.name,
            "judge_dtype": judge.dtype,
            "prompts": args.prompts,
            "prompt_tokens": args.prompt_tokens,
            "requests": args.requests,
            "sampling": merge_sampling(asdict(params)),
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
