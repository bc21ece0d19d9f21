"""`remask profile` measures how deep a shared prefix may be reused, `remask quantize` writes a checkpoint of quantized
weights: what is made of a model and kept.
"""

import argparse
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from remask.checkpoint.load import check_tensors, read_config
from remask.checkpoint.quantised_files import save_quantised
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import find_source, is_adapter, resolve
from remask.checks.values import check_real, check_whole
from remask.cli.lines import load_lines, read_lines
from remask.cli.options import open_llm
from remask.depth.find import keep_table
from remask.depth.measure import measure
from remask.depth.requests import default_requests, read_system_prompt
from remask.depth.table import DepthTable
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.loading import announce_download
from remask.model.sizes import check_sizes

REQUESTS = 128  # that are drawn where no number is asked for


def run(args: argparse.Namespace) -> int:
    """Measure the model, print the table, and write or keep it."""
    check_real("--bound", args.bound, low=0)
    check_whole("--requests", args.requests, low=1, optional=True)
    lines = None if args.input is None else load_lines(args.input, without=("cache", "cache_config"))
    system = None if args.system_prompt is None else read_system_prompt(args.system_prompt)
    if lines is not None and system is not None:
        lines = replace(lines, each=tuple(_under(system, lines.path, *line) for line in lines.each))
    # One canvas is audited at a time, and none is stored.
    limits = EngineConfig(max_num_seqs=1, store_budget_tokens=0)
    llm = open_llm(args, engine=limits, reads="tokens" if system is None else "text")
    if lines is None:
        requests, source = default_requests(llm.loaded, args.requests or REQUESTS, args.seed, system)
    else:
        requests = [request for request, _ in read_lines(llm, lines, {})][: args.requests]
        source = f"{len(requests)} requests of {Path(args.input).name}"
    table = measure(llm.session, requests, source, args.bound, progress=llm.session.progress)
    print(report(table))
    if args.output is None:
        print(f"\nKept for all further starts, in {keep_table(table, llm.loaded)}")
    else:
        table.save(args.output)
        print(f"\nSaved as {args.output}; use it with --depth-table {args.output}")
    return 0


def _under(system: str, path: str, number: int, name: str, line: dict[str, Any]) -> tuple[int, str, dict[str, Any]]:
    """A line whose messages begin with a system prompt. Raises `ConfigError` where they cannot."""
    messages = line.get("messages")
    if not isinstance(messages, list):
        raise ConfigError(f"{path}, line {number}: --system-prompt goes before messages, and this line has none")
    if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
        raise ConfigError(f"{path}, line {number}: these messages have a system prompt; leave --system-prompt out")
    return number, name, {**line, "messages": [{"role": "system", "content": system}, *messages]}


def report(table: DepthTable) -> str:
    """The table as text: what was found, and for each ratio the depth and what it rests on."""
    lines = [
        f"{table.model}: {table.layers} layers, {table.samples} requests audited ({table.source})",
        "How far first predictions move in nats, where they move most; mean and 95 % interval",
    ]
    for ratio, depths in sorted(table.nats.items()):
        depth = table.lookup.depth(ratio, 100)
        lines += ["", f"prefixes from {ratio} % of the canvas: {depth} layers may be read"]
        for tried, (mean, low, high) in sorted(depths.items()):
            lines.append(f"{tried:>7} layers  {mean:.3f} ({low:.3f} to {high:.3f})")
    if not table.entries:
        lines += ["", f"No depth is shown to stay below {table.bound:g} nats: nothing would be read from the store."]
    return "\n".join(lines)


def quantize(args: argparse.Namespace) -> int:
    """Write the checkpoint, and say how large it is."""
    announce_download(ModelSettings(args.model), None)
    if is_adapter(resolve(args.model, progress=args.progress)):
        raise ConfigError(
            f"--model: {args.model!r} is an adapter, which is merged into its base when it is loaded; --quantization "
            "of the command that loads it quantises the sum then"
        )
    source = find_source(args.model, progress=args.progress)
    folder = source.weights
    family, config = read_config(folder, source.overrides)
    check_sizes(args.quantization, config)
    check_tensors(folder, family, config, torch.bfloat16)
    try:
        size = save_quantised(
            folder,
            family,
            config,
            args.quantization,
            Path(args.output),
            args.progress,
            overrides=source.overrides,
            defaults=source.model_defaults(family.read_generation),
        )
    except OSError as error:
        raise ConfigError(f"--output: {args.output!r} cannot be written: {error.strerror or error}") from error
    print(f"{args.output}: {config.parameters:,} parameters in {size / 1e9:.3f} GB ({args.quantization})")
    return 0
