"""Names of cache policies, and the parser of specs such as `bicache+block-dual` with their JSON settings."""

import dataclasses
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from remask.checks import KINDS, ModelKind
from remask.checks.fields import declared, paths
from remask.checks.plugins import Plugin, Registry, module_in
from remask.checks.values import shown
from remask.errors import ConfigError, RemaskError, UnknownNameError
from remask.policies.base import CachePolicy, Traits
from remask.policies.bicache import BiCache, DepthLookup, Earned
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.dense import Dense, Reuse
from remask.policies.dkv import DkvDecode, DkvGreedy, DkvPd, DkvPrefill
from remask.policies.dllm import DllmCache
from remask.policies.exact import Exact
from remask.policies.uniform_cache import UniformCache
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms

GROUP = "remask.policies"
"""The entry-point group by which other packages add policies. Each entry point names a policy class."""

Depths = Callable[[], DepthLookup | Earned]
"""Returns the depth of a policy that is given none: the model's table, or what audits earn."""

_TABLE, _EARNED = "table", "earned"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_EXPECTED = "a frozen dataclass derived from remask.policies.base.CachePolicy whose fields all have defaults"


@dataclass(frozen=True, slots=True)
class PolicyType:
    """A policy class, and what specs may say about it. All of it follows from the class."""

    make: type[CachePolicy]
    # Names in `cache_config`, and the fields that they set. A field's name is its setting's name, unless the field has
    # `metadata={"setting": NAME}`. A field with `metadata={"unset": VALUE}` is not shown where it has that value.
    settings: Mapping[str, str]
    # The field of type `CachePolicy`, where there is one. The policy may stand before another one then.
    inner: str | None
    # Fields whose type includes `DepthLookup`. Where no setting gives one, it is the depth of the model.
    tables: frozenset[str]
    earns: frozenset[str]  # those of them whose type includes `Earned`
    kinds: tuple[ModelKind, ...]  # kinds of models that the policy with its default settings is defined for
    plugin: Plugin | None = None  # who provides the class; None: remask itself

    @classmethod
    def of(cls, make: object, plugin: Plugin | None = None) -> "PolicyType":
        """Raises `TypeError`, whose text says what was found, where `make` is no policy class."""
        if not isinstance(make, type) or not issubclass(make, CachePolicy):
            kind = (
                f"the class {make.__name__}" if isinstance(make, type) else f"an object of type {type(make).__name__}"
            )
            raise TypeError(f"it provides {kind}")
        if inspect.isabstract(make):
            raise TypeError(f"{make.__name__} does not define {', '.join(sorted(make.__abstractmethods__))}")
        if not dataclasses.is_dataclass(make):
            raise TypeError(f"{make.__name__} is not a dataclass")
        if not make.__dataclass_params__.frozen:
            raise TypeError(f"{make.__name__} is a dataclass that is not frozen")
        fields = [item for item in dataclasses.fields(make) if item.init]
        for item in fields:
            if item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
                raise TypeError(f"field {item.name!r} of {make.__name__} has no default")
        types = _field_types(make)
        tables = frozenset(item.name for item in fields if DepthLookup in types[item.name])
        earns = frozenset(name for name in tables if Earned in types[name])
        inner = [item.name for item in fields if CachePolicy in types[item.name]]
        if len(inner) > 1:
            raise TypeError(f"{make.__name__} has several fields of type CachePolicy ({', '.join(inner)})")
        settings = [(_setting(item), item.name) for item in fields if item.name not in inner]
        names = [name for name, _ in settings]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise TypeError(f"two fields of {make.__name__} are the setting {twice!r}")
        kinds = _default_kinds(make, tables)
        return cls(make, dict(settings), next(iter(inner), None), tables, earns, kinds, plugin)

    @property
    def owns_prefix(self) -> bool:
        """Whether the class says itself how much of a shared prefix is read from the store."""
        return self.make.boundary is not CachePolicy.boundary

    def build(self, settings: Mapping[str, Any], inner: CachePolicy | None, depths: Depths) -> CachePolicy:
        """The policy with these settings, around `inner` where one is given. Raises `ConfigError`."""
        fields = {self.settings[name]: value for name, value in settings.items()}
        if self.inner is not None and inner is not None:
            fields[self.inner] = inner
        for name in self.tables:
            if name not in fields or fields[name] in (_TABLE, _EARNED):
                fields[name] = _depth(depths(), fields.get(name), name in self.earns)
        if self.plugin is None:
            return self.make(**fields)
        try:
            return self.make(**fields)
        except RemaskError:
            raise
        except Exception as error:  # whatever another package's class raises on values that do not suit it
            described = f"the settings {shown(dict(settings))}" if settings else "its default settings"
            raise ConfigError(f"{self.plugin} refuses {described}: {type(error).__name__}: {error}") from error


