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
"""Returns the default depth of a policy: the model's table, or what audits earn."""

_TABLE, _EARNED = "table", "earned"
_NAME = re.compile(r"[A-Za-z0-9][\w.-]*")
_EXPECTED = "a frozen dataclass derived from remask.policies.base.CachePolicy whose fields all have defaults"


@dataclass(frozen=True, slots=True)
class PolicyType:
    """A policy class and what follows from it for specs."""

    make: type[CachePolicy]
    # Names in `cache_config`, and the fields that they set. A field's name is its setting's name, unless the field has
    # `metadata={"setting": NAME}`. A field with `metadata={"unset": VALUE}` is not shown if it has that value.
    settings: Mapping[str, str]
    # The field of type `CachePolicy`; None without one. Only a policy with such a field may wrap another one.
    inner: str | None
    # Fields whose type includes `DepthLookup`. By default they get the depth of the model.
    tables: frozenset[str]
    earns: frozenset[str]  # fields among these whose type includes `Earned`
    kinds: tuple[ModelKind, ...]  # kinds of models that the policy with its default settings is defined for
    plugin: Plugin | None = None  # the entry point of the class; None: it is remask's own

    @classmethod
    def of(cls, make: object, plugin: Plugin | None = None) -> "PolicyType":
        """Inspect the class `make`. Raises `TypeError`, whose text says what is wrong, if it is no policy class."""
        policy_class, fields = _checked_class(make)
        types = _field_types(policy_class)
        tables = frozenset(field.name for field in fields if DepthLookup in types[field.name])
        earns = frozenset(name for name in tables if Earned in types[name])
        inner = [field.name for field in fields if CachePolicy in types[field.name]]
        if len(inner) > 1:
            raise TypeError(f"{policy_class.__name__} has several fields of type CachePolicy ({', '.join(inner)})")
        settings = [(_setting(field), field.name) for field in fields if field.name not in inner]
        names = [name for name, _ in settings]
        duplicate = next((name for name in names if names.count(name) > 1), None)
        if duplicate is not None:
            raise TypeError(f"two fields of {policy_class.__name__} are the setting {duplicate!r}")
        kinds = _default_kinds(policy_class, tables)
        return cls(policy_class, dict(settings), next(iter(inner), None), tables, earns, kinds=kinds, plugin=plugin)

    @property
    def owns_prefix(self) -> bool:
        """Whether the class says itself how much of a shared prefix is read from the store."""
        return self.make.boundary is not CachePolicy.boundary

    def build(self, settings: Mapping[str, Any], inner: CachePolicy | None, depths: Depths) -> CachePolicy:
        """Build the policy with these settings, around `inner` if there is one. Raises `ConfigError`."""
        fields = {self.settings[name]: value for name, value in settings.items()}
        if self.inner is not None and inner is not None:
            fields[self.inner] = inner
        for name in self.tables:
            if name not in fields or fields[name] in (_TABLE, _EARNED):
                fields[name] = _depth(depths(), fields.get(name), earns=name in self.earns)
        if self.plugin is None:
            return self.make(**fields)
        try:
            return self.make(**fields)
        except RemaskError:
            raise
        except Exception as error:  # another package's class may raise anything on bad values
            described = f"the settings {shown(dict(settings))}" if settings else "its default settings"
            raise ConfigError(f"{self.plugin} refuses {described}: {type(error).__name__}: {error}") from error


