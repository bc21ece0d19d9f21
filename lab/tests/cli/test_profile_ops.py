"""`remask profile ops`: the table, the record, the picture, and what it refuses."""

import json
from pathlib import Path
from unittest.mock import patch

import pytest

from remask.cli import main
from remask_lab.ops.clock import OPERATIONS

SHAPE = ["--prefix-tokens", "16", "--prompt-tokens", "8", "--max-tokens", "8", "--requests", "2", "--rounds", "2"]


@pytest.fixture(autouse=True)
def _small_probes() -> object:
    """What the machine reaches does not matter here."""
    with patch("remask_lab.ops.roofline.SIZES", {"cpu": (64, 1 << 16)}):
        yield


def profile_ops(*options: str) -> int:
    return main(["--quiet", "profile", "ops", "--load-format", "dummy", *SHAPE, *options])


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("model", "cache", "settings"),
    [
        ("llada-tiny", "bicache", {"depth": 1}),
        ("dream-tiny", "dllm-cache", {"response_interval": 3, "ratio": 0.5}),
        ("gidd-tiny", "uniform-cache", {}),
        ("sdar-tiny", "exact", {}),
        ("fast-dllm-v2-tiny", "exact", {}),
    ],
)
def test_every_kind_of_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], model: str, cache: str, settings: dict[str, float]
) -> None:
    target, picture = tmp_path / "ops.json", tmp_path / "ops.png"
    chosen = ["--model", model, "--dtype", "float32", "--cache", cache, "--cache-config", json.dumps(settings)]
    assert profile_ops(*chosen, "--steps", "4", "--json", str(target), "--plot", str(picture)) == 0
    record = json.loads(target.read_text(encoding="utf-8"))
    assert (record["subject"], record["about"]["model"]) == ("profile ops", model)
    assert record["about"]["settings"]["cache"] == cache
    data = record["data"]
    assert len(data["steps"]) == 4
    assert set(data["operations"]) >= set(OPERATIONS)
    for step in data["steps"]:
        assert 0 < sum(step["flops"].values()) <= step["executed"]
        assert step["roof_share"] > 0
    assert sum(step["executed"] for step in data["steps"]) == data["counted"]
    assert sum(each["share"] for each in data["operations"].values()) == pytest.approx(1)
    assert picture.read_bytes().startswith(b"\x89PNG")
    out = capsys.readouterr().out
    assert all(f"| {name} |" in out for name in ("projections", "attention", "mlp", "head", "sampling", "rest", "all"))
    assert f"PyTorch counts {data['counted']:,}" in out
    assert "| steps | row-layers |" in out


def test_many_kinds_of_steps_are_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--max-tokens", "16", "--rounds", "1", "--cache", "dkv-decode"]
    assert profile_ops("--model", "llada-tiny", *options) == 0
    out = capsys.readouterr().out
    assert "| 1 to 2 |" in out, "the first two passes of a block are full"
    assert "3 more lines like these" in out


def test_a_picture_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--prefix-tokens", "0", "--steps", "1", "--rounds", "1", "--plot", str(tmp_path)]
    assert profile_ops("--model", "llada-tiny", *options) == 2
    assert "cannot be written" in capsys.readouterr().err
