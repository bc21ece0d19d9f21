"""The golden GIDD traces through `remask generate`: token ids, order of changes, forwards and row-layers."""

from pathlib import Path
from typing import Any

import pytest

from tests.cli.goldens import generate
from tests.goldens import uniform as goldens

LAYERS = {"unif": 3, "gentle": 2, "mask": 2, "hybrid": 2}
CANVAS = {"unif": 64, "gentle": 64, "mask": 48, "hybrid": 48}

Moves = list[tuple[list[int], list[int]]]


def moves(run: goldens.Run, answer: dict[str, Any]) -> Moves:
    """The trace without what changed nothing: a transfer may name a position that keeps its token."""
    canvas = run.trace.canvas(run.row).tolist()
    found: Moves = []
    for event in answer["trace"]:
        changed = [
            (place, token)
            for place, token in zip(event["positions"], event["token_ids"], strict=True)
            if canvas[place] != token
        ]
        for place, token in changed:
            canvas[place] = token
        if changed:
            found.append(([place for place, _ in changed], [token for _, token in changed]))
    return found


def check(run: goldens.Run, answer: dict[str, Any]) -> None:
    """Everything that binds for one batch row of a trace under one strategy."""
    given = run.trace.parameters
    assert answer.get("error") is None, run.id
    assert len(answer["token_ids"]) == given["max_length"], run.id
    expected = run.expected_ids()
    assert answer["token_ids"][: len(expected)] == expected, run.id
    end = given["prompt_length"] + run.blocks_run * given["block_length"]
    assert [move for move in moves(run, answer) if move[0][0] < end] == run.expected_moves(), run.id
    forwards, rows = run.expected_forwards(), run.expected_rows()
    if forwards is not None:
        assert answer["usage"]["forwards"] == forwards, run.id
    if rows is not None:
        assert answer["usage"]["row_layers"] == rows * LAYERS[run.trace.model], run.id


def ask(tmp_path: Path, model: str, runs: list[goldens.Run], *options: str) -> None:
    lines = [run.request_line() for run in runs]
    answers = generate(tmp_path, goldens.model_dir(model), lines, *options, max_model_len=CANVAS[model])
    assert set(answers) == {run.id for run in runs}
    for run in runs:
        check(run, answers[run.id])


@pytest.mark.few(2)
@pytest.mark.parametrize("model", goldens.MODELS)
def test_all_golden_traces_of_a_model_in_one_call(tmp_path: Path, model: str) -> None:
    """Lines of all strategies, blocks and schedules stand in one file, so they run batched together."""
    ask(tmp_path, model, goldens.runs(model))


@pytest.mark.few(3)
@pytest.mark.parametrize("model", goldens.MODELS)
@pytest.mark.parametrize("options", [["--max-num-seqs", "1"], ["--max-row-layers", "400", "--page-size", "5"]])
def test_the_answer_does_not_depend_on_the_batch(tmp_path: Path, model: str, options: list[str]) -> None:
    """One at a time, or a few at a time under a tight budget and odd pages."""
    ask(tmp_path, model, goldens.runs(model)[::3], *options)
