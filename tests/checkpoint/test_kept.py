"""Weights that were made once are read back bit for bit, and made anew wherever they might be another's."""

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from remask.checkpoint import loaded, weight_cache
from remask.checkpoint.load import load_weights
from remask.checkpoint.loaded import LoadedModel, find_model
from remask.checkpoint.settings import ModelSettings
from remask.checks import Quantization
from tests.checkpoint.adapters import base_and_adapted
from tests.checkpoint.checkpoints import DREAM, LLADA_MOE, random_tensors, same, write

WIDE = DREAM | {"hidden_size": 64, "intermediate_size": 96}


class Opening:
    """Opens a model, and counts how often its weights are made."""

    def __init__(self, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made, self._make = 0, load_weights
        self.folder = cache / "remask" / "weights"
        monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
        monkeypatch.setattr(loaded, "load_weights", self._counted)
        monkeypatch.setattr(weight_cache, "MIN_BYTES", 0)

    def _counted(self, *given: Any, **settings: Any) -> Any:
        self.made += 1
        return self._make(*given, **settings)

    def __call__(self, model: Path, kind: Quantization | None = None, **settings: Any) -> LoadedModel:
        found = find_model(ModelSettings(str(model), **settings))
        return found.load(torch.float32, torch.device("cpu"), quantization=kind)

    @property
    def file(self) -> Path:
        (found,) = self.folder.iterdir()
        return found


@pytest.fixture
def opening(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Opening:
    """Of a cache folder that is empty."""
    return Opening(tmp_path / "cache", monkeypatch)


@pytest.mark.parametrize("kind", ["int8", "int4", None])
def test_the_second_start_has_the_weights_of_the_first(tmp_path: Path, opening: Opening, kind: Quantization) -> None:
    base, adapter, _ = base_and_adapted(tmp_path, WIDE, target_modules=["q_proj", "down_proj"])
    first, second = (opening(base, kind, adapter=str(adapter)) for _ in range(2))
    assert opening.made == 1
    assert first.fingerprint == second.fingerprint
    same(first.weights, second.weights)
    x = torch.randn(5, 64)
    got, wanted = (torch.nn.functional.linear(x, own.weights.layers[0].qkv) for own in (second, first))
    assert torch.equal(got, wanted)


def test_experts_are_kept_too(tmp_path: Path, opening: Opening) -> None:
    base = write(tmp_path / "base", LLADA_MOE, random_tensors(LLADA_MOE))
    first, second = (opening(base, "int8") for _ in range(2))
    assert opening.made == 1
    same(first.weights, second.weights)


def test_a_folder_of_weights_that_may_not_be_entered_is_passed_over(
    tmp_path: Path, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, **_: object) -> os.stat_result:
        if path.is_relative_to(opening.folder):
            raise PermissionError(13, "Permission denied", str(path))
        return os.stat(path)

    monkeypatch.setattr(Path, "stat", refuse)
    base = write(tmp_path / "base", WIDE, random_tensors(WIDE))
    opening(base, "int8")
    assert opening.made == 1


def _change(place: int) -> Callable[[Path], None]:
    def change(file: Path) -> None:
        held = bytearray(file.read_bytes())
        held[place] ^= 1
        file.write_bytes(held)

    return change


DAMAGE: dict[str, Callable[[Path], object]] = {
    "a bit of a weight": _change(-1),
    "a bit of the header": _change(20),
    "its end": lambda file: file.write_bytes(file.read_bytes()[:-100]),
    "all": lambda file: file.write_bytes(b""),
}


@pytest.mark.parametrize("what", DAMAGE)
def test_what_is_damaged_is_made_anew(
    tmp_path: Path, opening: Opening, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    base = write(tmp_path / "base", WIDE, random_tensors(WIDE))
    first = opening(base, "int8")
    DAMAGE[what](opening.file)
    same(opening(base, "int8").weights, first.weights)
    assert opening.made == 2
    assert [each.levelno for each in caplog.records] == [logging.WARNING]
    assert "is damaged, and is written anew" in caplog.text
    same(opening(base, "int8").weights, first.weights)
    assert opening.made == 2, "it is whole again"


def test_what_other_files_or_other_code_made_is_made_anew(
    tmp_path: Path, opening: Opening, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the fingerprint, a sample of large files, does not tell: a file that was touched stands for one."""
    base, adapter, _ = base_and_adapted(tmp_path, WIDE, target_modules=["q_proj"])
    for number, file in enumerate((base / "config.json", base / "model.safetensors", adapter / "adapter_config.json")):
        opening(base, "int8", adapter=str(adapter))
        assert opening.made == 1 + number
        os.utime(file, ns=(0, number))
    opening(base, "int8", adapter=str(adapter))
    assert opening.made == 4
    monkeypatch.setattr(weight_cache, "_code_digest", lambda: "another version")
    opening(base, "int8", adapter=str(adapter))
    assert opening.made == 5
    assert len(list(opening.folder.iterdir())) == 1, "what nobody can read is replaced"


def test_what_is_read_as_it_stands_is_not_kept(
    tmp_path: Path, opening: Opening, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    base = write(tmp_path / "base", WIDE, random_tensors(WIDE))
    opening(base)
    opening(base, "int8", check_weights=False)
    for name, value in (("MAX_BYTES", 1), ("MIN_BYTES", 10**9)):
        with monkeypatch.context() as patched:
            patched.setattr(weight_cache, name, value)
            opening(base, "int8")
    assert not opening.folder.exists()
    opening.folder.parent.mkdir(parents=True)
    opening.folder.write_text("in the way of the folder")
    opening(base, "int8")
    assert "the weights are not kept, so the next start makes them again" in caplog.text
