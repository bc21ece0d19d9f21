"""The results of tasks under cache policies as a Markdown table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remask_lab.bench.workload import token_agreement
from remask_lab.harness.score import METRICS
from remask_lab.records.interval import percent_text
from remask_lab.records.markdown import NONE, markdown_table, number_text, percent

EvalRow = Mapping[str, Any]
"""Holds `task`, `cache`, `settings`, and `result` as the sweep keeps it."""

HEADER = ("task", "cache", "score (95 % interval)", "up to notation", "agreement", "tok/s", "prefix ratio", "hits")


def table(rows: Sequence[EvalRow]) -> str:
    """Returns one line a row. Agreement is the mean share of positions with the same token as under the first cache.

    Rows of one task with losses are told `by_agreement`.
    """
    if "loss" in rows[0]["result"]:
        return by_agreement(rows)
    first: dict[str, EvalRow] = {}
    for row in rows:
        first.setdefault(row["task"], row)
    return markdown_table(HEADER, [_cells(row, first[row["task"]]) for row in rows], aligned=True)


def by_agreement(rows: Sequence[EvalRow]) -> str:
    """Returns one line a row of results with a loss, and why a row has none. The first row is the baseline.

    "work saved" is the ratio of row-layers, prefix-only passes included, and "speed" that of time.
    """
    lines, base = [], rows[0]["result"]
    for row in rows:
        result = row["result"]
        loss = number_text(".3f", result["loss"])
        work, speed = base["row_layers"] / result["row_layers"], base["seconds"] / result["seconds"]
        lines.append(
            [row["cache"], _agreement(result, base), loss, f"{work:.2f}x", f"{speed:.2f}x", str(result["prefix_hits"])]
        )
    header = ("cache", "agreement", "loss (nats a token)", "work saved", "speed", "prefix hits")
    unread = [f"{row['cache']} has no loss: {row['result']['no_loss']}" for row in rows if row["result"]["no_loss"]]
    return "\n\n".join([markdown_table(header, lines, aligned=True), *unread])


def _cells(row: EvalRow, baseline: EvalRow) -> list[str]:
    result = row["result"]
    cells = [row["task"], row["cache"], _score(result["metrics"]), _share(result["metrics"].get("same_answer"))]
    if "seconds" not in result:
        return [*cells, "-", "-", "-", "-"]
    return [
        *cells,
        _agreement(result, baseline["result"]),
        f"{result['throughput_tok_s']:.1f}",
        f"{result['prefix_ratio']:.3f}",
        str(result["prefix_hits"]),
    ]


def _score(metrics: Mapping[str, Any]) -> str:
    own = next((metrics[name] for name in METRICS if name in metrics), None)
    if own is not None:
        return _share(own)
    return "; ".join(f"{name} {_share(metric)}" for name, metric in metrics.items()) or "-"


def _share(metric: Mapping[str, Any] | None) -> str:
    if metric is None:
        return NONE
    if metric["interval"] is None:
        return f"{metric['value']:.4g}"
    return percent_text(metric["value"], metric["interval"])


def _agreement(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    pairs = zip(result["samples"], baseline["samples"], strict=True)
    shares = [token_agreement(one["token_ids"], other["token_ids"]) for one, other in pairs if "token_ids" in one]
    return percent(float(np.mean(shares))) if shares else NONE
