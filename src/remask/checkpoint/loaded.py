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
from remask.checkpoint.load import load_weights, read_config
from remask.checkpoint.quantized_files import stored_quantization
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import Source, find_source
from remask.checkpoint.tokenizer import read_tokenizer
from remask.checkpoint.weight_cache import WeightCache
from remask.checks import Quantization
from remask.errors import CheckpointError, ConfigError
from remask.families import preset
from remask.families.family import Factors, Family, Slot
from remask.model.config import ModelConfig
from remask.model.quantized import QuantizedMatrix
from remask.model.ranks import Shard
from remask.model.weights import WHOLE, Weights, empty_weights
from remask.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

DUMMY_SEED = 0
_STD = 0.02  # of random weights
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
    """Random weights on `device` from a normal distribution with standard deviation 0.02. Gains of norms are one.

    A seed gives the same weights for the same shape, dtype and kind of device. A `shard` gets its part of the weights
    of the whole model: a tensor that is cut or quantized is drawn as a whole first, any other in its place.
    """
    generator = torch.Generator(device).manual_seed(seed)
    weights = empty_weights(config, dtype, device, shard, quantization)
    shapes = empty_weights(config, dtype, torch.device("meta")).named_tensors()
    for (name, layer, shape), (_, _, tensor) in zip(shapes, weights.named_tensors(), strict=True):
        if shard.size == 1 and not isinstance(tensor, QuantizedMatrix):
            _draw(name, tensor, generator)
            continue
        full = torch.empty_like(shape, device=device)
        _draw(name, full, generator)
        for slot in Slot(name, tuple(shape.shape), name, layer).parts(config, shard):
            slot.fill(weights, full if slot.part is None else full[slot.part])
    return weights


def _draw(field: str, tensor: Tensor, generator: torch.Generator) -> None:
    """Fill the tensor of a `field` of the weights with random numbers, or with ones."""
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
    tokenizer: Tokenizer | None
    fingerprint: str
    sampling: Mapping[str, Any] = field(default_factory=dict)  # default sampling parameters of requests
    quantization: Quantization | None = None  # of its matrices; None: they have the model's dtype
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # unmerged, by the names that requests give


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model whose shape is known, and whose weights have not been read."""

    # The settings without refused adapters: `find_model` finds the same model by them in another process
    settings: ModelSettings
    config: ModelConfig
    folder: Path | None = None  # the checkpoint's folder, or its GGUF file; None: random weights of a preset's shape
    family: Family | None = None  # of the checkpoint; None if there is no folder
    sampling: Mapping[str, Any] = field(default_factory=dict)  # see `LoadedModel`
    quantization: Quantization | None = None  # of the matrices in the files; None: they are not quantized
    tokenizer: Tokenizer | None = None  # None if there is none, or none is needed
    adapter: Adapter | None = None  # is merged into the weights when they are read
    adapters: Mapping[str, Adapter] = field(default_factory=dict)  # see `LoadedModel`
    refusals: Mapping[str, str] = field(default_factory=dict)  # the reason why an adapter is left out, by its name
    # Keys that replaced those of `config.json`, including those that the model's files give
    overrides: Mapping[str, Any] = field(default_factory=dict)
    default_names: Mapping[str, str] = field(default_factory=dict)  # see `Source`

    def load(
        self, dtype: torch.dtype, device: torch.device, shard: Shard = WHOLE, quantization: Quantization | None = None
    ) -> LoadedModel:
        """Read the weights that `shard` holds and quantize their matrices; without a folder they are random.

        Raises `CheckpointError` if files cannot be used.
        """
        quantization = quantization or self.quantization
        if self.folder is None or self.family is None:
            weights = dummy_weights(self.config, dtype, device, DUMMY_SEED, shard, quantization)
            factors = Factors()
            identity = fingerprint(self.config, DUMMY_SEED, quantization)
        else:
            factors = self.family.factors(raw_config(self.folder))
            changes = [] if self.adapter is None else ["adapter", self.adapter.fingerprint]
            changes += ["hf_overrides", json.dumps(self.overrides, sort_keys=True)] if self.overrides else []
            # Quantized files have a hash of their own.
            identity = fingerprint(self.config, self.folder, None if self.quantization else quantization, changes)
            weights = self._weights(self.folder, self.family, dtype, device, shard, quantization, identity=identity)
        adapters = dict(self.adapters)
        if self._drafter_folder is not None:
            adapters[self._drafter_folder.name] = read_adapter(str(self._drafter_folder), self.config, merge=False)
        return LoadedModel(
            name=self.settings.model,
            config=self.config,
            weights=with_adapters(weights, adapters, self.config, factors, shard),
            tokenizer=self.tokenizer,
            fingerprint=identity,
            sampling=self.sampling,
            quantization=quantization,
            adapters=self.adapters,
        )

    def _weights(
        self,
        folder: Path,
        family: Family,
        dtype: torch.dtype,
        device: torch.device,
        shard: Shard,
        quantization: Quantization | None,
        *,
        identity: str,
    ) -> Weights:
        """The weights of the checkpoint, of fingerprint `identity`: from its files, or from the weight cache.

        The cache holds weights of whole models on a CPU that are merged or quantized; missing ones are written to it.
        """
        is_converted = self.adapter is not None or quantization != self.quantization
        cache = None
        if is_converted and device.type == "cpu" and shard.size == 1 and self.settings.check_weights:
            files = [folder] if is_gguf(folder) else [folder / CONFIG, *weight_files(folder)]
            cache = WeightCache(identity, dtype, [*files, *(() if self.adapter is None else self.adapter.files)])
            weights = cache.read(partial(empty_weights, self.config, dtype, device, shard, quantization))
            if weights is not None:
                return weights
        weights = load_weights(
            folder,
            family,
            self.config,
            dtype,
            device,
            progress=self.settings.progress,
            check=self.settings.check_weights,
            shard=shard,
            quantization=quantization,
            adapter=self.adapter,
        )
        if cache is not None:
            cache.write(weights)
        return weights

    @property
    def _drafter_folder(self) -> Path | None:
        """The folder of the checkpoint's adapter for drafts. Returns None if there is none."""
        if self.folder is None or self.config.drafter is None:
            return None
        folder = self.folder / self.config.drafter
        return folder if folder.is_dir() else None


