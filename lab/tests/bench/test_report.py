"""What the table says of results, and the notes under it."""

import csv
import json
from pathlib import Path
from typing import Any

from matplotlib.patches import Rectangle

from remask_lab.bench.plot import _quality_figure, _work_figure, plot_bench
from remask_lab.bench.report import DETAILED, SHORT, csv_text, table
from remask_lab.records.record import Record

COMPARED = {"ratio_to_none": 1.0, "ratio_range": [1.0, 1.0], "work_ratio_to_none": 1.0, "slower_with_less_work": False}


def result(name: str, **values: Any) -> dict[str, Any]:
    return {
        "cache": name,
        "settings": {},
        "baseline": "none",
        "throughput_tok_s": 10.0,
        **COMPARED,
        "accuracy": None,
        "accuracy_interval": None,
        "agreement_with_none": 1.0,
        "forwards": 8,
        "row_layers": 1_234_000,
        "prefix_hits": 0,
        "prefix_depth": 0.0,
        "peak_memory_bytes": 2_000_000,
        "extra_memory_bytes": 0,
        "alone": dict(COMPARED),
        "flops": 2.5e11,
        "flops_saved": 4.0,
        "efficiency_kept": 0.75,
        "cache_ratio": 0.25,
        "staleness": 1.5,
        "staleness_is_upper_bound": False,
        **values,
    }


def report(*results: dict[str, Any], **more: Any) -> Record:
    workload: dict[str, Any] = {"requests": 4, "prefixes": 2, "prefix_ratio": 0.5, "concurrency": 2, "max_tokens": 8}
    workload |= {"steps": 8, "block_length": 8, "canvas_length": None, "rounds": 1}
    workload |= {"alone_requests": 2}
    machine = {"dtype": "float32", "cpu": "c", "threads": 1}
    about = {"model": "m", "fingerprint": "f", "seed": 0, "settings": workload, "machine": machine, "commit": None}
    return Record("bench", about, {"results": list(results), **more})


def cells(text: str, row: int) -> dict[str, str]:
    """A row of a table by its columns' names."""
    lines = [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line[:1] == "|"]
    return dict(zip(lines[0], lines[row + 2], strict=True))


def test_how_far_predictions_move_stands_beside_agreement_where_it_was_measured() -> None:
    none = result("none", divergence_nats=None, divergence_interval=None)
    moved = result("reuse", divergence_nats=0.4, divergence_interval=[-0.1, 0.9])
    single = result("bicache", divergence_nats=0.25, divergence_interval=[None, None])
    text = table(report(none, moved, single))
    told = [cells(text, row)["nats moved"] for row in range(3)]
    assert told == ["-", "0.400 (0.000 to 0.900)", "0.250"]
    assert "at most 24 audited requests" in text
    assert "nats" not in table(report(none, result("reuse")))
    flat = list(csv.DictReader(csv_text(report(none, moved)).splitlines()))
    assert (flat[1]["divergence_interval_low"], flat[0]["divergence_nats"]) == ("-0.1", "")


def test_a_baseline_that_answers_nothing_is_named() -> None:
    drawn = {"baseline": "none, random order", "accuracy": 0.05, "accuracy_interval": [0.0, 0.2]}
    said = "none, random order answers hardly anything itself"
    assert said in table(report(result("none, random order", **drawn), result("dkv-greedy", **drawn)))
    assert said not in table(report(result("none, random order", **drawn | {"accuracy": 0.1})))


def test_rows_as_csv() -> None:
    one = result("none", accuracy=0.5, accuracy_interval=[0.25, 0.75])
    two = result("bicache, deep", settings={"depth": 2}, slower_with_less_work=True)
    first, second = csv.DictReader(csv_text(report(one, two)).splitlines())
    assert list(first) == list(second)
    assert (first["accuracy_interval_low"], first["accuracy_interval_high"]) == ("0.25", "0.75")
    assert (first["alone_ratio_range_low"], first["slower_with_less_work"]) == ("1.0", "false")
    assert (second["cache"], json.loads(second["settings"])) == ("bicache, deep", {"depth": 2})
    assert (second["accuracy"], second["accuracy_interval_high"]) == ("", "")
    assert (second["row_layers"], second["slower_with_less_work"]) == ("1234000", "true")


def test_pictures_show_every_row(tmp_path: Path) -> None:
    rows = [
        result("none", accuracy=0.9, accuracy_interval=[0.8, 0.95]),
        result("reuse", accuracy=1.0, accuracy_interval=[0.9, 1.0], ratio_to_none=2.0, ratio_range=[1.5, 2.5]),
    ]
    quality, work = _quality_figure(rows), _work_figure(rows)
    assert {note.get_text() for note in quality.axes[0].texts} >= {"none", "reuse"}
    assert [tick.get_text() for tick in work.axes[0].get_yticklabels()] == ["none", "reuse"]
    bars = [bar for bar in work.axes[0].patches if isinstance(bar, Rectangle)]
    assert [bar.get_width() for bar in bars] == [1.0, 2.0, 1.0, 1.0]
    assert all(path.stat().st_size for path in plot_bench(report(*rows), tmp_path))


