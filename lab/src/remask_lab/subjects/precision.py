"""`remask analyze precision`: how many tokens other dtypes, batch sizes, kernels and exact caches change.

All of them compute what is mathematically the same, so only rounding differs (thesis, appendix D).
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
from tqdm import tqdm

from remask.checks import ModelKind
from remask.cli.options import object_option, open_llm
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.llm import LLM
from remask.model.attention_torch import TorchAttention
from remask_lab.asked import Outcome, check_least, separated
from remask_lab.bench.workload import Workload, token_agreement, usual_workload
from remask_lab.drawing import K_COLOR, V_COLOR, label, legend_below, new_panels
from remask_lab.observe import replace_attention
from remask_lab.records.markdown import text_table
from remask_lab.records.record import about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

USUAL, OTHER = "the model's attention", "softmax step by step"  # the latter in place of PyTorch's fused one
# Policies that compute the same as `none` but for rounding, by kind: the thesis' prefix cache, and final K/V.
EXACT: dict[ModelKind, str] = {"uniform": "block-prefix", "block_causal": "exact"}

Tokens: TypeAlias = tuple[tuple[int, ...], ...]


def measure(args: argparse.Namespace) -> Outcome:
    """Run the model's usual workload under every arithmetic."""
    check_least(args, requests=1, batch=1, prompt_tokens=1)
    dtypes = separated(args.dtypes)
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
    rows = measure_precision(models, workload, args.batch, progress=first.session.progress)
    settings = {"requests": args.requests, "batch": args.batch, "dtypes": dtypes, "sampling": sampling, **random}
    facts = about(first, seed=args.seed, settings=settings)
    return Outcome(facts, {"rows": [asdict(row) for row in rows]}, text(rows), reading(rows), lambda: figures(rows))


@dataclass(frozen=True, slots=True)
class Arithmetic:
    """A way to compute what is mathematically the same."""

    dtype: str
    concurrency: int
    cache: str
    attention: str

    def __str__(self) -> str:
        parts = [self.dtype, f"batch {self.concurrency}"]
        return ", ".join(parts + [word for word in (self.cache, self.attention) if word not in ("none", USUAL)])


@dataclass(frozen=True, slots=True)
class Divergence:
    """How the responses of `arithmetic` differ from those of `reference`.

    `tokens` and `responses` are the shares that differ; `onset` is the mean share of a response that stands before the
    first difference, over the responses that differ, NaN where none does. `accuracy` is None without answers.
    """

    arithmetic: Arithmetic
    reference: Arithmetic
    tokens: float
    responses: float
    onset: float
    accuracy: float | None


def arithmetics(llm: LLM, batch: int) -> list[Arithmetic]:
    """Those that `llm` can run: one request at a time, then `batch`, another kernel, and a cache that is exact."""
    dtype, kind = str(llm.model.dtype).removeprefix("torch."), llm.loaded.config.kind
    first = Arithmetic(dtype, 1, "none", USUAL)
    found = [first, replace(first, concurrency=batch)]
    # Where scores are capped or there is a sink, softmax is taken step by step in any case.
    if llm.model.config.score_cap is None and not llm.model.config.sink:
        found.append(replace(first, attention=OTHER))
    # Without structured attention clean rows see noise, and the prefix cache is an approximation.
    if kind in EXACT and llm.model.config.structured_attention:
        found.append(replace(first, cache=EXACT[kind]))
    return found


def run_arithmetic(llm: LLM, arithmetic: Arithmetic, workload: Workload) -> tuple[Tokens, float | None]:
    """The responses' tokens, in the workload's order, and the share of right answers."""
    engine = llm.session.new_engine(replace(llm.session.engine_config, max_num_seqs=arithmetic.concurrency))
    if arithmetic.attention == OTHER:
        replace_attention(engine, TorchAttention(fused=False))
    policy = llm.session.policy(arithmetic.cache)
    work = [task.request.with_policy(policy) for task in workload.tasks]
    outputs = {output.id: output for output in llm.session.run(work, engine=engine, progress=False)}
    verdicts = [task.correct(outputs[task.request.id].text) for task in workload.tasks]
    right = [verdict for verdict in verdicts if verdict is not None]
    tokens = tuple(outputs[task.request.id].token_ids for task in workload.tasks)
    return tokens, sum(right) / len(right) if right else None


