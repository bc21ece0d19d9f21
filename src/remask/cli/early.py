"""Checks of a command's options before its module is imported: that takes seconds, and reading weights minutes."""

import argparse
import os

from remask.errors import ConfigError

# Options of any command that name files to be read, and cache policies, which these words stand for too.
_READ, _POLICIES, _ANY = ("input", "prompts", "depth_table"), ("cache", "caches"), ("all", "auto", "none")


def check_named(args: argparse.Namespace) -> None:
    """Look for the files and the cache policies that the options name.

    Raises `ConfigError` where a file is missing, and what `remask.policies.parse` raises of a policy.
    """
    for option in _READ:
        check_file(f"--{option.replace('_', '-')}", getattr(args, option, None))
    for option in _POLICIES:
        check_policies(getattr(args, option, None))


def check_file(option: str, path: str | None) -> None:
    """Raise `ConfigError` if there is no file, pipe or device `path` to be read; "-" is standard input."""
    if path is not None and path != "-" and (not os.path.exists(path) or os.path.isdir(path)):
        raise ConfigError(f"{option}: there is no file {path!r}; check the name and the folder")


def check_policies(specs: str | None) -> None:
    """Raise `ConfigError` if one of the `specs`, separated by commas, names no cache policy or no composition."""
    named = [] if specs is None else [spec.strip() for spec in specs.split(",")]
    named = [spec for spec in named if spec not in _ANY]
    if not named:
        return
    # Imported here, as policies need NumPy, and most commands name none.
    from remask.policies import parse
    from remask.policies.depth_lookup import DepthLookup

    for spec in named:
        file = policy_file(spec)
        if file is None:
            parse(spec, None, lambda: DepthLookup({}))
        else:  # it is run later, once
            check_file("--cache", file[0])


def policy_file(spec: str) -> tuple[str, str] | None:
    """The file and the class that a spec `FILE.py:CLASS` names; None of any other."""
    path, colon, name = spec.rpartition(":")
    return (path, name) if colon and path.endswith(".py") and name.isidentifier() else None
