"""The examples run, and say what they promise."""

import json
import re
import runpy
from pathlib import Path

import pytest

from remask.cli import main

ROOT = Path(__file__).parents[1]


def test_shared_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "shared_prefix.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("->  ")[1].split("   [")[0] for line in lines] == [
        "5 Nina 7 Ruth 1 Rita 3 Hans",
        "3 Hans 1 Rita 5 Nina 7 Ruth",
        "guitar Nina fork Hans mat Ben saw Luis",
    ]
    assert [int(number) > 0 for number in re.findall(r"\[(\d+) tokens", "\n".join(lines))] == [False, True, True]


def test_infill(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "infill.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert said == "5 Nina 7 Ruth 1 Rita 3 Hans   holes: (' Nina', ' Ruth', ' Rita')   3 steps\n"


def test_tree_search_reads_its_ancestors_from_shared_pages(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "tree_search.py"), run_name="__main__")
    found = [list(map(int, pair)) for pair in re.findall(r"(\d+) of (\d+) prompt", capsys.readouterr().out)]
    # The first of three siblings computes the root's pages; below, all that the parents computed is found.
    assert found[0] == [2 * 24, 3 * 24]
    assert found[1] == [6 * 32, 6 * 32]
    assert found[2] == [6 * 40, 6 * 40]


def test_decisions_are_right_and_take_a_pass_each(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "decisions.py"), run_name="__main__")
    *answers, last = capsys.readouterr().out.splitlines()
    assert [line.partition("   [")[0] for line in answers] == ["buyer: Ben", "payer: Ruth", "price: 3"]
    assert all(float(line.split("all labels ")[1].rstrip("]")) > 0.9 for line in answers), "the model says nothing else"
    assert last == "3 passes, no token generated"


def test_retrieval_finds_the_document_below_the_system_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / "retrieval.py"), run_name="__main__")
    found = [int(number) for number in re.findall(r"(\d+) of 200", capsys.readouterr().out)]
    assert found == [0, 192, 64, 192, 192]


def test_an_own_policy_is_compared_with_none(capsys: pytest.CaptureFixture[str]) -> None:
    path = ROOT / "examples" / "own_policy.py"
    assert len(path.read_text(encoding="utf-8").splitlines()) < 60
    runpy.run_path(str(path), run_name="__main__")
    text = capsys.readouterr().out
    alone = [int(number) for number in re.findall(r"(\d+) row-layers", text)]
    none, every_fourth, every_second = alone
    assert re.findall(r": '(.*)', \d+ row-layers", text) == ["2 Maja 7 Dora 3 Max 6 Adam"] * 3
    assert none > every_second > every_fourth
    rows = {cells[1]: cells for line in text.splitlines() if (cells := [cell.strip() for cell in line.split("|")])[1:]}
    assert rows["none"][6] == "1.00x"
    assert float(rows["PromptOnce"][6].rstrip("x")) > 2, "work saved"


def test_the_request_file_of_the_readme(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "examples" / "tariff.jsonl")
    options = ["--model", "bundled-tariff", "--dtype", "float32", "--cache", "bicache"]
    assert main(["--quiet", "generate", *options, "--input", file]) == 0
    answers = {answer["id"]: answer["text"] for answer in map(json.loads, capsys.readouterr().out.splitlines())}
    assert answers == {
        "q0": "guitar Eric kite Sara clock Mia shelf Anna",
        "q1": "clock Mia compass Tom ladder Olga kite Sara",
        "q2": "7 Tom 8 Hugo 6 Amir 5 Sara",
        "q3": "7 Tom 8 Hugo 5 Sara 6 Amir",
    }


def test_the_request_file_of_the_transit_model(capsys: pytest.CaptureFixture[str]) -> None:
    file = str(ROOT / "examples" / "transit.jsonl")
    sampling = '{"max_tokens": 16, "steps": 8, "block_length": 2}'
    options = ["--model", "bundled-transit", "--dtype", "float32", "--cache", "bicache", "--sampling", sampling]
    assert main(["--quiet", "generate", *options, "--input", file]) == 0
    answers = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [answer["text"].split("## ")[1] for answer in sorted(answers, key=lambda answer: str(answer["id"]))] == [
        "laurel",
        "meadow",
        "river",
        "quarry",
    ]
