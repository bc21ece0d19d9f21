"""`scripts/gpu`, rehearsed on the CPU at a tiny size: what it proves, measures, keeps and tells."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from remask.errors import RecordError
from remask.families import preset
from remask_lab.gpu import __main__ as entry
from remask_lab.gpu import parts
from remask_lab.gpu import run as command
from remask_lab.gpu.parts import PARTS, Part, Setting, run_child
from remask_lab.gpu.plain import PASSES, ROWS, plain_row
from remask_lab.gpu.profile import _covered
from remask_lab.gpu.results import Result, speed_table, summarize
from remask_lab.gpu.steady import find_shape, roof_seconds
from remask_lab.ops.roofline import Peaks
from tests.waiting import ended, eventually

SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu"
FEW_TESTS = "(test_a_family_finds_its_common_left_parts_in_shared_pages and f1 and b4) or test_gate"


def setting(folder: Path, seconds: float = 300) -> Setting:
    return Setting(torch.device("cpu"), find_shape("tiny", torch.device("cpu")), folder, time.monotonic() + seconds)


@pytest.fixture(scope="module")
def rehearsal(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """The folder of a whole run, and what it printed."""
    folder = tmp_path_factory.mktemp("gpu") / "results"
    words = [str(SCRIPT), str(folder), "--device", "cpu", "--shape", "tiny", "--tests", FEW_TESTS]
    environment = {"REMASK_BIN": str(Path(sys.executable).parent), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


@pytest.mark.thorough
def test_a_run_leaves_a_result_of_each_part_and_a_page(rehearsal: tuple[Path, str]) -> None:
    folder, printed = rehearsal
    for name, part in PARTS.items():
        result = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
        assert result["done"]
        assert result["error"] is None
        assert f"## {part.title}" in printed
    assert (folder / "report.md").read_text(encoding="utf-8") in printed
    assert list(PARTS)[:3] == ["proof", "machine", "speed"], "what tells most comes first"


@pytest.mark.thorough
def test_the_tests_that_were_asked_for_passed(rehearsal: tuple[Path, str]) -> None:
    found = json.loads((rehearsal[0] / "tests.json").read_text(encoding="utf-8"))["found"]
    assert found["passed"] >= 2
    assert not found["failed"]


def only_graphs_are_refused(found: Mapping[str, Any]) -> None:
    """A rehearsal has no CUDA device, which graphs need."""
    assert found["refused"]
    for refused in found["refused"]:
        assert "graphs=True" in refused["cell"]
        assert refused["reason"].startswith("graphs=True needs a CUDA device")


@pytest.mark.thorough
def test_every_policy_is_measured_at_every_number_of_requests(rehearsal: tuple[Path, str]) -> None:
    found = json.loads((rehearsal[0] / "speed.json").read_text(encoding="utf-8"))["found"]
    only_graphs_are_refused(found)
    rows: list[dict[str, Any]] = found["rows"]
    caches = {"plain PyTorch", "none", "block-dual", "bicache", "bicache+block-dual"}
    assert {(row["cache"], row["requests"]) for row in rows} == {(cache, count) for cache in caches for count in (1, 2)}
    for row in rows:
        assert row["tok_s"] == pytest.approx(
            1e3 * row["requests"] * row["tokens_per_step"] / row["ms_per_step"], rel=1e-6
        )
    counted = [row for row in rows if row["cache"] != "plain PyTorch"]
    for row in counted:
        assert row["share_of_roof"] == pytest.approx(row["roof_ms_per_step"] / row["ms_per_step"], rel=1e-6)
        assert row["host_ms_per_step"] > 0
    by_cell = {row["cell"]: row["roof_ms_per_step"] for row in counted}
    dense = by_cell["b=2 none 2 tokens a step"]
    assert by_cell["b=2 block-dual 2 tokens a step"] < dense


@pytest.mark.thorough
def test_profiles_tell_where_time_goes(rehearsal: tuple[Path, str]) -> None:
    for part, requests in (("profile", {1, 2}), ("small", {16})):
        found = json.loads((rehearsal[0] / f"{part}.json").read_text(encoding="utf-8"))["found"]
        only_graphs_are_refused(found)
        assert {int(each["cell"].partition(" ")[0].removeprefix("b=")) for each in found["profiles"]} == requests
        for each in found["profiles"]:
            assert 0 < each["busy_ms_per_step"] < each["ms_per_step"]
            assert any("mm" in kernel["name"] and kernel["per_step"] >= 1 for kernel in each["kernels"])
            taken = [kernel["ms_per_step"] for kernel in each["kernels"]]
            assert taken == sorted(taken, reverse=True)


@pytest.mark.thorough
def test_matrices_of_few_bits_are_measured_too(rehearsal: tuple[Path, str]) -> None:
    folder, printed = rehearsal
    found = json.loads((folder / "quantized.json").read_text(encoding="utf-8"))["found"]
    assert found["quantization"] == "int8"
    only_graphs_are_refused(found)
    assert all(0 < each["error"] < 0.02 and each["ms"] > 0 for each in found["products"])
    assert [each["rows"] for each in found["products"]] == list(ROWS)
    assert {(row["cache"], row["requests"]) for row in found["rows"]} == {
        (cache, count) for cache in ("none", "bicache+block-dual") for count in (1, 2)
    }
    assert "float32, int8 weights: canvas 72" in printed


@pytest.mark.thorough
def test_what_is_done_is_not_run_again(rehearsal: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = rehearsal
    started: list[str] = []
    monkeypatch.setattr(command, "_start", lambda name, _: started.append(name))
    (folder / "speed.json").rename(folder / "kept")
    arguments = ["gpu", str(folder), "--device", "cpu", "--shape", "tiny"]
    try:
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="speed"):
            command.main(time.monotonic())
        assert started == ["speed"]
    finally:
        (folder / "kept").rename(folder / "speed.json")
    monkeypatch.setattr(sys, "argv", [*arguments, "--again", "--parts", "machine"])
    command.main(time.monotonic())
    assert started == ["speed", "machine"]


def test_a_part_that_fails_is_told_and_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_: Setting) -> Any:
        yield {"rows": 1}
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(PARTS, "speed", Part("Speed", work, 1.0))
    with pytest.raises(RuntimeError):
        command.run_part("speed", setting(tmp_path))
    result = Result.read(tmp_path, "speed")
    assert result is not None
    assert (result.found, result.done, result.error) == ({"rows": 1}, False, "RuntimeError: no kernel image")


@pytest.mark.thorough
def test_a_part_ends_when_its_time_is_over(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="out of time"):
        command.run_part("machine", setting(tmp_path, seconds=0))
    result = Result.read(tmp_path, "machine")
    assert result is not None
    assert not result.done
    assert "float32" in result.found["peaks"]


def test_a_process_without_an_end_is_ended_with_its_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    output = tmp_path / "output"

    class Waited(subprocess.Popen[bytes]):
        """A process whose time is over once it has told of its child."""

        def wait(self, timeout: float | None = None) -> int:
            if timeout is None:
                return super().wait()
            eventually(lambda: output.read_text(encoding="utf-8").endswith("\n"))
            raise subprocess.TimeoutExpired(self.args, timeout)

    monkeypatch.setattr(subprocess, "Popen", Waited)
    assert run_child(["sh", "-c", "sleep 600 & echo $!; wait"], tmp_path, output, 1) is None
    child = int(output.read_text(encoding="utf-8"))
    eventually(lambda: ended(child))


def test_peaks_are_measured_where_no_part_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "measure_peaks", lambda *_: Peaks(3.0, 2.0))
    assert parts._Bench(setting(tmp_path)).peaks == Peaks(3.0, 2.0)
    Result("machine", {"peaks": {"float32": {"flops_s": 5.0, "bytes_s": 4.0}}}).save(tmp_path)
    assert parts._Bench(setting(tmp_path)).peaks == Peaks(5.0, 4.0)


def test_one_cell_that_fails_costs_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it raises; each is written down as soon as it is there."""

    def measure(_llm: object, _shape: object, cell: Any, *_: object) -> dict[str, Any]:
        if cell.cache == "none":
            raise RuntimeError("no kernel image\nin line 7")
        return {"cell": cell.name}

    monkeypatch.setattr(parts, "measure_cell", measure)
    monkeypatch.setattr(parts, "measure_peaks", lambda *_: Peaks(3.0, 2.0))
    seen = [len(found["rows"]) + len(found["refused"]) for found in PARTS["speed"].work(setting(tmp_path))]
    assert seen == list(range(1, len(seen) + 1))
    command.run_part("speed", setting(tmp_path))
    result = Result.read(tmp_path, "speed")
    assert result is not None
    assert result.done
    assert {each["reason"] for each in result.found["refused"]} == {"RuntimeError: no kernel image"}
    assert len(result.found["rows"]) > len(result.found["refused"]) > 2