def find_model(settings: ModelSettings) -> FoundModel:
    """Find a model, read its shape and its tokenizer, and check adapters against its shape.

    Logs warnings about the model's files, but not on ranks other than the first. Raises `CheckpointError` if files
    cannot be used, `UnknownNameError` if the preset or architecture is unknown, `PluginError` if the package that
    provides it is broken, and `ConfigError` if texts cannot be read or an adapter cannot be merged.
    """
    if settings.load_format == "dummy":
        model, adapter = _find_preset(settings), None
    else:
        source = find_source(settings.model, settings.hf_overrides, progress=settings.progress)
        model = _find_checkpoint(settings, source)
        adapter = source.merged_adapter(settings.model, settings.adapter)
    if adapter is not None and model.quantization is not None:
        raise ConfigError(
            f"adapter={adapter!r} is merged before weights are quantized, and the model {settings.model!r} is "
            f"quantized as {model.quantization!r}: load the model that it was made of with "
            f"quantization={model.quantization!r}, or serve the adapter by name beside it (adapters=..., "
            "--lora-modules)"
        )
    if model._drafter_folder is not None and model._drafter_folder.name in (settings.adapters or {}):
        raise ConfigError(
            f"adapters: {model._drafter_folder.name!r} is the name of the adapter that the folder of {settings.model!r}"
            " has for drafts; give yours another name (adapters=..., --lora-modules)"
        )
    merged_adapter = None if adapter is None else read_adapter(adapter, model.config)
    adapters = dict[str, Adapter]()
    refusals = dict[str, str]()
    for name, path in (settings.adapters or {}).items():
        try:
            adapters[name] = read_adapter(path, model.config, merge=False, max_rank=settings.max_lora_rank)
        except CheckpointError as error:
            if not settings.skip_bad_adapters:
                raise
            refusals[name] = str(error)
    usable = {name: path for name, path in (settings.adapters or {}).items() if name in adapters}
    usable_settings = replace(settings, adapters=usable)
    return replace(model, settings=usable_settings, adapter=merged_adapter, adapters=adapters, refusals=refusals)


def _find_preset(settings: ModelSettings) -> FoundModel:
    """A model of random weights. Raises `ConfigError` if `settings` change a checkpoint, which it has not."""
    for name, value in (("adapter", settings.adapter), ("hf_overrides", settings.hf_overrides)):
        if value:
            raise ConfigError(f"{name}={value!r} changes a checkpoint; leave load_format='dummy' out")
    config = preset(settings.model)
    return FoundModel(settings, config, tokenizer=read_tokenizer(settings, config, None))


def _find_checkpoint(settings: ModelSettings, source: Source) -> FoundModel:
    """The model in the files of `source`, without adapters. Logs warnings about the files on the first rank."""
    family, config = read_config(source.weights, source.overrides, settings.tokenizer, force=settings.force)
    remark = family.remark(Path(settings.model).name, config)
    ignored = source.ignored_keys(family.read_generation)
    if settings.reads is not None:  # it is None on ranks other than the first
        if remark is not None:
            log.warning("%s", remark)
        if ignored:
            log.warning(
                "%s of %s also says %s, which is not followed: give sampling parameters in its place, with "
                "--sampling, in a request, or in the folder's remask.json",
                *(GENERATION, settings.model, ", ".join(ignored)),
            )
    tokenizer = read_tokenizer(settings, config, source.weights, family.chat_template)
    template = None if tokenizer is None else tokenizer.chat_template
    stops = [text for text in family.stop if text in (template or "")]
    return FoundModel(
        settings,
        config,
        source.weights,
        family,
        sampling=({"stop": stops} if stops else {}) | source.sampling(family.read_generation),
        quantization=stored_quantization(source.weights),
        tokenizer=tokenizer,
        overrides=source.overrides,
        default_names=source.default_names,
    )
