"""The model families that the transformer executes, and the choice of one by a checkpoint's configuration."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from remask.checks.plugins import Plugin, Registry
from remask.errors import CheckpointError, PluginError, UnknownNameError
from remask.families.contract import checked_family
from remask.families.dream import DREAM
from remask.families.family import Family, Slot
from remask.families.fast_dllm_v2 import FAST_DLLM_V2
from remask.families.gidd import GIDD
from remask.families.illada import ILLADA
from remask.families.llada import LLADA
from remask.families.llada2 import LLADA2
from remask.families.llada_moe import LLADA_MOE
from remask.families.sdar import SDAR
from remask.families.sdar_moe import SDAR_MOE

__all__ = [
    "DREAM",
    "FAMILIES",
    "FAST_DLLM_V2",
    "GIDD",
    "ILLADA",
    "LLADA",
    "LLADA2",
    "LLADA_MOE",
    "REGISTRY",
    "SDAR",
    "SDAR_MOE",
    "Family",
    "Slot",
    "family_of",
]

GROUP = "remask.families"
"""The entry-point group by which other packages add families. Each entry point names a `Family`."""

FAMILIES: tuple[Family, ...] = (LLADA, DREAM, GIDD, SDAR, FAST_DLLM_V2, LLADA_MOE, LLADA2, SDAR_MOE, ILLADA)


def _checked(plugin: Plugin, value: object) -> Family:
    return checked_family(plugin, value, FAMILIES)


REGISTRY: Registry[Family] = Registry("model family", GROUP, {family.name: family for family in FAMILIES}, _checked)
"""Families by name, those of other packages included."""


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of a `config.json`: one that recognises it, or by its `model_type` or, without it, `architectures`.

    Other packages' families are imported where no family of remask's claims the model.

    Raises:
        UnknownNameError: no family claims the model.
        PluginError: several packages claim it, or the family of this name cannot be used.
        CheckpointError: the configuration has neither key, or one that is not of the expected type.
    """
    recognised = next((family for family in FAMILIES if family.recognises(raw)), None)
    if recognised is not None:
        return REGISTRY.get(recognised.name)
    model_type = raw.get("model_type")
    if isinstance(model_type, str):
        # Case is not compared: re-saved checkpoints of one family write it either way.
        return _claimant("model_type", [model_type], lambda family: family.model_types, str.casefold)
    architectures = raw.get("architectures")
    if model_type is None and isinstance(architectures, list) and architectures:
        return _claimant("architecture", list(map(str, architectures)), lambda family: family.architectures, str)
    raise CheckpointError(
        f"config.json has 'model_type' {model_type!r} and 'architectures' {architectures!r}: they do not say which "
        f"family the model is of. Supported model types: {', '.join(name for f in FAMILIES for name in f.model_types)}."
    )


def _claimant(
    key: str, wanted: Sequence[str], claims: Callable[[Family], Sequence[str]], fold: Callable[[str], str]
) -> Family:
    """The family that claims the first of the `wanted` values of `key` that any family claims."""
    folded = [fold(name) for name in wanted]

    def claimants(families: Sequence[Family]) -> list[Family]:
        found = ([f for f in families if name in map(fold, claims(f))] for name in folded)
        return next((each for each in found if each), [])

    if own := claimants(FAMILIES):
        return REGISTRY.get(own[0].name)
    usable = list(REGISTRY.usable().values())
    found = claimants(usable)
    if len(found) > 1:
        sources = " and by ".join(REGISTRY.source(family.name) for family in found)
        raise PluginError(f"{key} {', '.join(wanted)} is claimed by {sources}; uninstall all of these packages but one")
    if found:
        return found[0]
    for name in REGISTRY.names():
        if fold(name) in folded:
            return REGISTRY.get(name)  # raises why this family cannot be used
    raise UnknownNameError(key, ", ".join(wanted), [name for family in usable for name in claims(family)])
