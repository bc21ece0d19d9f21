"""`remask inspect`: a model's shape and memory, and who holds the K/V pages while a file of requests is answered."""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

from remask.checks.values import real
from remask.cli.inspect_model import inspect_model
from remask.cli.lines import defaults_of, read_requests
from remask.cli.options import engine_config, open_llm
from remask.engine.engine import Engine
from remask.engine.report import MemoryReport, PageTable, StoredPart
from remask.engine.request import Request


def run_model(args: argparse.Namespace) -> int:
    """Print what is known of the model."""
    real("--memory", args.memory, low=0, above=True, optional=True)
    size = None if args.memory is None else int(args.memory * 1e9)
    report = inspect_model(args.path, size, args.tensor_parallel)
    print(json.dumps(asdict(report)) if args.json else report.text())
    return 0


def run(args: argparse.Namespace) -> int:
    """Look into what the subject names."""
    return run_model(args) if args.subject == "model" else run_store(args)


def run_store(args: argparse.Namespace) -> int:
    """Answer the requests, and print the memory when it was fullest and at the end."""
    defaults = defaults_of(args)
    llm = open_llm(args, defaults.cache, dict(defaults.cache_config), engine_config(args))
    fullest, end = watch(llm.engine, read_requests(llm, args.input, defaults))
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
