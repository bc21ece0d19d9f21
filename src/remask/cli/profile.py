"""`remask profile` measures how deep a shared prefix may be reused, `remask quantize` writes a checkpoint of quantized
weights: what is made of a model and kept.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

import torch

from remask.checkpoint.load import check_tensors, read_config
from remask.checkpoint.quantised_files import save_quantised
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import find_source, is_adapter, resolve
from remask.checks.plugins import Plugin, Registry, install_line
from remask.cli.arguments import rule_of
from remask.cli.options import check_folder, open_llm
from remask.depth.find import DepthTable
from remask.depth.profile import profile
from remask.depth.prompts import default_prompts, read_prompts, under_system_prompt
from remask.depth.rule import ProfileSettings
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, UnknownNameError
from remask.loading import announce_download
from remask.model.sizes import check_sizes

Drawing: TypeAlias = Callable[[str], Callable[[DepthTable], None]]


def run(args: argparse.Namespace) -> int:
    """Profile the model, print the table, and write the files that were asked for."""
    names = ["tau", "samples", "max_samples", "official", "joint", "needed_layers", "canvas", "response", "seed"]
    ratios = None if args.ratios is None else tuple(args.ratios)
    settings = ProfileSettings(rule=rule_of(args), ratios=ratios, **{name: getattr(args, name) for name in names})
    draw = None if args.plot is None else _picture(args.plot)
    check_folder("--output", args.output)
    # Profiling allocates its own K/V memory, so the engine's is made as small as possible.
    limits = EngineConfig(max_num_seqs=1, max_model_len=1, store_budget_tokens=0)
    llm = open_llm(args, engine=limits, reads="tokens" if args.system_prompt is None else "text")
    prompts = default_prompts(llm.loaded) if args.prompts is None else read_prompts(args.prompts, llm.loaded)
    if args.system_prompt is not None:
        prompts = under_system_prompt(args.system_prompt, prompts, llm.loaded)
    table = profile(llm.session, prompts, settings, progress=llm.session.progress)
    print(report(table))
    if args.output is not None:
        table.save(args.output)
        print(f"\nSaved as {args.output}; use it with --depth-table {args.output}")
    else:
        print("\nNot saved; --output FILE keeps it.")
    if draw is not None:
        draw(table)
        print(f"Picture: {args.plot}")
    return 0


def _checked(plugin: Plugin, value: object) -> Drawing:
    if not callable(value):
        raise plugin.error(f"it provides an object of type {type(value).__name__}", "a function of a file's path")
    return value


DRAWINGS: Registry[Drawing] = Registry("drawing", "remask.drawings", {}, _checked)
"""What draws into a file, by name. The laboratory registers it by an entry point."""


def _picture(path: str) -> Callable[[DepthTable], None]:
    """Return a function that draws a table into the file `path`."""
    try:
        return DRAWINGS.get("depth-table")(path)
    except UnknownNameError as error:
        raise ConfigError(
            f"--plot: no installed package draws depth tables; install one with: {install_line('lab')}, or leave "
            "--plot out"
        ) from error


def report(table: DepthTable) -> str:
    """Return the table as text: for each ratio the depth of a lookup, and the mean of the depths of single requests."""
    lookup = table.lookup
    lines = [
        f"{table.model}: {table.layers} layers, tau {table.tau:g}, {table.definition} similarity, "
        f"{table.samples} requests per ratio",
        f"({table.source})",
        f"rule: {'not published' if table.rule is None else table.rule}",
        "",
        "ratio %  depth" + ("  mean per request" if table.request_depths else ""),
    ]
    for ratio in sorted(table.limits):
        mean = f"  {table.request_depths[ratio]:>16.2f}" if table.request_depths else ""
        lines.append(f"{ratio:>7}  {lookup.depth(ratio, 100):>5}{mean}")
    if table.growth:
        steps = ", ".join(f"{step.distance:.2f} at {step.samples}" for step in table.growth)
        lines += ["", f"Mean change of depth as N grew: {steps}"]
    deepest = lookup.depth(100, 100)
    tried = ",".join(str(depth) for depth in sorted({1, deepest // 4, deepest // 2, deepest}) if depth)
    lines += [
        "",
        "These depths compare keys and values, a prefix as one vector, and no answers: where a question changes few "
        "rows of a prefix, they can be far too deep. Ask questions of your own before you rely on them:",
        f"  remask bench --model {table.model} --input prompts.jsonl --caches reuse --depths {tried or 1}",
    ]
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
            own=source.own(family.words),
        )
    except OSError as error:
        raise ConfigError(f"--output: {args.output!r} cannot be written: {error.strerror or error}") from error
    print(f"{args.output}: {config.parameters:,} parameters in {size / 1e9:.3f} GB ({args.quantization})")
    return 0
