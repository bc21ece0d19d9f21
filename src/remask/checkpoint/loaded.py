"""A loaded model: shape, weights, tokenizer and identity."""

import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from remask.checkpoint.adapter import Adapter, read_adapter, with_adapters
from remask.checkpoint.files import CONFIG, GENERATION, raw_config, weight_files
from remask.checkpoint.fingerprint import fingerprint
from remask.checkpoint.gguf_header import is_gguf
from remask.checkpoint.kept import KeptWeights
from remask.checkpoint.load import load_weights, read_config
from remask.checkpoint.quantised_files import stored_kind
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import find_source
from remask.checkpoint.tokenizer import read_tokenizer
from remask.checks import Quantization
from remask.errors import CheckpointError, ConfigError
from remask.families import preset
from remask.families.family import Factors, Family, Slot
from remask.model.config import ModelConfig
from remask.model.quantised import QuantisedMatrix
from remask.model.ranks import Shard
from remask.model.weights import WHOLE, Weights, empty_weights
from remask.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DUMMY_SEED = 0
_STD = 0.02
_ONES = (
    *("norm", "embed_norm", "head_norm", "attn_norm", "ffn_norm", "q_norm", "k_norm", "attn_post", "ffn_post"),
    *(f"mixture.{name}" for name in ("router_norm", "expert_norm", "expert_post", "shared_post", "factors")),
    *("signal.norm", "scale"),
)


def dummy_weights(
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int = 0,
    shard: Shard = WHOLE,
    quantization: Quantization | None = None,
) -> Weights:
    """Weights drawn on `device` from a normal distribution of standard deviation 0.02. The gains of norms are one.

    One seed gives the same weights for the same shape, dtype and kind of device; different kinds of devices draw
    different numbers. A `shard` holds its part of these weights, and matrices may be quantised: each tensor that is cut
    or quantised is drawn as a whole before, and the others in their places.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = empty_weights(config, dtype, device, shard, quantization)
    shapes = empty_weights(config, dtype, torch.device("meta")).named_tensors()
    for (name, layer, shape), (_, _, tensor) in zip(shapes, weights.named_tensors(), strict=True):
        if shard.size == 1 and not isinstance(tensor, QuantisedMatrix):
            _draw(name, tensor, generator)
            continue
        whole = torch.empty_like(shape, device=device)
        _draw(name, whole, generator)
        for piece in Slot(name, tuple(shape.shape), name, layer).pieces(config, shard):
            piece.fill(weights, whole if piece.part is None else whole[piece.part])
    return weights


def _draw(field: str, tensor: Tensor, generator: torch.Generator) -> None:
    if field in _ONES:
        tensor.fill_(1)
    else:
        tensor.normal_(0, _STD, generator=generator)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model as read from a folder, or drawn at random from a preset."""

    name: str
    config: ModelConfig
    weights: Weights
    tokenizer: Tokenizer | None  # None where there is none
    fingerprint: str
    # Sampling parameters that the checkpoint gives to requests that leave them out
    sampling: Mapping[str, Any] = field(default_factory=dict)
    quantization: Quantization | None = None  # how its matrices are kept; None: in the dtype of the model
    # Those that requests may name, which stand beside the weights
    adapters: Mapping[str, Adapter] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model whose shape is known, and whose weights have not been read."""

    # What was asked for, without the adapters that are refused: another process finds the same by them
    settings: ModelSettings
    config: ModelConfig
    folder: Path | None = None  # the checkpoint's folder, or its GGUF file; None for random weights of a preset's shape
    family: Family | None = None  # what reads the checkpoint; None beside no folder
    sampling: Mapping[str, Any] = field(default_factory=dict)  # as of `LoadedModel`
    quantization: Quantization | None = None  # how the files keep matrices; None: as numbers
    tokenizer: Tokenizer | None = None  # None where there is none, or none is needed
    adapter: Adapter | None = None  # what is merged into the weights when they are read
    # What stands beside them, by the names that requests give
    adapters: Mapping[str, Adapter] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)  # why other adapters are left out, by name
    # Keys that were laid over those of `config.json`, those of the model's files included
    overrides: Mapping[str, Any] = field(default_factory=dict)
    # The cache and the quantization on CPUs that its files name for whoever asks for none
    usual: Mapping[str, str] = field(default_factory=dict)

    def load(
        self,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard = WHOLE,
        quantization: Quantization | None = None,
    ) -> LoadedModel:
        """Read the weights that `shard` holds, or draw them where there is no folder, and quantise their matrices.

        Raises `CheckpointError` on files that cannot be used.
        """
        quantization = quantization or self.quantization
        if self.folder is None or self.family is None:
            weights = dummy_weights(self.config, dtype, device, DUMMY_SEED, shard, quantization)
            factors, identity = Factors(), fingerprint(self.config, DUMMY_SEED, quantization)
        else:
            factors = self.family.factors(raw_config(self.folder))
            changes = [] if self.adapter is None else ["adapter", self.adapter.fingerprint]
            changes += ["hf_overrides", json.dumps(self.overrides, sort_keys=True)] if self.overrides else []
            # Files that are quantised have a hash of their own.
            identity = fingerprint(self.config, self.folder, None if self.quantization else quantization, changes)
            weights = self._weights(self.folder, self.family, dtype, device, shard, quantization, identity)
        beside, drafter = dict(self.adapters), self._drafts_with
        if drafter is not None:
            beside[drafter.name] = read_adapter(str(drafter), self.config, apart=True)
        weights = with_adapters(weights, beside, self.config, factors, shard)
        model = self.settings.model, self.config, weights, self.tokenizer, identity
        return LoadedModel(*model, self.sampling, quantization, self.adapters)

    def _weights(
        self,
        folder: Path,
        family: Family,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        quantization: Quantization | None,
        identity: str,
    ) -> Weights:
        """Those that an earlier start has made and kept, else read, and kept where they took long to make."""
        dear = self.adapter is not None or quantization != self.quantization
        store = None
        if dear and device.type == "cpu" and shard.size == 1 and self.settings.check_weights:
            files = [folder] if is_gguf(folder) else [folder / CONFIG, *weight_files(folder)]
            store = KeptWeights(identity, dtype, [*files, *(() if self.adapter is None else self.adapter.files)])
            weights = store.read(partial(empty_weights, self.config, dtype, device, shard, quantization))
            if weights is not None:
                return weights
        how = self.settings.progress, self.settings.check_weights, shard, quantization, self.adapter
        weights = load_weights(folder, family, self.config, dtype, device, *how)
        if store is not None:
            store.write(weights)
        return weights

    @property
    def _drafts_with(self) -> Path | None:
        """The adapter in the checkpoint's folder that drafts are computed with; None: there is none."""
        name = self.config.drafter
        return None if name is None or self.folder is None or not (self.folder / name).is_dir() else self.folder / name


