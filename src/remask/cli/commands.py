"""The commands of `remask`: this package's own, and those that other packages register."""

import argparse
import gc
import importlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Final

from remask.checks.plugins import Plugin, Registry, install_command
from remask.cli.parser import examples
from remask.errors import ConfigError, PluginError

GROUP = "remask.commands"
"""The entry-point group by which other packages add commands. Each entry point is a mapping of names to `Command`s."""


@dataclass(frozen=True, slots=True)
class Command:
    """One command. Its modules are imported when it is used, so that a list of commands costs little time.

    Attributes:
        module: the module with `run(args) -> int`, which returns the exit status; or `MODULE:FUNCTION`.
        summary: its line in `remask --help`.
        examples: complete command lines, shown at the end of its help.
        extra: the extra that installs the packages that the module needs.
        opening: printed on stderr before the module is imported, which may take seconds; None prints nothing.
        arguments: the module with `add_arguments(parser)`, or `MODULE:FUNCTION`; None: `module` has it. It should
            import little, as `--help` and every usage error wait for it.
        log_level: the log level without `--log-level`.
        banner: the two lines below that of the model: where the output goes, and what to run next. `{model}` in the
            second is replaced by the model.
    """

    module: str
    summary: str
    extra: str | None = None
    examples: tuple[str, ...] = ()
    opening: str | None = None
    arguments: str | None = None
    log_level: str = "warning"
    banner: tuple[str, str] | None = None

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Add options, examples and `run` to `parser`. Raises `ConfigError` if a package of its extra is missing."""
        parser.set_defaults(run=self.run)
        if self.examples:
            parser.epilog = examples(*self.examples)
        self._call(self.arguments or self.module.partition(":")[0], "add_arguments", parser)

    def run(self, args: argparse.Namespace) -> int:
        """Run it. Returns the exit status. Raises its errors; `ConfigError` if a package of its extra is missing."""
        status: int = self._call(self.module, "run", args)
        return status

    def _call(self, target: str, default_function: str, argument: Any) -> Any:
        """Import `MODULE` or `MODULE:FUNCTION`, and call its function with `argument`."""
        module, _, name = target.partition(":")
        try:
            with _frozen_imports():
                function = getattr(importlib.import_module(module), name or default_function)
            return function(argument)
        except ModuleNotFoundError as error:
            raise missing_package_error(error, self.extra) from error


@contextmanager
def _frozen_imports() -> Iterator[None]:
    """Exclude objects that are made in the block from garbage collection, until `gc.unfreeze` is called.

    Imported modules hold no garbage, and scanning them repeatedly takes a sixth of the start-up time.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