def measure_precision(
    models: Sequence[LLM], workload: Workload, batch: int, progress: bool = False
) -> list[Divergence]:
    """Run `workload` under every arithmetic of `models`, which are one model in several dtypes.

    Each arithmetic is compared with the first of its own dtype, and those first ones with the first of all. Raises
    `ConfigError` where nothing differs or a request cannot run.
    """
    if batch < 2:
        raise ConfigError(f"a batch of {batch} is no batch: at least 2 requests at a time are compared with one")
    if len(workload.tasks) < batch:
        raise ConfigError(f"{len(workload.tasks)} requests make no batch of {batch}; ask for as many at least")
    jobs = [(llm, arithmetic) for llm in models for arithmetic in arithmetics(llm, batch)]
    for llm, arithmetic in jobs:
        for task in workload.tasks:
            llm.engine.check(task.request.with_policy(llm.session.policy(arithmetic.cache)))
    found: list[Divergence] = []
    seen: dict[str, tuple[Arithmetic, Tokens]] = {}  # the first of each dtype
    for llm, arithmetic in tqdm(jobs, desc="precision", unit="run", disable=not progress):
        tokens, accuracy = run_arithmetic(llm, arithmetic, workload)
        reference, expected = seen.get(arithmetic.dtype) or next(iter(seen.values()), (arithmetic, tokens))
        seen.setdefault(arithmetic.dtype, (arithmetic, tokens))
        found.append(_divergence(arithmetic, reference, tokens, expected, accuracy))
    return found


def _divergence(
    arithmetic: Arithmetic, reference: Arithmetic, tokens: Tokens, expected: Tokens, accuracy: float | None
) -> Divergence:
    pairs = list(zip(tokens, expected, strict=True))
    # A response that ends earlier differs from where it ends.
    onsets = [
        next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
        / max(len(ours), len(theirs))
        for ours, theirs in pairs
        if ours != theirs
    ]
    return Divergence(
        arithmetic,
        reference,
        tokens=1 - float(np.mean([token_agreement(*pair) for pair in pairs])),
        responses=len(onsets) / len(pairs),
        onset=float(np.mean(onsets)) if onsets else float("nan"),
        accuracy=accuracy,
    )


def reading(rows: Sequence[Divergence]) -> str:
    """The comparison in a paragraph."""
    others = [row for row in rows if row.arithmetic != row.reference]
    sentences = [
        f"{row.arithmetic} changes {100 * row.tokens:.2f} % of tokens, in {100 * row.responses:.1f} % of responses, "
        f"against {row.reference}, on average from {100 * row.onset:.0f} % of a response on"
        for row in others
        if row.tokens
    ]
    same = [f"{row.arithmetic} (as {row.reference})" for row in others if not row.tokens]
    if same:
        sentences.append(f"not a token changes under {'; '.join(same)}")
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    if accuracies:
        sentences.append(f"accuracy lies between {100 * min(accuracies):.1f} % and {100 * max(accuracies):.1f} %")
    return "".join(f"{sentence[0].upper()}{sentence[1:]}. " for sentence in sentences).strip()


def text(rows: Sequence[Divergence]) -> str:
    """The rows for people."""
    return text_table(
        rows,
        {
            "": lambda row: str(row.arithmetic),
            "tokens %": lambda row: f"{100 * row.tokens:.2f}",
            "responses %": lambda row: f"{100 * row.responses:.1f}",
            "accuracy %": lambda row: "-" if row.accuracy is None else f"{100 * row.accuracy:.1f}",
            "compared with": lambda row: "" if row.arithmetic == row.reference else str(row.reference),
        },
    )


def figures(rows: Sequence[Divergence]) -> dict[str, Figure]:
    """The shares of tokens and of responses that differ, by arithmetic."""
    shares = {str(row.arithmetic): (row.tokens, row.responses) for row in rows if row.arithmetic != row.reference}
    figure, (axes,) = new_panels("what other arithmetic changes", 1, height=1.6 + 0.55 * len(shares), width=8.5)
    places = np.arange(len(shares))
    for column, (name, color) in enumerate((("tokens", V_COLOR), ("responses", K_COLOR))):
        values = [100 * pair[column] for pair in shares.values()]
        bars = axes.barh(places + (column - 0.5) * 0.38, values, 0.34, color=color, label=name)
        axes.bar_label(bars, fmt="%.2f", padding=3, fontsize="small")
    axes.set_yticks(places, list(shares))
    axes.invert_yaxis()
    axes.set_xlim(0, max(1.0, *(115 * value for pair in shares.values() for value in pair)))
    label(
        axes,
        x="share that differs (%), from one request at a time in the same dtype, or from the first dtype",
        grid="x",
    )
    legend_below(figure, 2, axes, "outside lower center", "medium")
    return {"precision": figure}
