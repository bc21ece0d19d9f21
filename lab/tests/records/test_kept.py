"""What the kept records say of themselves."""

import json
from collections.abc import Iterator
from typing import Any

from remask_lab.pages.page import RESULTS
from remask_lab.records.record import Record, read_record


def benches() -> Iterator[tuple[str, Record]]:
    """Each kept record of `remask bench` and its file's name."""
    for path in sorted([*RESULTS.glob("bench.*.json"), *(RESULTS / "real-weights").glob("*-*.json")]):
        record = read_record(path)
        if isinstance(record.data, dict) and "results" in record.data:
            yield path.name, record


def test_passes_are_those_that_the_kept_decoding_takes() -> None:
    """Without a threshold a block takes its steps, unless it ends; with one it takes fewer."""
    seen = 0
    for name, record in benches():
        asked = record.about["settings"]
        sampling = asked["sampling"]
        none = next(row for row in record.data["results"] if row["cache"] == "none")
        passes = none["forwards"] / asked["requests"]
        block = asked["steps"] * asked["block_length"] / asked["max_tokens"]
        assert passes <= asked["steps"], name
        if sampling["ignore_eos"]:
            assert passes == asked["steps"], name
        elif sampling["threshold"] is None:
            assert passes >= block / 2, name
        else:
            assert passes < block, f"{name}: the threshold decided nothing"
        seen += 1
    assert seen > 8


def test_records_of_equal_settings_have_equal_answers() -> None:
    """Of the same weights, machine and cache."""
    answers: dict[str, tuple[str, Any]] = {}
    decided = ("fingerprint", "product", "depth_table", "settings", "seed", "commit", "machine", "versions")
    for name, record in benches():
        for row in record.data["results"]:
            settings = [record.about.get(fact) for fact in decided]  # "product" is younger than most
            key = json.dumps([settings, row["cache"], row["settings"]], sort_keys=True)
            other, verdicts = answers.setdefault(key, (name, row["verdicts"]))
            assert verdicts == row["verdicts"], f"{name} and {other}: {row['cache']}"
