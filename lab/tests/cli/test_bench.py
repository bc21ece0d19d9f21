"""`remask bench`: the table, the JSON, and what it refuses."""

import csv
import io
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from lab.tests import installed

from remask.checks import BUNDLED
from remask.cli import main
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.policies import names_for
from remask.request.sampling_params import SamplingParams
from remask.session import Session
from remask_lab.bench.contenders import contender
from remask_lab.bench.workload import random_workload
from remask_lab.records.record import read_record
from tests.depth.models import with_ascii_tokenizer
from tests.goldens import model_dir

KEYS = {"cache", "throughput_tok_s", "ratio_to_none", "accuracy", "agreement_with_none"}
KEYS |= {"forwards", "row_layers", "prefix_hits", "peak_memory_bytes"}
SMALL = ["--requests", "6", "--prefixes", "2", "--concurrency", "3", "--rounds", "2", "--dtype", "float32"]


def bench(*options: str) -> int:
    return main(["--quiet", "bench", *options])


def test_random_workload_on_dummy_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "bench.json"
    shape = ["--prefix-tokens", "40", "--prompt-tokens", "6", "--max-tokens", "8"]
    policies = ["--caches", "none,reuse,bicache", "--cache-config", '{"bicache": {"depth": 1, "refresh_interval": 4}}']
    model = ["--model", "llada-tiny", "--load-format", "dummy"]
    results = ["--json", str(target), "--csv", str(tmp_path / "bench.csv"), "--plots", str(tmp_path / "pictures")]
    assert bench(*model, *SMALL, *shape, *policies, *results) == 0
    report = read_record(target, "bench")
    assert report.data["left_out"] == []
    none, reuse, bicache = report.data["results"]
    assert [row["cache"] for row in report.data["results"]] == ["none", "reuse", "bicache"]
    assert all(set(row) >= KEYS for row in report.data["results"])
    assert all(row["accuracy"] is None for row in report.data["results"])
    layers = report.about["layers"]
    steps = 6 * 8
    assert none["forwards"] == reuse["forwards"] == bicache["forwards"] == steps
    assert none["row_layers"] == steps * 54 * layers
    assert reuse["row_layers"] == steps * 14 * layers + 2 * 40 * layers, "two prefix-only passes are counted"
    refreshes = 6 * 2
    assert bicache["row_layers"] == reuse["row_layers"] + refreshes * 40 * (layers - 1)
    assert (none["prefix_hits"], reuse["prefix_hits"], bicache["prefix_hits"]) == (0, 4, 4)
    assert none["ratio_to_none"] == none["agreement_with_none"] == 1
    table = capsys.readouterr().out
    assert table.count("|") == 10 * (2 + 3)
    with (tmp_path / "bench.csv").open(encoding="utf-8", newline="") as file:
        lines = list(csv.DictReader(file))
    for line, row in zip(lines, report.data["results"], strict=True):
        assert line["cache"] == row["cache"]
        assert float(line["throughput_tok_s"]) == row["throughput_tok_s"]
        assert [float(line["ratio_range_low"]), float(line["ratio_range_high"])] == row["ratio_range"]
        assert json.loads(line["settings"]) == row["settings"]
        assert line["accuracy"] == line["accuracy_interval_low"] == ""
    pictures = sorted((tmp_path / "pictures").iterdir())
    assert [path.name for path in pictures] == ["bench-quality.png", "bench-work.png"]
    assert all(f"Picture: {path}" in table for path in pictures)