def _depth(usual: DepthLookup | Earned, setting: object, earns: bool) -> DepthLookup | Earned:
    """The depth that "table" or "earned" ask for, or nothing; without `earns` it is a table. Raises `ConfigError`."""
    table = usual.start if isinstance(usual, Earned) else usual
    if setting == _EARNED and earns:
        return usual if isinstance(usual, Earned) else Earned(table)
    if setting is None and earns:
        return usual
    if table is None:
        raise ConfigError(
            "depth='table': there is no depth table of this model; give a number of layers or 'earned', or measure a "
            "table with `remask profile` and name it as depth_table (--depth-table)"
        )
    return table


def _setting(item: "dataclasses.Field[Any]") -> str:
    return str(item.metadata.get("setting", item.name))


def _field_types(make: type[CachePolicy]) -> dict[str, tuple[object, ...]]:
    """The members of each field's type, of a union more than one."""
    try:
        hints = get_type_hints(make)
    except Exception as error:  # an annotation may be any expression
        raise TypeError(
            f"the types of {make.__name__}'s fields cannot be read ({type(error).__name__}: {error})"
        ) from error
    return {name: get_args(hint) or (hint,) for name, hint in hints.items()}


def _default_kinds(make: type[CachePolicy], tables: frozenset[str]) -> tuple[ModelKind, ...]:
    try:
        traits: object = make(**dict.fromkeys(tables, DepthLookup({}))).traits
    except Exception as error:  # of a constructor or a property that are not remask's
        raise TypeError(f"{make.__name__}() and its traits raised {type(error).__name__}: {error}") from error
    if not isinstance(traits, Traits):
        raise TypeError(f"the traits of {make.__name__} are an object of type {type(traits).__name__}, not Traits")
    unknown = [kind for kind in traits.kinds if kind not in KINDS]
    if unknown or not traits.kinds:
        allowed = ", ".join(KINDS)
        raise TypeError(f"the kinds of {make.__name__}'s traits are {traits.kinds!r}, not some of {allowed}")
    return traits.kinds


def _checked(plugin: Plugin, value: object) -> PolicyType:
    name = plugin.entry.name
    if not _NAME.fullmatch(name):
        raise plugin.error(f"its name is {name!r}", "letters, digits, '-', '_' and '.'")
    try:
        return PolicyType.of(value, plugin)
    except TypeError as error:
        raise plugin.error(str(error), _EXPECTED) from error


POLICIES: Registry[PolicyType] = Registry(
    "cache policy",
    GROUP,
    {
        name: PolicyType.of(make)
        for name, make in {
            "none": Dense,
            "reuse": Reuse,
            "bicache": BiCache,
            "block-prefix": BlockPrefix,
            "block-dual": BlockDual,
            "dkv-decode": DkvDecode,
            "dkv-prefill": DkvPrefill,
            "dkv-pd": DkvPd,
            "dllm-cache": DllmCache,
            "dkv-greedy": DkvGreedy,
            "uniform-cache": UniformCache,
            "exact": Exact,
        }.items()
    },
    _checked,
)


def policy_names() -> tuple[str, ...]:
    """Names that a spec may join by `+`: remask's own, then those of other packages, none of which is imported."""
    return POLICIES.names()


