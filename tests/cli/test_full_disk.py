"""A disk that fills up while a command writes: the error names the file, and what was written stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from remask.cli import main
from tests.disks import small_disk
from tests.goldens import model_dir

LLADA = str(model_dir("llada"))
LINE = {"prompt_token_ids": [1, 2, 3], "sampling": {"max_tokens": 8}}
START = "import sys; from remask.cli import main; sys.exit(main())"
WORDS = ["--quiet", "generate", "--model", LLADA, "--dtype", "float32"]


def requests(folder: Path, count: int) -> str:
    source = folder / "in.jsonl"
    source.write_text("".join(json.dumps({"id": number, **LINE}) + "\n" for number in range(count)))
    return str(source)


def test_answers_before_the_disk_was_full_are_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = requests(tmp_path, 40)
    with small_disk(tmp_path / "disk", 1) as reason:
        target = tmp_path / "disk" / "out.jsonl"
        assert main([*WORDS, "--input", source, "--output", str(target)]) == 2
        answers = [json.loads(line) for line in target.read_text().splitlines()]
        assert [answer["id"] for answer in answers] == list(range(len(answers)))
        assert 4 < len(answers) < 40
        error = capsys.readouterr().err
        expected = f"'{target}' cannot be written: {reason}; it holds the {len(answers)} lines written before"
        assert error == f"remask generate: error: {expected}\n"


def test_one_answer_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS[:2], "--model", "bundled-transit", "--prompt", "from ivy", "--output", "/dev/full"]) == 2
    assert "'/dev/full' cannot be written: No space left on device; it holds the 0 lines" in capsys.readouterr().err


@pytest.mark.thorough
@pytest.mark.parametrize(
    "words",
    [
        [*WORDS, "--input", "in.jsonl"],
        ["--quiet", "profile", "--model", "bundled-transit", "--requests", "1", "--output", "t.json"],
    ],
)
def test_a_full_standard_output_is_an_error_without_a_traceback(tmp_path: Path, words: list[str]) -> None:
    requests(tmp_path, 2)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-c", START, *words],
            cwd=tmp_path,
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    error = f"remask {words[1]}: error: standard output cannot be written: No space left on device\n"
    assert (done.returncode, done.stderr) == (2, error)


@pytest.mark.thorough
def test_a_depth_table_that_does_not_fit_leaves_the_earlier_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with small_disk(tmp_path / "disk", 2) as reason:
        target = tmp_path / "disk" / "table.json"
        words = ["--quiet", "profile", "--model", "bundled-transit", "--dtype", "float32"]
        assert main([*words, "--requests", "1", "--output", str(target)]) == 0
        before = target.read_bytes()
        full = target.with_name("ballast")
        if reason == "No space left on device":
            full.write_bytes(bytes(4096))
        path = tmp_path / ("long" * 40)
        messages = [{"role": "system", "content": "from"}, {"role": "user", "content": "ivy"}]
        path.write_text(json.dumps({"messages": messages, "max_tokens": 2}) + "\n", encoding="utf-8")
        assert main([*words, "--input", str(path), "--output", str(target)]) == 2
        assert f"error: the depth table '{target}' cannot be written: {reason}\n" in capsys.readouterr().err
        assert target.read_bytes() == before
        assert set(os.listdir(target.parent)) <= {"table.json", "ballast"}
        full.unlink(missing_ok=True)
        assert main([*WORDS[:2], "--model", "bundled-transit", "--prompt", "x", "--depth-table", str(target)]) == 0