@pytest.mark.thorough
def test_the_bundled_task_has_answers(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    options = ["--caches", "none", "--depths", "0,10", "--without-prefix", "--baseline-steps", "off"]
    options += ["--json", str(target)]
    assert bench("--model", "bundled-transit", *SMALL, *options) == 0
    rows = {row["cache"]: row for row in read_record(target, "bench").data["results"]}
    assert set(rows) == {"none", "bicache depth=0", "bicache depth=10", "none, prefix removed"}
    assert rows["bicache depth=0"]["agreement_with_none"] == 1
    assert rows["bicache depth=0"]["row_layers"] == rows["none"]["row_layers"]
    assert all(
        0 <= row["accuracy_interval"][0] <= row["accuracy"] <= row["accuracy_interval"][1] for row in rows.values()
    )


@pytest.mark.thorough
def test_the_longest_prefix_is_compared_with_exact_ones(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    options = ["--prefix-match", "longest", "--caches", "none,reuse", "--baseline-steps", "off", "--requests", "9"]
    assert bench("--model", "bundled-transit", *SMALL, *options, "--json", str(target)) == 0
    report = read_record(target, "bench")
    assert report.about["settings"]["name"] == "transit, conversations"
    none, exact, longest = report.data["results"]
    assert [row["cache"] for row in (exact, longest)] == ["reuse", "reuse, longest"]
    assert (none["accuracy"], none["cached_tokens"], exact["partial_prefix_hits"]) == (1, 0, 0)
    assert 0 < longest["partial_prefix_hits"] <= longest["prefix_hits"]
    assert longest["cached_tokens"] > exact["cached_tokens"]
    assert longest["row_layers"] != exact["row_layers"]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (["--caches", "bicache,exact"], "not defined on masked models"),
        (["--caches", "bicache", "--cache-config", '{"reuse": {}}'], "not among --caches"),
        (["--caches", "bicache", "--cache-config", '{"bicache": {"refresh": 1}}'], "refresh"),
        (["--caches", "bicache", "--depths", "1,99"], "exceeds the model's"),
        (["--caches", "bicache", "--baseline-steps", "few,third"], "--baseline-steps takes half, few"),
    ],
)
def test_rows_that_cannot_be_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, options: list[str], text: str
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))  # other tests keep tables
    assert bench("--model", "llada-tiny", "--load-format", "dummy", *SMALL, *options) == 2
    assert text in capsys.readouterr().err


def test_the_longest_prompt_is_checked_before_anything_runs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after the first passes of each cache."""
    answered = count_answers(monkeypatch)
    llm = LLM("llada-tiny", load_format="dummy")
    short = random_workload(llm, requests=3, sampling=SamplingParams(max_tokens=4), prefix_tokens=8, prompt_tokens=4)
    long = random_workload(llm, requests=1, sampling=SamplingParams(max_tokens=4), prefix_tokens=600, prompt_tokens=4)
    workload = replace(short, tasks=(*short.tasks, *long.tasks))
    with pytest.raises(ConfigError, match="max_model_len"):
        contender(llm, "none", None, workload)
    assert not answered


def test_a_bench_without_right_answers_stops(capsys: pytest.CaptureFixture[str]) -> None:
    """In one step the model knows one hop of six, so no cache could lose anything."""
    assert bench("--model", BUNDLED, *SMALL, "--sampling", '{"steps": 1}') == 2
    said = capsys.readouterr().err
    assert "'none', without any cache, answers 0.0 % of the questions, less than 10 %" in said
    assert "6 tokens in 1 steps, blocks of 6) does not fit the task" in said
    assert re.search(
        r"It answers '.*' where '.*' is right; '.*' where '.*' is right \(right: every town is right", said
    )


def test_a_cache_that_reads_no_prefix_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    """Once, of those that would read one; `block-dual` never does."""
    shape = ["--prefix-tokens", "40", "--prompt-tokens", "6", "--max-tokens", "4", *SMALL, "--rounds", "1"]
    rows = ["--caches", "none,bicache,block-dual", "--cache-config", '{"bicache": {"depth": 0}}']
    assert bench("--model", "llada-tiny", "--load-format", "dummy", *shape, *rows) == 0
    told = [line for line in capsys.readouterr().out.splitlines() if "read no" in line]
    assert told == ["bicache read no shared prefix: depth=0 reads no shared prefix (6 of 6 requests)."]


def test_a_task_that_is_beyond_the_model_is_told_after_the_first_questions(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered = count_answers(monkeypatch)
    options = ["--requests", "40", "--prefixes", "2", "--dtype", "float32", "--sampling", '{"steps": 1}']
    assert bench("--model", BUNDLED, *options) == 2
    said = capsys.readouterr().err
    assert "answers 0.0 % of the questions, less than 10 % (the first 8 of 40 were asked)" in said
    assert "--metric agreement" in said
    assert len(answered) == 8, "before any cache has run"
    assert bench("--model", BUNDLED, *options, "--rounds", "1", "--caches", "none", "--metric", "accuracy") == 0
    assert "0.0 %" in capsys.readouterr().out, "whoever asks for it gets it"


def test_agreement_loss_work_and_time_are_measured_all_the_same(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target, sheet = tmp_path / "bench.json", tmp_path / "bench.csv"
    options = ["--metric", "agreement", "--json", str(target), "--csv", str(sheet), "--sampling", '{"steps": 2}']
    caches = ["--caches", "reuse,bicache", "--cache-config", '{"bicache": {"depth": 0}}']
    assert bench("--model", BUNDLED, *SMALL, *options, *caches) == 0
    told = capsys.readouterr().out
    assert "| loss (nats a token) | agreement | nats moved             | tok/s |" in told
    assert "accuracy" not in told
    record = read_record(target, "bench")
    assert record.about["settings"]["metric"] == "agreement"
    none, reuse, exact = record.data["results"][:3]
    assert none["agreement_with_none"] == 1
    assert reuse["loss"] > none["loss"] + 1
    assert none["loss_tokens"] == reuse["loss_tokens"] == 36
    assert reuse["row_layers"] < none["row_layers"]
    assert exact["loss"] == pytest.approx(none["loss"], rel=1e-3)
    assert [float(row["loss"]) for row in csv.DictReader(io.StringIO(sheet.read_text()))][:2] == [
        none["loss"],
        reuse["loss"],
    ]


def count_answers(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The ids of the requests that are answered from here on."""
    answered: list[str] = []
    run = Session.run

    def counted(*given: Any, **named: Any) -> Iterator[Output]:
        for output in run(*given, **named):
            answered.append(output.id)
            yield output

    monkeypatch.setattr(Session, "run", counted)
    return answered