def test_the_roof_is_the_slower_of_products_and_copies() -> None:
    class Total:
        flops, bytes = 100, 10

    class Cost:
        total = Total

    assert roof_seconds(Cost, Peaks(flops_s=10, bytes_s=10)) == 10  # type: ignore[arg-type]
    assert roof_seconds(Cost, Peaks(flops_s=1000, bytes_s=10)) == 1  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("printed", "found", "error"),
    [
        (
            "[gw0] [ 33%] PASSED tests/a.py::test_a[x y] \n[gw1] [ 66%] SKIPPED tests/a.py::test_b \n"
            "[gw0] [100%] PASSED tests/b.py::test_c \n=== 2 passed, 1 skipped in 3.14s ===\n",
            {"passed": 2, "skipped": 1, "failed": []},
            None,
        ),
        (
            "[gw0] [ 50%] FAILED tests/a.py::test_a[x] \n[gw0] [100%] PASSED tests/b.py::test_c \n"
            "=== 1 failed, 1 passed in 3.14s ===\n",
            {"passed": 1, "skipped": 0, "failed": ["tests/a.py::test_a[x]"]},
            "1 of 2 tests failed",
        ),
        (
            "[gw0] [ 50%] PASSED tests/a.py::test_a \n",
            {"passed": 1, "skipped": 0, "failed": []},
            "the tests did not come to their end",
        ),
        ("ImportError: no module\n", {"passed": 0, "skipped": 0, "failed": []}, "0 of 0 tests failed"),
    ],
    ids=["all", "a failure", "no end", "no tests"],
)
def test_tests_that_ended_count_though_their_session_did_not(
    printed: str, found: dict[str, Any], error: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts, "run_child", lambda _words, _folder, output, _seconds: output.write_text(printed))
    with pytest.raises(parts.PartError, match=error) if error else nullcontext():
        command.run_part("tests", setting(tmp_path))
    result = Result.read(tmp_path, "tests")
    assert result is not None
    assert (result.found, result.done) == (found, error is None)


