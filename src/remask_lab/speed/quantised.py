"""Quantized weights beside those of the model's dtype: bytes, time of a pass, and answers of the bundled model.

    python -m remask_lab.speed.quantised [--model llada-100m] [--kinds int8,int4] [--rows 1,32,256] [--questions 40]

Passes over random canvases take turns; their time is that of the computing thread's processor, with one thread. The
bundled model answers questions of its task under `none` and under `block-dual`: how many are right, and what share of
the tokens is that of the unquantised model.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from remask import LLM, EngineConfig
from remask.checkpoint.bundled import BUNDLED_TARIFF
from remask.engine.uncached import pack_uncached
from remask.model.pool import Pool
from remask.model.quantization_names import QUANTIZATIONS
from remask.plan.canvas import Canvas
from remask.tasks import tariff
from remask_lab.arguments.common import check_least, separated
from remask_lab.speed.command import add_model_options, command_parser, print_report, run_command

CACHES = ("none", "block-dual")


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--kinds", default="int8,int4", help=f"of {', '.join(QUANTIZATIONS)}, separated by commas")
    parser.add_argument("--rows", default="1,32,256", help="rows of a pass, separated by commas")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--questions", type=int, default=40, help="of the bundled model's task; 0 asks none")
    add_model_options(parser, "llada-100m")
    args = parser.parse_args()
    check_least(args, rounds=1, questions=0)
    kinds = [None, *separated(args.kinds)]
    models = [open_model(args.model, args, kind, "dummy") for kind in kinds]
    whole = models[0].loaded.weights.nbytes
    rows: list[dict[str, Any]] = [
        {
            "quantization": kind,
            "weight_bytes": llm.loaded.weights.nbytes,
            "share_of_bytes": llm.loaded.weights.nbytes / whole,
            "times_as_fast": {},
        }
        for kind, llm in zip(kinds, models, strict=True)
    ]
    for count in map(int, separated(args.rows)):
        seconds = passes(models, count, args.rounds)
        for row, own in zip(rows, seconds, strict=True):
            row["times_as_fast"][count] = seconds[0] / own
    answers = answered(args, kinds) if args.questions else []
    shape = ("model", "dtype", "rounds", "questions")
    print_report(models[0], **{name: getattr(args, name) for name in shape}, results=rows, bundled=answers)


def open_model(name: str, args: argparse.Namespace, kind: str | None, load_format: str = "auto") -> LLM:
    """A model whose matrices are of `kind`, on one thread."""
    limits = EngineConfig(max_num_seqs=8, max_model_len=None if load_format == "auto" else 1)
    return LLM(
        name,
        load_format=load_format,
        dtype=args.dtype,
        device=args.device,
        threads=1,
        engine=limits,
        quantization=kind,  # type: ignore[arg-type]
    )


def passes(models: Sequence[LLM], count: int, rounds: int) -> list[float]:
    """Seconds of processor time of a pass over `count` rows, the median of `rounds`, of each model."""
    rng, times = np.random.default_rng(0), [list[float]() for _ in models]
    canvas = Canvas(rng.integers(0, models[0].loaded.config.vocab, count).tolist(), (), 0)
    pools = [Pool(llm.model.config, count, 1, llm.model.dtype, llm.model.device) for llm in models]
    for number in range(rounds + 1):
        for llm, pool, own in zip(models, pools, times, strict=True):
            batch = pack_uncached(llm.model, [canvas])
            start = time.thread_time()
            with torch.inference_mode():
                llm.model.forward(batch, pool)
            if number:  # the first pass of a shape makes kernels
                own.append(time.thread_time() - start)
    return [statistics.median(own) for own in times]


def answered(args: argparse.Namespace, kinds: Sequence[str | None]) -> list[dict[str, object]]:
    """Right answers of the bundled model to questions of its task, and the share of tokens that stay the same."""
    work = tariff.make_workload(args.questions, min(4, args.questions), 0)
    chats = [tariff.messages(each.prompt, each.question) for each in work]
    right = [tariff.reference_response(each.prompt, each.question) for each in work]
    rows: list[dict[str, object]] = []
    before: dict[str, list[tuple[int, ...]]] = {}
    for kind in kinds:
        llm = open_model(BUNDLED_TARIFF, args, kind)
        for cache in CACHES:
            outputs = llm.generate(chats, cache=cache)
            tokens = [output.token_ids for output in outputs]
            usual = before.setdefault(cache, tokens)
            same = [one == other for a, b in zip(usual, tokens, strict=True) for one, other in zip(a, b, strict=False)]
            pairs = zip(outputs, right, strict=True)
            correct = sum(tariff.is_correct(output.text or "", answer) for output, answer in pairs)
            found = {"right": correct, "of": len(work), "same_tokens": sum(same) / len(same)}
            rows.append({"quantization": kind, "cache": cache, **found})
    return rows


if __name__ == "__main__":
    sys.exit(run_command(main))
