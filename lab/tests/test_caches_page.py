"""Caches under every way of decoding: what is measured, and the page that is made of it."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remask import LLM
from remask.errors import ConfigError, UnknownNameError
from remask_lab.bench import decodings
from remask_lab.bench.decodings import BASELINE, GRIDS, SUBJECT, measure
from remask_lab.pages import caches
from remask_lab.pages.page import PAGES
from remask_lab.records.record import Record, read_record, write_record


@pytest.fixture
def _few(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two caches, and few tokens."""
    small = {
        "bundled-tariff": replace(
            GRIDS["bundled-tariff"], caches=(("none", {}), ("block-dual", {}), ("dkv-greedy", {}))
        ),
        "bundled-uniform": replace(GRIDS["bundled-uniform"], caches=(("none", {}), ("uniform-cache", {"drift": 0.3}))),
    }
    monkeypatch.setattr(decodings, "GRIDS", small)


@pytest.mark.thorough
@pytest.mark.usefixtures("_few")
def test_the_command_measures_and_writes_the_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder, page = tmp_path / "results", tmp_path / "caches.md"
    given = ["--folder", str(folder), "--output", str(page), "--requests", "2"]
    asked = ["--decodings", "2 steps", "3 tokens in each of 6 steps", "random order"]
    assert caches.main([*given, *asked, "--measure", "bundled-tariff", "bundled-uniform"]) == 0
    assert sorted(path.name for path in folder.iterdir()) == [
        "bundled-tariff.2.json",
        "bundled-tariff.6.json",
        "bundled-uniform.2.json",
    ]
    text = page.read_text(encoding="utf-8")
    assert text.count("## `bundled-tariff`\n") == text.count("## `bundled-uniform`\n") == 1
    assert "### 2 steps (`bundled-tariff`)" in text
    assert "| `block-dual` | 4.00 | 100.0 % (33.3 to 100.0) | 100.0 % | " in text
    assert "| `uniform-cache drift=0.3` | 1.00 | " in text
    assert "- Left out: `dkv-greedy`: dkv-greedy plans by an order drawn beforehand" in text
    assert "\n| `dkv-greedy` | 1.00 | " in text, "in random order it runs"
    kept = read_record(folder / "bundled-tariff.2.json", SUBJECT)
    rows = {row["cache"]: row for row in kept.data["results"]}
    assert set(rows) == {BASELINE, "none", "block-dual"}
    assert rows["none"]["work_ratio_to_none"] == 4, "two steps in place of eight"
    assert caches.main(given) == 0
    assert page.read_text(encoding="utf-8") == text, "without --measure the page is made of the files"
    (folder / "x.json").write_text("{}")
    assert caches.main(given) == 2
    assert "x.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--decodings", "2 steps"], "--decodings says what --measure measures"),
        (["--measure", "bundled-tariff", "--decodings", "3 stepz"], "Unknown decoding of the models of --measure"),
    ],
)
def test_decodings_that_are_not_measured_are_refused(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--folder", str(tmp_path / "results"), "--output", str(tmp_path / "caches.md")]
    assert caches.main([*given, *options]) == 2
    assert message in capsys.readouterr().err


def row(cache: str, right: float, work: float, time: float) -> dict[str, Any]:
    shares = {"accuracy": right, "accuracy_interval": [right, right], "agreement_with_none": 1.0}
    return {"cache": cache, **shares, "forwards": 4, "work_ratio_to_none": work, "ratio_to_none": time}


def record(model: str, decoding: str, *rows: dict[str, Any]) -> Record:
    asked = {"requests": 1, "prefixes": 1, "max_tokens": 8, "block_length": 8, "concurrency": 1, "decoding": decoding}
    machine = {"cpu": "a CPU", "threads": 1, "dtype": "float32"}
    about = {
        "model": model,
        "fingerprint": "f",
        "settings": asked,
        "seed": 1,
        "machine": machine,
        "commit": "c",
        "date": "d",
    }
    return Record(SUBJECT, about, {"results": [row(BASELINE, 1, 1, 1), *rows], "left_out": {}})


def test_what_loses_is_named(tmp_path: Path) -> None:
    rows = [row("none", 0.5, 4, 4), row("a", 0.2, 9, 9), row("b", 0.5, 5, 3)]
    text = caches.page([record("bundled-tariff", "factor 1", *rows)])
    assert "loses answers without a cache too. Fewer right answers than `none`: `a`. A loss of 5 points is" in text
    assert "answers than `none` under the same decoding:\n\n- `bundled-tariff`, factor 1: `a`.\n" in text
    assert "Less work than `none`, and slower: `b`." in text
    within = row("a", 0.9, 5, 3.9) | {"accuracy_interval": [0.5, 1.0]}
    text = caches.page([record("bundled-tariff", "factor 1", row("none", 1.0, 4, 4), within)])
    assert text.endswith("\n\nFewer, which shows no loss at this size: `a`.\n")
    assert "None of those measured." in text
    found = record("bundled-tariff", "factor 1", row("none", 1.0, 4, 4), row("a", 1.0, 5, 3.9))
    write_record(tmp_path / "x.json", found)
    text = caches.page([read_record(tmp_path / "x.json", SUBJECT)])
    assert text.endswith("\n\nA loss of 5 points is excluded: `a`. No cache has fewer right answers than `none`.\n")


def test_one_table_of_all_caches() -> None:
    none = row("none", 1, 1, 1)
    text = caches.page(
        [
            record("bundled-tariff", "8 steps", none, row("a", 0.5, 5.25, 1)),
            record("bundled-tariff", "factor 1", none, row("a", 0.25, 9, 1)),
            record("bundled-tariff", "random order", none, row("dkv-greedy", 1.0, 7, 1)),
            record("bundled-uniform", "1 token a step", none, row("b", 1.0, 3, 1)),
        ]
    )
    table = text[text.index("| cache | `bundled-tariff`") :].split("\n\n")[0].splitlines()
    assert table[2:] == [
        "| `none` | 100 % (100 to 100), 1.00x | 100 % (100 to 100), 1.00x |",
        "| `a` | 50 % (50 to 50), 5.25x | - |",
        "| `none`, random order | 100 % (100 to 100), 1.00x | - |",
        "| `dkv-greedy`, random order | 100 % (100 to 100), 7.00x | - |",
        "| `b` | - | 100 % (100 to 100), 3.00x |",
    ]


def test_only_bundled_models_and_their_decodings_are_measured() -> None:
    with pytest.raises(ConfigError, match="has no task of its own; known models: bundled-tariff"):
        measure(LLM("llada-tiny", load_format="dummy", dtype="float32", device="cpu"), "8 steps", 1, 0)
    with pytest.raises(UnknownNameError, match="decoding"):
        measure(LLM("bundled-uniform", dtype="float32", device="cpu"), "8 steps", 1, 0)


def test_the_page_is_that_of_the_files() -> None:
    records = [read_record(path, SUBJECT) for path in sorted(caches.FOLDER.glob("*.json"))]
    assert PAGES["caches"].read_text(encoding="utf-8") == caches.page(records), "run python -m remask_lab pages caches"
