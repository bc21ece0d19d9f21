"""Checks of families from other packages, when they are loaded and when they read a configuration."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from remask.checks.plugins import Plugin
from remask.errors import CheckpointError, RemaskError
from remask.families.family import Factors, Family, TensorNames
from remask.model.config import ModelConfig

T = TypeVar("T")

_EXPECTED = "an object of type remask.families.family.Family"


def validate_family(plugin: Plugin, value: object, built_in: Sequence[Family]) -> Family:
    """The family `value` of `plugin`, with its functions wrapped: all of their errors become `CheckpointError`.

    Raises `PluginError` if `value` is not a family, a field is not as `Family` documents, or it claims a model type,
    architecture or preset of the `built_in` families.
    """
    if not isinstance(value, Family):
        kind = f"the class {value.__name__}" if isinstance(value, type) else f"an object of type {type(value).__name__}"
        raise plugin.error(f"it provides {kind}", _EXPECTED)
    fault = next(_faults(plugin, value, built_in), None)
    if fault is not None:
        raise plugin.error(*fault)
    return replace(
        value,
        config=_guard(plugin, value.config, ModelConfig, lambda config: _config_faults(config, value)),
        factors=_guard(plugin, value.factors, Factors, lambda _: iter(())),
    )


def _faults(plugin: Plugin, family: Family, built_in: Sequence[Family]) -> Iterator[tuple[str, str]]:
    """For every field that is not as documented: what it is, and what is expected."""
    if family.name != plugin.entry.name:
        yield f"its name is {family.name!r}", f"the entry point's name, {plugin.entry.name!r}"
    if not isinstance(family.names, TensorNames):
        yield f"its 'names' is an object of type {type(family.names).__name__}", "a TensorNames"
    for field in ("config", "factors"):
        if not callable(getattr(family, field)):
            yield f"its {field!r} is an object of type {type(getattr(family, field)).__name__}", "a function"
    for field in ("model_types", "architectures"):
        claims: object = getattr(family, field)
        if not isinstance(claims, tuple) or not all(isinstance(name, str) and name for name in claims):
            yield f"its {field!r} is {claims!r}", "a tuple of texts"
            return
        for other in built_in:
            common = {name.casefold() for name in getattr(other, field)} & {name.casefold() for name in claims}
            if common:
                yield (
                    f"its {field!r} claims {', '.join(sorted(common))}, which remask's family {other.name!r} has",
                    "values that no other family claims",
                )
    if not family.model_types and not family.architectures:
        yield "it claims no model", "a value in 'model_types' or 'architectures'"
    shapes: object = family.presets
    if not isinstance(shapes, Mapping) or not all(isinstance(shape, ModelConfig) for shape in shapes.values()):
        yield f"its 'presets' is {shapes!r}", "a mapping of names to ModelConfig"
        return
    for name, shape in shapes.items():
        if any(name in other.presets for other in built_in):
            yield f"its preset {name!r} has the name of one of remask's", "a name of its own"
        for fault in _config_faults(shape, family):
            yield f"its preset {name!r} is wrong: {fault}", "a ModelConfig that fits the family"


def _config_faults(config: ModelConfig, family: Family) -> Iterator[str]:
    """The values of a configuration that do not fit its family, in words."""
    names = family.names
    if config.family != family.name:
        yield f"'family' is {config.family!r}, and the family's name is {family.name!r}"
    if config.kind == "uniform" and config.noise is None:
        yield "'kind' is 'uniform', and 'noise' is None"
    is_needed: dict[str, bool] = {
        **dict.fromkeys(("q", "k", "v"), names.qkv is None),
        "up": names.gate_up is None,
        "gate": config.gated and names.gate_up is None,
        "q_norm": config.qk_norm is not None,
        "k_norm": config.qk_norm is not None,
        "embed_norm": config.embed_norm,
        "head_dense": config.head_dense,
        "head_norm": config.head_dense,
        "sink_k": config.sink == "learned",
        "sink_v": config.sink == "learned",
        "mixture": config.mixture is not None,
        "attn_post": config.post_norms,
        "ffn_post": config.post_norms,
        "scales": config.layer_scales,
        "signal": config.self_conditioning,
    }
    for field, needed in is_needed.items():
        if needed and getattr(names, field) is None:
            yield f"it has the tensor {field!r}, which the family's 'names' leaves out"
    if not config.gated and (names.gate or names.gate_up) is not None:
        yield f"'mlp' is {config.mlp!r}, which has no gate, and the family's 'names' has one"


def _guard(
    plugin: Plugin, function: Callable[[Mapping[str, Any]], T], expected: type[T], faults: Callable[[T], Iterator[str]]
) -> Callable[[Mapping[str, Any]], T]:
    """`function` wrapped: its errors and wrong results become `CheckpointError`s that name the package."""

    def guarded_function(raw: Mapping[str, Any]) -> T:
        try:
            result: object = function(raw)
        except RemaskError:
            raise
        except Exception as error:  # another package's code may raise anything
            raise CheckpointError(f"{plugin} raised {type(error).__name__} on config.json: {error}") from error
        if not isinstance(result, expected):
            raise CheckpointError(
                f"{plugin} made an object of type {type(result).__name__} of config.json; expected {expected.__name__}"
            )
        for fault in faults(result):
            raise CheckpointError(f"{plugin} made a configuration that the transformer cannot execute: {fault}")
        return result

    return guarded_function