def test_a_detailed_row() -> None:
    settings = {"refresh_interval": None, "ratio": 0.5}
    values = {"accuracy": 0.5, "accuracy_interval": [0.25, 0.75], "extra_memory_bytes": -500_000}
    shown = cells(table(report(result("x", settings=settings, **values)), detail=True), 0)
    assert list(shown) == [name for name, _ in DETAILED if name != "nats moved"]
    assert shown["settings"] == "refresh_interval=null, ratio=0.5"
    assert shown["accuracy (95 % interval)"] == "50.0 % (25.0 to 75.0)"
    assert (shown["forwards"], shown["row-layers"], shown["cache ratio"]) == ("8", "1.234 M", "25.0 %")
    assert (shown["TFLOPs"], shown["FLOPs saved"], shown["efficiency kept"]) == ("0.25", "4.00x", "75 %")
    assert (shown["staleness"], shown["extra memory"]) == ("1.50", "-0.5 MB")


def test_an_efficiency_has_its_range_and_is_not_shown_where_noise_makes_it() -> None:
    values = {"flops_saved": 2.0, "ratio_to_none": 1.8, "ratio_range": [1.6, 1.9], "work_ratio_to_none": 2.0}
    rows = [
        result("none", flops_saved=1.0, efficiency_kept=1.0),
        result("x", **values, efficiency_kept=0.9),
        result("y", **values | {"ratio_to_none": 2.1, "ratio_range": [1.9, 2.3]}, efficiency_kept=1.05),
    ]
    text = table(report(*rows), detail=True)
    assert [cells(text, row)["efficiency kept"] for row in range(3)] == ["100 %", "90 % (80 to 95)", "-"]
    assert "- where it would be above 100 %" in text


def test_what_saves_nothing_is_marked() -> None:
    rows = [result("none", flops_saved=1.0), result("x", flops_saved=1.0), result("y", work_ratio_to_none=2.0)]
    for detail, column in ((False, "work saved"), (True, "FLOPs saved")):
        text = table(report(*rows), detail=detail)
        shown = [cells(text, row)[column] for row in range(3)]
        assert [mark.endswith(" =") for mark in shown] == [False, True, False]
        assert text.splitlines()[-1].startswith("= Saves nothing at these settings")
    assert "=" not in table(report(rows[0], rows[2]))


def test_a_bound_is_shown_as_one() -> None:
    text = table(report(result("x", staleness_is_upper_bound=True)), detail=True)
    assert cells(text, 0)["staleness"] == "<= 1.50"


def test_less_work_in_more_time_is_marked_and_explained() -> None:
    slow = {**COMPARED, "ratio_to_none": 0.8, "slower_with_less_work": True}
    plain, batched, alone = report(result("a")), report(result("a", **slow)), report(result("a", alone=slow))
    assert "⚠" not in table(plain, detail=True)
    assert cells(table(batched), 0)["speed"] == "0.80x ⚠"
    text = table(alone, detail=True)
    assert (cells(text, 0)["speed"], cells(text, 0)["speed alone"]) == ("1.00x", "0.80x ⚠")
    for shown in (table(batched), text):
        assert shown.splitlines()[-1] == "⚠ Slower than its baseline although it computes fewer row-layers."


def test_other_baselines_and_what_is_left_out_are_named() -> None:
    rows = [result("none"), result("drawn", baseline="drawn"), result("y", baseline="drawn")]
    text = table(report(*rows, left_out=[{"name": "z", "reason": "it cannot be"}]))
    assert list(cells(text, 0)) == [name for name, _ in SHORT if name != "nats moved"]
    assert "y is compared with 'drawn', not with 'none'." in text
    assert text.count("is compared with") == 1
    assert text.endswith("Left out: z: it cannot be")


def test_the_range_over_rounds_stands_beside_the_median() -> None:
    text = table(report(result("a", ratio_to_none=2.0, ratio_range=[1.8, 2.2])))
    assert cells(text, 0)["speed"] == "2.00x (1.80 to 2.20)"


def test_a_busy_machine_is_told() -> None:
    busy = "The machine was busy: others used 1.8 of its 2 cores."
    assert busy in table(report(result("a"), conditions={"busy": busy}))
    assert "busy" not in table(report(result("a"), conditions={"busy": None}))
