"""`remask analyze curves`: what is swept, how it goes on, what is refused."""

from pathlib import Path
from typing import Any

import pytest

from remask import LLM
from remask.cli import main
from remask_lab.bench.workload import usual_workload
from remask_lab.records.record import read_record
from remask_lab.subjects.curves import KNOBS, Curves, Knob, asked_knobs, reading, text

TINY = ["--model", "llada-tiny", "--load-format", "dummy", "--requests", "2", "--concurrency", "2"]
SHORT = ["--max-tokens", "8", "--prefix-tokens", "12", "--prompt-tokens", "3", "--dtype", "float32", "--device", "cpu"]
FEW = '{"bicache": {"depth": [0, 2]}, "dkv-pd": {"refresh_interval": [2]}}'


def curves(*options: str) -> int:
    return main(["--quiet", "analyze", "curves", *TINY, *SHORT, *options])


def row(name: str, accuracy: float, interval: tuple[float, float], work: float) -> dict[str, Any]:
    own = {"accuracy": accuracy, "accuracy_interval": interval, "agreement_with_none": 1.0}
    return {"cache": name, **own, "work_ratio_to_none": work, "ratio_to_none": 1.0}


@pytest.mark.thorough
def test_points_are_measured_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "curves.json", tmp_path / "plots"
    assert curves("--knobs", FEW, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, "analyze curves")
    rows = {row["cache"]: row for row in record.data["results"]}
    assert "bicache depth=2" in rows
    assert "bicache depth=1" not in rows
    assert "block-dual" in rows, "a policy without knobs runs at its defaults"
    assert "dllm-cache ratio=0.5" in rows, "policies that --knobs leaves out keep the usual ones"
    assert (plots / "curves.png").read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert "bicache depth=2" in out
    assert record.data["reading"] in out
    none = rows["none"]["row_layers"]
    assert rows["bicache depth=2"]["row_layers"] < none
    assert [rows[f"none steps={steps}"]["row_layers"] for steps in (1, 2, 4, 8)] == [
        none // share for share in (8, 4, 2, 1)
    ]


@pytest.mark.thorough
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
        for value in knob.values:
            assert knob.contender(llm, workload, value).name.startswith(knob.cache)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ('{"bicahe": {"depth": [1]}}', "--knobs names 'bicahe', which does not run here; known: "),
        ('{"bicache": 3}', "--knobs: 'bicache' must be an object of settings and their values, got 3"),
        ('{"bicache": {"depth": 3}}', "--knobs: bicache: depth"),
        ('{"bicache": {"depth": []}}', "--knobs: bicache: depth must hold one value or more, got []"),
        ('{"bicache": {"dept": [3]}}', "Unknown setting"),
        ('{"bicache": {"depth": [99]}}', "at bicache depth=99: "),
    ],
)
def test_what_cannot_be_swept(knobs: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert curves("--knobs", knobs) == 2
    assert message in capsys.readouterr().err


def test_the_reading_names_the_cheapest_point_that_holds() -> None:
    depth = Knob("bicache", "depth", (2, 4, 6))
    points = (
        row("bicache depth=2", 0.9, (0.8, 0.95), 2.0),
        row("bicache depth=4", 0.88, (0.8, 0.95), 4.0),
        row("bicache depth=6", 0.1, (0.05, 0.2), 5.0),
    )
    none = row("none", 0.9, (0.85, 0.95), 1.0)
    found = Curves(none, {depth: points, Knob("reuse"): (row("reuse", 0.0, (0.0, 0.1), 8.0),)})
    words = reading(found)
    assert "bicache is not shown to lose it with 25.0 % of the work at depth=4, and falls to 10.0 % at depth=6" in words
    assert "reuse loses answers everywhere; its best point has 0.0 %." in words
    same = [row(f"bicache depth={number}", 0.9, (0.89, 0.91), 2.0) for number in (2, 4, 6)]
    steady = Curves(row("none", 0.9, (0.89, 0.91), 1.0), {depth: tuple(same)})
    assert "bicache keeps it with 50.0 % of the work at depth=2." in reading(steady)
    assert "bicache depth=6" in text(found)