def names_for(kind: ModelKind) -> tuple[str, ...]:
    """Names of the policies for models of this kind, whose packages are imported; what cannot be used is left out."""
    return tuple(name for name, policy in POLICIES.usable().items() if kind in policy.kinds)


def parse(spec: str | CachePolicy, settings: Mapping[str, Any] | None, depths: Depths) -> CachePolicy:
    """The policy that `spec` names (outermost first, joined by `+`), with `settings` applied.

    A setting goes to the outermost policy of the spec that takes it; as `NAME.setting` to the policy of that name. A
    policy object is returned as it is. `depths` is called only where a policy reads a prefix to a depth that no setting
    gives as a number.

    Raises `UnknownNameError` for a name or a setting that does not exist, `PluginError` where another package provides
    the name, and provides it wrongly or not alone, and `ConfigError` where a value is out of range, a composition
    cannot be, or settings come with a policy object.
    """
    if not isinstance(spec, str):
        return _as_given(spec, settings)
    names = spec.split("+")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:  # refused before depths are looked for
        raise ConfigError(f"{spec!r} stacks {twice!r} on itself; name {twice} once")
    types = [POLICIES.get(name) for name in names]
    for name, policy_type in zip(names[:-1], types[:-1], strict=True):
        if policy_type.inner is None:
            around = ", ".join(name for name, policy_type in POLICIES.usable().items() if policy_type.inner is not None)
            raise ConfigError(f"{spec!r}: {name!r} cannot wrap another policy; only {around} can")
    owners = sorted({name for name, policy_type in zip(names, types, strict=True) if policy_type.owns_prefix})
    if len(owners) > 1:
        raise ConfigError(f"{spec!r}: {' and '.join(owners)} would both own the shared prefix; choose one of them")
    rest = _addressed(names, types, settings or {})
    policy: CachePolicy | None = None
    shares = [
        {key: rest.pop(f"{name}.{key}") for key in policy_type.settings if f"{name}.{key}" in rest}
        for name, policy_type in zip(names, types, strict=True)
    ]
    for key in rest:
        request_fields = {path.rpartition(".")[2] for path in paths(SamplingParams)} | declared(SamplingParams).keys()
        if key in request_fields or key in declared(Terms):
            raise ConfigError(f"{key} is no setting of cache policy {spec!r}: it belongs into the request itself")
        allowed = [key for policy_type in types for key in policy_type.settings]
        if not allowed:
            raise ConfigError(f"cache policy {spec!r} takes no settings, got {key!r}")
        raise UnknownNameError(f"setting of cache policy {spec!r}", str(key), allowed)
    for policy_type, share in zip(reversed(types), reversed(shares), strict=True):
        policy = policy_type.build(share, policy, depths)
    assert policy is not None
    return policy


def _as_given(policy: object, settings: Mapping[str, Any] | None) -> CachePolicy:
    if isinstance(policy, CachePolicy):
        if settings:
            raise ConfigError(
                f"cache_config={shown(dict(settings))} is for a policy that is named; give an object of type "
                f"{type(policy).__name__} its settings when it is made, and leave cache_config out"
            )
        return policy
    if isinstance(policy, type) and issubclass(policy, CachePolicy):
        raise ConfigError(f"cache is the class {policy.__name__}; give an object of it: {policy.__name__}()")
    raise ConfigError(
        "cache must be the name of a policy or a CachePolicy object, "
        f"got {shown(policy)} of type {type(policy).__name__}"
    )


def _addressed(names: Sequence[str], types: Sequence[PolicyType], settings: Mapping[str, Any]) -> dict[Any, Any]:
    """`settings` with keys `NAME.setting` wherever a policy takes them."""
    full_names: dict[Any, Any] = {}
    for key, value in settings.items():
        owner = next((name for name, policy in zip(names, types, strict=True) if key in policy.settings), None)
        full = key if owner is None else f"{owner}.{key}"
        if full in full_names:
            raise ConfigError(f"{full!r} and {full.split('.')[1]!r} are the same setting here; give one of them")
        full_names[full] = value
    return full_names


