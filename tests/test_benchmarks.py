"""The commands in `benchmarks/` run, at sizes that say nothing about speed."""

import json
import sys

import pytest
from benchmarks import boundary, concurrency, gpu, overhead


def test_overhead(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "dream-tiny", "--length", "48", "--response", "12", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["overhead", *options])
    overhead.main()
    report = json.loads(capsys.readouterr().out)
    assert report["ratio"] > 0
    assert report["ratio_range"][0] <= report["ratio"] <= report["ratio_range"][1]


def test_concurrency(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["concurrency", "--requests", "4", "--rounds", "1"])
    concurrency.main()
    report = json.loads(capsys.readouterr().out)
    assert report["eight_at_a_time_gain"] > 0
    assert report["first_settled_hit_ms"] > 0


def test_boundary(capsys: pytest.CaptureFixture[str]) -> None:
    boundary.main()
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(rows) == 18
    exact = next(
        row for row in rows if (row["depth"], row["refresh_interval"], row["boundary"]) == (1, 1, "recomputed")
    )
    assert (exact["equal"], exact["work"]) == (1.0, 1.0), (
        "depth 1, refreshed every step, from states that saw everything"
    )


def test_the_paper_setting_without_a_gpu(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setattr(gpu, "STAND_IN", ("llada-tiny", "float32"))
    monkeypatch.setattr(gpu, "CELLS", gpu.CELLS[:1])
    monkeypatch.setattr(sys, "argv", ["gpu", "--rounds", "1", "--requests", "1"])
    gpu.main()
    cells = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [cell["batch"] for cell in cells] == [1, 8]
    assert all(cell["canvas"] == 200 for cell in cells)
    assert [row["cache"] for row in cells[0]["results"]][:2] == ["none", "reuse"]
