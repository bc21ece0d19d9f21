"""The shelf: published models by one word each, in the table `shelf.txt`, from which `docs/shelf.md` is written."""

import difflib
import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from remask.checks import BUNDLED_MODELS, ModelKind
from remask.families import PRESETS
from remask.model.config import ModelConfig

CACHES: Mapping[ModelKind, str] = MappingProxyType(
    {"masked": "block-dual", "uniform": "uniform-cache", "block_causal": "exact"}
)
"""The cache that a model of the shelf runs with where none is named."""

# Families that were compared only with decoders of our own.
_UNRECORDED = ("fast-dllm-v2", "illada", "nemotron-labs-diffusion", "stable-diffcoder", "sumi")


@dataclass(frozen=True, slots=True)
class ShelfEntry:
    """A published model that starts by its name alone."""

    name: str  # also of the preset that has its shape
    hub: str  # id on the Hugging Face hub, as far as we know; nothing was downloaded
    licence: str = ""  # of the weights, as far as we know; empty: see its page
    revision: str | None = None  # a branch, tag or commit of the repository; None: the newest
    # Sampling parameters that differ from the family's: those of its authors' examples, or of our recipes
    sampling: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)  # keys of `config.json` that the published file lacks

    @property
    def config(self) -> ModelConfig:
        """The model's shape, as far as we know; the published `config.json` decides."""
        return PRESETS[self.name]

    @property
    def cache(self) -> str:
        """The cache that runs if none is named."""
        return "none" if self.config.whole_canvas else CACHES[self.config.kind]

    @property
    def recorded(self) -> bool:
        """Whether tiny models of its family reproduce recorded runs of public code; published weights were not run."""
        return self.config.family not in _UNRECORDED and self.config.edit_tokens is None  # LLaDA2.2: by description


def _entries() -> Iterator[ShelfEntry]:
    """The entries of `shelf.txt`, whose cells two or more spaces separate; "-" is an empty cell."""
    _, *lines = Path(__file__).with_name("shelf.txt").read_text(encoding="utf-8").splitlines()
    for line in lines:
        name, hub, licence, sampling, overrides = ("" if cell == "-" else cell for cell in re.split(" {2,}", line))
        yield ShelfEntry(
            name, hub, licence, sampling=json.loads(sampling or "{}"), overrides=json.loads(overrides or "{}")
        )


SHELF: Mapping[str, ShelfEntry] = MappingProxyType({entry.name: entry for entry in _entries()})


def is_in_cache(repo: str) -> bool:
    """Whether the hub's cache has a folder of `repo`, even an incomplete one. Does not import the hub's client."""
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}").is_dir()


def shelf_entry(model: str) -> ShelfEntry | None:
    """The entry of the shelf called `model`. Returns None if there is none, or if a file or folder has this name."""
    return None if os.path.exists(os.path.expanduser(model)) else SHELF.get(model)


def suggest_models(model: str) -> str:
    """A question with the names most similar to `model`, for the end of an error: " Did you mean 'llada-8b'?".

    The candidates are names of the shelf and their hub ids, bundled models, and the folders and GGUF files in the
    folder of the path `model`. Returns an empty text if none is similar, or if `model` is a candidate.
    """
    folder = os.path.dirname(os.path.expanduser(model)) or "."
    paths = list[str]()
    # A folder that is not there, or that this user may not list, suggests nothing.
    with suppress(OSError, ValueError), os.scandir(folder) as entries:
        paths = [os.path.join(os.path.dirname(model), entry.name) for entry in entries if _may_be_model(entry)]
    hub_ids = [entry.hub for entry in SHELF.values()]
    candidates = {name.casefold(): name for name in (*paths, *hub_ids, *BUNDLED_MODELS, *SHELF)}
    if model in candidates.values():
        return ""
    similar = [repr(candidates[name]) for name in difflib.get_close_matches(model.casefold(), candidates, n=3)]
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


def _may_be_model(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(".gguf") or os.path.exists(os.path.join(entry.path, "config.json"))
