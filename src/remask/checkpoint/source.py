"""The files of a model: a bundled one, a local folder or GGUF file, or a repository of the Hugging Face hub."""

import os
import re
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

from huggingface_hub import hf_hub_download, snapshot_download

from remask.checkpoint.bundled import BUNDLED_MODELS
from remask.checkpoint.presets import PRESETS, presets
from remask.errors import CheckpointError
from remask.gguf.header import SUFFIX

# What a model needs, and nothing that could be executed: no Python files, no pickles.
_PATTERNS = ["*.safetensors", "*.json", "merges.txt", "tokenizer.model", "*.jinja"]
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# A file of a repository, which may lie in folders of it; no name begins with a dot, so none leads out of it.
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern}):((?:\w[\w.+-]*/)*\w[\w.+-]*\{SUFFIX})", re.IGNORECASE)


def resolve(model: str) -> Path:
    """The folder or the GGUF file of `model`: the name of a bundled one, a path, a hub id, or `id:file.gguf`.

    A hub's model is downloaded, or found in the hub's cache; of `id:file.gguf` that file alone.

    Raises:
        CheckpointError: the folder does not exist, or the hub does not answer or does not know the id.
    """
    if model in BUNDLED_MODELS:
        return _bundled(model)
    # `os.path` returns False for names that cannot be paths, where `Path` raises.
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path):
        if path.lower().endswith(SUFFIX):
            return Path(path)
        raise CheckpointError(
            f"The model {model!r} is a file. Give the folder that holds it and its config.json, or a file named "
            f"*{SUFFIX}."
        )
    file = _HUB_FILE.fullmatch(model)
    if file is not None:
        return _downloaded(model, lambda: hf_hub_download(file[1], file[2]))
    hub_id = _HUB_ID.fullmatch(model) is not None
    # Other packages' presets are looked up, and the packages imported, for what can be no hub id.
    if model in PRESETS or (not hub_id and model in presets()):
        raise CheckpointError(
            f"The model {model!r} is a preset: a shape without weights. Pass --load-format dummy to run it with random "
            "weights, or give a folder or a hub id."
        )
    if not hub_id:
        raise CheckpointError(
            f"There is no model {model!r}: no such folder, and not a hub id, which reads 'organisation/name'. "
            f"Give a folder, a GGUF file, a hub id, 'organisation/name:file{SUFFIX}', or one of "
            f"{', '.join(map(repr, BUNDLED_MODELS))}."
        )
    return _downloaded(model, lambda: snapshot_download(model, allow_patterns=_PATTERNS))


def _bundled(model: str) -> Path:
    folder = Path(str(files("remask"))) / model.replace("-", "_")
    if not (folder / "config.json").is_file():
        raise CheckpointError(
            f"The {model} model is not in this installation (no {folder / 'config.json'}). Install remask again, or "
            f"give a folder or a hub id; a folder of your own called {model!r} is ./{model}."
        )
    return folder


def _downloaded(model: str, fetch: Callable[[], str]) -> Path:
    try:
        return Path(fetch())
    # The hub's client raises its own errors, the operating system's, and those of an HTTP library that differs between
    # its versions. All of them mean that the model cannot be downloaded.
    except Exception as error:
        raise CheckpointError(
            f"The model {model!r} is neither a local folder nor available from the hub: {error}\n"
            "Check the name and the network, log in with `hf auth login` if access to it is restricted, or download "
            "it elsewhere and give its folder or file."
        ) from error
