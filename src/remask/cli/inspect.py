"""`remask inspect`: a model's shape and memory, and who holds the K/V pages while a file of requests is answered.

What is said of a model comes from `config.json` and the headers of the weight files alone.
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
from remask.checks import ModelKind, Quantization, in_words
from remask.checks.values import real, whole
from remask.cli.lines import load_lines, read_lines
from remask.cli.options import engine_config, object_option, open_llm, sampling_option
from remask.engine.capacity import DeviceMemory, token_bytes, weight_bytes
from remask.engine.config import DEFAULT_UTILIZATION
from remask.engine.engine import Engine
from remask.engine.fitting import CPU_SHARE, CpuMemory, cpu_quantizations, gpu_tokens
from remask.engine.report import MemoryReport, PageTable, StoredPart
from remask.engine.request import Request
from remask.families import presets
from remask.machine.cpu import memory
from remask.machine.device import DTYPES, free_memory
from remask.model.config import Mixture, ModelConfig
from remask.model.executors import resolve_executor
from remask.model.ranks import Shard
from remask.policies import names_for


def run(args: argparse.Namespace) -> int:
    """Look into what the subject names."""
    return _run_model(args) if args.subject == "model" else _run_store(args)


def _run_model(args: argparse.Namespace) -> int:
    """Print what is known of the model."""
    real("--memory", args.memory, low=0, above=True, optional=True)
    size = None if args.memory is None else int(args.memory * 1e9)
    report = inspect_model(args.path, size, args.tensor_parallel, args.adapter)
    print(json.dumps(asdict(report)) if args.json else report.text())
    return 0


def _run_store(args: argparse.Namespace) -> int:
    """Answer the requests, and print the memory when it was fullest and at the end."""
    sampling, lines = sampling_option(args), load_lines(args.input)
    llm = open_llm(args, args.cache, object_option("--cache-config", args.cache_config), engine_config(args))
    fullest, end = watch(llm.engine, [request for request, _ in read_lines(llm, lines, sampling)])
    if args.json:
        print(json.dumps({"fullest": _plain(fullest), "end": _plain(end)}))
    else:
        print(f"When the memory was fullest:\n{text(fullest)}\n\nAt the end:\n{text(end)}")
    return 0


def watch(engine: Engine, work: Sequence[Request]) -> tuple[MemoryReport, MemoryReport]:
    """Run `work`. Returns the memory report of the step with most pages and references in use, and the last report."""
    for item in work:
        engine.add(item)
    fullest = engine.memory_report(detail=True)
    while engine.busy:
        engine.step()
        now = engine.memory_report(detail=True)
        fullest = max(fullest, now, key=lambda report: (report.used, report.references))
    return fullest, engine.memory_report(detail=True)


def text(report: MemoryReport) -> str:
    """Return a report as text. A page counts once in each layer."""
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
        numbers = (holder.tokens, holder.pages, holder.shared, holder.found)
        lines.append(f"  {holder.name:<{width}}" + "".join(f"{number:>8}" for number in numbers))
        lines += [f"    {_table_text(table)}" for table in holder.tables]
    if report.stored:
        lines += ["", "  stored (hash, tokens up to its end, pages, who reads it):", *_tree(report.stored)]
    return "\n".join(lines)


def _tree(stored: Sequence[StoredPart], parent: str | None = None, indent: str = "  ") -> Iterator[str]:
    """A line for each part of the store, below the one that it continues."""
    for part in stored:
        if part.parent == parent:
            readers = ", ".join(part.readers) or "nobody"
            yield f"{indent}{part.id}  {part.tokens} tokens, {_table_text(part.table)}: {readers}"
            yield from _tree(stored, part.id, indent + "  ")


def _table_text(table: PageTable) -> str:
    """A page table in a line: runs of pages that are held by equally many."""
    runs: list[list[int]] = []  # first page, last page, references
    for page, count in zip(table.pages, table.references, strict=True):
        if runs and runs[-1][1:] == [page - 1, count]:
            runs[-1][1] = page
        else:
            runs.append([page, page, count])
    named = [f"{first}{f'-{last}' if last > first else ''} (held by {count})" for first, last, count in runs]
    return f"layers {table.layers[0]}-{table.layers[1] - 1}: pages {', '.join(named) or 'none'}"


def _plain(report: MemoryReport) -> dict[str, Any]:
    return {**asdict(report), "utilisation": report.utilisation}


@dataclass(frozen=True, slots=True)
class ModelReport:
    """A model, before any weight is read.

    Attributes:
        name: the path or preset.
        family: its family.
        kind: how it is denoised.
        layers, hidden, heads, kv_heads, head_dim, intermediate, vocab, max_length, block_length: as in `ModelConfig`.
        mixture: the experts, where layers have them.
        parameters: weights that are resident.
        active_parameters: weights that one row is computed with.
        stored: parameters in the files by the type that they are stored in; empty for a preset.
        weight_bytes: memory of the weights by the dtype, or the kind of few bits, that they are loaded as.
        kv_bytes: memory of one token's K and V in all layers, likewise: beside few bits in bfloat16.
        ranks: devices that the model is spread over; the memory is that of each.
        memory_bytes: memory of a device; None where this machine does not say.
        kv_tokens: tokens whose K and V have room there beside the weights and a pass, likewise; None: not even these.
        policies: names of the cache policies that fit the model's attention.
        adapter: the low-rank adapter that is merged into the weights, if one was named.
    """

    name: str
    family: str
    kind: ModelKind
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    max_length: int
    block_length: int | None
    mixture: Mixture | None
    parameters: int
    active_parameters: int
    stored: Mapping[str, int]
    weight_bytes: Mapping[str, int]
    kv_bytes: Mapping[str, int]
    ranks: int
    memory_bytes: int | None
    kv_tokens: Mapping[str, int | None]
    policies: tuple[str, ...]
    adapter: AdapterFacts | None = None

    def text(self) -> str:
        """The report as lines of text."""
        block = "" if self.block_length is None else f", blocks of {self.block_length}"
        lines = [
            f"{self.name}: {self.family}, {in_words((self.kind,))}{block}",
            f"  {self.layers} layers of {self.hidden}, {self.heads} heads of {self.head_dim} "
            f"({self.kv_heads} for K/V), vocabulary {self.vocab}, up to {self.max_length} positions",
            f"  feed-forward: {self._feed_forward()}",
            f"  {self.parameters:,} parameters, of which {self.active_parameters:,} compute a row",
        ]
        if self.stored:
            held = ", ".join(f"{count:,} {dtype}" for dtype, count in self.stored.items())
            lines.append(f"  in the files: {held}")
        if self.adapter is not None:
            lines.append(f"  adapter {self.adapter}")
        lines += [
            f"  as {dtype}: weights {size / 1e9:.2f} GB, K/V {self.kv_bytes[dtype] / 1e3:.1f} kB a token"
            + (f"; {self._fit(dtype)}" if self.memory_bytes is not None else "")
            for dtype, size in self.weight_bytes.items()
        ]
        if self.memory_bytes is not None:
            each = "one device" if self.ranks == 1 else f"each of {self.ranks} devices"
            lines.append(
                f"  on {each} of {self.memory_bytes / 1e9:.1f} GB, with {DEFAULT_UTILIZATION:.0%} of it taken; on a "
                f"CPU {CPU_SHARE:.0%} of what is free beside the weights"
            )
        return "\n".join([*lines, f"  cache policies: {', '.join(self.policies)}"])

    def _fit(self, dtype: str) -> str:
        tokens = self.kv_tokens[dtype]
        return "does not fit" if tokens is None else f"room for {tokens:,} tokens"

    def _feed_forward(self) -> str:
        mixture = self.mixture
        if mixture is None:
            return f"{self.intermediate} wide"
        shared = f", a shared one of {mixture.shared}" if mixture.shared else ""
        dense = mixture.dense_layers
        apart = f"; {len(dense)} of {self.layers} layers dense, {self.intermediate} wide" if dense else ""
        router = f"{mixture.router.score} router"
        if mixture.router.kept_groups < mixture.router.groups:
            router += f" over {mixture.router.kept_groups} of {mixture.router.groups} groups"
        experts = f"{mixture.active} of {mixture.experts} experts of {mixture.intermediate}"
        return f"{experts}{shared}, {router}{apart}"


def inspect_model(
    name: str, memory_bytes: int | None = None, ranks: int = 1, adapter: str | None = None
) -> ModelReport:
    """What the model `name` is: a folder or hub id, or a preset. No weight of it is read or allocated.

    An `adapter`, a folder or hub id, is checked against it. The report says what fits on `ranks` devices of
    `memory_bytes` each; None: that of this machine.

    Raises `ConfigError` where it cannot be cut for so many devices, `CheckpointError` where its files do not fit its
    configuration or cannot be used, `UnknownNameError` where no family claims it, and `PluginError` where another
    package provides it and cannot be used.
    """
    shapes = presets()
    if name in shapes:
        return _report(name, shapes[name], {}, memory_bytes, ranks, adapter)
    source = find_source(name)
    folder = source.weights
    family, config = read_config(folder, source.overrides)
    adapter = source.merged(name, adapter)
    _, located = check_tensors(folder, family, config, torch.bfloat16)
    stored = Counter[str]()
    for place in located.values():
        stored[place.dtype] += prod(place.shape)
    return _report(name, config, stored, memory_bytes, ranks, adapter)


_SHAPE = (
    *("family", "kind", "layers", "hidden", "heads", "kv_heads", "head_dim", "intermediate", "vocab", "max_length"),
    *("block_length", "mixture", "parameters", "active_parameters"),
)  # of `ModelConfig`, as `ModelReport` has it


def _report(
    name: str, c: ModelConfig, stored: Mapping[str, int], size: int | None, ranks: int, adapter: str | None
) -> ModelReport:
    whole("--tensor-parallel", ranks, low=1)
    Shard(0, ranks).check(c)
    total, free = _machine_memory() if size is None else (size, size)
    cuda = torch.cuda.is_available()
    on_cpu = size is None and not cuda  # whose processes share its memory
    attention = resolve_executor("auto", c, torch.device("cuda")).attention(c) if size is None and cuda else None
    forms: dict[str, tuple[torch.dtype, Quantization | None]] = {name: (dtype, None) for name, dtype in DTYPES.items()}
    forms |= {kind: (torch.bfloat16, kind) for kind in cpu_quantizations(c, ranks)}
    weights = {form: weight_bytes(c, dtype, ranks, kind) for form, (dtype, kind) in forms.items()}
    kv = {form: token_bytes(c, dtype.itemsize, ranks).kv for form, (dtype, _) in forms.items()}
    tokens: dict[str, int | None] = {}
    for form, (dtype, kind) in forms.items():
        if on_cpu or kind is not None:
            tokens[form] = CpuMemory.before_loading(
                c, dtype, kind, (free or 0) * (1 if on_cpu else ranks), ranks
            ).tokens()
        else:
            device = DeviceMemory(total or 0, total or 0, DEFAULT_UTILIZATION)
            tokens[form] = gpu_tokens(c, dtype, None, device, ranks, attention)
    return ModelReport(
        name=name,
        **{field: getattr(c, field) for field in _SHAPE},
        stored=dict(stored),
        weight_bytes=weights,
        kv_bytes=kv,
        ranks=ranks,
        memory_bytes=total,
        kv_tokens=tokens,
        policies=names_for(c.kind),
        adapter=None if adapter is None else read_adapter(adapter, c).facts,
    )


def _machine_memory() -> tuple[int, int] | tuple[None, None]:
    """Memory in all of the first CUDA device or of this machine, and what is free; None where it does not say."""
    if torch.cuda.is_available():
        free, total = free_memory(torch.device("cuda"))
        return total, free
    return memory() or (None, None)