def _checked_class(make: object) -> tuple[type[CachePolicy], "list[dataclasses.Field[Any]]"]:
    """Return `make` and its fields that the constructor takes. Raises `TypeError` if it is not a usable class.

    It must be a concrete subclass of `CachePolicy`, and a frozen dataclass whose fields have defaults.
    """
    if not isinstance(make, type) or not issubclass(make, CachePolicy):
        name = make.__name__ if isinstance(make, type) else type(make).__name__
        raise TypeError(f"it provides {'the class' if isinstance(make, type) else 'an object of type'} {name}")
    if inspect.isabstract(make):
        raise TypeError(f"{make.__name__} does not define {', '.join(sorted(make.__abstractmethods__))}")
    if not dataclasses.is_dataclass(make):
        raise TypeError(f"{make.__name__} is not a dataclass")
    if not make.__dataclass_params__.frozen:
        raise TypeError(f"{make.__name__} is a dataclass that is not frozen")
    fields = [field for field in dataclasses.fields(make) if field.init]
    for field in fields:
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise TypeError(f"field {field.name!r} of {make.__name__} has no default")
    return make, fields


def _depth(default: DepthLookup | Earned, setting: object, *, earns: bool) -> DepthLookup | Earned:
    """Return the depth for the setting "table", "earned", or None (the default). Without `earns` it is a table.

    Raises `ConfigError` if there is no table.
    """
    table = default.start if isinstance(default, Earned) else default
    if setting == _EARNED and earns:
        return default if isinstance(default, Earned) else Earned(table)
    if setting is None and earns:
        return default
    if table is None:
        raise ConfigError(
            "depth='table': there is no depth table of this model; give a number of layers or 'earned', or measure a "
            "table with `remask profile` and name it as depth_table (--depth-table)"
        )
    return table


def _setting(field: "dataclasses.Field[Any]") -> str:
    return str(field.metadata.get("setting", field.name))


def _field_types(make: type[CachePolicy]) -> dict[str, tuple[object, ...]]:
    """Return the type of every field, as the members of a union."""
    try:
        hints = get_type_hints(make)
    except Exception as error:  # an annotation may be any expression
        raise TypeError(
            f"the types of {make.__name__}'s fields cannot be read ({type(error).__name__}: {error})"
        ) from error
    return {name: get_args(hint) or (hint,) for name, hint in hints.items()}


def _default_kinds(make: type[CachePolicy], tables: frozenset[str]) -> tuple[ModelKind, ...]:
    """Return the kinds of models that the policy with its defaults, and empty depth tables, is defined for.

    Raises `TypeError` if the policy cannot be made so, or has other traits than `Traits` with known kinds.
    """
    try:
        traits: object = make(**dict.fromkeys(tables, DepthLookup({}))).traits
    except Exception as error:  # another package's constructor or property may raise anything
        raise TypeError(f"{make.__name__}() and its traits raised {type(error).__name__}: {error}") from error
    if not isinstance(traits, Traits):
        raise TypeError(f"the traits of {make.__name__} are an object of type {type(traits).__name__}, not Traits")
    unknown = [kind for kind in traits.kinds if kind not in KINDS]
    if unknown or not traits.kinds:
        allowed = ", ".join(KINDS)
        raise TypeError(f"the kinds of {make.__name__}'s traits are {traits.kinds!r}, not some of {allowed}")
    return traits.kinds


def _validate(plugin: Plugin, value: object) -> PolicyType:
    """Return the policy type of an entry point's value. Raises `PluginError` if it is no policy class."""
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
    _validate,
)


def policy_names() -> tuple[str, ...]:
    """Names that a spec may join by `+`: remask's own, then those of other packages. Imports no package."""
    return POLICIES.names()


def names_for(kind: ModelKind) -> tuple[str, ...]:
    """Names of the policies for models of this kind, without broken ones. Imports the packages that provide them."""
    return tuple(name for name, policy in POLICIES.usable().items() if kind in policy.kinds)


