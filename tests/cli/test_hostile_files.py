"""Model folders that were made to hurt: each is refused through the command line, by name."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from remask.checkpoint.source import resolve_model
from remask.cli import main
from tests.text.test_chat_template import BILLIONS, ENDLESS


def copied(folder: Path, **config: Any) -> Path:
    """A copy of the bundled model with other keys in its config.json."""
    folder.mkdir()
    for file in resolve_model("bundled-transit").iterdir():
        if file.is_file():
            (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | config))
    return folder


def generate(folder: Path, *words: str) -> int:
    return main(["--quiet", "generate", "--model", str(folder), "--dtype", "float32", "--prompt", "from ivy", *words])


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("n_layers", 10**9, 4096),
        ("max_sequence_length", 10**15, 2**20),
        ("d_model", 2**40, 2**20),
        ("vocab_size", 2**62, 2**24),
        ("mlp_hidden_size", 10**30, 2**20),
    ],
)
def test_sizes_without_bounds_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], key: str, value: int, allowed: int
) -> None:
    assert generate(copied(tmp_path / "model", **{key: value})) == 2
    assert f"'{key}' is {value}; supported: an integer from 1 to {allowed}.\n" in capsys.readouterr().err


def test_layers_that_the_files_do_not_hold_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert generate(copied(tmp_path / "model", n_layers=4096)) == 2
    error = capsys.readouterr().err
    assert "describes 4096 layers, and its files list" in error
    assert "GB as float32; the tensors in the files need" in error


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], value: float
) -> None:
    folder = copied(tmp_path / "model")
    held = load_file(folder / "model.safetensors")
    name = sorted(held)[3]
    held[name][0] = value
    save_file(held, folder / "model.safetensors")
    commands = [
        ["generate", "--prompt", "from ivy"],
        ["profile", "--requests", "1"],
        ["serve", "--port", "0"],
        ["inspect", "store", "--input", "/dev/null"],
        ["bench", "--requests", "1"],
        ["analyze", "prefix-similarity"],
        ["analyze", "depth"],
    ]
    for words in commands:
        place = 2 if words[0] in ("inspect", "analyze") else 1
        assert main(["--quiet", *words[:place], "--model", str(folder), *words[place:]]) == 2
        assert f"The tensor '{name}' in {folder / 'model.safetensors'} holds " in capsys.readouterr().err
    assert generate(folder, "--skip-weight-check") == 0


@pytest.mark.few(5)
@pytest.mark.parametrize(
    ("template", "reason"),
    [
        ("{{ 1 / 0 }}", "fails on these messages: ZeroDivisionError: division by zero"),
        (ENDLESS, "fails on these messages: it calls itself too often"),
        (BILLIONS, "fails on these messages: it takes more than 1 s of processor time"),
        ("{{ 'x' * 10 ** 12 }}", "fails on these messages: it needs more than 512 MiB of memory"),
        ("{{ 'x' * 9000000 }}", "fails on these messages: it writes more than 8388608 characters"),
        ("{% for %}", "refuses these messages"),
    ],
)
def test_templates_are_held_to_limits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], template: str, reason: str
) -> None:
    folder = copied(tmp_path / "model")
    (folder / "chat_template.jinja").write_text(template)
    assert generate(folder) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"remask generate: error: The model's chat template {reason}")
