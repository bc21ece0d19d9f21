"""`remask profile` measures in how many layers a shared prefix may be reused; `remask quantize` writes a checkpoint of
quantized weights.
"""

import argparse
from dataclasses import replace
from pathlib import Path

import torch

from remask.checkpoint.load import check_tensors, read_config
from remask.checkpoint.quantized_files import save_quantized
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import find_source, is_adapter, resolve_model
from remask.checks.values import check_real, check_whole
from remask.cli.arguments import PROFILE_REQUESTS
from remask.cli.lines import RequestLine, build_requests, load_lines
from remask.cli.options import open_llm
from remask.depth.find import save_table
from remask.depth.measure import measure
from remask.depth.requests import default_requests, read_system_prompt
from remask.depth.table import DepthTable
from remask.engine.config import EngineConfig
from remask.errors import ConfigError
from remask.loading import announce_download
from remask.model.sizes import check_matrix_sizes


def run(args: argparse.Namespace) -> int:
    """Measure, print and store a depth table. Returns 0. Raises `ConfigError`, `TableError`, and as `open_llm` does."""
    check_real("--bound", args.bound, low=0)
    check_whole("--requests", args.requests, low=1, optional=True)
    file = None if args.input is None else load_lines(args.input, forbidden_keys=("cache", "cache_config"))
    system = None if args.system_prompt is None else read_system_prompt(args.system_prompt)
    if file is not None and system is not None:
        file = replace(file, lines=tuple(_with_system_prompt(line, system, file.path) for line in file.lines))
    # Audits need one canvas at a time, and no stored prefix.
    limits = EngineConfig(max_num_seqs=1, store_budget_tokens=0)
    with open_llm(args, engine=limits, reads="tokens" if system is None else "text") as llm:
        if file is None:
            requests, source = default_requests(llm.loaded, args.requests or PROFILE_REQUESTS, args.seed, system)
        else:
            requests = [request for request, _ in build_requests(llm, file, {})][: args.requests]
            source = f"{len(requests)} requests of {Path(args.input).name}"
        table = measure(llm.session, requests, source, args.bound, progress=llm.session.progress)
        print(table_text(table))
        if args.output is None:
            print(f"\nKept for all further starts, in {save_table(table, llm.loaded)}")
        else:
            table.save(args.output)
            print(f"\nSaved as {args.output}; use it with --depth-table {args.output}")
    return 0


def _with_system_prompt(line: RequestLine, system: str, path: str) -> RequestLine:
    """Return `line` with a system prompt before its messages.

    Raises `ConfigError` if the line has no messages, or a system prompt of its own.
    """
    messages = line.fields.get("messages")
    if not isinstance(messages, list):
        raise ConfigError(f"{path}, line {line.number}: --system-prompt goes before messages, and this line has none")
    if any(isinstance(message, dict) and message.get("role") == "system" for message in messages):
        raise ConfigError(f"{path}, line {line.number}: these messages have a system prompt; leave --system-prompt out")
    return line._replace(fields={**line.fields, "messages": [{"role": "system", "content": system}, *messages]})


def table_text(table: DepthTable) -> str:
    """Return the table as text: for each prefix ratio the proven depth, and the measured nats of each depth."""
    lines = [
        f"{table.model}: {table.layers} layers, {table.samples} requests audited ({table.source})",
        "How far first predictions move in nats, where they move most; mean and 95 % interval",
    ]
    for ratio, depths in sorted(table.nats.items()):
        depth = table.lookup.depth(ratio, 100)
        lines += ["", f"prefixes from {ratio} % of the canvas: {depth} layers may be read"]
        for measured_depth, (mean, low, high) in sorted(depths.items()):
            lines.append(f"{measured_depth:>7} layers  {mean:.3f} ({low:.3f} to {high:.3f})")
    if not table.entries:
        lines += ["", f"No depth is shown to stay below {table.bound:g} nats: nothing would be read from the store."]
    return "\n".join(lines)


def quantize(args: argparse.Namespace) -> int:
    """Write the quantized checkpoint, and print its size. Returns 0. Raises `ConfigError` and `CheckpointError`."""
    announce_download(ModelSettings(args.model), None)
    if is_adapter(resolve_model(args.model, progress=args.progress)):
        raise ConfigError(
            f"--model: {args.model!r} is an adapter, which is merged into its base when it is loaded; --quantization "
            "of the command that loads it quantizes the sum then"
        )
    source = find_source(args.model, progress=args.progress)
    folder = source.weights
    family, config = read_config(folder, source.overrides)
    check_matrix_sizes(args.quantization, config)
    check_tensors(folder, family, config, torch.bfloat16)
    try:
        size = save_quantized(
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
