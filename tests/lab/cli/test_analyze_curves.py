"""`remask analyze curves`: what is swept, how it goes on, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from remask import LLM
from remask.cli import main
from remask_lab.bench.grid import GridRow
from remask_lab.bench.workload import usual_workload
from remask_lab.records.record import read_record
from remask_lab.subjects.curves import KNOBS, Curve, Knob, asked_knobs, reading, text

TINY = ["--model", "llada-tiny", "--load-format", "dummy", "--requests", "2", "--concurrency", "2"]
SHORT = ["--max-tokens", "8", "--prefix-tokens", "12", "--prompt-tokens", "3", "--dtype", "float32", "--device", "cpu"]
FEW = '{"bicache": {"depth": [0, 2]}, "dkv-pd": {"refresh_interval": [2]}}'


def curves(*options: str) -> int:
    return main(["--quiet", "analyze", "curves", *TINY, *SHORT, *options])


def row(setting: dict[str, Any], accuracy: float, interval: tuple[float, float], work: float) -> GridRow:
    return GridRow(
        setting, accuracy, interval, 0.9, 1.0, 2.0, work, work, 1.0, 1.0, 10, 10, 0.5, round(1000 / work), 1000
    )


def test_points_are_kept_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "curves.json", tmp_path / "plots"
    assert curves("--knobs", FEW, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, "analyze curves")
    points = [(row["point"]["cache"], row["point"]["settings"]) for row in record.data["rows"]]
    assert ("bicache", {"depth": 2}) in points
    assert ("bicache", {"depth": 1}) not in points
    assert ("block-dual", {}) in points, "a policy without knobs runs at its defaults"
    assert ("dllm-cache", {"ratio": 0.5}) in points, "policies that --knobs leaves out keep the usual ones"
    assert (plots / "curves.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "bicache depth=2" in out
    assert record.data["reading"] in out
    by_point = {str(row["point"]["settings"]): row["result"] for row in record.data["rows"]}
    assert by_point["{'depth': 2}"]["policy"]["row_layers"] < by_point["{'depth': 0}"]["none"]["row_layers"]
    fewer = [row for row in record.data["rows"] if row["point"]["sampling"]]
    assert [row["point"]["cache"] for row in fewer] == ["none"] * len(fewer)
    kept = output.read_bytes()
    assert curves("--knobs", FEW, "--output", str(output)) == 0
    assert output.read_bytes() == kept, "nothing is measured again"


def test_every_knob_is_one_of_its_policy() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    workload = usual_workload(llm, 1, 0, {"max_tokens": 8, "steps": 8}, prefixes=1)
    knobs, left_out = asked_knobs(llm, workload, {}, {})
    depths = next(knob for knob in knobs if knob.setting == "depth")
    assert depths.values == tuple(range(llm.loaded.config.layers + 1))
    assert {knob.cache for knob in knobs} | {left.name for left in left_out} >= set(KNOBS) - {"uniform-cache"}
    (steps,) = [knob for knob in knobs if knob.of_sampler]
    assert (steps.cache, steps.values) == ("none", (1, 2, 4, 8))
    for knob in knobs:
        assert knob.grid(1).points(llm)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ('{"bicahe": {"depth": [1]}}', "--knobs names 'bicahe', which does not run here; known: "),
        ('{"bicache": 3}', "--knobs: 'bicache' must be an object of settings and their values, got 3"),
        ('{"bicache": {"depth": 3}}', "--knobs: bicache: depth"),
        ('{"bicache": {"dept": [3]}}', "--grid varies 'dept'"),
        ('{"bicache": {"depth": [99]}}', "at cache=bicache, depth=99"),
    ],
)
def test_what_cannot_be_swept(knobs: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert curves("--knobs", knobs) == 2
    assert message in capsys.readouterr().err


def test_the_reading_names_the_cheapest_point_that_holds() -> None:
    depth = Curve(
        Knob("bicache", "depth", (2, 4, 6)),
        (
            row({"depth": 2}, 0.9, (0.8, 0.95), 2.0),
            row({"depth": 4}, 0.88, (0.8, 0.95), 4.0),
            row({"depth": 6}, 0.1, (0.05, 0.2), 5.0),
        ),
    )
    reuse = Curve(Knob("reuse"), (row({}, 0.0, (0.0, 0.1), 8.0),))
    words = reading([depth, reuse])
    assert "bicache holds it with 25.0 % of the work at depth 4, and falls to 10.0 % at depth 6." in words
    assert "reuse does not hold it anywhere; its best point has 0.0 %." in words
    assert "bicache depth=6" in text([depth, reuse])
