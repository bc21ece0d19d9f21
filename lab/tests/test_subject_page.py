"""The examples of a subject of `remask analyze` and of an attention kernel, as they stand in the documentation."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from remask.cli import main
from remask.policies import BiCache, Dense
from remask_lab import subjects
from remask_lab.cli import analyze
from remask_lab.observe import replace_attention
from remask_lab.records.record import read_record
from tests.docs.test_extending_sampling import example
from tests.engine.support import Work, make_engine, request, run


def test_the_kernel_of_the_example_computes_a_models_attention() -> None:
    names: dict[str, Any] = {}
    exec(example("An attention kernel"), names)
    engine = make_engine()
    work = [
        Work(request(str(number), 5 + number), policy) for number, policy in enumerate((Dense(), BiCache(Dense(), 2)))
    ]
    expected = {name: result.token_ids for name, result in run(make_engine(), work).items()}
    replaced = replace_attention(engine, names["RowByRow"]())
    assert {name: result.token_ids for name, result in run(engine, work).items()} == expected
    engine.detach(replaced)


PAGE = Path(__file__).parents[2] / "docs" / "lab" / "analysis-subject.md"


@pytest.fixture
def certainty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The subject as an entry of `SUBJECTS` and a module of `remask_lab.subjects`."""
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    (entry,) = [block for block in blocks if block.lstrip().startswith('"certainty": Subject(')]
    (code,) = [block for block in blocks if block.startswith('"""`remask analyze certainty`')]
    monkeypatch.setattr(analyze, "SUBJECTS", {**analyze.SUBJECTS, **eval(f"{{{entry}}}", vars(analyze))})
    (tmp_path / "certainty.py").write_text(code, encoding="utf-8")
    monkeypatch.setattr(subjects, "__path__", [*subjects.__path__, str(tmp_path)])
    # What the test imports under this name goes when it ends.
    monkeypatch.setitem(sys.modules, "remask_lab.subjects.certainty", None)
    monkeypatch.delitem(sys.modules, "remask_lab.subjects.certainty")


@pytest.mark.usefixtures("certainty")
def test_it_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "certainty.json", tmp_path / "plots"
    model = ["--model", "llada-tiny", "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    own = [
        "--requests",
        "2",
        "--prefix-tokens",
        "2",
        "--prompt-tokens",
        "3",
        "--sampling",
        '{"max_tokens": 6, "steps": 3}',
    ]
    files = ["--output", str(output), "--plots", str(plots)]
    assert main(["--quiet", "analyze", "certainty", *model, *own, *files]) == 0
    record = read_record(output, "analyze certainty")
    probability = record.data["probability"]
    assert len(probability) == 3
    assert all(0 < value < 1 for value in probability)
    assert f"pass    3{probability[-1]:>8.3f}" in capsys.readouterr().out
    assert (plots / "certainty.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.usefixtures("certainty")
def test_the_help_lists_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["analyze", "--help"])
    assert "largest probability at the predicted positions" in capsys.readouterr().out
