"""The measurements of `remask_lab.speed` run, at sizes that say nothing about speed."""

import importlib
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from remask.errors import ConfigError, IntegrityError
from remask.model.work_list import WorkList
from remask_lab.papers import uniform_shapes
from remask_lab.papers.definition import load_table
from remask_lab.records.record import read_record
from remask_lab.speed import host, host_decode, routing, runs, serving
from remask_lab.speed.__main__ import MEASUREMENTS, measure
from remask_lab.speed.__main__ import main as speed
from tests.engine.executors import NEEDS_TRITON

Capture = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch
INVARIANCE = "--model llada-tiny --caches none,reuse --rounds 2 --requests 2 --prompt 12 --response 8 --block-length 4"


def run(name: str, *words: str) -> None:
    """Run a measurement; words may stand together in one string."""
    measure(name, [each for word in words for each in word.split(" ")])


def measured(capsys: Capture, name: str, *words: str) -> Any:
    """The JSON that a measurement prints."""
    run(name, *words)
    return json.loads(capsys.readouterr().out)


def lines_of(capsys: Capture, name: str, *words: str) -> list[dict[str, Any]]:
    """The lines of JSON that a measurement prints behind what it says of the machine."""
    run(name, *words)
    return [json.loads(line) for line in capsys.readouterr().out.rpartition("\n}\n")[2].splitlines()]


