"""The shelf: published models by one word each. `docs/shelf.md` is written from this table."""

import difflib
import os
from collections.abc import Mapping
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


_MIT, _APACHE = "MIT", "Apache-2.0"
_BLOCKS: Mapping[str, Any] = {"block_length": 32}
_DREAM: Mapping[str, Any] = {"block_length": 32, "temperature": 0.2, "top_p": 0.95}
_BD3LM: Mapping[str, Any] = {"block_size": 32}
_GIDD: Mapping[str, Any] = {"uniform": "s32/b32"}
_NVIDIA = "NVIDIA Nemotron Open Model"

_ENTRIES = (
    ShelfEntry("qwen3-0.6b-diffusion-mdlm", "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", _APACHE, sampling=_BLOCKS),
    ShelfEntry(
        "qwen2.5-coder-0.5b-instruct-diffusion-mdlm",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        _APACHE,
        sampling=_BLOCKS,
    ),
    ShelfEntry("qwen3-0.6b-diffusion-bd3lm", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1", _APACHE, overrides=_BD3LM),
    ShelfEntry(
        "qwen2.5-coder-0.5b-instruct-diffusion-bd3lm",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",
        _APACHE,
        overrides=_BD3LM,
    ),
    ShelfEntry("modernbert-base-chat", "dllm-hub/ModernBERT-base-chat-v0.1", _APACHE, sampling=_BLOCKS),
    ShelfEntry("modernbert-large-chat", "dllm-hub/ModernBERT-large-chat-v0.1", _APACHE, sampling=_BLOCKS),
    ShelfEntry("llada-8b", "GSAI-ML/LLaDA-8B-Instruct", _MIT, sampling=_BLOCKS),
    ShelfEntry("llada-1.5", "GSAI-ML/LLaDA-1.5", _MIT, sampling=_BLOCKS),
    ShelfEntry("llada-moe-7b-a1b", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct", _APACHE, sampling=_BLOCKS),
    ShelfEntry("dream-7b", "Dream-org/Dream-v0-Instruct-7B", _APACHE, sampling=_DREAM),
    ShelfEntry("diffucoder-7b", "apple/DiffuCoder-7B-cpGRPO", sampling=_BLOCKS),
    ShelfEntry("illada-8b", "GSAI-ML/iLLaDA-8B-Instruct"),
    ShelfEntry("gidd-unif-3b", "dvruette/gidd-unif-3b", sampling=_GIDD),
    ShelfEntry("gidd-unif-10b", "dvruette/gidd-unif-10b", sampling=_GIDD),
    ShelfEntry("sumi-7b", "tohoku-nlp/sumi-7b", _APACHE, sampling={"steps_per_block": 64, "temperature": 0.7}),
    ShelfEntry("sdar-1.7b", "JetLM/SDAR-1.7B-Chat"),
    ShelfEntry("sdar-4b", "JetLM/SDAR-4B-Chat"),
    ShelfEntry("sdar-8b", "JetLM/SDAR-8B-Chat"),
    ShelfEntry("sdar-30b-a3b", "JetLM/SDAR-30B-A3B-Chat"),
    ShelfEntry("llada2-mini", "inclusionAI/LLaDA2.0-mini", _APACHE, sampling={"threshold": 0.95}),
    ShelfEntry("llada2.1-mini", "inclusionAI/LLaDA2.1-mini", _APACHE, sampling={"remasking": "joint_threshold"}),
    ShelfEntry("llada2-flash", "inclusionAI/LLaDA2.0-flash", _APACHE, sampling={"threshold": 0.95}),
    ShelfEntry("llada2.2-mini", "inclusionAI/LLaDA2.2-mini", _APACHE),
    ShelfEntry("llada2.2-flash", "inclusionAI/LLaDA2.2-flash", _APACHE),
    ShelfEntry(
        "fast-dllm-v2-7b",
        "Efficient-Large-Model/Fast_dLLM_v2_7B",
        sampling={"blocks": {"sub_block_length": 8}, "threshold": 0.9},
    ),
    ShelfEntry("stable-diffcoder-8b-instruct", "ByteDance-Seed/Stable-DiffCoder-8B-Instruct"),
    ShelfEntry("nemotron-labs-diffusion-3b", "nvidia/Nemotron-Labs-Diffusion-3B", _NVIDIA),
    ShelfEntry("nemotron-labs-diffusion-8b", "nvidia/Nemotron-Labs-Diffusion-8B", _NVIDIA),
    ShelfEntry("nemotron-labs-diffusion-14b", "nvidia/Nemotron-Labs-Diffusion-14B", _NVIDIA),
    ShelfEntry("diffusiongemma-26b-a4b", "google/diffusiongemma-26B-A4B-it", _APACHE),
)
SHELF: Mapping[str, ShelfEntry] = MappingProxyType({entry.name: entry for entry in _ENTRIES})


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
    if os.path.isdir(folder):
        with os.scandir(folder) as entries:
            paths = [os.path.join(os.path.dirname(model), entry.name) for entry in entries if _may_be_model(entry)]
    hub_ids = [entry.hub for entry in _ENTRIES]
    candidates = {name.casefold(): name for name in (*paths, *hub_ids, *BUNDLED_MODELS, *SHELF)}
    if model in candidates.values():
        return ""
    similar = [repr(candidates[name]) for name in difflib.get_close_matches(model.casefold(), candidates, n=3)]
    return f" Did you mean {' or '.join(similar)}?" if similar else ""


def _may_be_model(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(".gguf") or os.path.exists(os.path.join(entry.path, "config.json"))
