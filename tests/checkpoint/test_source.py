import json
from pathlib import Path
from typing import Any

import pytest

from remask.checkpoint import source
from remask.checkpoint.source import resolve
from remask.errors import CheckpointError
from tests.checkpoint.checkpoints import LLADA


def test_a_local_folder_is_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    assert resolve(str(tmp_path)) == tmp_path
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert resolve("org/name") == Path("org/name")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/nowhere/at/all", "no such folder"),
        ("./missing", "no such folder"),
        (
            "missing",
            "no such folder, and not a hub id.*'bundled', 'bundled-tariff', 'bundled-transit', 'bundled-uniform'",
        ),
        ("", "no such folder"),
        ("~nobody-of-this-name/x", "no such folder"),
        ("x" * 5000, "no such folder"),
        ("a\0b", "no such folder"),
        ("a/b/c", "no such folder"),
        ("llada-8b", "preset.*--load-format dummy"),
    ],
)
def test_what_is_neither_a_folder_nor_a_hub_id_never_asks_the_hub(
    model: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(source, "snapshot_download", lambda *_, **__: pytest.fail("the hub was asked"))
    with pytest.raises(CheckpointError, match=message):
        resolve(model)


def test_a_file_is_not_a_model(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.touch()
    with pytest.raises(CheckpointError, match=r"is a file\. Give the folder"):
        resolve(str(file))


def test_a_hub_id_fetches_data_and_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def download(model: str, allow_patterns: list[str]) -> str:
        asked.update(model=model, patterns=allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(source, "snapshot_download", download)
    assert resolve("GSAI-ML/LLaDA-8B-Instruct") == tmp_path
    assert asked["model"] == "GSAI-ML/LLaDA-8B-Instruct"
    wanted = ["model-00001-of-00006.safetensors", "model.safetensors.index.json", "config.json", "tokenizer.json"]
    wanted += ["vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja", "tokenizer.model"]
    unwanted = ["modeling_llada.py", "pytorch_model.bin", "weights.pt", "README.md", "model.gguf"]
    taken = [name for name in wanted + unwanted if any(Path(name).match(pattern) for pattern in asked["patterns"])]
    assert taken == wanted


@pytest.mark.parametrize("error", [ConnectionError("no route"), ValueError("bad id"), RuntimeError("unknown")])
def test_a_hub_that_does_not_answer_is_a_clear_error(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    def download(model: str, allow_patterns: list[str]) -> str:
        raise error

    monkeypatch.setattr(source, "snapshot_download", download)
    with pytest.raises(CheckpointError, match=rf"(?s)'org/name' is neither a local folder.*{error}.*network"):
        resolve("org/name")


@pytest.mark.parametrize("model", ["bundled", "bundled-tariff", "bundled-transit", "bundled-uniform"])
def test_bundled_ones_are_folders_in_the_package(model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(source, "files", lambda _: tmp_path)
    with pytest.raises(CheckpointError, match=rf"The {model} model is not in this installation.* is \./{model}\."):
        resolve(model)
    folder = tmp_path / model.replace("-", "_")
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLADA))
    assert resolve(model) == folder
