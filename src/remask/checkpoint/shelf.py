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

# Families that were compared with decoders of our own alone.
_UNRECORDED = ("fast-dllm-v2", "illada", "nemotron-labs-diffusion", "stable-diffcoder", "sumi")


@dataclass(frozen=True, slots=True)
class Shelved:
    """A model that its name alone starts."""

    name: str  # what starts it; the preset of this name has its shape
    hub: str  # its id on the Hugging Face hub, as far as we know; nothing was downloaded
    licence: str = ""  # that of its weights, as far as we know; empty: see its page
    revision: str | None = None  # a branch, tag or commit of the repository; None: the newest
    # How a start by name decodes where the family does otherwise: by its authors' examples, or our recipes
    sampling: Mapping[str, Any] = field(default_factory=dict)
    overrides: Mapping[str, Any] = field(default_factory=dict)  # keys of `config.json` that the published file lacks

    @property
    def config(self) -> ModelConfig:
        """Its shape, as far as we know; the published `config.json` decides."""
        return PRESETS[self.name]

    @property
    def cache(self) -> str:
        """The cache that we would take."""
        return "none" if self.config.whole_canvas else CACHES[self.config.kind]

    @property
    def recorded(self) -> bool:
        """Whether tiny models of its kind give the recorded runs of public code. More was not tested here."""
        return self.config.family not in _UNRECORDED and self.config.edit_tokens is None  # LLaDA2.2: by description


_MIT, _APACHE = "MIT", "Apache-2.0"
_BLOCKS: Mapping[str, Any] = {"block_length": 32}
_DREAM: Mapping[str, Any] = {"block_length": 32, "temperature": 0.2, "top_p": 0.95}
_BD3LM: Mapping[str, Any] = {"block_size": 32}
_GIDD: Mapping[str, Any] = {"uniform": "s32/b32"}
_NVIDIA = "NVIDIA Nemotron Open Model"

