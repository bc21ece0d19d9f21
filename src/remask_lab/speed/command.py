"""What the commands in this folder share: their options, the model that they open, and the report that they print."""

import argparse
import json
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from remask.errors import RemaskError
from remask_lab.records.machine import commit, machine

if TYPE_CHECKING:
    from remask import LLM, EngineConfig

REMASK = (sys.executable, "-c", "import sys; from remask.cli import main; sys.exit(main())")
"""The words that run `remask` with this interpreter."""


def command_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser whose help begins with a module's docstring."""
    return argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)


def add_model_options(parser: argparse.ArgumentParser, model: str | None = None) -> None:
    """Add `--dtype` and `--device`, and `--model` where the command has a default `model`."""
    if model is not None:
        parser.add_argument("--model", default=model, help=f"preset whose shape is taken (default {model})")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")


def open_random(args: argparse.Namespace, limits: "EngineConfig") -> "LLM":
    """Open the preset that `--model` names, with random weights."""
    from remask import LLM

    return LLM(args.model, load_format="dummy", dtype=args.dtype, device=args.device, engine=limits)


def print_report(llm: "LLM", **figures: Any) -> None:
    """Print one JSON object: the machine, the commit, and the figures."""
    print(json.dumps({"machine": machine(llm), "commit": commit(), **figures}, indent=2))


def run_command(main: Callable[[], None]) -> int:
    """Run a command. Returns 0, or 2 after printing an error that the user can mend."""
    try:
        main()
    except RemaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0
