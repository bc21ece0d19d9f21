"""Kernels compile for GPUs that are not here. `scripts/kernels` compiles all of them."""

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from remask.errors import ConfigError
from remask.families import presets
from remask_lab.gpu import kernels
from remask_lab.gpu.kernels import Compiled, Variant
from tests.engine.executors import NEEDS_TRITON


def run(*words: str) -> subprocess.CompletedProcess[str]:
    """The command, in a process whose kernels are not interpreted as those of the tests are."""
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "remask_lab.gpu.kernels", *words]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False, timeout=300)


@pytest.mark.thorough
@NEEDS_TRITON
def test_kernels_serve() -> None:
    """Fewer K/V heads than heads; a sink; float32, which has no matrix units."""
    chosen = (
        "_heads bf16 HEADS=28 GROUPS=4",
        "_merge bf16 SINK=1 TALL=8 HEADS=24",
        "_attend fp32 ROWS=16 KEYS=16 MERGED=1 num_warps=4 HEADS=4",
    )
    done = run("--targets", "90", *(word for each in chosen for word in ("--match", each)))
    assert done.returncode == 0, done.stdout + done.stderr
    *lines, last = done.stdout.splitlines()
    assert all(any(line.startswith(f"sm_90 {each}") for line in lines) for each in chosen)
    assert all(" 0 B local" in line for line in lines)
    assert f"{len(lines)} kernels compiled by Triton" in last


@NEEDS_TRITON
def test_every_kernel_is_compiled_at_every_shape() -> None:
    found = list(kernels.variants(presets().values()))
    assert len({each.label for each in found}) == len(found)
    for target, dtype in ((80, torch.bfloat16), (90, torch.bfloat16), (90, torch.float32)):
        usual = {each.kernel for each in found if each.dtype == dtype and kernels.usual(each, target)}
        assert usual == {each.kernel for each in found}
    heads = {(each.constants["TALL"], each.constants["LOW"]) for each in found if each.kernel.endswith("_heads")}
    assert (32, 4) in heads
    assert {each.constants["SINK"] for each in found if each.kernel.endswith("_merge")} == {False, True}


def test_what_cannot_serve_is_said() -> None:
    assert Compiled(1000, 100, 0, "").problem(90) is None
    assert "2048 bytes of registers a thread are spilled" in str(Compiled(1000, 255, 2048, "").problem(90))
    assert "device has 101376" in str(Compiled(200_000, 100, 0, "").problem(86))
    assert Compiled(200_000, 100, 0, "").problem(90) is None


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ("CompilationError: at 3:14", "FAILED sm_90 _gate bf16 BLOCK=1024: CompilationError: at 3:14"),
        (Compiled(300_000, 9, 0, ""), "300000 B shared, 0 B local, : 300000 bytes of shared memory"),
    ],
)
def test_a_kernel_that_cannot_serve_ends_the_command_with_1(
    found: Compiled | str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    gate = Variant("module:_gate", torch.bfloat16, types={}, constants={"BLOCK": 1024})
    monkeypatch.setattr(kernels, "_interpreted", lambda: False)
    monkeypatch.setattr(kernels, "ProcessPoolExecutor", ThreadPoolExecutor)
    monkeypatch.setattr(kernels, "variants", lambda _: [gate])
    monkeypatch.setattr(kernels, "_try_compile", lambda _: found)
    monkeypatch.setattr(kernels, "_version", lambda: "a compiler")
    monkeypatch.setattr("sys.argv", ["kernels", "--targets", "90"])
    with pytest.raises(SystemExit) as ended:
        kernels.main()
    assert ended.value.code == 1
    out = capsys.readouterr().out
    assert said in out
    assert "1 kernels compiled by a compiler, 1 failed" in out


def test_unknown_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", "--targets", "90,75"])
    with pytest.raises(ConfigError, match="--targets names '75'; known: 80, 86, 89, 90, 100"):
        kernels.main()
