"""`python -m remask_lab papers`: what it prints, writes and refuses."""

from pathlib import Path

import pytest
from lab.tests.papers.tables import SMALL

from remask.checks import BUNDLED
from remask_lab.papers import __main__ as command
from remask_lab.papers import definition
from remask_lab.papers.measure import Measurer
from remask_lab.records.record import read_record

SIZE = ["--device", "cpu", "--requests", "1", "--rounds", "1", "--quiet"]


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of two tables in place of the papers': one of masked models, one of uniform ones."""
    (tmp_path / "small-1.toml").write_text(SMALL, encoding="utf-8")
    uniform = SMALL.replace('kind = "masked"', 'kind = "uniform"').replace("llada-tiny", "gidd-tiny")
    uniform = (
        uniform[: uniform.index("[[rows]]")].replace("steps = 8", "steps_per_block = 4").replace(", steps = 16", "")
    )
    rows = '[[rows]]\nname = "A"\npublished.X = [1]\n[[rows]]\nname = "B"\ncache = "block-prefix"\npublished = {}\n'
    (tmp_path / "small-2.toml").write_text(uniform + rows, encoding="utf-8")
    monkeypatch.setattr(definition, "FOLDER", tmp_path)
    out = tmp_path / "out"
    out.mkdir()
    return out


def test_all_tables_go_into_a_folder_and_are_resumed(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert command.main(["--all", "--out", str(small), *SIZE]) == 0
    text = capsys.readouterr().out
    assert text.index("## small-1: A small table") < text.index("## small-2: A small table")
    names = sorted(path.name for path in small.iterdir())
    assert names == ["small-1.llada-tiny.json", "small-2.gidd-tiny.json"]
    record = read_record(small / names[0], "paper")
    assert record.about["settings"]["workload"]["requests"] == 1
    assert record.about["machine"]["device"] == "cpu"

    def measured(*_: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr(Measurer, "measure", measured)
    assert command.main(["--all", "--out", str(small), *SIZE]) == 0
    assert capsys.readouterr().out == text
    assert command.main(["--all", "--out", str(small), *SIZE, "--seed", "4"]) == 2
    assert "another measurement (seed: 31337, 4)" in capsys.readouterr().err


def test_all_goes_on_where_a_table_answers_nothing(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Its model knows one town of six after a single step, so no answer is right."""
    table = small.parent / "small-1.toml"
    asked = SMALL.replace('model = "llada-tiny"\nload_format = "dummy"', f'model = "{BUNDLED}"', 1)
    asked = asked.replace('name = "random"', 'name = "questions"', 1)
    table.write_text(asked.replace("max_tokens = 8, steps = 8", "max_tokens = 6, steps = 1"), encoding="utf-8")
    assert command.main(["--all", "--out", str(small), *SIZE, "--dtype", "float32"]) == 2
    out, err = capsys.readouterr()
    assert "## small-2" in out
    assert "small-1: stopped: 'nothing', without any cache, answers 0.0 % of the questions, less than 10 %" in err
    assert err.endswith("error: small-1 stopped, for the reasons above; all other tables are measured\n")
    assert command.main(["small-1", *SIZE, "--dtype", "float32"]) == 2
    assert "answers 0.0 % of the questions" in capsys.readouterr().err


def test_all_leaves_out_tables_of_other_kinds(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "gidd-tiny", "--load-format", "dummy", "--dtype", "float32"]
    assert command.main(["--all", *model, *SIZE]) == 0
    text = capsys.readouterr().out
    assert "left out: table small-1 is about masked models, and 'gidd-tiny' is uniform" in text
    assert "## small-2" in text
    assert command.main(["small-1", *model, *SIZE]) == 2
    assert "give a masked one with --model, such as 'llada-tiny'" in capsys.readouterr().err
    assert not list(small.iterdir())


def test_scale_and_workload(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = small / "x.json"
    assert command.main(["small-1", "--scale", "paper", "--json", str(target), *SIZE]) == 0
    assert "max_tokens=16, steps=16" in capsys.readouterr().out
    assert read_record(target).about["settings"]["scale"] == "paper"
    assert command.main(["small-1", "--workload", "questions", *SIZE]) == 2
    assert "has no chat template, so it cannot be asked questions; --workload random" in capsys.readouterr().err
    assert command.main(["small-1", "--workload", "texts", *SIZE]) == 2
    assert "texts of 4 tokens: give a file of them with --prompts" in capsys.readouterr().err
    assert command.main(["small-1", "--prompts", str(small / "none.txt"), *SIZE]) == 2
    assert "has no tokenizer" in capsys.readouterr().err


def test_an_interruption_says_how_to_go_on(
    small: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Measurer, "measure", stop)
    assert command.main(["small-1", "--out", str(small), *SIZE]) == 130
    assert "the same command resumes" in capsys.readouterr().err


def test_lists(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    assert "dkv-1 " in capsys.readouterr().out
    assert command.main(["--published", "bicache-1"]) == 0
    assert "| BiCache | 111.7 tok/s (+40.7 %), 85.3 % (-0.8 %) |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["bicache-11"], "Unknown table 'bicache-11'. Did you mean 'bicache-1'"),
        ([], "give names of tables, or --all; there are bicache-1,"),
        (["dkv-1", "--all"], "give names of tables, or --all"),
        (["dkv-1", "dkv-2", "--json", "x.json"], "--json is the result file of a single table"),
        (["dkv-1", "--json", "nowhere/x.json"], "there is no folder 'nowhere'"),
        (["dkv-1", "--out", "nowhere"], "--out: there is no folder 'nowhere'"),
        (["dkv-1", "--rounds", "0"], "--rounds must be a whole number from 1"),
        (["dkv-1", "--requests", "4", "--rounds", "5"], "--rounds: 5 rounds cannot share 4 prefixes"),
        (["dkv-1", "--requests", "0"], "--requests must be a whole number from 1"),
        (["thesis-6-1", "--judge", "x"], "--judge scores responses to texts"),
        (["dkv-1", "--model", "bundled-uniform"], "about masked models, and 'bundled-uniform' is uniform"),
        (["dkv-1", "--model", "nowhere"], "There is no model 'nowhere'"),
    ],
)
def test_what_cannot_be_done(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert command.main([*arguments, "--quiet"]) == 2
    error = capsys.readouterr().err
    assert error.startswith("remask_lab.papers: error: ")
    assert message in error
