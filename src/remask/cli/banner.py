"""The banner: three lines that tell people what runs, where, and what to do next. All choices are in the log."""

import argparse

import torch

from remask.cli.logs import tell_people
from remask.engine.config import AUTO
from remask.llm import LLM


def show_banner(args: argparse.Namespace, llm: LLM, where: str, then: str) -> None:
    """Tell people what runs, `where`, and what to do `then`, once in a command that opens several models."""
    if not vars(args).get("banner_shown"):
        args.banner_shown = True
        command = " ".join([args.command, *filter(None, [vars(args).get("subject")])])
        tell_people(args, f"remask {command}: {what_runs(args, llm)}\n  {where}\n  next: {then}")


def what_runs(args: argparse.Namespace, llm: LLM) -> str:
    """The model, its size, where and in which numbers it computes, and the cache that the options name."""
    config, device = llm.loaded.config, llm.model.device
    threads = torch.get_num_threads()
    cores = f" ({threads} thread{'s' if threads > 1 else ''})" if device.type == "cpu" else ""
    parts = [
        f"{args.model} ({config.family}, {size_text(config.parameters)} parameters) on {device}{cores}",
        str(llm.model.dtype).removeprefix("torch."),
    ]
    if llm.loaded.quantization is not None:
        parts.append(f"matrices {llm.loaded.quantization}")
    named = vars(args).get("cache", "")
    if named != "":
        parts.append(f"cache {llm.cache_name if named in (None, AUTO) else named}")
    return ", ".join(parts)


def size_text(number: int) -> str:
    """A number of parameters in three digits: 455 k, 8.02 B."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
