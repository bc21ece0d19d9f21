"""`remask analyze grid`: sweeps of settings, resumed where they stopped, their pictures, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from remask.cli import main
from remask_lab.bench import grid as grids
from remask_lab.records.record import read_record

SMALL = ["--requests", "3", "--concurrency", "2", "--dtype", "float32", "--device", "cpu"]
DUMMY = ["--model", "llada-tiny", "--load-format", "dummy", *SMALL]


def grid(*options: str) -> int:
    return main(["--quiet", "analyze", "grid", *options])


def rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = read_record(path, "analyze grid").data["rows"]
    return found


@pytest.mark.thorough
def test_an_interrupted_grid_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    output, plots = tmp_path / "grid.json", tmp_path / "plots"
    small = ["--cache", "dllm-cache", "--prompt-tokens", "12", *DUMMY, "--output", str(output)]
    wide = [*small, "--grid", '{"response_interval": [1, 4], "ratio": [0, 0.5]}', "--plots", str(plots)]
    measured: list[int] = []
    measure, ends_at = grids._measure, [3]

    def counted(*given: Any, answers: bool) -> dict[str, Any]:
        if len(measured) in ends_at:
            raise KeyboardInterrupt
        measured.append(len(measured))
        return measure(*given, answers=answers)

    monkeypatch.setattr(grids, "_measure", counted)
    assert grid(*wide) == 130
    assert len(rows(output)) == 3
    assert "reading" not in read_record(output).data
    kept = output.read_bytes()
    ends_at.clear()
    assert grid(*wide) == 0
    assert len(measured) == 4
    record = read_record(output, "analyze grid")
    assert [row["point"]["settings"] for row in record.data["rows"]] == [
        {"response_interval": interval, "ratio": ratio} for interval in (1, 4) for ratio in (0, 0.5)
    ]
    assert json.dumps(record.data["rows"][:3]) == json.dumps(json.loads(kept)["data"]["rows"])
    policy = record.data["rows"][0]["result"]["policy"]
    assert policy["agreement_with_none"] == 1, "rows of the response are computed in every step"
    assert 0 < policy["cache_ratio"] < 1
    out = capsys.readouterr().out
    assert "3 rows were in" in out
    assert record.data["reading"] in out
    for name in ("lines", "tradeoff", "map"):
        assert (plots / f"grid-{name}.png").read_bytes().startswith(b"\x89PNG")
    assert grid(*small, "--plots", str(plots)) == 0, "a narrower grid in the same file, of a single point"
    assert len(rows(output)) == 5
    assert grid(*small, "--seed", "1") == 2
    assert "another measurement (seed: 2024, 1)" in capsys.readouterr().err


@pytest.mark.thorough
def test_prompt_lengths_and_requests_at_a_time(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "grid.json", tmp_path / "plots"
    options = ["--cache", "none,dkv-decode", *DUMMY, "--prompt-tokens", "8,40", "--concurrency", "1,3"]
    assert grid(*options, "--output", str(output), "--plots", str(plots), "--x", "prompt_tokens") == 0
    found = rows(output)
    points = [(row["point"]["prompt_tokens"], row["point"]["concurrency"], row["point"]["cache"]) for row in found]
    assert points == [
        (length, many, cache) for length in (8, 40) for many in (1, 3) for cache in ("none", "dkv-decode")
    ]
    layers = read_record(output).about["layers"]
    assert found[0]["result"]["none"]["row_layers"] == 3 * 16 * (8 + 16) * layers
    assert found[6]["result"]["none"]["row_layers"] == 3 * 16 * (40 + 16) * layers
    one, three = (found[index]["result"]["policy"]["peak_memory_bytes"] for index in (5, 7))
    assert three == 3 * one
    assert (plots / "grid-load.png").exists()
    assert not (plots / "grid-map.png").exists()
    assert "Over prompt_tokens 8 to 40:" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_delay_of_dkv_decode(tmp_path: Path) -> None:
    output, plots = tmp_path / "grid.json", tmp_path / "plots"
    sampling = json.dumps({"max_tokens": 16, "steps": 16, "block_length": 16})
    options = ["--cache", "dkv-decode", "--without-delay", "--grid", '{"refresh_interval": [1, 16]}', "--seed", "5"]
    shape = ["--model", "bundled-transit", "--sampling", sampling, *SMALL]
    assert grid(*options, *shape, "--x", "cache_ratio", "--output", str(output), "--plots", str(plots)) == 0
    every, delayed, same, undelayed = (row["result"]["policy"] for row in rows(output))
    assert every["agreement_with_none"] == same["agreement_with_none"] == 1
    assert every["row_layers"] == same["row_layers"]
    assert undelayed["row_layers"] < delayed["row_layers"]
    assert undelayed["cache_ratio"] > delayed["cache_ratio"] > 0.8
    assert undelayed["accuracy"] == 0 < delayed["accuracy"], "K/V of masks answer nothing"


@pytest.mark.thorough
def test_results_of_another_model_stand_beside(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, plots = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "plots"
    shape = ["--load-format", "dummy", *SMALL, "--cache", "none", "--prompt-tokens", "8"]
    steps = ["--sampling-grid", '{"steps_per_block": [2, 8]}', "--sampling", '{"max_tokens": 8, "block_length": 8}']
    assert grid("--model", "llada-tiny", *shape, *steps, "--output", str(first)) == 0
    more = ["--output", str(second), "--beside", str(first), "--plots", str(plots), "--x", "steps_per_block"]
    assert grid("--model", "gidd-tiny", *shape, *steps, *more) == 0
    assert len(rows(second)) == 2, "the other model's rows stay in their own file"
    assert "Over gidd-tiny, llada-tiny: agreement" in capsys.readouterr().out
    assert (plots / "grid-lines.png").exists()
    assert grid("--model", "gidd-tiny", *shape, *steps, "--beside", str(tmp_path / "none.json")) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.thorough
def test_a_sampling_grid_on_the_bundled_uniform_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "grid.json"
    options = ["--cache", "none,uniform-cache", "--grid", '{"refresh_next": [0, 4]}', "--output", str(output)]
    varied = ["--sampling-grid", '{"steps_per_block": [2, 8]}']
    assert grid("--model", "bundled-uniform", *SMALL, *options, *varied) == 0
    told = rows(output)
    assert len(told) == 2 * 3, "none takes no setting, so it is measured once"
    forwards = [row["result"]["none"]["forwards"] for row in told]
    assert len(set(forwards[:3])) == 1
    assert forwards[3:] == [4 * count for count in forwards[:3]]
    assert "Over steps_per_block 2 to 8: accuracy" in capsys.readouterr().out


def test_null_unsets_what_the_task_sets(tmp_path: Path) -> None:
    """The task of `bundled` sets steps, which a grid over steps of a block cannot have beside it."""
    output = tmp_path / "grid.json"
    options = ["--sampling", '{"steps": null}', "--sampling-grid", '{"steps_per_block": [2, 3]}']
    assert grid("--model", "bundled", *SMALL, "--cache", "none", *options, "--output", str(output)) == 0
    two, three = (row["result"]["none"]["forwards"] for row in rows(output))
    assert 3 * two == 2 * three


def test_what_a_kind_does_not_fit_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert grid("--model", "bundled-uniform", *SMALL, "--cache", "dllm-cache") == 2
    assert "not defined on uniform models" in capsys.readouterr().err
    shifted = ["--model", "dream-tiny", "--load-format", "dummy", *SMALL]
    assert grid(*shifted, "--cache", "dkv-decode", "--without-delay") == 2
    assert "not Dream" in capsys.readouterr().err


@pytest.mark.thorough
def test_shift_variants_of_dream(tmp_path: Path) -> None:
    output = tmp_path / "grid.json"
    shifted = ["--model", "dream-tiny", "--load-format", "dummy", *SMALL, "--output", str(output)]
    assert grid(*shifted, "--cache", "dkv-decode", "--grid", '{"shift": ["un", "right", "un_right"]}') == 0
    un, right, both = (row["result"]["policy"]["row_layers"] for row in rows(output))
    assert un < both, "the stricter condition caches later"
    assert right < both
