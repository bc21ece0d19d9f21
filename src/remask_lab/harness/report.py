"""Rows of tasks and cache policies as a Markdown table."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from remask_lab.bench.report import markdown
from remask_lab.bench.workload import token_agreement
from remask_lab.harness.score import METRICS

Row = Mapping[str, Any]
"""`task`, `cache`, `settings` and `result`, which is what a sweep keeps."""

HEADER = ("task", "cache", "score (95 % interval)", "up to notation", "agreement", "tok/s", "prefix ratio", "hits")


def table(rows: Sequence[Row]) -> str:
    """One line a row. Agreement: mean share of positions that hold the same token as under the task's first cache."""
    first: dict[str, Row] = {}
    for row in rows:
        first.setdefault(row["task"], row)
    return markdown(HEADER, [_cells(row, first[row["task"]]) for row in rows])


def _cells(row: Row, baseline: Row) -> list[str]:
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
        return "-"
    if metric["interval"] is None:
        return f"{metric['value']:.4g}"
    low, high = metric["interval"]
    return f"{100 * metric['value']:.1f} % ({100 * low:.1f} to {100 * high:.1f})"


def _agreement(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    pairs = zip(result["samples"], baseline["samples"], strict=True)
    shares = [token_agreement(one["token_ids"], other["token_ids"]) for one, other in pairs if "token_ids" in one]
    return f"{100 * float(np.mean(shares)):.1f} %" if shares else "-"
