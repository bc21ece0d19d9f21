import json
from pathlib import Path
from typing import Any

import pytest

from remask.cli import main


def inspect(tmp_path: Path, lines: list[dict[str, Any]], *options: str) -> int:
    file = tmp_path / "requests.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)) + "\n")
    model = ["--model", "sdar-tiny", "--load-format", "dummy", "--dtype", "float32", "--cache", "exact"]
    return main(["--quiet", "inspect", "store", "--input", str(file), *model, "--page-size", "8", *options])


def lines(count: int) -> list[dict[str, Any]]:
    return [
        {"prompt_token_ids": [*range(40), 50 + n], "sampling": {"max_tokens": 7, "ignore_eos": True}}
        for n in range(count)
    ]


def test_a_shared_prompt_is_held_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path, lines(3), "--json") == 0
    told = json.loads(capsys.readouterr().out)
    layers = 2
    full, end = told["fullest"], told["end"]
    # Canvases of 48 tokens: five pages of prompt, read by all and kept by the store, and one of each's own.
    assert full["used"] == layers * (5 + 3)
    assert full["shared"] == layers * 5
    assert full["references"] == layers * (4 * 5 + 3)
    assert {holder["name"]: holder["found"] for holder in full["holders"]} == {"1": 0, "2": 40, "3": 40, "pages": 0}
    assert full["wasted"] == 0
    # What the requests generated completes a page each, which stays for a next turn.
    assert end["used"] == end["references"] == layers * (5 + 3)
    assert (end["hit_tokens"], end["asked_tokens"]) == (80, 120)


def test_unused_slots_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    short = {"prompt_token_ids": [1, 2], "sampling": {"max_tokens": 2, "ignore_eos": True}}
    assert inspect(tmp_path, [short], "--json") == 0
    full = json.loads(capsys.readouterr().out)["fullest"]
    assert (full["slots"], full["wasted"], full["utilisation"]) == (16, 8, 0.5)


def test_people_get_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path, lines(2)) == 0
    text = capsys.readouterr().out
    assert "When the memory was fullest" in text
    assert "40 of 80 tokens asked for were found" in text


def test_a_bad_line_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert inspect(tmp_path, [*lines(1), {"prompt_token_ids": []}]) == 2
    assert "line 2: the prompt is empty" in capsys.readouterr().err