@pytest.mark.thorough
def test_the_uniform_task_has_answers_and_its_own_policies(tmp_path: Path) -> None:
    target = tmp_path / "bench.json"
    options = ["--requests", "6", "--concurrency", "3", "--rounds", "1", "--dtype", "float32", "--json", str(target)]
    options += ["--sampling", '{"block_length": 3, "steps_per_block": 3}', "--model", "bundled-uniform"]
    assert bench(*options, "--cache-config", '{"uniform-cache": {"refresh_next": 2}}') == 0
    report = read_record(target, "bench")
    none, prefix, cache, one, half = report.data["results"]
    assert [row["cache"] for row in report.data["results"]] == [
        "none",
        "block-prefix",
        "uniform-cache",
        "none steps=1 block_length=6 tokens_per_step=6",
        "none steps=2 tokens_per_step=3",
    ]
    assert report.about["settings"]["name"] == "relay"
    assert (report.about["settings"]["steps"], report.about["settings"]["canvas_length"]) == (6, 128)
    assert max(one["accuracy"], half["accuracy"]) <= 1 / 3
    assert none["accuracy"] >= 2 / 3, "a guess of 6 towns is right with probability 24 ** -6"
    assert prefix["agreement_with_none"] > 0.95, "exact but for rounding"
    layers = report.about["layers"]
    assert none["row_layers"] == 6 * 6 * 128 * layers
    # Prompts have 96 tokens. The second block is refreshed once with the first; after the last nothing is.
    assert cache["row_layers"] == 6 * layers * (2 * (128 + 2 * 3) + 3)
    assert prefix["row_layers"] == 6 * layers * (2 * 128 + 2 * (32 + 29))


@pytest.mark.parametrize(
    ("model", "caches"),
    [("sdar-tiny", {"none", "exact"}), ("gidd-tiny", {"none", "block-prefix", "uniform-cache"})],
)
def test_the_default_policies_suit_the_kind(tmp_path: Path, model: str, caches: set[str]) -> None:
    target = tmp_path / "bench.json"
    shape = ["--prefix-tokens", "8", "--prompt-tokens", "4", "--max-tokens", "8", "--json", str(target)]
    assert bench("--model", model, "--load-format", "dummy", *SMALL, *shape) == 0
    assert {row["cache"] for row in read_record(target, "bench").data["results"]} == caches