_ROWS = (
    Shelved("qwen3-0.6b-diffusion-mdlm", "dllm-hub/Qwen3-0.6B-diffusion-mdlm-v0.1", _APACHE, sampling=_BLOCKS),
    Shelved(
        "qwen2.5-coder-0.5b-instruct-diffusion-mdlm",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-mdlm-v0.1",
        _APACHE,
        sampling=_BLOCKS,
    ),
    Shelved("qwen3-0.6b-diffusion-bd3lm", "dllm-hub/Qwen3-0.6B-diffusion-bd3lm-v0.1", _APACHE, overrides=_BD3LM),
    Shelved(
        "qwen2.5-coder-0.5b-instruct-diffusion-bd3lm",
        "dllm-hub/Qwen2.5-Coder-0.5B-Instruct-diffusion-bd3lm-v0.1",
        _APACHE,
        overrides=_BD3LM,
    ),
    Shelved("modernbert-base-chat", "dllm-hub/ModernBERT-base-chat-v0.1", _APACHE, sampling=_BLOCKS),
    Shelved("modernbert-large-chat", "dllm-hub/ModernBERT-large-chat-v0.1", _APACHE, sampling=_BLOCKS),
    Shelved("llada-8b", "GSAI-ML/LLaDA-8B-Instruct", _MIT, sampling=_BLOCKS),
    Shelved("llada-1.5", "GSAI-ML/LLaDA-1.5", _MIT, sampling=_BLOCKS),
    Shelved("llada-moe-7b-a1b", "inclusionAI/LLaDA-MoE-7B-A1B-Instruct", _APACHE, sampling=_BLOCKS),
    Shelved("dream-7b", "Dream-org/Dream-v0-Instruct-7B", _APACHE, sampling=_DREAM),
    Shelved("diffucoder-7b", "apple/DiffuCoder-7B-cpGRPO", sampling=_BLOCKS),
    Shelved("illada-8b", "GSAI-ML/iLLaDA-8B-Instruct"),
    Shelved("gidd-unif-3b", "dvruette/gidd-unif-3b", sampling=_GIDD),
    Shelved("gidd-unif-10b", "dvruette/gidd-unif-10b", sampling=_GIDD),
    Shelved("sumi-7b", "tohoku-nlp/sumi-7b", _APACHE, sampling={"steps_per_block": 64, "temperature": 0.7}),
    Shelved("sdar-1.7b", "JetLM/SDAR-1.7B-Chat"),
    Shelved("sdar-4b", "JetLM/SDAR-4B-Chat"),
    Shelved("sdar-8b", "JetLM/SDAR-8B-Chat"),
    Shelved("sdar-30b-a3b", "JetLM/SDAR-30B-A3B-Chat"),
    Shelved("llada2-mini", "inclusionAI/LLaDA2.0-mini", _APACHE, sampling={"threshold": 0.95}),
    Shelved("llada2.1-mini", "inclusionAI/LLaDA2.1-mini", _APACHE, sampling={"remasking": "joint_threshold"}),
    Shelved("llada2-flash", "inclusionAI/LLaDA2.0-flash", _APACHE, sampling={"threshold": 0.95}),
    Shelved("llada2.2-mini", "inclusionAI/LLaDA2.2-mini", _APACHE),
    Shelved("llada2.2-flash", "inclusionAI/LLaDA2.2-flash", _APACHE),
    Shelved(
        "fast-dllm-v2-7b",
        "Efficient-Large-Model/Fast_dLLM_v2_7B",
        sampling={"blocks": {"sub_block_length": 8}, "threshold": 0.9},
    ),
    Shelved("stable-diffcoder-8b-instruct", "ByteDance-Seed/Stable-DiffCoder-8B-Instruct"),
    Shelved("nemotron-labs-diffusion-3b", "nvidia/Nemotron-Labs-Diffusion-3B", _NVIDIA),
    Shelved("nemotron-labs-diffusion-8b", "nvidia/Nemotron-Labs-Diffusion-8B", _NVIDIA),
    Shelved("nemotron-labs-diffusion-14b", "nvidia/Nemotron-Labs-Diffusion-14B", _NVIDIA),
    Shelved("diffusiongemma-26b-a4b", "google/diffusiongemma-26B-A4B-it", _APACHE),
)
SHELF: Mapping[str, Shelved] = MappingProxyType({row.name: row for row in _ROWS})


def begun(repo: str) -> bool:
    """Whether the hub's cache has a folder of `repo`, whatever is in it. The hub's client is not imported."""
    from huggingface_hub import constants

    return (Path(constants.HF_HUB_CACHE).expanduser() / f"models--{repo.replace('/', '--')}").is_dir()


def shelved(model: str) -> Shelved | None:
    """The model of the shelf that `model` names; None: another one, or a file or folder of this name."""
    return None if os.path.exists(os.path.expanduser(model)) else SHELF.get(model)


def meant(model: str) -> str:
    """A question after the names nearest to `model`, with a space before it; empty where none is near, or it is one.

    These are names of the shelf and their hub ids, models that ship, and folders and GGUF files where `model` points.
    """
    folder, beside = os.path.dirname(os.path.expanduser(model)), list[str]()
    if os.path.isdir(folder or "."):
        with os.scandir(folder or ".") as entries:
            beside = [os.path.join(os.path.dirname(model), entry.name) for entry in entries if _may_be_model(entry)]
    known = {name.casefold(): name for name in (*beside, *(row.hub for row in _ROWS), *BUNDLED_MODELS, *SHELF)}
    if model in known.values():
        return ""
    near = [repr(known[name]) for name in difflib.get_close_matches(model.casefold(), known, n=3)]
    return f" Did you mean {' or '.join(near)}?" if near else ""


def _may_be_model(entry: os.DirEntry[str]) -> bool:
    return entry.name.lower().endswith(".gguf") or os.path.exists(os.path.join(entry.path, "config.json"))
