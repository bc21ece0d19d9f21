"""A loaded model: shape, weights, tokenizer and identity."""

from dataclasses import dataclass

import torch

from remask.models.config import ModelConfig
from remask.models.dummy import dummy_weights
from remask.models.fingerprint import fingerprint
from remask.models.load import load_weights, read_config
from remask.models.presets import preset
from remask.models.source import resolve
from remask.models.tokenizer import Tokenizer, load_tokenizer
from remask.models.weights import Weights

DUMMY_SEED = 0


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as read from a folder, or drawn at random from a preset. `tokenizer` is None where there is none."""

    name: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer | None
    fingerprint: str


def load_model(
    name: str, dtype: torch.dtype, device: torch.device, *, dummy: bool, progress: bool, check: bool = True
) -> LoadedModel:
    """Load a checkpoint, or with `dummy` draw random weights of the shape that the preset `name` has.

    With `check` a checkpoint whose weights are not all finite is refused.

    Raises `CheckpointError` on files that cannot be used, `UnknownNameError` on an unknown preset or architecture, and
    `PluginError` where another package provides it and cannot be used.
    """
    if dummy:
        config = preset(name)
        weights = dummy_weights(config, dtype, device, DUMMY_SEED)
        return LoadedModel(name, config, weights, None, fingerprint(config, DUMMY_SEED))
    folder = resolve(name)
    family, config = read_config(folder)
    tokenizer = load_tokenizer(folder)
    weights = load_weights(folder, family, config, dtype, device, progress, check)
    return LoadedModel(name, config, weights, tokenizer, fingerprint(config, folder))
