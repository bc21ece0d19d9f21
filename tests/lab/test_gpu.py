"""`scripts/gpu`, rehearsed on the CPU at a tiny size: what it proves, measures, keeps and tells."""

import json
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from remask.checkpoint.presets import preset
from remask.engine.device_defaults import device_key, read_defaults
from remask_lab.gpu import __main__ as command
from remask_lab.gpu import parts
from remask_lab.gpu.children import run_child
from remask_lab.gpu.decide import decide
from remask_lab.gpu.parts import PARTS, Part, Setting
from remask_lab.gpu.results import Result
from remask_lab.gpu.shapes import find_shape
from remask_lab.gpu.steady import roof_seconds
from remask_lab.ops.peaks import Peaks
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
        assert f"## {part.about}" in printed
    assert (folder / "report.md").read_text(encoding="utf-8") in printed
    assert list(PARTS)[:2] == ["compile", "proof"], "what takes seconds and decides most comes first"


@pytest.mark.thorough
def test_a_rehearsal_decides_for_its_own_folder_alone(rehearsal: tuple[Path, str]) -> None:
    folder, printed = rehearsal
    file = folder / "devices.json"
    found = read_defaults(torch.device("cpu"), file)
    assert found is not None
    assert found.attention == "torch", "nothing but a GPU shows that Triton's kernels are right"
    assert f"attention torch, overlap {'on' if found.overlap else 'off'}" in printed
    assert str(file) in printed
    (entry,) = json.loads(file.read_text(encoding="utf-8")).values()
    assert any("rehearsal" in why for why in entry["why"])


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["kernels", "goldens", "overlap", "graphs"])
def test_the_tests_that_were_asked_for_passed(rehearsal: tuple[Path, str], part: str) -> None:
    found = json.loads((rehearsal[0] / f"{part}.json").read_text(encoding="utf-8"))["found"]
    assert found["passed"] + found["skipped"] >= 1
    assert not found["failed"]


def only_graphs_are_refused(found: Mapping[str, Any]) -> None:
    """A rehearsal has no CUDA device, which graphs need."""
    assert found["refused"]
    for refused in found["refused"]:
        assert "graphs=True" in refused["cell"]
        assert refused["reason"].startswith("graphs=True needs a CUDA device")


@pytest.mark.thorough
def test_every_policy_is_measured_at_every_number_of_requests(rehearsal: tuple[Path, str]) -> None:
    found = json.loads((rehearsal[0] / "policies.json").read_text(encoding="utf-8"))["found"]
    only_graphs_are_refused(found)
    rows: list[dict[str, Any]] = found["rows"]
    assert {row["cache"] for row in rows} == {"none", "block-dual", "bicache", "bicache+block-dual"}
    assert {row["requests"] for row in rows} == {1, 2}
    for row in rows:
        assert row["tok_s"] == pytest.approx(
            1e3 * row["requests"] * row["tokens_per_step"] / row["ms_per_step"], rel=1e-6
        )
        assert row["share_of_roof"] == pytest.approx(row["roof_ms_per_step"] / row["ms_per_step"], rel=1e-6)
        assert row["host_ms_per_step"] > 0
    by_cell = {row["cell"]: row["roof_ms_per_step"] for row in rows}
    dense = by_cell["b=2 none 2 tokens a step"]
    assert by_cell["b=2 block-dual 2 tokens a step"] < dense


@pytest.mark.thorough
def test_matrices_of_few_bits_are_measured_too(rehearsal: tuple[Path, str]) -> None:
    folder, printed = rehearsal
    found = json.loads((folder / "quantised.json").read_text(encoding="utf-8"))["found"]
    assert found["quantization"] == "int8"
    only_graphs_are_refused(found)
    assert {(row["cache"], row["requests"]) for row in found["rows"]} == {
        (cache, count) for cache in ("none", "bicache+block-dual") for count in (1, 2)
    }
    assert "float32, matrices int8: canvas 72" in printed


@pytest.mark.thorough
def test_what_is_done_is_not_run_again(rehearsal: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, _ = rehearsal
    started: list[str] = []
    monkeypatch.setattr(command, "_start", lambda name, _: started.append(name))
    (folder / "policies.json").rename(folder / "kept")
    arguments = ["gpu", str(folder), "--device", "cpu", "--shape", "tiny"]
    try:
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit, match="policies"):
            command.main()
        assert started == ["policies"]
    finally:
        (folder / "kept").rename(folder / "policies.json")
    monkeypatch.setattr(sys, "argv", [*arguments, "--again", "--parts", "machine"])
    command.main()
    assert started == ["policies", "machine"]


def test_a_part_that_fails_is_told_and_keeps_what_it_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(_: Setting) -> Any:
        yield {"rows": 1}
        raise RuntimeError("no kernel image")

    monkeypatch.setitem(PARTS, "policies", Part("Speed", work, 1.0))
    with pytest.raises(RuntimeError):
        command.run_part("policies", setting(tmp_path))
    result = Result.read(tmp_path, "policies")
    assert result is not None
    assert (result.found, result.done, result.error) == ({"rows": 1}, False, "RuntimeError: no kernel image")


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


def test_speed_without_peaks_names_the_part_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="run the part 'machine' first"):
        command.run_part("policies", setting(tmp_path))


