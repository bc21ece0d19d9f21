"""Named shapes for `--load-format dummy`: those of published models, and small ones for benchmarks and tests.

Each family brings its own. See `Family.presets`.
"""

from collections.abc import Mapping
from types import MappingProxyType

from remask.errors import PluginError, UnknownNameError
from remask.families import FAMILIES, REGISTRY
from remask.model.config import ModelConfig

PRESETS: Mapping[str, ModelConfig] = MappingProxyType(
    {name: config for family in FAMILIES for name, config in family.presets.items()}
)
"""The shapes of remask's own families."""


def presets() -> dict[str, ModelConfig]:
    """Every shape by name, those of other packages' families included. Imports these packages.

    Raises:
        PluginError: two packages provide one name.
    """
    owners: dict[str, str] = {}
    found: dict[str, ModelConfig] = {}
    for family in REGISTRY.usable().values():
        for name, config in family.presets.items():
            if name in found:
                sources = " and by ".join(REGISTRY.source(owner) for owner in (owners[name], family.name))
                raise PluginError(
                    f"preset {name!r} is provided by {sources}; rename it in one of them, or uninstall one"
                )
            owners[name], found[name] = family.name, config
    return found


def preset(name: str) -> ModelConfig:
    """The shape called `name`.

    Raises:
        UnknownNameError: there is no preset of that name.
        PluginError: two packages provide one name.
    """
    if name in PRESETS:
        return PRESETS[name]
    every = presets()
    if name not in every:
        raise UnknownNameError("preset", name, every)
    return every[name]