def check_setting(name: str) -> None:
    """Raise `ConfigError` where a field of a request, which is not known, is a setting of one of remask's policies."""
    owners = [owner for owner, policy in POLICIES.built_in.items() if name in policy.settings]
    if owners:
        raise ConfigError(f"{name} is a setting of the cache policy {owners[0]!r}: it belongs into 'cache_config'")


def settings_of(policy: CachePolicy) -> dict[str, Any]:
    """The settings of a policy, as `cache_config` names them; a depth table is "table".

    A setting of the inner policy that the outer one takes too is given as `NAME.setting`. A value that JSON cannot
    hold is given as text. A policy that is no dataclass has no settings.
    """
    settings, inner = _own_settings(policy)
    if inner is None:
        return settings
    name = _own_name(inner)
    return settings | {f"{name}.{key}" if key in settings else key: value for key, value in settings_of(inner).items()}


def name_of(policy: CachePolicy) -> str:
    """The spec that names a policy, without settings; where no name does, its attribute `name`, or its class."""
    _, inner = _own_settings(policy)
    name = _own_name(policy)
    return name if inner is None or isinstance(inner, Dense) else f"{name}+{name_of(inner)}"


def _own_settings(policy: CachePolicy) -> tuple[dict[str, Any], CachePolicy | None]:
    settings: dict[str, Any] = {}
    inner = None
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ()
    for item in fields:
        value = getattr(policy, item.name)
        if isinstance(value, CachePolicy):
            inner = value
        elif item.init and not ("unset" in item.metadata and value == item.metadata["unset"]):
            settings[_setting(item)] = _shown(value)
    return settings, inner


def _shown(value: object) -> object:
    if isinstance(value, DepthLookup | Earned):
        return _TABLE if isinstance(value, DepthLookup) else _EARNED
    return value if value is None or isinstance(value, str | int | float | list | tuple | dict) else repr(value)


def _own_name(policy: CachePolicy) -> str:
    for name, policy_type in (*POLICIES.built_in.items(), *POLICIES.imported().items()):
        if policy_type.make is type(policy):
            return name
    attribute = getattr(policy, "name", None)
    return attribute if isinstance(attribute, str) and attribute else type(policy).__name__


def file_and_class(spec: str) -> tuple[str, str] | None:
    """The file and the class that a spec `FILE.py:CLASS` names; None of any other."""
    path, colon, name = spec.rpartition(":")
    return (path, name) if colon and path.endswith(".py") and name.isidentifier() else None


def from_file(
    cache: str | CachePolicy, settings: Mapping[str, Any] | None, option: str = "cache"
) -> tuple[str | CachePolicy, dict[str, Any]]:
    """A policy object, with its settings and with none beside it, where `cache` names a file, which is run.

    Anything else is returned as it is. `option` is the setting's name in errors. Raises `ConfigError` where the file
    cannot be run, holds no such class, or the class is no policy or does not take the settings.
    """
    place = file_and_class(cache) if isinstance(cache, str) else None
    if place is None:
        return cache, dict(settings or {})
    path, name = place
    value = vars(module_in(path, option)).get(name)
    if value is None:
        raise ConfigError(f"{option}: {path} has no class {name!r}")
    try:
        policy = PolicyType.of(value)
    except TypeError as error:
        raise ConfigError(
            f"{option}: {name} of {path} is not a cache policy: {error}; expected a frozen dataclass derived from "
            "remask.policies.CachePolicy whose fields all have defaults (docs/extending.md)"
        ) from error
    for key in settings or {}:
        if key not in policy.settings:
            raise UnknownNameError(f"setting of cache policy {name!r}", key, policy.settings)
    try:
        return policy.build(settings or {}, None, lambda: _no_table(option)), {}
    except RemaskError:
        raise
    except Exception as error:  # of a constructor that is anybody's
        raise ConfigError(f"{option}: {name} of {path} cannot be made: {type(error).__name__}: {error}") from error


def _no_table(option: str) -> DepthLookup:
    raise ConfigError(
        f"{option}: a policy of a file gets no depth table, as there is none before the model is loaded; give its "
        "depths among its settings, or make the policy a package (docs/extending.md)"
    )
