"""How many tokens change where only rounding does: other dtypes, batch sizes, kernels, and caches that are exact."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from tqdm import tqdm

from remask.core.kinds import ModelKind
from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.llm import LLM
from remask.models.capped import CappedAttention
from remask.models.transformer import Transformer
from remask_lab.bench.workload import Workload, token_agreement

USUAL, OTHER = "the model's attention", "softmax step by step"  # the latter in place of PyTorch's fused one
# Policies that compute the same as `none` but for rounding, by kind: the thesis' prefix cache, and final K/V.
EXACT: dict[ModelKind, str] = {"uniform": "block-prefix", "block_causal": "exact"}

Tokens: TypeAlias = tuple[tuple[int, ...], ...]


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
    if kind in EXACT:
        found.append(replace(first, cache=EXACT[kind]))
    return found


def run_arithmetic(llm: LLM, arithmetic: Arithmetic, workload: Workload) -> tuple[Tokens, float | None]:
    """The responses' tokens, in the workload's order, and the share of right answers."""
    attention = CappedAttention(None) if arithmetic.attention == OTHER else None
    model = Transformer(llm.model.config, llm.model.weights, attention)
    config = replace(llm.engine_config, max_num_seqs=arithmetic.concurrency)
    decode = None if llm.tokenizer is None else llm.tokenizer.decode
    engine = Engine(model, config, llm.loaded.fingerprint, decode)
    policy = llm.policy(arithmetic.cache)
    work = [task.request.with_policy(policy) for task in workload.tasks]
    outputs = {output.id: output for output in llm.run(work, engine=engine, progress=False)}
    verdicts = [task.correct(outputs[task.request.id].text) for task in workload.tasks]
    right = [verdict for verdict in verdicts if verdict is not None]
    tokens = tuple(outputs[task.request.id].token_ids for task in workload.tasks)
    return tokens, sum(right) / len(right) if right else None


def measure_precision(
    models: Sequence[LLM], workload: Workload, batch: int, progress: bool = False
) -> list[Divergence]:
    """Run `workload` under every arithmetic of `models`, which are one model in several dtypes.

    Each arithmetic is compared with the first of its own dtype, and those first ones with the first of all (thesis,
    appendix D). Raises `ConfigError` where nothing differs or a request cannot run.
    """
    if batch < 2:
        raise ConfigError(f"a batch of {batch} is no batch: at least 2 requests at a time are compared with one")
    if len(workload.tasks) < batch:
        raise ConfigError(f"{len(workload.tasks)} requests make no batch of {batch}; ask for as many at least")
    jobs = [(llm, arithmetic) for llm in models for arithmetic in arithmetics(llm, batch)]
    for llm, arithmetic in jobs:
        for task in workload.tasks:
            llm.engine.check(task.request.with_policy(llm.policy(arithmetic.cache)))
    found: list[Divergence] = []
    seen: dict[str, tuple[Arithmetic, Tokens]] = {}  # the first of each dtype
    for llm, arithmetic in tqdm(jobs, desc="precision", unit="run", disable=not progress):
        tokens, accuracy = run_arithmetic(llm, arithmetic, workload)
        reference, expected = seen.get(arithmetic.dtype) or next(iter(seen.values()), (arithmetic, tokens))
        seen.setdefault(arithmetic.dtype, (arithmetic, tokens))
        found.append(_divergence(arithmetic, reference, tokens, expected, accuracy))
    return found


def reading(rows: Sequence[Divergence]) -> str:
    """The comparison in a paragraph."""
    others = [row for row in rows if row.arithmetic != row.reference]
    told = [
        f"{row.arithmetic} changes {100 * row.tokens:.2f} % of tokens, in {100 * row.responses:.1f} % of responses, "
        f"against {row.reference}, on average from {100 * row.onset:.0f} % of a response on"
        for row in others
        if row.tokens
    ]
    same = [f"{row.arithmetic} (as {row.reference})" for row in others if not row.tokens]
    if same:
        told.append(f"not a token changes under {'; '.join(same)}")
    accuracies = [row.accuracy for row in rows if row.accuracy is not None]
    if accuracies:
        told.append(f"accuracy lies between {100 * min(accuracies):.1f} % and {100 * max(accuracies):.1f} %")
    return "".join(f"{sentence[0].upper()}{sentence[1:]}. " for sentence in told).strip()


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
