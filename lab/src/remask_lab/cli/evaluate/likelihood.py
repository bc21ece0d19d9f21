"""`remask eval likelihood`: log-likelihoods of given responses under a model, and multiple choice."""

import argparse
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.cli.options import model_settings, open_llm
from remask.loading import announce_download
from remask.machine.device import resolve_device
from remask_lab.arguments import check_least
from remask_lab.cli.evaluate import FIELDS
from remask_lab.likelihood.masked import MaskDraws, MaskLikelihoods
from remask_lab.likelihood.passes import Pair, encode_pair, encode_reply
from remask_lab.likelihood.scores import Question, check_kind, read_items, score_questions, score_responses
from remask_lab.records.jsonl import field_names, read_lines
from remask_lab.records.record import Record, about, write_record


def draws_of(args: argparse.Namespace) -> MaskDraws:
    """The values of `add_draw_options`. Raises `ConfigError` on values out of range."""
    return MaskDraws(args.mc_samples, args.mc_strata, args.seed, exact=not args.mc_no_exact)


def run(args: argparse.Namespace) -> int:
    """Score, print, and write the record to the file of `--output`. Returns 0.

    Raises `ConfigError` before the weights are read if the kind of model has no likelihoods.
    """
    check_least(args, limit=1, max_rows=1)
    draws = draws_of(args)
    lines = list(read_lines(args.prompts, field_names("--fields", args.fields, FIELDS), args.limit))
    names = ("dtype", "device", "quantization", "load_format", "hf_overrides", "tensor_parallel", "force")
    load_settings = {name: value for name, value in model_settings(args).items() if name in names}
    model = ModelSettings(args.model, reads=None, progress=args.progress, **load_settings)
    announce_download(model, resolve_device(args.device))
    check_kind(args.model, find_model(model).config.kind)
    llm = open_llm(args, reads="chat" if args.chat else "text")
    estimator = MaskLikelihoods(llm, draws, args.max_rows)

    def encode(prompt: str, response: str) -> Pair:
        pair = (encode_reply if args.chat else encode_pair)(llm, prompt, response)
        estimator.check(pair)
        return pair

    items = read_items(lines, encode)
    if isinstance(items[0], Question):
        data = score_questions(estimator, items, llm.session.progress)
    else:
        data = score_responses(estimator, items, llm.session.progress)
    print(text(data))
    if args.output is not None:
        settings = {"prompts": args.prompts, "lines": len(lines), "chat": args.chat, "draws": asdict(draws)}
        write_record(args.output, Record("eval likelihood", about(llm, seed=args.seed, settings=settings), data))
        print(f"\nSaved as {args.output}")
    return 0


def text(data: Mapping[str, Any]) -> str:
    """Accuracies with their 95 % intervals for multiple choice, else a table of log-likelihoods and their mean."""
    if "questions" in data:
        lines = [f"Multiple choice by likelihood, {len(data['questions'])} questions", ""]
        for name, title in (("accuracy", "as it is"), ("accuracy_norm", "a character")):
            low, high = data[f"{name}_interval"]
            lines.append(f"accuracy, {title:<12} {data[name]:7.1%} ({low:.1%} to {high:.1%})")
        return "\n".join(lines)
    rows = data["responses"]
    lines = [f"{'log-likelihood':>15}{'+-':>9}{'tokens':>8}  response"]
    lines += [
        f"{row['log_likelihood']:>15.3f}{row['standard_error']:>9.3f}{row['tokens']:>8}  {row['text'][:60]!r}"
        for row in rows
    ]
    mean, error = data["log_likelihood_per_token"], data["standard_error"]
    lines.append(
        f"\n{mean:.4f} +- {error:.4f} nats a token, {data['tokens']} tokens of {len(rows)} responses (lower bound)"
    )
    return "\n".join(lines)
