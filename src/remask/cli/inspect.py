"""`remask inspect`: a model's shape and memory, and who holds the K/V pages while a file of requests is answered.

A model is described by its `config.json` and the headers of its weight files alone.
"""

import argparse
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import prod
from typing import Any

import torch

from remask.checkpoint.adapter import AdapterFacts, read_adapter
from remask.checkpoint.load import check_tensors, read_config
from remask.checkpoint.source import find_source
from remask.checks import Quantization, in_words
from remask.checks.values import check_real, check_whole
from remask.cli.lines import build_requests, load_lines
from remask.cli.options import engine_config, object_option, open_llm, sampling_option
from remask.engine.capacity import DeviceMemory, token_bytes, weight_bytes
from remask.engine.config import DEFAULT_UTILIZATION
from remask.engine.engine import Engine
from remask.engine.fitting import CPU_SHARE, CpuMemory, cpu_quantizations, gpu_tokens
from remask.engine.report import MemoryReport, PageTable, StoredPart
from remask.engine.request import Request
from remask.families import presets
from remask.machine.cpu import memory
from remask.machine.device import DTYPES, trim_cuda_memory
from remask.model.config import ModelConfig
from remask.model.executors import resolve_executor
from remask.model.ranks import Shard
from remask.policies import names_for


def run(args: argparse.Namespace) -> int:
    """Inspect a model or the store. Returns 0. Raises as `inspect_model`, or as `open_llm` and `load_lines`."""
    return _run_model(args) if args.subject == "model" else _run_store(args)


def _run_model(args: argparse.Namespace) -> int:
    """Print a `ModelReport`."""
    check_real("--memory", args.memory, low=0, above=True, optional=True)
    memory_bytes = None if args.memory is None else int(args.memory * 1e9)
    report = inspect_model(args.path, memory_bytes, args.tensor_parallel, args.adapter)
    print(json.dumps(report.as_json()) if args.json else report.text())
    return 0


def _run_store(args: argparse.Namespace) -> int:
    """Answer the requests, and print the memory when it was fullest and at the end."""
    sampling = sampling_option(args)
    file = load_lines(args.input)
    settings = object_option("--cache-config", args.cache_config)
    with open_llm(args, args.cache, settings, engine_config(args)) as llm:
        fullest, end = watch_memory(llm.engine, [request for request, _ in build_requests(llm, file, sampling)])
    if args.json:
        print(json.dumps({"fullest": _as_json(fullest), "end": _as_json(end)}))
    else:
        print(f"When the memory was fullest:\n{report_text(fullest)}\n\nAt the end:\n{report_text(end)}")
    return 0


def watch_memory(engine: Engine, requests: Sequence[Request]) -> tuple[MemoryReport, MemoryReport]:
    """Run `requests`. Returns the memory report of the step with the most pages in use, and the last report.

    Of steps with equally many pages in use, it is the one with the most references to them.
    """
    for request in requests:
        engine.add(request)
    fullest = engine.memory_report(detail=True)
    while engine.busy:
        engine.step()
        current = engine.memory_report(detail=True)
        fullest = max(fullest, current, key=lambda report: (report.used, report.references))
    return fullest, engine.memory_report(detail=True)


def report_text(report: MemoryReport) -> str:
    """Return a memory report as text. A page counts once in each layer."""
    width = max([12, *(len(holder.name) + 2 for holder in report.holders)])
    lines = [
        f"  {report.used} of {report.total} pages (x layers) used, {report.bytes / 1e6:.2f} MB; without sharing "
        f"{report.references}",
        f"  {report.shared} have more than one reference",
        f"  {report.slots} slots, {report.wasted} wasted: utilisation {100 * report.utilisation:.1f} %",
        f"  exact pages: {report.hit_tokens} of {report.asked_tokens} tokens asked for were found",
        "",
        f"  {'holder':<{width}}{'tokens':>8}{'pages':>8}{'shared':>8}{'found':>8}",
    ]
    for holder in report.holders:
        counts = (holder.tokens, holder.pages, holder.shared, holder.found)
        lines.append(f"  {holder.name:<{width}}" + "".join(f"{count:>8}" for count in counts))
        lines += [f"    {_table_text(table)}" for table in holder.tables]
    if report.stored:
        lines += ["", "  stored (hash, tokens up to its end, pages, who reads it):", *_stored_lines(report.stored)]
    return "\n".join(lines)