def test_the_roof_is_the_slower_of_products_and_copies() -> None:
    class Total:
        flops, bytes = 100, 10

    class Cost:
        total = Total

    assert roof_seconds(Cost, Peaks(flops_s=10, bytes_s=10)) == 10  # type: ignore[arg-type]
    assert roof_seconds(Cost, Peaks(flops_s=1000, bytes_s=10)) == 1  # type: ignore[arg-type]


def a_row(tok_s: float, attention: str = "triton", requests: int = 1, **settings: Any) -> dict[str, Any]:
    return {
        "tok_s": tok_s,
        "attention": attention,
        "cache": "none",
        "requests": requests,
        "tokens_per_step": 2,
        "settings": {"depth": 1, **settings},
    }


def a_run(**changed: Any) -> dict[str, Result | None]:
    """The results of a run in which all is right, overlap gains a fifth, and graphs double the speed."""
    engines: list[tuple[int, dict[str, Any]]] = [
        (100, {}),
        (120, {"overlap": True}),
        (200, {"graphs": True}),
        (190, {"overlap": True, "graphs": True}),
    ]
    rows = [a_row(speed * number, requests=number, **engine) for number in (1, 8) for speed, engine in engines]
    found: dict[str, Any] = {
        "compile": {"status": 0, "last": "all"},
        "proof": {"executor": "triton", "proven": ["a"], "faults": [], "graph_faults": []},
        "policies": {"rows": rows},
    }
    results: dict[str, Result | None] = {name: Result(name, found.get(name, {}), done=True) for name in PARTS}
    return results | changed


def failed(name: str, **found: Any) -> Result:
    return Result(name, found, error="it failed")


PRESET = preset("llada-tiny")
PROVEN: dict[str, Any] = {"executor": "triton", "proven": ["a"], "faults": [], "graph_faults": []}


@pytest.mark.parametrize(
    ("changed", "expected", "said"),
    [
        ({}, ("triton", False, True), "graphs: 2.00 times"),
        ({"graphs": failed("graphs")}, ("triton", True, False), "graphs is off: the part 'graphs': it failed"),
        ({"graphs": None, "overlap": None}, ("triton", False, False), "overlap is off: the part 'overlap' was not run"),
        (
            {"proof": failed("proof", **PROVEN | {"graph_faults": ["b: full pass differs"]})},
            ("triton", True, False),
            "b:",
        ),
        (
            {"proof": failed("proof", **PROVEN | {"faults": ["a: merged pass"]})},
            ("torch", False, False),
            "a: merged pass",
        ),
        ({"kernels": failed("kernels")}, ("torch", False, False), "the part 'kernels': it failed"),
        ({"compile": failed("compile")}, ("torch", False, False), "the part 'compile': it failed"),
        ({"goldens": None}, ("torch", False, False), "the part 'goldens' was not run"),
        (
            {"policies": Result("policies", {"rows": [a_row(100), a_row(101, overlap=True)]}, done=True)},
            ("triton", False, False),
            "overlap: 1.01 times",
        ),
    ],
)
def test_defaults_follow_from_what_is_proven_and_faster(
    changed: dict[str, Result | None], expected: tuple[str, bool, bool], said: str
) -> None:
    decision = decide(a_run(**changed))
    assert decision is not None
    assert (decision.attention, decision.overlap, decision.graphs) == expected
    assert said in " ".join(decision.why)


@pytest.mark.parametrize("missing", ["proof", "policies"])
def test_nothing_is_decided_without_a_proof_and_times(missing: str) -> None:
    assert decide(a_run(**{missing: None})) is None


def test_a_run_writes_the_defaults_that_a_start_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for result in a_run().values():
        assert result is not None
        result.save(tmp_path)
    monkeypatch.setattr(sys, "argv", ["gpu", str(tmp_path), "--device", "cpu", "--shape", "tiny", "--parts", "proof"])
    monkeypatch.setattr(command, "page", lambda _, decision, file: f"{decision.attention} {file}")
    command.main()
    assert list(json.loads((tmp_path / "devices.json").read_text(encoding="utf-8"))) == [
        device_key(torch.device("cpu"))
    ]
    found = read_defaults(torch.device("cpu"), tmp_path / "devices.json")
    assert found is not None
    assert (found.attention, found.overlap, found.graphs) == ("triton", False, True)


@pytest.mark.parametrize("status", [0, 3])
def test_kernels_are_compiled_by_their_script(status: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "kernels"
    script.write_text(f"#!/bin/sh\necho 40 kernels\nexit {status}\n", encoding="utf-8")
    script.chmod(0o755)
    monkeypatch.setattr(parts, "COMPILER", script)
    if status:
        with pytest.raises(Exception, match=r"kernels failed; compile\.txt says how"):
            command.run_part("compile", setting(tmp_path))
    else:
        command.run_part("compile", setting(tmp_path))
    result = Result.read(tmp_path, "compile")
    assert result is not None
    assert (result.found, result.done) == ({"status": status, "last": "40 kernels"}, status == 0)


def test_a_fault_of_the_proof_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "presets", lambda: {"llada-tiny": PRESET})
    command.run_part("proof", setting(tmp_path))
    monkeypatch.setattr(parts, "prove", lambda *_, graphs: [] if graphs else ["full pass: wrong"])
    with pytest.raises(Exception, match="llada-tiny float32: full pass: wrong"):
        command.run_part("proof", setting(tmp_path))
    result = Result.read(tmp_path, "proof")
    assert result is not None
    assert (result.found["faults"], result.found["graph_faults"]) == (["llada-tiny float32: full pass: wrong"], [])