def parse(spec: str | CachePolicy, settings: Mapping[str, Any] | None, depths: Depths) -> CachePolicy:
    """Build the policy that `spec` names (outermost first, joined by `+`), with `settings` applied.

    A setting goes to the outermost policy of the spec that takes it, or, as `NAME.setting`, to the policy of that name.
    A policy object is returned unchanged. `depths` is called only if a policy reads a prefix to a depth that no setting
    gives as a number.

    Raises `UnknownNameError` on an unknown name or setting, `PluginError` if the package that provides a name is broken
    or another one provides it too, and `ConfigError` if a value is out of range, the policies cannot be combined, or
    settings come with a policy object.
    """
    if not isinstance(spec, str):
        return _policy_object(spec, settings)
    names = spec.split("+")
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:  # checked before depths are read
        raise ConfigError(f"{spec!r} stacks {duplicate!r} on itself; name {duplicate} once")
    types = [POLICIES.get(name) for name in names]
    for name, policy_type in zip(names[:-1], types[:-1], strict=True):
        if policy_type.inner is None:
            wrappers = ", ".join(other for other, usable in POLICIES.usable().items() if usable.inner is not None)
            raise ConfigError(f"{spec!r}: {name!r} cannot wrap another policy; only {wrappers} can")
    owners = sorted({name for name, policy_type in zip(names, types, strict=True) if policy_type.owns_prefix})
    if len(owners) > 1:
        raise ConfigError(f"{spec!r}: {' and '.join(owners)} would both own the shared prefix; choose one of them")
    unused = _qualify_settings(names, types, settings or {})
    settings_by_policy = [
        {key: unused.pop(f"{name}.{key}") for key in policy_type.settings if f"{name}.{key}" in unused}
        for name, policy_type in zip(names, types, strict=True)
    ]
    if unused:
        raise _unknown_setting(spec, next(iter(unused)), types)
    policy: CachePolicy | None = None
    for policy_type, policy_settings in zip(reversed(types), reversed(settings_by_policy), strict=True):
        policy = policy_type.build(policy_settings, policy, depths)
    assert policy is not None
    return policy


def _unknown_setting(spec: str, key: object, types: Sequence[PolicyType]) -> ConfigError:
    """Return the error that no policy of `spec` has the setting `key`. It says so if `key` is a field of requests."""
    request_fields = {path.rpartition(".")[2] for path in paths(SamplingParams)} | declared(SamplingParams).keys()
    if key in request_fields or key in declared(Terms):
        return ConfigError(f"{key} is no setting of cache policy {spec!r}: it belongs into the request itself")
    allowed = [name for policy_type in types for name in policy_type.settings]
    if not allowed:
        return ConfigError(f"cache policy {spec!r} takes no settings, got {key!r}")
    return UnknownNameError(f"setting of cache policy {spec!r}", str(key), allowed)


def _policy_object(policy: object, settings: Mapping[str, Any] | None) -> CachePolicy:
    """Return a policy object unchanged. Raises `ConfigError` if it is none, or comes with settings."""
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


def _qualify_settings(names: Sequence[str], types: Sequence[PolicyType], settings: Mapping[str, Any]) -> dict[Any, Any]:
    """Return `settings` with `NAME.setting` as the key of each setting that a policy takes, and other keys unchanged.

    Raises `ConfigError` if a setting is given under both keys.
    """
    qualified: dict[Any, Any] = {}
    for key, value in settings.items():
        owner = next((name for name, policy in zip(names, types, strict=True) if key in policy.settings), None)
        full_key = key if owner is None else f"{owner}.{key}"
        if full_key in qualified:
            raise ConfigError(
                f"{full_key!r} and {full_key.split('.')[1]!r} are the same setting here; give one of them"
            )
        qualified[full_key] = value
    return qualified


def check_setting(name: str) -> None:
    """Raise `ConfigError` if the unknown field `name` of a request is a setting of one of remask's policies."""
    owners = [owner for owner, policy in POLICIES.built_in.items() if name in policy.settings]
    if owners:
        raise ConfigError(f"{name} is a setting of the cache policy {owners[0]!r}: it belongs into 'cache_config'")