def _stored_lines(parts: Sequence[StoredPart], parent: str | None = None, indent: str = "  ") -> Iterator[str]:
    """Yield a line for each stored part, indented below the part that it continues."""
    for part in parts:
        if part.parent == parent:
            readers = ", ".join(part.readers) or "nobody"
            yield f"{indent}{part.id}  {part.tokens} tokens, {_table_text(part.table)}: {readers}"
            yield from _stored_lines(parts, part.id, indent + "  ")


def _table_text(table: PageTable) -> str:
    """Return a page table as a line: runs of consecutive pages with the same number of references."""
    runs: list[tuple[int, int, int]] = []  # first page, last page, references
    for page, count in zip(table.pages, table.references, strict=True):
        if runs and runs[-1][1:] == (page - 1, count):
            runs[-1] = (runs[-1][0], page, count)
        else:
            runs.append((page, page, count))
    texts = [f"{first}{f'-{last}' if last > first else ''} (held by {count})" for first, last, count in runs]
    return f"layers {table.layers[0]}-{table.layers[1] - 1}: pages {', '.join(texts) or 'none'}"


def _as_json(report: MemoryReport) -> dict[str, Any]:
    return {**asdict(report), "utilisation": report.utilisation}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model's shape, and the memory that it needs, found without reading weights.

    A form is a dtype, or a quantization beside bfloat16, in which weights can be loaded.

    Attributes:
        name: the path or preset.
        config: its shape.
        stored: number of weights in the files, by their type there; empty for a preset.
        weight_bytes: bytes of the weights on one device, by form.
        kv_bytes: bytes of one token's K and V in all layers on one device, by form.
        ranks: devices that the model is spread over.
        memory_bytes: bytes of memory of one device; None if unknown.
        kv_tokens: tokens whose K and V fit beside the weights and a pass, by form; None if not even these fit.
        policies: names of the cache policies that run on the model.
        adapter: the adapter that is merged into the weights; None without one.
    """

    name: str
    config: ModelConfig
    stored: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    kv_bytes: Mapping[str, int]
    ranks: int
    memory_bytes: int | None
    kv_tokens: Mapping[str, int | None]
    policies: tuple[str, ...]
    adapter: AdapterFacts | None = None

    def as_json(self) -> dict[str, Any]:
        """Return the report as JSON values, with `_SHAPE` in place of the configuration."""
        values = asdict(self)
        shape = {name: getattr(self.config, name) for name in _SHAPE} | {"mixture": values.pop("config")["mixture"]}
        return {"name": values.pop("name"), **shape, **values}

    def text(self) -> str:
        """Return the report as lines of text."""
        config = self.config
        block = "" if config.block_length is None else f", blocks of {config.block_length}"
        lines = [
            f"{self.name}: {config.family}, {in_words((config.kind,))}{block}",
            f"  {config.layers} layers of {config.hidden}, {config.heads} heads of {config.head_dim} "
            f"({config.kv_heads} for K/V), vocabulary {config.vocab}, up to {config.max_length} positions",
            f"  feed-forward: {self._feed_forward()}",
            f"  {config.parameters:,} parameters, of which {config.active_parameters:,} compute a row",
        ]
        if self.stored:
            types = ", ".join(f"{count:,} {dtype}" for dtype, count in self.stored.items())
            lines.append(f"  in the files: {types}")
        if self.adapter is not None:
            lines.append(f"  adapter {self.adapter}")
        lines += [
            f"  as {form}: weights {size / 1e9:.2f} GB, K/V {self.kv_bytes[form] / 1e3:.1f} kB a token"
            + (f"; {self._fit(form)}" if self.memory_bytes is not None else "")
            for form, size in self.weight_bytes.items()
        ]
        if self.memory_bytes is not None:
            devices = "one device" if self.ranks == 1 else f"each of {self.ranks} devices"
            lines.append(
                f"  on {devices} of {self.memory_bytes / 1e9:.1f} GB, with {DEFAULT_UTILIZATION:.0%} of it taken; on a "
                f"CPU {CPU_SHARE:.0%} of what is free beside the weights"
            )
        return "\n".join([*lines, f"  cache policies: {', '.join(self.policies)}"])

    def _fit(self, form: str) -> str:
        """Return how many tokens have room beside weights of this form."""
        tokens = self.kv_tokens[form]
        return "does not fit" if tokens is None else f"room for {tokens:,} tokens"

    def _feed_forward(self) -> str:
        """Return what follows attention in words: the width, or the experts, their router and the dense layers."""
        config = self.config
        mixture = config.mixture
        if mixture is None:
            return f"{config.intermediate} wide"
        shared = f", a shared one of {mixture.shared}" if mixture.shared else ""
        dense_layers = mixture.dense_layers
        dense = f"; {len(dense_layers)} of {config.layers} layers dense, {config.intermediate} wide"
        router = f"{mixture.router.score} router"
        if mixture.router.kept_groups < mixture.router.groups:
            router += f" over {mixture.router.kept_groups} of {mixture.router.groups} groups"
        experts = f"{mixture.active} of {mixture.experts} experts of {mixture.intermediate}"
        return f"{experts}{shared}, {router}{dense if dense_layers else ''}"


def inspect_model(
    name: str, memory_bytes: int | None = None, ranks: int = 1, adapter: str | None = None
) -> ModelReport:
    """Return the report of a model: a folder, GGUF file, hub id or preset. No weight is read or allocated.

    `memory_bytes` is the memory of each of `ranks` devices; None: that of this machine. An `adapter`, a folder or hub
    id, is checked against the model.

    Raises `ConfigError` if the model cannot be split over `ranks` devices, `CheckpointError` if its files cannot be
    used or do not fit its configuration, `UnknownNameError` if it is of no known family, and `PluginError` if the
    package that provides the family cannot be used.
    """
    shapes = presets()
    if name in shapes:
        return _model_report(name, shapes[name], {}, memory_bytes, ranks, adapter)
    source = find_source(name)
    folder = source.weights
    family, config = read_config(folder, source.overrides)
    adapter = source.merged_adapter(name, adapter)
    _, tensors = check_tensors(folder, family, config, torch.bfloat16)
    stored = Counter[str]()
    for tensor in tensors.values():
        stored[tensor.dtype] += prod(tensor.shape)
    return _model_report(name, config, stored, memory_bytes, ranks, adapter)


_SHAPE = (
    *("family", "kind", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_length"),
    *("block_length", "mixture", "parameters", "active_parameters"),
)  # of `ModelConfig`, in the JSON of a `ModelReport`


def _model_report(
    name: str, config: ModelConfig, stored: Mapping[str, int], memory_bytes: int | None, ranks: int, adapter: str | None
) -> ModelReport:
    """The report of the shape `config`; `stored` counts weights by type. Raises `ConfigError` and `CheckpointError`."""
    check_whole("--tensor-parallel", ranks, low=1)
    Shard(0, ranks).check(config)
    total, free = _machine_memory() if memory_bytes is None else (memory_bytes, memory_bytes)
    has_cuda = torch.cuda.is_available()
    on_cpu = memory_bytes is None and not has_cuda
    attention = None
    if memory_bytes is None and has_cuda:
        attention = resolve_executor("auto", config, torch.device("cuda")).attention(config)
    forms: dict[str, tuple[torch.dtype, Quantization | None]] = {form: (dtype, None) for form, dtype in DTYPES.items()}
    forms |= {quantization: (torch.bfloat16, quantization) for quantization in cpu_quantizations(config, ranks)}
    form_bytes = {
        form: weight_bytes(config, dtype, ranks, quantization) for form, (dtype, quantization) in forms.items()
    }
    kv_bytes = {form: token_bytes(config, dtype.itemsize, ranks).kv for form, (dtype, _) in forms.items()}
    kv_tokens: dict[str, int | None] = {}
    for form, (dtype, quantization) in forms.items():
        if on_cpu or quantization is not None:
            cpu_free = (free or 0) * (1 if on_cpu else ranks)  # on this CPU all ranks share the memory
            kv_tokens[form] = CpuMemory.before_loading(config, dtype, quantization, cpu_free, ranks).kv_tokens()
        else:
            device = DeviceMemory(total or 0, total or 0, DEFAULT_UTILIZATION)
            kv_tokens[form] = gpu_tokens(config, dtype, None, device, ranks, attention)
    return ModelReport(
        name=name,
        config=config,
        stored=dict(stored),
        weight_bytes=form_bytes,
        kv_bytes=kv_bytes,
        ranks=ranks,
        memory_bytes=total,
        kv_tokens=kv_tokens,
        policies=names_for(config.kind),
        adapter=None if adapter is None else read_adapter(adapter, config).facts,
    )


def _machine_memory() -> tuple[int, int] | tuple[None, None]:
    """Return the total and free bytes of the first CUDA device, or else of this machine; None, None if unknown."""
    if torch.cuda.is_available():
        return trim_cuda_memory(torch.device("cuda"))
    return memory() or (None, None)
