"""Names for policies, and the parser of `bicache+block-dual` with its JSON settings."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from remask.core.depth import DepthLookup
from remask.errors import ConfigError, UnknownNameError
from remask.policies.base import CachePolicy
from remask.policies.bicache import BOUNDARIES, BiCache
from remask.policies.block import FILL_PASSES, BlockDual, BlockPrefix
from remask.policies.dense import Dense
from remask.policies.dkv import SHIFTS, DkvDecode, DkvGreedy, DkvPd, DkvPrefill
from remask.policies.dllm import SELECTS, DllmCache
from remask.policies.reuse import Reuse

DepthTable = Callable[[], DepthLookup]
"""Gives the model's depth table, profiling the model first where there is none."""


def _bicache(inner: CachePolicy, settings: dict[str, Any], table: DepthTable) -> CachePolicy:
    depth = settings.get("depth", "table")
    if depth != "table" and (isinstance(depth, bool) or not isinstance(depth, int) or depth < 0):
        raise ConfigError(f"depth must be a number of layers >= 0 or 'table', got {depth!r}")
    return BiCache(
        inner=inner,
        depth=table() if depth == "table" else depth,
        refresh_interval=_interval(settings, "refresh_interval", default=16),
        boundary_state=_one_of(settings, "boundary", BOUNDARIES) or "stored",
    )


def _block_dual(_inner: CachePolicy, settings: dict[str, Any], _table: DepthTable) -> CachePolicy:
    return BlockDual(fill_pass=_one_of(settings, "fill_pass", FILL_PASSES) or "transfer")


def _dkv_decode(_inner: CachePolicy, settings: dict[str, Any], _table: DepthTable) -> CachePolicy:
    return DkvDecode(_interval(settings, "refresh_interval", default=8), _shift(settings))


def _dkv_pd(_inner: CachePolicy, settings: dict[str, Any], _table: DepthTable) -> CachePolicy:
    return DkvPd(_interval(settings, "refresh_interval", default=8), _shift(settings))


def _dkv_greedy(_inner: CachePolicy, settings: dict[str, Any], _table: DepthTable) -> CachePolicy:
    window = settings.get("window", 4)
    if isinstance(window, bool) or not isinstance(window, int) or window < 0:
        raise ConfigError(f"window must be a whole number >= 0, got {window!r}")
    return DkvGreedy(_interval(settings, "refresh_interval", default=8), window)


def _dllm_cache(_inner: CachePolicy, settings: dict[str, Any], _table: DepthTable) -> CachePolicy:
    ratio = settings.get("ratio", 0.25)
    if isinstance(ratio, bool) or not isinstance(ratio, int | float) or not 0 <= ratio <= 1:
        raise ConfigError(f"ratio must be a number from 0 to 1, got {ratio!r}")
    return DllmCache(
        prompt_interval=_positive(settings, "prompt_interval", default=100),
        response_interval=_positive(settings, "response_interval", default=8),
        ratio=float(ratio),
        guidance_interval=_positive(settings, "cfg_interval", default=1),
        select=_one_of(settings, "select", SELECTS) or "value",
    )


@dataclass(frozen=True, slots=True)
class _Entry:
    """How one name is built. `around` policies may stand before another one; alone they wrap `none`."""

    settings: tuple[str, ...]
    build: Callable[[CachePolicy, dict[str, Any], DepthTable], CachePolicy]
    around: bool = False


_POLICIES = {
    "none": _Entry((), lambda _inner, _settings, _table: Dense()),
    "reuse": _Entry((), lambda _inner, _settings, _table: Reuse()),
    "bicache": _Entry(("depth", "refresh_interval", "boundary"), _bicache, around=True),
    "block-prefix": _Entry((), lambda _inner, _settings, _table: BlockPrefix()),
    "block-dual": _Entry(("fill_pass",), _block_dual),
    "dkv-decode": _Entry(("refresh_interval", "shift"), _dkv_decode),
    "dkv-prefill": _Entry((), lambda _inner, _settings, _table: DkvPrefill()),
    "dkv-pd": _Entry(("refresh_interval", "shift"), _dkv_pd),
    "dllm-cache": _Entry(("prompt_interval", "response_interval", "ratio", "cfg_interval", "select"), _dllm_cache),
    "dkv-greedy": _Entry(("refresh_interval", "window"), _dkv_greedy),
}


def policy_names() -> tuple[str, ...]:
    """Names that a spec may join by `+`, outermost first."""
    return tuple(_POLICIES)


def parse(spec: str, settings: Mapping[str, Any] | None, table: DepthTable) -> CachePolicy:
    """The policy that `spec` names (outermost first, joined by `+`), with `settings` applied.

    A setting goes to the outermost policy of the spec that takes it. `table` is called only where a depth table is
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
    rest = dict(settings or {})
    taken = [{key: rest.pop(key) for key in _POLICIES[name].settings if key in rest} for name in names]
    for key in rest:
        allowed = [key for name in names for key in _POLICIES[name].settings]
        if not allowed:
            raise ConfigError(f"cache policy {spec!r} takes no settings, got {key!r}")
        raise UnknownNameError(f"setting of cache policy {spec!r}", str(key), allowed)
    policy: CachePolicy = Dense()
    for name, own in zip(reversed(names), reversed(taken), strict=True):
        policy = _POLICIES[name].build(policy, own, table)
    return policy


def _interval(settings: dict[str, Any], name: str, default: int) -> int | None:
    value = settings.get(name, default)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, or null for step 0 only, got {value!r}")
    return int(value)


def _positive(settings: dict[str, Any], name: str, default: int) -> int:
    value = settings.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} must be a whole number >= 1, got {value!r}")
    return int(value)


def _one_of(settings: dict[str, Any], name: str, allowed: tuple[str, ...]) -> Any:
    value = settings.get(name)
    if value is not None and value not in allowed:
        raise UnknownNameError(name, str(value), allowed)
    return value


def _shift(settings: dict[str, Any]) -> Any:
    if settings.get("shift") == "right":
        raise ConfigError(
            "shift='right' asks for logits of rows that were left out, so the authors' code yields NaN; use 'un' or "
            "'un_right'"
        )
    return _one_of(settings, "shift", SHIFTS)
