"""The commands in `benchmarks/` run, at sizes that say nothing about speed."""

import json
import sys
from pathlib import Path

import pytest
from benchmarks import (
    boundary,
    concurrency,
    first_layer,
    gpu,
    overhead,
    policies,
    selection,
    serving,
    sharing,
    uniform,
    uniform_settings,
    uniform_tables,
)

import remask
from remask.errors import ConfigError
from remask.evals.record import read_record
from tests.evals.judges import save_judge


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


def test_serving(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "serving.json"
    size = ["--clients", "2", "--requests", "4", "--prefixes", "2", "--rounds", "1"]
    monkeypatch.setattr(sys, "argv", ["serving", *size, "--json", str(target)])
    serving.main()
    report = read_record(target, "benchmarks serving").data
    assert report["served_gain_over_none"] > 0
    for told in report["server_overhead"].values():
        assert told["range"][0] <= told["total"] <= told["range"][1] < 1
        parts = told["computing_slower"] + told["waiting_in_steps"] + told["between_steps"]
        assert parts == pytest.approx(told["total"]), "one round, so no medians of different rounds are added"
    alone, at_once = (report["per_request"][name] for name in ("engine_alone", "all_at_once"))
    assert alone["engine_ms"] <= alone["in_steps_ms"] <= alone["wall_ms"]
    assert alone["server_ms"] == 0 < at_once["server_ms"]
    assert at_once["client_ms"] > 0
    assert alone["steps"] > 0
    assert report["prefix_ratio"] == pytest.approx(0.9, abs=0.01)
    assert report["accuracy"] == {"cache": 1, "none": 1}
    assert report["first_settled_block_miss_ms"] > 0
    assert report["first_settled_block_hit_ms"] > 0


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


@pytest.mark.parametrize("model", ["llada-tiny", "dream-tiny"])
def test_every_policy_beside_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path, model: str
) -> None:
    target = tmp_path / "policies.json"
    shape = ["--batch", "2", "--prompt", "24", "--prefix", "16", "--response", "16", "--block-length", "8"]
    monkeypatch.setattr(sys, "argv", ["policies", "--model", model, *shape, "--steps", "4", "--json", str(target)])
    policies.main()
    rows = {row["cache"]: row for row in json.loads(target.read_text(encoding="utf-8"))["results"]}
    none = rows.pop("none")
    assert (none["gain"], none["work_gain"], none["quotient"]) == (1, 1, 1)
    assert none["rows_a_layer"] == [80, 80]
    assert set(rows) >= {"dkv-decode", "dllm-cache", "elastic-cache", "bicache+block-dual"}
    assert ("dkv-greedy" in rows) is (model == "llada-tiny")
    block = rows["block-dual"]
    assert block["work_gain"] == pytest.approx(4 * 80 / (80 + 3 * 16)), "one full pass and three over two blocks of 8"
    assert block["steps_with_many_rows"] == 1
    assert block["times_bare_with_few_rows"] > 0
    assert rows["reuse"]["quotient"] is None
    assert rows["reuse"]["rows_a_layer"] == [48, 48], "without the prefix-only pass"
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in rows)
    unshared = [*shape, "--prefix", "0", "--steps", "1", "--json", str(target)]
    monkeypatch.setattr(sys, "argv", ["policies", "--model", model, *unshared])
    policies.main()
    rows = {row["cache"]: row for row in json.loads(target.read_text(encoding="utf-8"))["results"]}
    assert {row["work_gain"] for row in rows.values()} == {1}, "without a prefix every policy begins with a full pass"


def test_selection(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--model", "llada-tiny", "--batch", "2", "--prompt", "8", "--response", "8", "--turns", "3"]
    monkeypatch.setattr(sys, "argv", ["selection", *shape])
    selection.main()
    report = json.loads(capsys.readouterr().out)
    assert set(report["step_ms"]) == {"held", "value", "key", "random"}
    assert all(ms > 0 for ms in report["step_ms"].values())
    assert report["bare_projections_ms"] > 0
    assert set(report["over_held_ms"]) == {"value", "key", "random"}
    monkeypatch.setattr(sys, "argv", ["selection", *shape, "--turns", "6"])
    with pytest.raises(SystemExit):
        selection.main()
    assert "at least --turns + 3" in capsys.readouterr().err


def test_sharing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    shape = ["--requests", "5", "--prompt", "70", "--own", "6", "--response", "8", "--concurrency", "3"]
    monkeypatch.setattr(sys, "argv", ["sharing", "--model", "sdar-tiny", *shape])
    sharing.main()
    report = json.loads(capsys.readouterr().out)
    assert report["requests_that_skip_the_context"] == 4
    assert report["row_layers_gain"] > 1.5


def test_first_layer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "llada-tiny", "--length", "48", "--response", "12", "--turns", "2"]
    monkeypatch.setattr(sys, "argv", ["first_layer", *options])
    first_layer.main()
    assert 0 < json.loads(capsys.readouterr().out)["share_of_step"] < 1