def find_model(settings: ModelSettings) -> FoundModel:
    """Find a model and read its shape and its tokenizer. Adapters are checked against its shape.

    Raises `CheckpointError` on files that cannot be used, `UnknownNameError` on an unknown preset or architecture,
    `PluginError` where another package provides it and cannot be used, and `ConfigError` where texts cannot be read, or
    on an adapter for weights that it cannot be merged into.
    """
    adapter = settings.adapter
    if settings.load_format == "dummy":
        for what, value in (("adapter", adapter), ("hf_overrides", settings.hf_overrides)):
            if value:
                raise ConfigError(f"{what}={value!r} changes a checkpoint; leave load_format='dummy' out")
        shape = preset(settings.model)
        model = FoundModel(settings, shape, tokenizer=read_tokenizer(settings, shape, None))
    else:
        source = find_source(settings.model, settings.hf_overrides, progress=settings.progress)
        family, config = read_config(source.weights, source.overrides, settings.tokenizer, force=settings.force)
        remark = family.remark(Path(settings.model).name, config)
        unfollowed = source.unfollowed(family.words)
        if settings.reads is not None:  # ranks beside the first one read no texts
            if remark is not None:
                log.warning("%s", remark)
            if unfollowed:
                log.warning(
                    "%s of %s also says %s, which is not followed: give sampling parameters in its place, with "
                    "--sampling, in a request, or in the folder's remask.json",
                    *(GENERATION, settings.model, ", ".join(unfollowed)),
                )
        tokenizer = read_tokenizer(settings, config, source.weights, family.chat_template)
        template = None if tokenizer is None else tokenizer.chat_template
        stops = [text for text in family.stop if text in (template or "")]
        model = FoundModel(
            settings,
            config,
            source.weights,
            family,
            sampling=({"stop": stops} if stops else {}) | source.sampling(family.words),
            quantization=stored_kind(source.weights),
            tokenizer=tokenizer,
            overrides=source.overrides,
            usual=source.usual,
        )
        adapter = source.merged(settings.model, adapter)
    if adapter is not None and model.quantization is not None:
        raise ConfigError(
            f"adapter={adapter!r} is merged before weights are quantised, and the model {settings.model!r} is "
            f"quantised as {model.quantization!r}: load the model that it was made of with "
            f"quantization={model.quantization!r}, or serve the adapter by name beside it (adapters=..., "
            "--lora-modules)"
        )
    if model._drafts_with is not None and model._drafts_with.name in (settings.adapters or {}):
        raise ConfigError(
            f"adapters: {model._drafts_with.name!r} is the name of the adapter that the folder of {settings.model!r} "
            "has for drafts; give yours another name (adapters=..., --lora-modules)"
        )
    merged = None if adapter is None else read_adapter(adapter, model.config)
    apart, refused = dict[str, Adapter](), dict[str, str]()
    for name, path in (settings.adapters or {}).items():
        try:
            apart[name] = read_adapter(path, model.config, apart=True, most=settings.max_lora_rank)
        except CheckpointError as error:
            if not settings.skip_bad_adapters:
                raise
            refused[name] = str(error)
    usable = {name: path for name, path in (settings.adapters or {}).items() if name in apart}
    settings = replace(settings, adapters=usable)
    return replace(model, settings=settings, adapter=merged, adapters=apart, refused=refused)
