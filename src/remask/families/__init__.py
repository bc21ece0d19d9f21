"""The model families that the transformer executes, the choice of one by a checkpoint's configuration, and presets."""

import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from remask.checks.plugins import Plugin, Registry
from remask.errors import CheckpointError, PluginError, UnknownNameError
from remask.families.a2d import A2D, LLAMA, QWEN2, QWEN3
from remask.families.contract import validate_family
from remask.families.diffusion_gemma import DIFFUSION_GEMMA
from remask.families.dream import DREAM
from remask.families.family import Family, Slot
from remask.families.fast_dllm_v2 import FAST_DLLM_V2
from remask.families.gidd import GIDD
from remask.families.illada import ILLADA
from remask.families.llada import LLADA
from remask.families.llada2 import LLADA2
from remask.families.llada_moe import LLADA_MOE
from remask.families.modernbert import MODERNBERT
from remask.families.nemotron import NEMOTRON
from remask.families.sdar import SDAR, SDAR_MOE
from remask.families.stable_diffcoder import STABLE_DIFFCODER
from remask.families.sumi import SUMI
from remask.model.config import ModelConfig

__all__ = ["FAMILIES", "PRESETS", "REGISTRY", "Family", "Slot", "family_of", "preset", "presets"]

GROUP = "remask.families"
"""The entry-point group by which other packages add families. Each entry point names a `Family`."""

FAMILIES: tuple[Family, ...] = (
    *(LLADA, DREAM, GIDD, SDAR, FAST_DLLM_V2, LLADA_MOE, LLADA2, SDAR_MOE, ILLADA, A2D, MODERNBERT),
    *(NEMOTRON, STABLE_DIFFCODER, DIFFUSION_GEMMA, SUMI),
)

# Autoregressive models, by the beginning of their class, with the `model_type` of a diffusion model made of one.
_CAUSAL = {"llama": LLAMA, "qwen2": QWEN2, "qwen3": QWEN3}
_ENCODERS = ("bert", "roberta")


def _validate(plugin: Plugin, value: object) -> Family:
    return validate_family(plugin, value, FAMILIES)


REGISTRY: Registry[Family] = Registry("model family", GROUP, {family.name: family for family in FAMILIES}, _validate)
"""Families by name, including those of other packages."""

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {name: config for family in FAMILIES for name, config in family.presets.items()}
)
"""Shapes by name for `--load-format dummy`, of remask's own families: published models, and small ones for tests."""


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of a `config.json`: by its `recognises`, by `model_type` or, without this key, by `architectures`.

    Other packages' families are imported only if none of remask's claims the model. Raises `UnknownNameError` if no
    family does, `PluginError` if several packages do or the family is broken, and `CheckpointError` if the
    configuration has neither key, or one of a wrong type.
    """
    recognised = next((family for family in FAMILIES if family.recognises(raw)), None)
    if recognised is not None:
        return REGISTRY.get(recognised.name)
    model_type, architectures = raw.get("model_type"), raw.get("architectures")
    _refuse_bases(model_type, architectures)
    if isinstance(model_type, str):
        # Case is not compared: re-saved checkpoints of one family write it either way.
        return _claiming_family("model_type", [model_type], lambda family: family.model_types, str.casefold)
    if model_type is None and isinstance(architectures, list) and architectures:
        return _claiming_family("architecture", list(map(str, architectures)), lambda family: family.architectures, str)
    raise CheckpointError(
        f"config.json has 'model_type' {model_type!r} and 'architectures' {architectures!r}: they do not say which "
        f"family the model is of. Supported model types: {', '.join(name for f in FAMILIES for name in f.model_types)}."
    )


def _refuse_bases(model_type: object, architectures: object) -> None:
    """Raise `CheckpointError` for autoregressive models and encoders, with how to make a diffusion model of one."""
    names = architectures if model_type is None and isinstance(architectures, list) else [model_type]
    key = "architectures" if model_type is None else "model_type"
    for name in map(str, names):
        base = re.split("for|model", name.casefold())[0]
        if base in _CAUSAL:
            raise CheckpointError(
                f"{key!r} is {name!r}: an autoregressive model, which writes from left to right; it becomes a "
                f"diffusion model by training (training/adapt makes an adapter for it), and then has 'model_type' "
                f"{_CAUSAL[base]!r}: give the adapter's folder as the model, or --adapter with --hf-overrides."
            )
        if base in _ENCODERS:
            raise CheckpointError(
                f"{key!r} is {name!r}: an encoder, which fills a few masks of a text that is there; it becomes a "
                "diffusion model by training it to denoise whole answers, as dLLM's BERT-Chat does."
            )


def _claiming_family(
    key: str, values: Sequence[str], claims: Callable[[Family], Sequence[str]], fold: Callable[[str], str]
) -> Family:
    """The family that claims the first of `values` of `key` that any family claims. `fold` makes values comparable.

    Raises `PluginError` if several packages claim it or its family is broken, and `UnknownNameError` if none does.
    """
    folded = [fold(name) for name in values]

    def claimants(families: Sequence[Family]) -> list[Family]:
        for name in folded:
            if matches := [family for family in families if name in map(fold, claims(family))]:
                return matches
        return []

    if built_in := claimants(FAMILIES):
        return REGISTRY.get(built_in[0].name)
    usable = list(REGISTRY.usable().values())
    added = claimants(usable)  # by other packages
    if len(added) > 1:
        sources = " and by ".join(REGISTRY.source(family.name) for family in added)
        raise PluginError(f"{key} {', '.join(values)} is claimed by {sources}; uninstall all of these packages but one")
    if added:
        return added[0]
    for name in REGISTRY.names():
        if fold(name) in folded:
            return REGISTRY.get(name)  # raises the reason why this family is broken
    raise UnknownNameError(key, ", ".join(values), [name for family in usable for name in claims(family)])


def presets() -> dict[str, ModelConfig]:
    """Every shape by name. Imports other packages' families. Raises `PluginError` if two provide one name."""
    owners: dict[str, Family] = {}
    for family in REGISTRY.usable().values():
        for name in family.presets:
            if name in owners:
                sources = " and by ".join(REGISTRY.source(owner.name) for owner in (owners[name], family))
                raise PluginError(
                    f"preset {name!r} is provided by {sources}; rename it in one of them, or uninstall one"
                )
            owners[name] = family
    return {name: family.presets[name] for name, family in owners.items()}


def preset(name: str) -> ModelConfig:
    """The shape called `name`. Raises `UnknownNameError` if there is none, and `PluginError` if two provide a name."""
    if name in PRESETS:
        return PRESETS[name]
    shapes = presets()
    if name not in shapes:
        raise UnknownNameError("preset", name, shapes)
    return shapes[name]
