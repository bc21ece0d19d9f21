"""`remask decide`."""

import io
import json
from pathlib import Path

import pytest

from remask.cli import main
from remask.llm import LLM

EXAMPLE = Path(__file__).parents[2] / "examples" / "decisions.json"


def test_the_answers_of_a_file(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    model = ["--quiet", "decide", "--model", "bundled-tariff", "--dtype", "float32", "--device", "cpu"]
    assert main([*model, "--input", str(EXAMPLE)]) == 0
    printed = json.loads(capsys.readouterr().out)
    body = json.loads(EXAMPLE.read_text(encoding="utf-8"))
    found = LLM("bundled-tariff", dtype="float32", device="cpu").decide(body["state"], body["questions"])
    assert {name: each["choice"] for name, each in printed["answers"].items()} == {
        name: each.choice for name, each in found.answers.items()
    }
    assert printed["work"]["forwards"] == found.usage.forwards == 3
    monkeypatch.setattr("sys.stdin", io.StringIO(json.dumps({**body, "questions": {}})))
    assert main([*model, "--input", "-"]) == 2
    assert "questions is empty" in capsys.readouterr().err
