"""`--cache FILE.py:CLASS`: a cache policy from a file that the user names. Requests over HTTP name no files."""

import importlib.util
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from remask.cli.early import policy_file
from remask.errors import ConfigError, RemaskError, UnknownNameError
from remask.policies import CachePolicy, DepthLookup
from remask.policies.registry import PolicyType


def policy_option(
    cache: str | CachePolicy, settings: Mapping[str, Any] | None
) -> tuple[str | CachePolicy, dict[str, Any]]:
    """What `LLM` takes of `--cache` and `--cache-config`: an object with its settings where `cache` names a file.

    Anything else is returned as it is. The file is run. Raises `ConfigError` where it cannot be, holds no such class,
    or the class is no policy or does not take the settings.
    """
    found = policy_file(cache) if isinstance(cache, str) else None
    if found is None:
        return cache, dict(settings or {})
    path, name = Path(found[0]), found[1]
    made = vars(_module(path)).get(name)
    if made is None:
        raise ConfigError(f"--cache: {path} has no class {name!r}")
    try:
        policy = PolicyType.of(made)
    except TypeError as error:
        raise ConfigError(
            f"--cache: {name} of {path} is not a cache policy: {error}; expected a frozen dataclass derived from "
            "remask.policies.CachePolicy whose fields all have defaults (docs/extending.md)"
        ) from error
    for key in settings or {}:
        if key not in policy.settings:
            raise UnknownNameError(f"setting of cache policy {name!r}", key, policy.settings)
    try:
        return policy.build(settings or {}, None, _no_table), {}
    except RemaskError:
        raise
    except Exception as error:  # of a constructor that is anybody's
        raise ConfigError(f"--cache: {name} of {path} cannot be made: {type(error).__name__}: {error}") from error


def _module(path: Path) -> Any:
    """The module of a file, run under a name that no other has."""
    name = f"remask_policy_file:{path.resolve()}"
    spec = importlib.util.spec_from_file_location(name, path)
    if not path.is_file() or spec is None or spec.loader is None:
        raise ConfigError(f"--cache: there is no file {str(path)!r}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    try:
        spec.loader.exec_module(module)
    except BaseException as error:
        del sys.modules[name]
        if not isinstance(error, Exception | SystemExit):
            raise
        raise ConfigError(f"--cache: {path} cannot be run: {type(error).__name__}: {error}") from error
    return module


def _no_table() -> DepthLookup:
    raise ConfigError(
        "--cache: a policy of a file gets no depth table, as there is none before the model is loaded; give its depths "
        "in --cache-config, or make the policy a package (docs/extending.md)"
    )