def settings_of(policy: CachePolicy) -> dict[str, Any]:
    """Return the settings of a policy as `cache_config` names them; a depth table is "table".

    A setting of the inner policy that the outer one has too is named `NAME.setting`. A value that is not JSON is
    returned as text. A policy that is no dataclass has no settings.
    """
    settings, inner = _outer_settings(policy)
    if inner is None:
        return settings
    name = _outer_name(inner)
    return settings | {f"{name}.{key}" if key in settings else key: value for key, value in settings_of(inner).items()}


def name_of(policy: CachePolicy) -> str:
    """Return the spec of a policy, without settings. An unregistered policy has its attribute `name`, or its class."""
    _, inner = _outer_settings(policy)
    name = _outer_name(policy)
    return name if inner is None or isinstance(inner, Dense) else f"{name}+{name_of(inner)}"


def _outer_settings(policy: CachePolicy) -> tuple[dict[str, Any], CachePolicy | None]:
    """Return the settings of a policy without those of the inner policy, and the inner policy, if there is one."""
    settings: dict[str, Any] = {}
    inner = None
    fields: tuple[dataclasses.Field[Any], ...] = dataclasses.fields(policy) if dataclasses.is_dataclass(policy) else ()
    for field in fields:
        value = getattr(policy, field.name)
        if isinstance(value, CachePolicy):
            inner = value
        elif field.init and not ("unset" in field.metadata and value == field.metadata["unset"]):
            settings[_setting(field)] = _setting_value(value)
    return settings, inner


def _setting_value(value: object) -> object:
    if isinstance(value, DepthLookup | Earned):
        return _TABLE if isinstance(value, DepthLookup) else _EARNED
    return value if value is None or isinstance(value, str | int | float | list | tuple | dict) else repr(value)


def _outer_name(policy: CachePolicy) -> str:
    for name, policy_type in (*POLICIES.built_in.items(), *POLICIES.imported().items()):
        if policy_type.make is type(policy):
            return name
    attribute = getattr(policy, "name", None)
    return attribute if isinstance(attribute, str) and attribute else type(policy).__name__


def file_and_class(spec: str) -> tuple[str, str] | None:
    """Return the file and the class that a spec `FILE.py:CLASS` names. Returns None for any other spec."""
    path, colon, name = spec.rpartition(":")
    return (path, name) if colon and path.endswith(".py") and name.isidentifier() else None


def from_file(
    cache: str | CachePolicy, settings: Mapping[str, Any] | None, option: str = "cache"
) -> tuple[str | CachePolicy, dict[str, Any]]:
    """Replace a spec `FILE.py:CLASS` by a policy object with its settings applied, and no further settings.

    Runs the file. Any other `cache` is returned unchanged, with its settings. `option` is the setting's name in errors.
    Raises `ConfigError` if the file cannot be run or has no such class, or if the class is no policy or does not take
    the settings.
    """
    file_spec = file_and_class(cache) if isinstance(cache, str) else None
    if file_spec is None:
        return cache, dict(settings or {})
    path, name = file_spec
    value = vars(module_in(path, option)).get(name)
    if value is None:
        raise ConfigError(f"{option}: {path} has no class {name!r}")
    try:
        policy_type = PolicyType.of(value)
    except TypeError as error:
        raise ConfigError(
            f"{option}: {name} of {path} is not a cache policy: {error}; expected a frozen dataclass derived from "
            "remask.policies.CachePolicy whose fields all have defaults (docs/extending.md)"
        ) from error
    for key in settings or {}:
        if key not in policy_type.settings:
            raise UnknownNameError(f"setting of cache policy {name!r}", key, policy_type.settings)
    try:
        return policy_type.build(settings or {}, None, lambda: _no_table(option)), {}
    except RemaskError:
        raise
    except Exception as error:  # the file's constructor may raise anything
        raise ConfigError(f"{option}: {name} of {path} cannot be made: {type(error).__name__}: {error}") from error


def _no_table(option: str) -> DepthLookup:
    raise ConfigError(
        f"{option}: a policy of a file gets no depth table, as there is none before the model is loaded; give its "
        "depths among its settings, or make the policy a package (docs/extending.md)"
    )
