"""Names for policies, and the parser of `bicache+block-dual` with its JSON settings."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from remask.core.depth import DepthLookup
from remask.core.kinds import ModelKind
from remask.errors import ConfigError, UnknownNameError
from remask.policies.base import CachePolicy
from remask.policies.bicache import BiCache
from remask.policies.block import BlockDual, BlockPrefix, UniformCache
from remask.policies.dense import Dense
from remask.policies.dkv import DkvDecode, DkvGreedy, DkvPd, DkvPrefill
from remask.policies.dllm import DllmCache
from remask.policies.elastic import ElasticCache
from remask.policies.exact import Exact
from remask.policies.reuse import Reuse

DepthTable = Callable[[], DepthLookup]
"""Gives the model's depth table, profiling the model first where there is none."""


@dataclass(frozen=True, slots=True)
class _Entry:
    """How one name is built, and its settings as users and as the policy's fields name them.

    `around` policies may stand before another one; alone they wrap `none`.
    """

    make: Callable[..., CachePolicy]
    settings: Mapping[str, str]
    around: bool = False


def _entry(make: Callable[..., CachePolicy], *settings: str, around: bool = False, **renamed: str) -> _Entry:
    return _Entry(make, {name: name for name in settings} | renamed, around)


_POLICIES = {
    "none": _entry(Dense),
    "reuse": _entry(Reuse),
    "bicache": _entry(BiCache, "depth", "refresh_interval", boundary="boundary_state", around=True),
    "block-prefix": _entry(BlockPrefix),
    "block-dual": _entry(BlockDual, "fill_pass"),
    "dkv-decode": _entry(DkvDecode, "refresh_interval", "shift"),
    "dkv-prefill": _entry(DkvPrefill),
    "dkv-pd": _entry(DkvPd, "refresh_interval", "shift"),
    "dllm-cache": _entry(
        DllmCache, "prompt_interval", "response_interval", "ratio", "select", cfg_interval="guidance_interval"
    ),
    "dkv-greedy": _entry(DkvGreedy, "refresh_interval", "window"),
    "elastic-cache": _entry(ElasticCache, "window", "threshold"),
    "uniform-cache": _entry(UniformCache, "refresh_next"),
    "exact": _entry(Exact, "prefill_chunk"),
}


def policy_names() -> tuple[str, ...]:
    """Names that a spec may join by `+`, outermost first."""
    return tuple(_POLICIES)


def names_for(kind: ModelKind) -> tuple[str, ...]:
    """Names of the policies that are defined on models of this kind."""
    return tuple(name for name in _POLICIES if kind in parse(name, None, lambda: DepthLookup({})).traits.kinds)


def parse(spec: str, settings: Mapping[str, Any] | None, table: DepthTable) -> CachePolicy:
    """The policy that `spec` names (outermost first, joined by `+`), with `settings` applied.

    A setting goes to the outermost policy of the spec that takes it; as `NAME.setting` to the policy of that name.
    `table` is called only where a depth table is
    needed. Raises `UnknownNameError` for names and settings that do not exist, `ConfigError` for values out of range
    and for compositions that cannot be.
    """
    names = spec.split("+")
    for name in names:
        if name not in _POLICIES:
            raise UnknownNameError("cache policy", name, _POLICIES)
    for name in names[:-1]:
        if not _POLICIES[name].around:
            around = ", ".join(name for name, entry in _POLICIES.items() if entry.around)
            raise ConfigError(f"{spec!r}: {name!r} cannot stand before another policy; only {around} can")
    if "reuse" in names and "bicache" in names:
        raise ConfigError(f"{spec!r}: bicache and reuse would both own the shared prefix; choose one of them")
    rest = _addressed(names, settings or {})
    taken = [
        {key: rest.pop(f"{name}.{key}") for key in _POLICIES[name].settings if f"{name}.{key}" in rest}
        for name in names
    ]
    for key in rest:
        allowed = [key for name in names for key in _POLICIES[name].settings]
        if not allowed:
            raise ConfigError(f"cache policy {spec!r} takes no settings, got {key!r}")
        raise UnknownNameError(f"setting of cache policy {spec!r}", str(key), allowed)
    policy: CachePolicy | None = None
    for name, own in zip(reversed(names), reversed(taken), strict=True):
        entry = _POLICIES[name]
        fields = {entry.settings[key]: value for key, value in own.items()}
        if entry.around:
            fields["inner"] = policy or Dense()
        if "depth" in entry.settings and fields.get("depth", "table") == "table":
            fields["depth"] = table()
        policy = entry.make(**fields)
    assert policy is not None
    return policy


def _addressed(names: Sequence[str], settings: Mapping[str, Any]) -> dict[Any, Any]:
    """`settings` with keys `NAME.setting` wherever a policy takes them."""
    found: dict[Any, Any] = {}
    for key, value in settings.items():
        owner = next((name for name in names if key in _POLICIES[name].settings), None)
        full = key if owner is None else f"{owner}.{key}"
        if full in found:
            raise ConfigError(f"{full!r} and {full.split('.')[1]!r} are the same setting here; give one of them")
        found[full] = value
    return found


def settings_of(policy: CachePolicy) -> dict[str, Any]:
    """The settings of a policy that `parse` made, as `cache_config` names them; a depth table is "table".

    A setting of the inner policy that the outer one takes too is given as `NAME.setting`.
    """
    entry = _POLICIES.get(_name_of(policy))
    if entry is None:
        return {}
    own = {name: getattr(policy, field) for name, field in entry.settings.items()}
    if isinstance(own.get("depth"), DepthLookup):
        own["depth"] = "table"
    if not isinstance(policy, BiCache):
        return own
    name, inner = _name_of(policy.inner), settings_of(policy.inner)
    return own | {f"{name}.{key}" if key in own else key: value for key, value in inner.items()}


def _name_of(policy: CachePolicy) -> str:
    """The name that makes such a policy; empty for somebody else's."""
    return next((name for name, entry in _POLICIES.items() if entry.make is type(policy)), "")
