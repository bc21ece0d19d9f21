"""One `remask generate` call over request lines on a golden model."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from remask.cli import main
from tests import goldens
from tests.device import attention, device, graphs, overlap

TIE = 1e-4
"""Confidences of two positions that are no further apart may change places where sums have another order.

Recorded runs were computed on a CPU, and say how near the nearest two came of which one was chosen (`min_conf_gap`).
Where that is null no confidence decided anything, as in an order that is drawn beforehand, and no sum can change it.
"""


def generate(
    tmp_path: Path, folder: Path, lines: Iterable[dict[str, Any]], *options: str, max_model_len: int = 512
) -> dict[str, dict[str, Any]]:
    """The answers by id, traces included; the call must succeed."""
    source, target = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = ["--input", str(source), "--output", str(target), "--max-model-len", str(max_model_len)]
    common = ["--dtype", "float32", "--device", device(), "--trace"]
    free, dense = "--batch-invariant" not in options, "expert" not in (folder / "config.json").read_text("utf-8")
    common += ["--overlap"] * (overlap() and free) + ["--graphs"] * (graphs() and free and dense)
    if "--attention" not in options:
        common += ["--attention", attention()]
    assert main(["--quiet", "generate", "--model", str(folder), *files, *common, *options]) == 0
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    return {answer["id"]: answer for answer in answers}


def check_trace(run: dict[str, Any], answer: dict[str, Any]) -> None:
    """The order of transfers: on a CPU as recorded, and on other devices unless the run has a tie (`TIE`)."""
    trace = [(event["positions"], event["token_ids"]) for event in answer["trace"]]
    expected = [(positions, tokens) for _, positions, tokens in goldens.transfers(run)]
    gap = run["min_conf_gap"]
    if device() == "cpu" or gap is None or gap > TIE:
        assert trace == expected
    else:
        assert _tokens(trace) == _tokens(expected)


def _tokens(trace: list[tuple[list[int], list[int]]]) -> list[tuple[int, int]]:
    """What each position got, in the order of positions."""
    return sorted(pair for positions, tokens in trace for pair in zip(positions, tokens, strict=True))