@pytest.mark.parametrize("content", ["{", "[]", '{"made": 1}', "\udcff"])
def test_a_file_that_is_no_result_is_to_be_removed(content: str, tmp_path: Path) -> None:
    (tmp_path / "speed.json").write_text(content, encoding="utf-8", errors="surrogateescape")
    with pytest.raises(RecordError, match=r"speed\.json is no result of this command .*; remove it"):
        Result.read(tmp_path, "speed")


def test_a_part_whose_packages_or_time_are_missing_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "run_child", lambda *_: pytest.fail("nothing is started"))
    monkeypatch.setitem(PARTS, "speed", Part("Speed", PARTS["speed"].work, 1.0, {"no_such_module": "no-such"}))
    command._start("speed", setting(tmp_path))
    command._start("tests", setting(tmp_path, seconds=5))
    told = [Result.read(tmp_path, name) for name in ("speed", "tests")]
    assert [result and result.error for result in told] == ["not run: it needs no-such", "not run: 3 s were left"]


def test_what_every_part_needs_is_named_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(entry, "find_spec", lambda name: None if name in ("torch", "yaml") else name)
    assert entry.main() == 2
    assert capsys.readouterr().err == "error: scripts/gpu needs torch, pyyaml: pip install torch pyyaml\n"


def test_what_runs_at_the_same_time_is_counted_once() -> None:
    assert _covered([(0, 4), (5, 6), (1, 2), (3, 5.5)]) == 6
    assert _covered([(10, 11), (0, 1)]) == 2
    assert _covered([]) == 0


