"""The result of a load, under the keys of vLLM's `bench serve`, with further keys for diffusion models."""

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np

from remask_lab.load.client import RequestOutcome
from remask_lab.load.load import Load, LoadRun
from remask_lab.load.mix import PromptMix, Target

TIMES = ("ttft", "tpot", "itl", "e2el")
BACKEND = "openai"


def summary(target: Target, mix: PromptMix, load: Load, run: LoadRun) -> dict[str, Any]:
    """Returns one JSON object. Times are of answered requests, in milliseconds. A key without a value is null.

    `ttft` ends with the first settled text. `itl` is the time between two chunks of text, which may hold many tokens
    each. `tpot` is the time after the first text, divided by the number of tokens after the first one.
    """
    done = [outcome for outcome in run.outcomes if outcome.error is None]
    tokens_in = sum(outcome.input_tokens for outcome in done)
    tokens_out = sum(outcome.output_tokens for outcome in done)
    failed = Counter(outcome.error for outcome in run.outcomes if outcome.error is not None)
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "backend": BACKEND,
        "base_url": target.base_url,
        "model_id": target.model,
        "num_prompts": len(run.outcomes),
        "request_rate": "inf" if load.request_rate == math.inf else load.request_rate,
        "burstiness": 1.0,
        "max_concurrency": load.max_concurrency,
        "dataset": mix.chosen(target),
        "prefixes": mix.prefixes,
        "prefix_share": mix.prefix_share,
        "seed": mix.seed,
        "duration": run.seconds,
        "completed": len(done),
        "failed": len(run.outcomes) - len(done),
        "total_input_tokens": tokens_in,
        "total_output_tokens": tokens_out,
        "request_throughput": len(done) / run.seconds,
        "output_throughput": tokens_out / run.seconds,
        "total_token_throughput": (tokens_in + tokens_out) / run.seconds,
        "max_concurrent_requests": run.peak_concurrency,
        **_times(done),
        **_work(done, tokens_in),
        "errors_by_status": dict(sorted(failed.items())),
        "accuracy": _accuracy(done),
    }


def detail(run: LoadRun) -> dict[str, Any]:
    """Returns lists with one entry per request, under vLLM's keys."""
    return {
        "input_lens": [outcome.input_tokens for outcome in run.outcomes],
        "output_lens": [outcome.output_tokens for outcome in run.outcomes],
        "start_times": [outcome.started_s for outcome in run.outcomes],
        "ttfts": [outcome.ttft_s for outcome in run.outcomes],
        "itls": [outcome.gaps_s for outcome in run.outcomes],
        "e2els": [outcome.elapsed_s for outcome in run.outcomes],
        "cached_lens": [outcome.cached_tokens for outcome in run.outcomes],
        "generated_texts": [outcome.text for outcome in run.outcomes],
        "errors": [outcome.message or "" for outcome in run.outcomes],
    }


def lines(result: dict[str, Any]) -> list[str]:
    """The main figures of a summary, as lines of a label and a value."""
    shown = [
        ("requests answered", result["completed"]),
        ("failed", f"{result['failed']} {result['errors_by_status'] or ''}".strip()),
        ("duration, s", result["duration"]),
        ("requests a second", result["request_throughput"]),
        ("output tokens a second", result["output_throughput"]),
        ("all tokens a second", result["total_token_throughput"]),
        ("tokens per forward", result["tokens_per_forward"]),
        ("cached tokens", result["cached_tokens"]),
        ("hit ratio", result["prefix_hit_ratio"]),
        ("accuracy", result["accuracy"]),
    ]
    for name in TIMES:
        values = [f"{_shown(result[f'{kind}_{name}_ms'])}" for kind in ("mean", "median", "std", "p99")]
        shown.append((f"{name}, ms (mean, median, std, p99)", ", ".join(values)))
    return [f"{label:<36} {_shown(value)}" for label, value in shown]


def _shown(value: object) -> str:
    if value is None:
        return "-"
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _times(done: Sequence[RequestOutcome]) -> dict[str, float | None]:
    found: dict[str, Iterable[float | None]] = {
        "ttft": [outcome.ttft_s for outcome in done],
        "tpot": [outcome.tpot_s for outcome in done],
        "itl": [gap for outcome in done for gap in outcome.gaps_s],
        "e2el": [outcome.elapsed_s for outcome in done],
    }
    times: dict[str, float | None] = {}
    for name in TIMES:
        values = np.array([1e3 * value for value in found[name] if value is not None])
        times[f"mean_{name}_ms"] = float(values.mean()) if values.size else None
        times[f"median_{name}_ms"] = float(np.median(values)) if values.size else None
        times[f"std_{name}_ms"] = float(values.std()) if values.size else None
        times[f"p99_{name}_ms"] = float(np.percentile(values, 99)) if values.size else None
    return times


def _work(done: Sequence[RequestOutcome], tokens_in: int) -> dict[str, Any]:
    reporting = [outcome for outcome in done if outcome.forwards]
    forwards = sum(outcome.forwards or 0 for outcome in reporting)
    cached = sum(outcome.cached_tokens for outcome in done)
    return {
        "tokens_per_forward": sum(outcome.output_tokens for outcome in reporting) / forwards if forwards else None,
        "cached_tokens": cached,
        "prefix_hits": sum(outcome.cached_tokens > 0 for outcome in done),
        "prefix_hit_ratio": cached / tokens_in if tokens_in else None,
    }


def _accuracy(done: Sequence[RequestOutcome]) -> float | None:
    verdicts = [outcome.correct for outcome in done if outcome.correct is not None]
    return sum(verdicts) / len(verdicts) if verdicts else None
