"""Names that other installed packages provide by entry points; and modules in files."""

import importlib.util
import json
import logging
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points, requires, version
from pathlib import Path
from types import ModuleType
from typing import Generic, TypeVar, cast

from remask.errors import ConfigError, PluginError, UnknownNameError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Plugin:
    """An entry point of an installed package."""

    package: str  # name and version of the distribution
    folder: str  # of the installed distribution
    entry: EntryPoint  # name, value and group of the entry point

    def __str__(self) -> str:
        entry = self.entry
        return f"package {self.package} (entry point '{entry.name} = {entry.value}' of '{entry.group}')"

    def error(self, fault: str, expected: str) -> PluginError:
        """The error for a `fault` of what it provides, with what its group expects."""
        return PluginError(f"{self}: {fault}; expected {expected}. Correct the package or uninstall it.")


def plugins(group: str) -> Mapping[str, tuple[Plugin, ...]]:
    """The entry points of a group by name, from the metadata of installed packages; none is imported.

    They are cached until `sys.path` changes, so a package that is installed later is not found.
    """
    return _entry_points(group, tuple(sys.path))


@lru_cache(maxsize=16)
def _entry_points(group: str, path: tuple[str, ...]) -> Mapping[str, tuple[Plugin, ...]]:  # noqa: ARG001 - the key
    by_name: dict[str, tuple[Plugin, ...]] = {}
    for entry in entry_points(group=group):
        source = entry.dist
        package = "of unknown name" if source is None else f"{source.name!r} {source.version}"
        folder = "" if source is None else str(source.locate_file(""))
        by_name[entry.name] = (*by_name.get(entry.name, ()), Plugin(package, folder, entry))
    return by_name


@dataclass(frozen=True, slots=True)
class Registry(Generic[T]):
    """Values by name: remask's own, and those that other packages provide under an entry-point group."""

    noun: str  # for a name, in error messages
    group: str  # the entry-point group
    built_in: Mapping[str, T]  # remask's own values
    # Makes a value of the object of an entry point. Raises `Plugin.error` if it cannot be used.
    check: Callable[[Plugin, object], T]

    def names(self) -> tuple[str, ...]:
        """All names, remask's own first. Nothing is imported."""
        return tuple(dict.fromkeys([*self.built_in, *sorted(plugins(self.group))]))

    def get(self, name: str) -> T:
        """The value of `name`, for which its package may be imported.

        Raises `UnknownNameError` if nobody provides it, and `PluginError` if several do or the package's object cannot
        be used.
        """
        claims = plugins(self.group).get(name, ())
        if not claims and name not in self.built_in:
            raise UnknownNameError(self.noun, name, self.names())
        sources = [*(["remask itself"] if name in self.built_in else []), *map(str, claims)]
        if len(sources) > 1:
            raise PluginError(
                f"{self.noun} {name!r} is provided by {' and by '.join(sources)}; a name has one owner: uninstall the "
                "other package, or rename its entry point"
            )
        if not claims:
            return self.built_in[name]
        loaded = _load(claims[0], self.check)
        if isinstance(loaded, PluginError):
            raise _without_frames(loaded)
        return cast(T, loaded)

    def usable(self) -> dict[str, T]:
        """The values of all names that can be used. Imports their packages, and logs once why one cannot be used."""
        return self._values(self.names(), _warn)

    def source(self, name: str) -> str:
        """The packages that provide `name`, for error messages."""
        return " and by ".join(map(str, plugins(self.group).get(name, ()))) or "remask itself"

    def imported(self) -> dict[str, T]:
        """The values of other packages' names whose modules are already imported."""
        claims_by_name = plugins(self.group).items()
        names = [name for name, claims in claims_by_name if all(claim.entry.module in sys.modules for claim in claims)]
        return self._values(names, None)

    def _values(self, names: Iterable[str], on_error: Callable[[str], None] | None) -> dict[str, T]:
        """The values of the `names` that can be used. `on_error` is called with the errors of the others."""
        values = {}
        for name in names:
            try:
                values[name] = self.get(name)
            except PluginError as error:
                if on_error is not None:
                    on_error(str(error))
        return values


@cache
def _load(plugin: Plugin, check: Callable[[Plugin, object], object]) -> object:
    """The result of `check` for the plugin's object, or the `PluginError` if it cannot be used."""
    try:
        value = plugin.entry.load()
    except Exception as error:  # modules of other packages may raise anything when imported
        log.debug("remask: %s could not be imported", plugin, exc_info=True)
        fault = f"loading it raised {type(error).__name__}: {error}"
        return _without_frames(plugin.error(fault, "an object that can be imported"))
    try:
        return check(plugin, value)
    except PluginError as error:
        return _without_frames(error)


def _without_frames(error: PluginError) -> PluginError:
    """A copy of `error` without a traceback: a cached one would keep its frames alive, and with them a model."""
    return PluginError(str(error))


@cache
def _warn(text: str) -> None:
    log.warning("remask: left out: %s", text)


def module_in(path: str, option: str) -> ModuleType:
    """The module in the file `path`, imported under a name of its own.

    Raises `ConfigError` if there is no such file, or running it fails; `option` is the setting with the path.
    """
    name = f"remask_file:{Path(path).resolve()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not Path(path).is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"{option}: there is no file {path!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ConfigError(f"{option}: {path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def install_command(extra: str) -> str:
    """The command that installs the packages of `extra`.

    It names the extra if remask was installed from an index or a wheel. In a repository that would install remask
    again, so the command names the missing packages of the extra, or all of them if none is missing.
    """
    if not _is_from_repository():
        return f"pip install 'remask[{extra}]'"
    requirements = _extra_requirements(extra)
    if not requirements:  # the code runs without being installed
        return f"pip install '.[{extra}]' (in the folder of remask's pyproject.toml)"
    missing = [requirement for requirement in requirements if not _is_installed(requirement)] or requirements
    paths = [re.sub(r"^remask-", "./", requirement) for requirement in missing]
    return f"pip install {' '.join(map(repr, paths))}" + (" (in remask's repository)" if paths != missing else "")


def _is_from_repository() -> bool:
    """Whether remask runs from a repository: installed from its folder, as pip notes (PEP 610), or not at all."""
    try:
        origin = json.loads(distribution("remask").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:
        return True
    return "dir_info" in origin or "vcs_info" in origin


def _extra_requirements(extra: str, project: str = "remask") -> list[str]:
    """Requirements of an extra, such as "ray[serve]>=2.60", including those of other extras that it names."""
    requirements: list[str] = []
    for line in _requirements(project):
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        if not re.search(rf"extra == ['\"]{extra}['\"]", marker):
            continue
        extra_of = re.fullmatch(r"(remask(?:-\w+)*)\[([\w,-]+)\]", requirement)
        if extra_of is None:
            requirements.append(requirement)
        else:
            for name in extra_of[2].split(","):
                requirements += _extra_requirements(name, extra_of[1])
    return list(dict.fromkeys(requirements))


def _requirements(project: str) -> list[str]:
    try:
        return requires(project) or []
    except PackageNotFoundError:
        return []


def _is_installed(requirement: str) -> bool:
    try:
        return bool(version(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]))
    except PackageNotFoundError:
        return False
