"""The measurements of `remask_lab.speed` run, at sizes that say nothing about speed."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from remask.errors import ConfigError
from remask.model.work_list import WorkList
from remask_lab.papers import uniform_shapes
from remask_lab.papers.definition import load_table
from remask_lab.records.record import read_record
from remask_lab.speed import host, host_decode
from remask_lab.speed.__main__ import MEASUREMENTS, measure
from remask_lab.speed.__main__ import main as speed
from tests.engine.executors import NEEDS_TRITON

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def run(name: str, *words: str) -> None:
    """Run a measurement; words may stand together in one string."""
    measure(name, [each for word in words for each in word.split(" ")])


def measured(capsys: Capture, name: str, *words: str) -> Any:
    """The JSON that a measurement prints."""
    run(name, *words)
    return json.loads(capsys.readouterr().out)


def test_every_measurement_is_a_function_of_its_module() -> None:
    for name, (module, _) in MEASUREMENTS.items():
        assert callable(getattr(importlib.import_module(f"remask_lab.speed.{module}"), name))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("large", "--block 3", "--block must be at least 4, got 3"),
        ("host", "--policies no-such --no-lists", "no-such"),
    ],
)
def test_what_cannot_be_measured(name: str, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(name, words)


def test_a_users_error_is_one_line(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "argv", ["speed", "policies", "--model", "llada-1t"])
    assert speed() == 2
    assert capsys.readouterr().err.startswith("error: Unknown preset 'llada-1t'.")


@pytest.mark.parametrize(
    "code",
    [
        "import remask",
        "from remask.cli import main; main(['--version'])",
        "from remask.cli import main; main(['--help'])",
        "import remask_lab.speed.__main__",
    ],
)
def test_starting_imports_no_torch(code: str) -> None:
    program = (
        "import atexit, os, sys\n"
        "atexit.register(lambda: os._exit(3) if {'torch', 'numpy', 'transformers'} & set(sys.modules) else None)\n"
        + code
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.returncode == 0, done.stderr.decode()


def test_a_start_and_a_step_beside_its_products(capsys: Capture) -> None:
    told = measured(capsys, "large", "--model", "llada-tiny", "--block", "8", "--turns", "2")
    assert told["kv_tokens"] >= 2 * told["max_model_len"]
    assert 0 < told["weight_bytes"] < told["peak_bytes"] <= told["peak_bytes_after"]
    assert 0 < told["ratio_range"][0] <= told["ratio"] <= told["ratio_range"][1]


@pytest.mark.parametrize("model", ["llada-tiny", "dream-tiny"])
def test_every_policy_beside_none(capsys: Capture, tmp_path: Path, model: str) -> None:
    target = tmp_path / "policies.json"
    shape = "--batch 2 --prompt 24 --prefix 16 --response 16 --block-length 8"

    def rows_of(*words: str) -> dict[str, dict[str, Any]]:
        run("policies", "--model", model, shape, *words, "--json", str(target))
        return {row["cache"]: row for row in json.loads(target.read_text(encoding="utf-8"))["results"]}

    rows = rows_of("--steps", "4")
    none = rows.pop("none")
    assert (none["gain"], none["work_gain"], none["quotient"]) == (1, 1, 1)
    assert none["rows_a_layer"] == [80, 80]
    assert set(rows) >= {"dkv-decode", "dllm-cache", "bicache+block-dual"}
    assert ("dkv-greedy" in rows) is (model == "llada-tiny")
    block = rows["block-dual"]
    assert block["work_gain"] == pytest.approx(4 * 80 / (80 + 3 * 16)), "one full pass and three over two blocks of 8"
    assert block["steps_with_many_rows"] == 1
    assert block["times_bare_with_few_rows"] > 0
    assert rows["reuse"]["quotient"] is None
    assert rows["reuse"]["rows_a_layer"] == [48, 48], "without the prefix-only pass"
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in rows)
    rows = rows_of("--prefix", "0", "--steps", "1")
    assert {row["work_gain"] for row in rows.values()} == {1}, "without a prefix every policy begins with a full pass"


def test_uniform(capsys: Capture, tmp_path: Path) -> None:
    target = tmp_path / "uniform.json"
    shape = "--canvas 64 --prompt 8 --block-length 8 --steps 4 --full-steps 2"
    run("uniform", "--model", "gidd-tiny", shape, "--json", str(target))
    report = read_record(target, "uniform block").data
    rows = {row["cache"]: row for row in report["results"]}
    assert rows["none"]["gain"] == rows["none"]["bound_by_rows"] == 1
    assert rows["block-prefix"]["bound_by_rows"] == pytest.approx(4 * 64 / (64 + 3 * 56))
    assert rows["uniform-cache r=0"]["bound_by_rows"] == pytest.approx(4 * 64 / (64 + 3 * 8))
    assert rows["uniform-cache r=4"]["bound_by_rows"] < rows["uniform-cache r=0"]["bound_by_rows"]
    assert all(ms > 0 for spent in report["operations_ms"].values() for ms in spent.values())
    assert "| cached |" in capsys.readouterr().out


def uniform_shape(monkeypatch: Patch, *options: str) -> None:
    monkeypatch.setattr(sys, "argv", ["uniform_shapes", *options])
    uniform_shapes.main()


@pytest.mark.parametrize("table", uniform_shapes.TABLES)
def test_blocks_of_the_thesis_shapes(table: str, monkeypatch: Patch, capsys: Capture) -> None:
    uniform_shape(monkeypatch, table, "--model", "gidd-tiny", "--divide", "32")
    shown = [line.split(" | ") for line in capsys.readouterr().out.splitlines()[2:]]
    rows = load_table(table).rows
    assert sorted(line[0].strip("| ") for line in shown) == sorted(row.name for row in rows)
    for line in shown:
        gain = float(line[5].strip("x |"))
        assert gain == 1 if "Base" in line[0] else gain >= 1, "rows that are computed"


def test_blocks_stand_for_whole_responses(monkeypatch: Patch, capsys: Capture, tmp_path: Path) -> None:
    target = tmp_path / "rows.json"
    options = ("thesis-6-1", "--model", "gidd-tiny", "--divide", "16", "--json", str(target))
    uniform_shape(monkeypatch, *options)
    first = capsys.readouterr().out
    kept = read_record(target, "uniform shapes").data["rows"]
    assert len(kept) == 3, "a baseline with its rows is measured side by side"
    found = {name: own for row in kept for name, own in row["result"].items()}
    assert all(own["gain"] == own["gain_in_work"] == 1 for name, own in found.items() if name.startswith("Base"))
    assert [found[f"Base, s32/b32, r{length}"]["shape"]["batch"] for length in (512, 1536)] == [8, 6], "6 prompts"
    long = found["Cached, s32/b32, r1536"]
    assert long["shape"] == {
        "canvas": 128, "prompt": 32 + 47, "block": 2, "steps": 2, "per_step": 3, "batch": 6, "next_block": True
    }  # fmt: skip
    assert long["seconds"] * long["tokens_per_s"] == pytest.approx(6 * 96), "all tokens of all responses"
    assert not found["Cached, s512/b512"]["shape"]["next_block"]
    monkeypatch.setattr(uniform_shapes, "time_block", None)
    uniform_shape(monkeypatch, *options)
    assert capsys.readouterr().out == first, "nothing is measured twice"


def test_shapes_that_a_model_cannot_have(monkeypatch: Patch) -> None:
    with pytest.raises(ConfigError, match="divide all lengths with --divide 16"):
        uniform_shape(monkeypatch, "thesis-6-9", "--model", "gidd-tiny")
    with pytest.raises(ConfigError, match="of uniform models, and 'llada-tiny' is none"):
        uniform_shape(monkeypatch, "thesis-6-9", "--model", "llada-tiny")


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", host_decode.POLICIES)
def test_a_decode_of_the_host_takes_every_step(policy: str) -> None:
    figures = host_decode.decode(host_decode.make_model(), policy, 320, 2)
    assert figures["steps"] == host_decode.STEPS
    assert figures["ms_per_step"] > 0


@NEEDS_TRITON
def test_the_host_cuts_the_lists_of_every_pass(monkeypatch: Patch) -> None:
    cut, whole = list[int](), host_decode.cut

    def noted(work: WorkList) -> None:
        cut.append(len(work.owners))
        whole(work)

    monkeypatch.setattr(host_decode, "cut", noted)
    host_decode.decode(host_decode.make_model(), "block-dual", 320, 2, lists=True)
    assert len(cut) == host_decode.STEPS
    assert set(cut) == {2 * host_decode.BLOCK, 2 * 320}


def test_the_host_says_what_lists_need(monkeypatch: Patch) -> None:
    monkeypatch.setattr(host, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"needs triton: .* or --no-lists"):
        run("host")


@pytest.mark.thorough
def test_host(tmp_path: Path, capsys: Capture) -> None:
    target = tmp_path / "host.json"
    sizes = "--rounds 1 --no-lists --policies none --canvases 320 --requests 1 2"
    run("host", sizes, "--json", str(target))
    rows = json.loads(target.read_text(encoding="utf-8"))["rows"]
    assert [(row["policy"], row["canvas"], row["requests"]) for row in rows] == [("none", 320, 1), ("none", 320, 2)]
    assert all(row["ms_per_step"] > 0 for row in rows)
    assert len(capsys.readouterr().out.splitlines()) == 4
    with pytest.raises(ConfigError, match="--against no-such-commit"):
        host.measure(1, "no-such-commit", [])
    with pytest.raises(ConfigError, match="the decode failed"):
        host.measure(1, None, [{"policy": "no such policy", "canvas": 320, "requests": 1}])
