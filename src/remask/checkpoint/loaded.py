"""A loaded model: shape, weights, tokenizer and identity."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from remask.checkpoint.dummy import dummy_weights
from remask.checkpoint.fingerprint import fingerprint
from remask.checkpoint.generation_config import read_sampling
from remask.checkpoint.load import load_weights, read_config
from remask.checkpoint.presets import preset
from remask.checkpoint.quantised_files import stored_kind
from remask.checkpoint.source import resolve
from remask.families.family import Family
from remask.model.config import ModelConfig
from remask.model.quantization_names import Quantization
from remask.model.ranks import Shard
from remask.model.weights import WHOLE, Weights
from remask.text.tokenizer import Tokenizer, load_tokenizer

DUMMY_SEED = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as read from a folder, or drawn at random from a preset.

    Attributes:
        tokenizer: None where there is none.
        sampling: sampling parameters that the checkpoint gives to requests that leave them out.
        quantization: how its matrices are kept; None: in the dtype of the model.
    """

    name: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer | None
    fingerprint: str
    sampling: Mapping[str, Any] = field(default_factory=dict)
    quantization: Quantization | None = None


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model whose shape is known, and whose weights have not been read.

    Attributes:
        folder: the checkpoint's folder, or its GGUF file; None for random weights of a preset's shape.
        family: what reads the checkpoint; None beside no folder.
        sampling: as of `LoadedModel`.
        quantization: how the files keep matrices; None: as numbers.
    """

    name: str
    config: ModelConfig
    folder: Path | None = None
    family: Family | None = None
    sampling: Mapping[str, Any] = field(default_factory=dict)
    quantization: Quantization | None = None

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        *,
        progress: bool,
        check: bool = True,
        shard: Shard = WHOLE,
        quantization: Quantization | None = None,
    ) -> LoadedModel:
        """Read the weights that `shard` holds, or draw them where there is no folder, and quantise their matrices.

        With `check` a checkpoint whose weights are not all finite is refused. Raises `CheckpointError` on files that
        cannot be used.
        """
        quantization = quantization or self.quantization
        if self.folder is None or self.family is None:
            weights = dummy_weights(self.config, dtype, device, DUMMY_SEED, shard, quantization)
            identity = fingerprint(self.config, DUMMY_SEED, quantization)
            return LoadedModel(self.name, self.config, weights, None, identity, quantization=quantization)
        tokenizer = load_tokenizer(self.folder)
        weights = load_weights(
            self.folder, self.family, self.config, dtype, device, progress, check, shard, quantization
        )
        # Files that are quantised have a hash of their own.
        identity = fingerprint(self.config, self.folder, None if self.quantization else quantization)
        return LoadedModel(self.name, self.config, weights, tokenizer, identity, self.sampling, quantization)


def find_model(name: str, *, dummy: bool) -> FoundModel:
    """Find a checkpoint and read its shape; with `dummy` the shape of the preset `name`.

    Raises `CheckpointError` on files that cannot be used, `UnknownNameError` on an unknown preset or architecture, and
    `PluginError` where another package provides it and cannot be used.
    """
    if dummy:
        return FoundModel(name, preset(name))
    folder = resolve(name)
    family, config = read_config(folder)
    return FoundModel(name, config, folder, family, read_sampling(folder), stored_kind(folder))
