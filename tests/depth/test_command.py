import json
from pathlib import Path

import pytest

from remask.cli import main
from remask.cli.main import parse
from remask.depth.find import table_file
from remask.depth.table import DepthTable
from remask.policies.earned import BOUND
from tests.depth.models import loaded, write_lines

MODEL = ["--model", "bundled", "--dtype", "float32", "--device", "cpu"]


def remask(*args: str) -> int:
    return main(["--quiet", "profile", *MODEL, *args])


def test_the_bound_is_that_of_audits() -> None:
    assert parse(["profile", *MODEL]).bound == BOUND


def test_a_file_of_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    messages = [{"role": "system", "content": "a good list"}, {"role": "user", "content": "in"}]
    lines = [{"messages": messages, "max_tokens": 6}] * 20
    table, source = tmp_path / "t.json", write_lines(tmp_path / "in.jsonl", lines)
    assert remask("--input", str(source), "--requests", "18", "--bound", "5", "--output", str(table)) == 0
    out, saved = capsys.readouterr().out, DepthTable.load(table, loaded("bundled"))
    assert (saved.bound, saved.source) == (5, "18 requests of in.jsonl")
    (ratio,) = saved.nats
    assert saved.lookup.depth(ratio, 100) == 9, "nothing moves by so much"
    assert f"prefixes from {ratio} % of the canvas: 9 layers may be read" in out
    assert f"--depth-table {table}" in out


def test_without_a_file_the_table_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert remask("--requests", "2", "--seed", "3") == 0
    out, file = capsys.readouterr().out, table_file(loaded("bundled"))
    assert "No depth is shown to stay below 0.1 nats" in out
    assert f"Kept for all further starts, in {file}" in out
    assert DepthTable.load(file).source == "questions of the task relay; seed 3"


def test_a_system_prompt_goes_before_messages(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    system, source, table = tmp_path / "s.txt", tmp_path / "in.jsonl", tmp_path / "t.json"
    system.write_text("a good list", encoding="utf-8")
    user = {"role": "user", "content": "in"}
    write_lines(source, [{"messages": [user], "max_tokens": 6}])
    asked = ["--input", str(source), "--system-prompt", str(system), "--output", str(table)]
    assert remask(*asked) == 0
    assert json.loads(table.read_text())["samples"] == 1
    for line, message in [
        ({"prompt": "x"}, "line 1: --system-prompt goes before messages, and this line has none"),
        ({"messages": [{"role": "system", "content": "x"}, user]}, "these messages have a system prompt"),
    ]:
        write_lines(source, [line])
        assert remask(*asked) == 2
        assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bound", "-1"], "--bound must be"),
        (["--requests", "0"], "--requests must be"),
        (["--output", "none/t.json"], "there is no folder"),
        (["--input", "none.jsonl"], "there is no file 'none.jsonl'"),
    ],
)
def test_what_cannot_be_is_refused_first(options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert remask(*options) == 2
    assert message in capsys.readouterr().err
