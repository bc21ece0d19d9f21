"""The model families that the one transformer executes, and which of them a configuration belongs to."""

from collections.abc import Mapping
from typing import Any

from remask.errors import CheckpointError, UnknownNameError
from remask.models.families.dream import DREAM
from remask.models.families.family import Family, Slot
from remask.models.families.fast_dllm_v2 import FAST_DLLM_V2
from remask.models.families.gidd import GIDD
from remask.models.families.llada import LLADA
from remask.models.families.sdar import SDAR

__all__ = ["DREAM", "FAMILIES", "FAST_DLLM_V2", "GIDD", "LLADA", "SDAR", "Family", "Slot", "family_of"]

FAMILIES: tuple[Family, ...] = (LLADA, DREAM, GIDD, SDAR, FAST_DLLM_V2)


def family_of(raw: Mapping[str, Any]) -> Family:
    """The family of a `config.json`, told by its `model_type` or, where it has none, by its `architectures`.

    Raises:
        UnknownNameError: no family claims the name.
        CheckpointError: the configuration has neither key, or one that is not of the expected type.
    """
    model_type = raw.get("model_type")
    if isinstance(model_type, str):
        # Case is not compared: re-saved checkpoints of one family write it either way.
        types = {name.casefold(): family for family in FAMILIES for name in family.model_types}
        if model_type.casefold() in types:
            return types[model_type.casefold()]
        raise UnknownNameError("model_type", model_type, [name for family in FAMILIES for name in family.model_types])
    architectures = raw.get("architectures")
    if model_type is None and isinstance(architectures, list) and architectures:
        classes = {name: family for family in FAMILIES for name in family.architectures}
        for name in architectures:
            if name in classes:
                return classes[name]
        raise UnknownNameError("architecture", ", ".join(map(str, architectures)), classes)
    raise CheckpointError(
        f"config.json has 'model_type' {model_type!r} and 'architectures' {architectures!r}: they do not tell the "
        f"model's family. Supported model types: {', '.join(name for f in FAMILIES for name in f.model_types)}."
    )
