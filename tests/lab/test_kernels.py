"""Kernels compile for GPUs that are not here. `scripts/kernels` compiles all of them."""

import pytest
import torch

from remask.errors import ConfigError
from remask.models.presets import preset, presets
from remask_lab.gpu import kernels
from remask_lab.gpu.kernels import Compiled, Variant
from tests.engine.executors import NEEDS_TRITON


def variants(name: str, kernel: str, dtype: torch.dtype) -> list[Variant]:
    """Those of one kernel at the shape of a preset."""
    found = kernels.variants([preset(name)])
    return [each for each in found if each.kernel.endswith(f":{kernel}") and each.dtype == dtype]


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("name", "kernel", "dtype", "target"),
    [
        ("dream-7b", "_heads", torch.bfloat16, 90),  # fewer K/V heads than heads
        ("gidd-unif-3b", "_merge", torch.bfloat16, 80),  # with a sink
        ("llada-8b", "_attend", torch.float32, 90),  # no matrix units
        pytest.param("llada2-mini", "_attend", torch.bfloat16, 100, marks=pytest.mark.thorough),
        pytest.param("gidd-unif-3b", "_attend", torch.float16, 89, marks=pytest.mark.thorough),
    ],
)
def test_a_kernel_serves(name: str, kernel: str, dtype: torch.dtype, target: int) -> None:
    variant = variants(name, kernel, dtype)[-1]
    found = kernels.compiled(variant, target)
    assert found.registers > 16
    assert found.problem(target) is None
    assert (found.matrix == "no matrix units") == (kernel != "_attend" or dtype == torch.float32)


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


@NEEDS_TRITON
def test_a_kernel_that_does_not_compile_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (gate,) = variants("llada-tiny", "_gate", torch.bfloat16)
    broken = Variant(gate.kernel, gate.dtype, gate.pointers, {**gate.constants, "BLOCK": 1000}, gate.aligned)
    monkeypatch.setattr(kernels, "variants", lambda _: [broken])
    monkeypatch.setattr("sys.argv", ["kernels", "--targets", "90"])
    with pytest.raises(SystemExit) as ended:
        kernels.main()
    assert ended.value.code == 1
    said = capsys.readouterr().out
    assert said.startswith("FAILED sm_90 _gate bf16 BLOCK=1000")
    assert "1 kernels compiled" in said
    assert "1 failed" in said


def test_unknown_targets_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["kernels", "--targets", "90,75"])
    with pytest.raises(ConfigError, match="--targets names '75'; known: 80, 86, 89, 90, 100"):
        kernels.main()