def test_a_model_that_chats_is_asked_gsm8k(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The tiny model's context is too short for the worked examples, which the error says."""
    folder = with_ascii_tokenizer(model_dir("llada"), tmp_path / "model")
    assert bench("--model", str(folder), "--caches", "none", "--requests", "2") == 2
    assert "max_tokens=256" in capsys.readouterr().err
    lengths = ["--prefix-tokens", "20", "--prompt-tokens", "4", "--max-tokens", "4"]
    assert bench("--model", str(folder), *SMALL, "--caches", "none", *lengths) == 0


SETTINGS = {
    name: {"depth": 1} for name in ("bicache", "bicache+block-dual", "bicache+dllm-cache", "bicache+dkv-decode")
} | installed.SETTINGS


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["llada-tiny", "dream-tiny"])
def test_all_caches_in_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str) -> None:
    target = tmp_path / "bench.json"
    shape = ["--prefix-tokens", "20", "--prompt-tokens", "6", "--max-tokens", "8", "--baseline-steps", "half"]
    options = ["--model", model, "--load-format", "dummy", "--caches", "all", "--cache-config", json.dumps(SETTINGS)]
    assert bench(*SMALL, *shape, *options, "--json", str(target)) == 0
    report = read_record(target, "bench")
    rows = {row["cache"]: row for row in report.data["results"]}
    left_out = {left["name"]: left["reason"] for left in report.data["left_out"]}
    assert set(rows) | set(left_out) == {*names_for("masked"), *SETTINGS, "none steps=4", *rows}
    out = capsys.readouterr().out
    if model == "dream-tiny":
        assert "not Dream" in left_out["dkv-greedy"]
        assert f"Left out: dkv-greedy: {left_out['dkv-greedy']}" in out
    else:
        assert rows["dkv-greedy"]["baseline"] == "none, random order"
        assert rows["none, random order"]["ratio_to_none"] == rows["none, random order"]["agreement_with_none"] == 1
        assert not left_out
    none = rows["none"]
    assert (none["cache_ratio"], none["staleness"], none["extra_memory_bytes"]) == (0, 0, 0)
    assert rows["none steps=4"]["row_layers"] * 2 <= none["row_layers"] + 6 * 34 * report.about["layers"]
    assert (none["flops_saved"], none["efficiency_kept"]) == (1, 1)
    for row in rows.values():
        assert row["ratio_to_none"] == pytest.approx(row["flops_saved"] * row["efficiency_kept"])
        assert sum(row["flops_by_operation"].values()) == row["flops"] <= row["executed_flops"]
        assert row["bytes"] > 0
    keys = 32 if model == "dream-tiny" else 64
    layer = 34 * (2 * 64 * (2 * 64 + 2 * keys + 3 * 160) + 4 * 64 * 34)
    head = none["flops_by_operation"]["head"]
    assert none["flops"] - head == none["forwards"] * layer * report.about["layers"], "34 rows in every pass"
    assert head % (2 * 64 * 256) == 0
    assert rows["dkv-prefill"]["cache_ratio"] == pytest.approx(7 / 8 * 25 / 34), "25 of 34 rows, in all steps but one"
    assert rows["dkv-prefill"]["staleness"] == pytest.approx(sum(range(8)) / 8 * 25 / 34)
    assert rows["dllm-cache"]["extra_memory_bytes"] > 0
    assert rows["dllm-cache"]["staleness_is_upper_bound"]
    assert report.about["settings"]["alone_requests"] == 2
    assert all(row["alone"]["ratio_to_none"] > 0 for row in rows.values())
    assert all(f"| {name} " in out for name in rows)


@pytest.mark.thorough
def test_settings_of_a_policy_that_cannot_be_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    model = ["--model", "llada-tiny", "--load-format", "dummy"]
    assert bench(*model, *SMALL, "--caches", "none,dkv-greedy", "--max-tokens", "8") == 2
    assert "use remasking 'random'" in capsys.readouterr().err
    assert bench(*model, *SMALL, "--caches", "all", "--cache-config", '{"bicahe": {}}', "--depths", "1") == 2
    assert "names 'bicahe'" in capsys.readouterr().err
