import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from remask.checkpoint.fingerprint import digest, fingerprint
from remask.checkpoint.load import read_config
from remask.errors import CheckpointError
from remask.families import preset
from tests.checkpoint.checkpoints import LLADA, random_tensors, write


def of(folder: Path) -> str:
    return fingerprint(read_config(folder)[1], folder)


def test_it_is_stable_and_the_place_does_not_count(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", LLADA, random_tensors(LLADA))
    copy = Path(shutil.copytree(folder, tmp_path / "elsewhere" / "b"))
    assert re.fullmatch(r"[0-9a-f]{16}", of(folder))
    assert of(folder) == of(folder) == of(copy)


def _flip(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def _config(folder: Path) -> None:
    (folder / "config.json").write_text(json.dumps(LLADA | {"rope_theta": 10000.0}))


def _rename_tensor(folder: Path) -> None:
    tensors = random_tensors(LLADA)
    tensors["model.transformer.ln_g.weight"] = tensors.pop("model.transformer.ln_f.weight")
    save_file(tensors, folder / "model.safetensors")


def _halve(folder: Path) -> None:
    save_file({name: tensor.half() for name, tensor in random_tensors(LLADA).items()}, folder / "model.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        _config,
        _rename_tensor,
        _halve,
        lambda folder: _flip(folder / "model.safetensors", -1),
        lambda folder: _flip(folder / "model.safetensors", -5000),
    ],
)
def test_every_part_counts(tmp_path: Path, change: Callable[[Path], None]) -> None:
    folder = write(tmp_path, LLADA, random_tensors(LLADA))
    before = of(folder)
    change(folder)
    assert of(folder) != before


def test_shards_count_each(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA, random_tensors(LLADA), shards=3)
    before = of(folder)
    _flip(folder / "model-00003-of-00003.safetensors", -1)
    assert of(folder) != before


def test_a_shard_whose_name_is_not_unicode_counts_like_any_other(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA, random_tensors(LLADA), shards=3)
    before = of(folder)
    name, other = "model-00003-of-00003.safetensors", "model-\udcff.safetensors"
    (folder / name).rename(folder / other)
    index = folder / "model.safetensors.index.json"
    index.write_text(index.read_text().replace(name, other.encode("unicode-escape").decode()))
    assert of(folder) != before


def test_a_large_file_is_sampled_from_its_first_byte_to_its_last(tmp_path: Path) -> None:
    folder = write(tmp_path, LLADA, random_tensors(LLADA))
    file = folder / "model.safetensors"
    values = torch.randn(2 << 20, generator=torch.Generator().manual_seed(0))
    save_file({"large": values}, file)
    header = file.stat().st_size - values.nbytes
    seen = {of(folder)}
    for place in (header, -1):
        _flip(file, place)
        seen.add(of(folder))
    save_file({"large": values * 1.01}, file)
    seen.add(of(folder))
    assert len(seen) == 4


def test_where_a_part_ends_counts() -> None:
    assert digest([b"ab", b"c"]) == digest([b"ab", b"c"]) != digest([b"a", b"bc"])


def test_dummy_models_differ_by_shape_and_seed() -> None:
    tiny, other = preset("llada-tiny"), preset("dream-tiny")
    assert fingerprint(tiny, 0) == fingerprint(tiny, 0)
    assert len({fingerprint(tiny, 0), fingerprint(tiny, 1), fingerprint(other, 0)}) == 3


def test_a_broken_folder_is_a_clear_error(tmp_path: Path) -> None:
    config = preset("llada-tiny")
    with pytest.raises(CheckpointError, match=r"config\.json"):
        fingerprint(config, tmp_path)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"neither model\.safetensors nor"):
        fingerprint(config, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    with pytest.raises(CheckpointError, match="truncated"):
        fingerprint(config, tmp_path)