MODEL_EXAMPLES = ("remask inspect model bundled", "remask inspect model llada-moe-7b-a1b --json")
STORE_EXAMPLES = (
    "remask inspect store --model bundled --input requests.jsonl --cache bicache",
    "remask inspect store --model bundled --input requests.jsonl --cache reuse --json",
)
_OPENING: Final = "loading PyTorch and the model, some seconds"
_BUILTIN = {
    "generate": Command(
        "remask.cli.generate",
        "answer a prompt, or a JSONL file of them",
        examples=(
            "remask generate --model GSAI-ML/LLaDA-8B-Instruct --prompt 'What is a diffusion language model?'",
            "remask generate --model bundled --input requests.jsonl --output answers.jsonl --cache bicache",
        ),
        banner=(
            "the answers go to standard output, or into the file of --output",
            "remask chat --model {model} talks to it; remask serve {model} offers an API and a page in the browser",
        ),
        opening=_OPENING,
    ),
    "decide": Command(
        "remask.cli.generate:decide",
        "answer questions by the model's distribution over labels",
        examples=(
            "remask decide --model bundled-tariff --input examples/decisions.json",
            "remask decide --model GSAI-ML/LLaDA-8B-Instruct --input questions.json --cache bicache",
        ),
        banner=(
            "the answers go to standard output, as JSON",
            "remask serve {model} answers such questions at /v1/decisions",
        ),
        opening=_OPENING,
    ),
    "serve": Command(
        "remask.cli.serve",
        "serve a model over HTTP, as OpenAI's API does",
        "server",
        examples=(
            "remask serve bundled",
            "remask serve GSAI-ML/LLaDA-8B-Instruct --port 8080 --max-num-seqs 16 --api-key KEY",
        ),
        log_level="info",
        opening=_OPENING,
    ),
    "deploy": Command(
        "remask.cli.serve:deploy",
        "serve a model on many machines, with Ray Serve",
        "ray",
        examples=(
            "remask deploy bundled --min-replicas 2",
            "remask deploy GSAI-ML/LLaDA-8B-Instruct --num-gpus 1 --max-replicas 4 --ray-address auto",
        ),
        log_level="info",
    ),
    "chat": Command(
        "remask.cli.chat",
        "talk to a model in the terminal",
        "server",
        examples=(
            "remask chat --base-url http://127.0.0.1:8000/v1",
            "remask chat --model GSAI-ML/LLaDA-8B-Instruct --system 'You answer in one sentence.'",
        ),
        banner=(
            "in this process, for you alone",
            "type a line, or /help; remask serve {model} lets many ask at a time",
        ),
        opening=_OPENING,
    ),
    "demo": Command(
        "remask.cli.demo",
        "eight questions about a page, with and without caches, in a minute",
        examples=("remask demo", "remask demo --threads 2"),
        opening=_OPENING,
        banner=(
            "the answers and the table go to standard output",
            "remask serve {model} opens a page in the browser for questions of your own; remask chat {model} asks here",
        ),
    ),
    "models": Command(
        "remask.cli.models",
        "list the models that one word starts, and which of them fit this machine",
        examples=("remask models", "remask models --memory 24"),
    ),
    "models pull": Command(
        "remask.cli.models:pull",
        "download one of these models, or its newest revision",
        examples=("remask models pull sdar-1.7b", "remask models pull GSAI-ML/LLaDA-8B-Instruct --force"),
    ),
    "profile": Command(
        "remask.cli.profile",
        "measure how many layers may read a shared prefix",
        "lab",
        examples=(
            "remask profile --model bundled --output depth.json",
            "remask profile --model smollm2 --input requests.jsonl",
        ),
        banner=(
            "the table goes to standard output, and into the file of --output",
            "remask bench --model {model} --depth-table FILE compares caches with it",
        ),
        opening=_OPENING,
    ),
    "quantize": Command(
        "remask.cli.profile:quantize",
        "write a checkpoint of quantized weights",
        examples=(
            "remask quantize --model bundled --quantization int8 --output bundled-int8",
            "remask quantize --model GSAI-ML/LLaDA-8B-Instruct --quantization int4 --output llada-int4",
        ),
        opening=_OPENING,
    ),
    "inspect": Command(
        "remask.cli.inspect",
        "look into a model, or into the engine's memory",
        examples=(MODEL_EXAMPLES[0], STORE_EXAMPLES[0]),
        banner=("the memory goes to standard output", "remask serve {model} shows it live in the playground"),
    ),
}
BUILTIN_COMMANDS: Mapping[str, Command] = {
    name: replace(command, arguments=f"remask.cli.arguments:{name.split()[-1]}") for name, command in _BUILTIN.items()
}
"""The commands of this package, by name."""

ALIASES: Mapping[str, str] = {"run": "chat", "list": "models", "pull": "models pull"}
"""Names that commands have in other programs, and their names here."""

MOVED_COMMANDS: Mapping[str, str] = {
    "profile-ops": "remask profile ops",
    "analyze compare": "remask bench with --answers or --page, and --variants",
    "analyze sweep": "remask bench with --variants",
    "eval questions": "remask bench, with --answers where every response is wanted",
}
"""Names that commands had, and what to use now."""

LAB_COMMANDS: Final = ("analyze", "bench", "eval", "profile ops", "verify")
"""Commands that the package remask-lab provides."""


def _validate_commands(plugin: Plugin, value: object) -> Mapping[str, Command]:
    """Return `value` if it is a mapping of new names to commands. Raises `PluginError` if it is not."""
    expected = "a mapping of names that remask does not have to remask.cli.commands.Command"
    if not isinstance(value, Mapping) or not all(isinstance(command, Command) for command in value.values()):
        raise plugin.error(f"it provides an object of type {type(value).__name__}", expected)
    if duplicates := (BUILTIN_COMMANDS.keys() | ALIASES) & value.keys():
        raise plugin.error(f"it provides the command {', '.join(map(repr, sorted(duplicates)))}", expected)
    return value


REGISTRY: Registry[Mapping[str, Command]] = Registry("set of commands", GROUP, {}, _validate_commands)


def all_commands() -> dict[str, Command]:
    """Return the commands of all packages, by name. A package whose commands cannot be used is logged and left out.

    Raises `PluginError` if two packages provide one name.
    """
    commands = dict(BUILTIN_COMMANDS)
    for source, plugin_commands in REGISTRY.usable().items():
        if duplicates := commands.keys() & plugin_commands.keys():
            names = ", ".join(map(repr, sorted(duplicates)))
            raise PluginError(
                f"{REGISTRY.source(source)} provides the command {names}, which another package provides; uninstall "
                "one of them, or rename its command"
            )
        commands |= plugin_commands
    return commands


def missing_package_error(error: ModuleNotFoundError, extra: str | None) -> Exception:
    """Return a `ConfigError` that says how to install the package that `error` names.

    Returns `error` itself if the module belongs to this project or if `extra` is None.
    """
    package = (error.name or "").partition(".")[0]
    if extra is None or package.startswith("remask"):
        return error
    return ConfigError(f"the package {package!r} is not installed; install it with: {install_command(extra)}")