def test_the_plain_loop_is_the_models_own_arithmetic() -> None:
    """A product more or a head less, and the engine would be compared with something else."""
    shape, config = find_shape("tiny", torch.device("cpu")), preset("llada-tiny")
    with FlopCounterMode(display=False) as counter:
        row = plain_row(config, shape, 2, torch.device("cpu"))
    assert row["ms_per_step"] > 0  # type: ignore[operator]
    rows, dim = 2 * shape.canvas, config.heads * config.head_dim
    layer = config.hidden * (2 * dim + 2 * config.kv_heads * config.head_dim + 3 * config.intermediate)
    flops = config.layers * 2 * rows * layer  # PyTorch counts no fused attention on CPUs
    flops += 2 * 2 * shape.response * config.hidden * config.vocab
    assert counter.get_total_flops() == (PASSES + 1) * flops


def test_a_fault_of_the_proof_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "presets", lambda: {"llada-tiny": preset("llada-tiny")})
    command.run_part("proof", setting(tmp_path))
    monkeypatch.setattr(parts, "prove", lambda *_, graphs: [] if graphs else ["full pass: wrong"])
    with pytest.raises(Exception, match="full pass: wrong"):
        command.run_part("proof", setting(tmp_path))
    result = Result.read(tmp_path, "proof")
    assert result is not None
    assert (result.found["faults"], result.found["graph_faults"]) == (["full pass: wrong"], [])


def test_what_is_kept_of_a_gpu_and_the_table_of_it() -> None:
    """Of each cache the fastest settings, at two tokens a step. A rehearsal on a CPU leaves nothing to keep."""
    row = {"cache": "none", "requests": 1, "settings": {}, "attention": "triton", "tokens_per_step": 2, "took_s": 1.0}
    rows = [
        row | {"tok_s": 50.4, "ms_per_step": 40.0},
        row | {"tok_s": 57.6, "ms_per_step": 35.0, "settings": {"graphs": True}},
        row | {"tok_s": 99.0, "ms_per_step": 40.0, "tokens_per_step": 4},
        row | {"tok_s": 800.4, "ms_per_step": 20.0, "requests": 8, "cache": "block-dual", "share_of_roof": 0.694},
    ]
    shape = asdict(find_shape("llada-8b", torch.device("cpu")))
    about = {"versions": {"torch": "2", "triton": "3"}, "peaks": {}, "gpu": {"name": "NVIDIA X9 80GB"}}
    speed = Result("speed", {"shape": shape, "rows": rows}, commit="0123456789ab")
    found = summarize({"machine": Result("machine", about), "speed": speed})
    assert found is not None
    assert "took_s" not in found["rows"][0]
    lines = speed_table([found]).splitlines()
    assert lines[0] == "| cache | X9, 1 at a time | 8 | 32 | roof, 8 |"
    assert lines[3] == "| none | 58 | - | - | - |"
    assert lines[5:7] == ["| block-dual | - | 800* | - | 69 % |", "| bicache+block-dual | - | - | - | - |"]
    assert "NVIDIA X9 80GB, commit 01234567" in lines[-1]
    assert lines[-1].endswith(" * Without graphs.")
    assert summarize({"machine": Result("machine", about), "speed": None}) is None
    assert summarize({"machine": Result("machine", {"versions": {}}), "speed": speed}) is None