def test_every_measurement_is_a_function_of_its_module() -> None:
    for name, (module, _) in MEASUREMENTS.items():
        assert callable(getattr(importlib.import_module(f"remask_lab.speed.{module}"), name))


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("invariance", f"{INVARIANCE} --rounds 0", "--rounds"),
        ("quantised", "--rows 1 0", "--rows"),
        ("large", "--block 3", "--block must be at least 4, got 3"),
        ("routing", "--fronts nginx", "nginx.*client, ray, vllm-router|nginx.*client, vllm-router, ray"),
        ("host", "--policies no-such --no-lists", "no-such"),
    ],
)
def test_what_cannot_be_measured(name: str, words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run(name, words)


def test_a_users_error_is_one_line(monkeypatch: Patch, capsys: Capture) -> None:
    monkeypatch.setattr(sys, "argv", ["speed", "sharing", "--model", "llada-1t"])
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


def test_sharing(capsys: Capture) -> None:
    shape = "--requests 5 --prompt 70 --own 6 --response 8 --concurrency 3"
    report = measured(capsys, "sharing", "--model", "sdar-tiny", shape)
    assert report["requests_that_skip_the_context"] == 4
    assert report["row_layers_gain"] > 1.5


def test_invariance(monkeypatch: Patch, capsys: Capture) -> None:
    report = measured(capsys, "invariance", INVARIANCE)
    assert [row["cache"] for row in report["results"]] == ["none", "reuse"]
    for row in report["results"]:
        low, high = row["range"]
        assert 0 < low <= row["times_as_long"] <= high
        assert 0 <= row["answers_that_differ"] <= 2
    answers, calls = runs.answers, list[int]()

    def other_answers(*args: Any, **settings: Any) -> Any:
        calls.append(1)
        seconds, found = answers(*args, **settings)
        return seconds, [replace(each, token_ids=each.token_ids[: len(calls)]) for each in found]

    monkeypatch.setattr("remask_lab.speed.engines.answers", other_answers)
    with pytest.raises(IntegrityError, match="none: with batch_invariant an answer depends on what else runs"):
        run("invariance", INVARIANCE)


@pytest.mark.thorough
def test_quantised(capsys: Capture) -> None:
    words = "--model llada-tiny --kinds int8,int4 --rows 1 5 --rounds 1 --questions 3"
    report = measured(capsys, "quantised", words)
    plain, *others = report["results"]
    assert (plain["quantization"], plain["share_of_bytes"]) == (None, 1)
    assert plain["times_as_fast"] == {"1": 1, "5": 1}
    assert [row["quantization"] for row in others] == ["int8", "int4"]
    for row in others:
        assert 0.2 < row["share_of_bytes"] < 0.6
        assert row["times_as_fast"].keys() == {"1", "5"}
    assert len(report["bundled"]) == 6
    assert [row["same_tokens"] for row in report["bundled"][:2]] == [1, 1]
    assert all(0 <= row["right"] <= row["of"] == 3 for row in report["bundled"])


@pytest.mark.thorough
def test_serving(tmp_path: Path) -> None:
    target = tmp_path / "serving.json"
    size = "--clients 2 --requests 4 --prefixes 2 --rounds 1"
    run("serving", size, "--json", str(target))
    report = read_record(target, "benchmarks serving").data
    assert report["served_gain_over_none"] > 0
    for shares in report["server_overhead"].values():
        assert shares["range"][0] <= shares["total"] <= shares["range"][1] < 1
        parts = shares["computing_slower"] + shares["waiting_in_steps"] + shares["between_steps"]
        assert parts == pytest.approx(shares["total"]), "one round, so no medians of different rounds are added"
    alone, at_once = (report["per_request"][name] for name in ("engine_alone", "all_at_once"))
    assert alone["engine_ms"] <= alone["in_steps_ms"] <= alone["wall_ms"]
    assert alone["server_ms"] == 0 < at_once["server_ms"]
    assert at_once["client_ms"] > 0
    assert alone["steps"] > 0
    assert report["prefix_ratio"] == pytest.approx(0.9, abs=0.01)
    assert report["accuracy"] == {"cache": 1, "none": 1}
    assert report["first_settled_block_miss_ms"] > 0
    assert report["first_settled_block_hit_ms"] > 0


def test_what_a_request_takes_is_a_median_over_turns() -> None:
    turns = [serving.Clocks(wall=wall, steps=8, in_steps=0, engine=0, server=0, client=0) for wall in (3, 1)]
    told = serving.per_request(turns, 2)
    assert (told["wall_ms"], told["steps"]) == (1000, 4)


@pytest.mark.thorough
def test_routing(monkeypatch: Patch, tmp_path: Path) -> None:
    target = tmp_path / "routing.json"
    monkeypatch.setattr(routing, "ROUTER", None)
    run("routing", "--requests", "24", "--fronts", "client,vllm-router", "--json", str(target))
    ratios = read_record(target, "benchmarks routing").data
    assert ratios["vllm-router"] == "not installed"
    assert ratios["client"]["by_prefix"] > ratios["client"]["round_robin"] + 0.2, ratios


def test_a_process_that_does_not_stop_is_killed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(serving, "STOP_S", 0.2)
    deaf = "import os, signal, time; signal.signal(15, signal.SIG_IGN); print('pid', os.getpid()); time.sleep(60)"
    number = 0
    with (
        pytest.raises(RuntimeError, match="ended with status -9"),
        serving.process([sys.executable, "-uc", deaf], r"pid (\d+)") as pid,
    ):
        number = int(pid)
    with pytest.raises(ProcessLookupError):
        os.kill(number, 0)


def test_a_process_that_ends_early_is_reported_at_once() -> None:
    words = [sys.executable, "-c", "print('no port'); raise SystemExit(3)"]
    with (
        pytest.raises(RuntimeError, match=r"and the process ended with status 3"),
        serving.process(words, "running on (.*)"),
    ):
        pass


@pytest.mark.thorough
def test_depth_rule(capsys: Capture) -> None:
    none, *rows = lines_of(capsys, "depth_rule", "--requests", "4", "--samples", "2")
    accuracy = {(row["boundary"], row["depth"]): row["accuracy"] for row in rows if "depth" in row}
    assert none["accuracy"] == accuracy["stored", 4] == accuracy["recomputed", 5] == 1
    assert accuracy["stored", 5] == accuracy["stored", 8] == accuracy["recomputed", 8] == 0
    depths = {row["rule"]: row["one request"] for row in rows if "rule" in row}
    assert (depths["leading, least-depth, safe"], depths["leading, least-depth, paper"]) == (4, 5)


@pytest.mark.thorough
def test_within_request(capsys: Capture) -> None:
    lines = lines_of(capsys, "within_request", "--requests", "3", "--seeds", "1")
    tasks = [line["task"] for line in lines if "task" in line]
    assert len(tasks) == len(set(tasks)) == 6
    *_, none, fewer, reuse, often, seldom, once = lines
    assert none["right"] == fewer["right"] == often["right"] == seldom["right"] == once["right"] == none["of"] == 3
    assert reuse["right"] == 0
    assert none["row_layers"] > often["row_layers"] > seldom["row_layers"] > once["row_layers"] > reuse["row_layers"]


@pytest.mark.thorough
def test_parts(capsys: Capture) -> None:
    words = "--requests 4 --prompts 1 --documents 4 --depths 2 8 --ratios 0"
    none, shallow, deep, anchors, prefix, _ = lines_of(capsys, "parts", words)
    assert none["plan"]["accuracy"] == shallow["plan"]["accuracy"] == deep["lookup"]["accuracy"] == 1
    assert deep["plan"] == anchors["plan"]
    assert deep["row_layers"] == anchors["row_layers"] < shallow["row_layers"] < none["row_layers"]
    assert (deep["passes_over_parts"], none["passes_over_parts"]) == (8, 0)
    assert prefix["passes_over_parts"] > 2, "each order of the documents is a prefix of its own"


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
