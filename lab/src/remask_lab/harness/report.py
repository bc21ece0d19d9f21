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
    """A table with one line per row. Agreement is with the responses under the first cache of the row's task.

    Rows with losses in place of scores go to `loss_table`.
    """
    if "loss" in rows[0]["result"]:
        return loss_table(rows)
    baselines: dict[str, EvalRow] = {}
    for row in rows:
        baselines.setdefault(row["task"], row)
    return markdown_table(HEADER, [_cells(row, baselines[row["task"]]) for row in rows], aligned=True)


def loss_table(rows: Sequence[EvalRow]) -> str:
    """A table of rows with losses, and the reasons why others have none. The first row is the baseline.

    "work saved" is the ratio of row-layers, prefix-only passes included, and "speed" that of seconds.
    """
    cells = []
    baseline = rows[0]["result"]
    for row in rows:
        result = row["result"]
        loss = number_text(".3f", result["loss"])
        work, speed = baseline["row_layers"] / result["row_layers"], baseline["seconds"] / result["seconds"]
        ratios = [f"{work:.2f}x", f"{speed:.2f}x"]
        cells.append([row["cache"], _agreement(result, baseline), loss, *ratios, str(result["prefix_hits"])])
    header = ("cache", "agreement", "loss (nats a token)", "work saved", "speed", "prefix hits")
    reasons = [f"{row['cache']} has no loss: {row['result']['no_loss']}" for row in rows if row["result"]["no_loss"]]
    return "\n\n".join([markdown_table(header, cells, aligned=True), *reasons])


def _cells(row: EvalRow, baseline: EvalRow) -> list[str]:
    """The cells under `HEADER`; those of generation are "-" for tasks without it."""
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
    """The score of one of our tasks, or all metrics of another one."""
    score = next((metrics[name] for name in METRICS if name in metrics), None)
    if score is not None:
        return _share(score)
    return "; ".join(f"{name} {_share(metric)}" for name, metric in metrics.items()) or "-"


def _share(metric: Mapping[str, Any] | None) -> str:
    """A metric's value, in percent with its interval where it has one."""
    if metric is None:
        return NONE
    if metric["interval"] is None:
        return f"{metric['value']:.4g}"
    return percent_text(metric["value"], metric["interval"])


def _agreement(result: Mapping[str, Any], baseline: Mapping[str, Any]) -> str:
    """The mean share of positions with the same token as in the baseline's responses, in percent."""
    pairs = zip(result["samples"], baseline["samples"], strict=True)
    shares = [token_agreement(ours["token_ids"], base["token_ids"]) for ours, base in pairs if "token_ids" in ours]
    return percent(float(np.mean(shares))) if shares else NONE