def test_uniform(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = tmp_path / "uniform.json"
    shape = ["--canvas", "64", "--prompt", "8", "--block-length", "8", "--steps", "4", "--full-steps", "2"]
    monkeypatch.setattr(sys, "argv", ["uniform", "--model", "gidd-tiny", *shape, "--json", str(target)])
    uniform.main()
    report = read_record(target, "uniform block").data
    rows = {row["cache"]: row for row in report["results"]}
    assert rows["none"]["gain"] == rows["none"]["bound_by_rows"] == 1
    assert rows["block-prefix"]["bound_by_rows"] == pytest.approx(4 * 64 / (64 + 3 * 56))
    assert rows["uniform-cache r=0"]["bound_by_rows"] == pytest.approx(4 * 64 / (64 + 3 * 8))
    assert rows["uniform-cache r=4"]["bound_by_rows"] < rows["uniform-cache r=0"]["bound_by_rows"]
    assert all(ms > 0 for spent in report["operations_ms"].values() for ms in spent.values())
    assert "| cached |" in capsys.readouterr().out


def uniform_table(monkeypatch: pytest.MonkeyPatch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["uniform_tables", *options])
    uniform_tables.main()


@pytest.mark.parametrize("table", [name for name in uniform_settings.TABLES if name != "correction"])
def test_tables_of_the_thesis_on_random_weights(
    table: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uniform_table(monkeypatch, "--table", table, "--model", "gidd-tiny", "--load-format", "dummy", "--divide", "32")
    shown = capsys.readouterr().out
    rows = uniform_settings.TABLES[table]
    assert shown.count("\n| ") == 1 + len(rows.rows) * len(rows.caches)
    assert all(text in shown for row in rows.rows for text in row.published.values())
    assert "%" not in shown.split("req/s")[1].split("quality (95 %)")[1], "random weights have no quality"


def test_a_table_on_the_bundled_model_resumes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    target = tmp_path / "rows.json"
    options = ("--table", "6.10", "--requests", "2", "--json", str(target))
    uniform_table(monkeypatch, *options)
    first = capsys.readouterr().out
    rows = read_record(target, "uniform tables").data["rows"]
    assert [row["point"]["label"] for row in rows] == ["r=1", "r=4", "r=0"]
    for row in rows:
        none, cached = row["result"]["none"], row["result"]["uniform-cache"]
        assert (none["gain"], none["agreement"]) == (1, 1)
        assert cached["gain_in_work"] > 2
        assert cached["requests_per_s"] * 32 == pytest.approx(cached["tokens_per_s"])
        assert 0 <= cached["accuracy_interval"][0] <= cached["accuracy"] <= 1
    monkeypatch.setattr(uniform_tables, "run_bench", None)
    uniform_table(monkeypatch, *options)
    assert capsys.readouterr().out == first, "nothing is measured twice"


def test_a_table_with_a_judge(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """A folder's name does not say that it is the bundled model, so its settings and prompts are the thesis's."""
    folder, prompts = Path(remask.__file__).parent / "bundled_uniform", tmp_path / "prompts.txt"
    prompts.write_text("bus every 4 minutes from 44 : 44 48 52 56\n" * 2, encoding="utf-8")
    judged = ("--judge", str(save_judge(tmp_path / "judge", positions=512)), "--prompts", str(prompts))
    small = ("--table", "6.10", "--model", str(folder), "--divide", "16", "--requests", "2")
    uniform_table(monkeypatch, *small, *judged)
    assert capsys.readouterr().out.count("| PPL ") == 6
    uniform_table(monkeypatch, *small)
    assert "| PPL " not in capsys.readouterr().out


def test_what_a_table_cannot_be_measured_on(monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = ("--model", "gidd-tiny", "--load-format", "dummy")
    with pytest.raises(ConfigError, match="divide all lengths with --divide 16"):
        uniform_table(monkeypatch, "--table", "6.9", *tiny)
    with pytest.raises(ConfigError, match="needs right and wrong answers"):
        uniform_table(monkeypatch, "--table", "correction", *tiny)
    with pytest.raises(ConfigError, match="of uniform models, and 'bundled' is none"):
        uniform_table(monkeypatch, "--table", "6.9", "--model", "bundled")
    with pytest.raises(ConfigError, match="--judge and --prompts go together"):
        uniform_table(monkeypatch, "--table", "6.9", "--judge", "x")
