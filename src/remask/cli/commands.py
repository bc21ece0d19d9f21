"""The commands of `remask`: this package's own, and those that other packages register."""

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import entry_points
from types import ModuleType

from remask.errors import ConfigError

GROUP = "remask.commands"  # entry points of this group name mappings from names to `Command`s


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its module is imported when the command is used, so that a list of commands costs little time.

    Attributes:
        module: has `add_arguments(parser)` and `run(args) -> int`, the exit status.
        summary: its line in `remask --help`.
        extra: the extra that installs the further packages that the module needs.
    """

    module: str
    summary: str
    extra: str | None = None

    def load(self) -> ModuleType:
        """Import the module. Raises `ConfigError` if a package of its extra is missing."""
        try:
            return importlib.import_module(self.module)
        except ModuleNotFoundError as error:
            raise missing(error, self.extra) from error


OWN: Mapping[str, Command] = {
    "generate": Command("remask.cli.generate", "answer a prompt, or a JSONL file of them"),
    "serve": Command("remask.cli.serve", "serve a model over HTTP, as OpenAI's API does", "server"),
    "deploy": Command("remask.cli.deploy", "serve a model on many machines, with Ray Serve", "ray"),
    "chat": Command("remask.cli.chat", "talk to a model in the terminal", "server"),
    "profile": Command("remask.cli.profile", "measure the depth table that BiCache reads", "lab"),
    "inspect": Command("remask.cli.inspect", "look into the engine's memory"),
}


def all_commands() -> dict[str, Command]:
    """Return every command by its name. Raises `ConfigError` if a package registers a name that is taken."""
    found = dict(OWN)
    for entry in entry_points(group=GROUP):
        for name, command in entry.load().items():
            if name in found:
                raise ConfigError(
                    f"the entry point {entry.name!r} of {GROUP} ({entry.value}) registers the command {name!r}, which "
                    "there is already; uninstall its package, or rename its command"
                )
            found[name] = command
    return found


def missing(error: ModuleNotFoundError, extra: str | None) -> Exception:
    """Return the error for a missing module: `error` itself if the module is the project's own or no extra has it."""
    package = (error.name or "").partition(".")[0]
    if extra is None or package.startswith("remask"):
        return error
    return ConfigError(f"the package {package!r} is not installed; install it with: pip install 'remask[{extra}]'")
