"""Writes docs/lab/caches.md from the result files in benchmarks/results/caches, and measures them.

    python -m remask_lab pages caches [--measure MODEL ...] [--decodings NAME ...] [--requests N]

Without `--measure` only the page is written. Each decoding of a model is one run, and has a file.
"""

import argparse
from collections.abc import Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from remask.engine.config import EngineConfig
from remask.errors import ConfigError, UnknownNameError
from remask.llm import LLM
from remask.machine.disk import write_whole
from remask_lab.bench.decodings import BASELINE, GRIDS, RANDOM_ORDER, SUBJECT, measure
from remask_lab.bench.plot import Row
from remask_lab.pages.page import PAGES, RESULTS, fill, made, page_parser, run_page
from remask_lab.records.interval import MARGIN, Shown, judged, percent_text
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, number_format, read_record, write_record

CLEARLY = 0.8  # one turn's speed over another's, below which it counts as slower
FOLDER = RESULTS / "caches"


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and write the page. Returns 0, or 2 after printing an error that the user can mend."""
    parser = page_parser("caches", __doc__)
    parser.add_argument("--measure", nargs="+", choices=tuple(GRIDS), default=(), metavar="MODEL")
    parser.add_argument("--decodings", nargs="+", metavar="NAME", help="measure these alone (default: all)")
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="of each model (default 48)")
    parser.add_argument("--folder", default=str(FOLDER), help="of the result files")
    parser.add_argument("--output", default=str(PAGES["caches"]), help="the page")
    return run_page(_run, parser, argv)


def _run(args: argparse.Namespace) -> None:
    if args.decodings and not args.measure:
        raise ConfigError("--decodings says what --measure measures; name a model there")
    known = [name for model in args.measure for name in GRIDS[model].decodings]
    for name in args.decodings or ():
        if name not in known:
            raise UnknownNameError("decoding of the models of --measure", name, known)
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    for model in args.measure:
        llm = LLM(model, dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=8), progress=False)
        for number, decoding in enumerate(GRIDS[model].decodings):
            if not args.decodings or decoding in args.decodings:
                write_record(folder / f"{model}.{number}.json", measure(llm, decoding, args.requests, 31337))
    write_whole("the page", args.output, page([read_record(path, SUBJECT) for path in sorted(folder.iterdir())]))


def page(records: Sequence[Record]) -> str:
    """The page of all models; the records of one model follow one another."""
    models = []
    for model, group in groupby(records, lambda record: str(record.about["model"])):
        own = list(group)
        models.append((model, _about(own[0]), [_section(record) for record in own]))
    losses = []
    for record in records:
        rows = _rows(record)
        lost = [name for name, row in rows.items() if name != BASELINE and judged(row, rows["none"]) is Shown.LOST]
        if lost:
            losses.append(f"- `{record.about['model']}`, {record.about['settings']['decoding']}: {_listed(lost)}.")
    told = "\n".join(losses) or "None of those measured."
    return fill("caches", overview=_overview(records), losses=told, models=models)


def _rows(record: Record) -> dict[str, Row]:
    return {row["cache"]: row for row in record.data["results"]}


def _overview(records: Sequence[Record]) -> str:
    """One table of all caches and models, at one token a step."""
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        model, decoding = record.about["model"], record.about["settings"]["decoding"]
        if decoding not in (next(iter(GRIDS[model].decodings)), RANDOM_ORDER):
            continue
        for cache, row in _rows(record).items():
            if cache != BASELINE:
                right, low, high = (100 * share for share in (row["accuracy"], *row["accuracy_interval"]))
                name = f"`{cache}`" + (f", {RANDOM_ORDER}" if decoding == RANDOM_ORDER else "")
                shown = f"{right:.0f} % ({low:.0f} to {high:.0f}), {row['work_ratio_to_none']:.2f}x"
                cells.setdefault(name, {})[model] = shown
    models = list(dict.fromkeys(record.about["model"] for record in records))
    rows = [[name, *(own.get(model, "-") for model in models)] for name, own in cells.items()]
    return markdown_table(["cache", *(f"`{model}`" for model in models)], rows)


def _about(record: Record) -> str:
    about, asked = record.about, record.about["settings"]
    over = f" over {asked['prefixes']} prefixes" if asked["prefixes"] else ""
    return (
        f"{asked['requests']} questions{over}, {asked['max_tokens']} tokens in blocks of {asked['block_length']}, "
        f"{asked['concurrency']} at a time, seed {about['seed']}, {number_format(about)} {made(record)}"
    )


def _section(record: Record) -> tuple[str, str, str, str]:
    """The title, the table, its reading and what is left out of one decoding."""
    asked, rows = record.about["settings"], _rows(record)
    first = rows.pop(BASELINE)
    titles = ["cache", "tokens a step", "right answers", "as `none`", "work", "time"]
    table = markdown_table(titles, [_cells(row, asked) for row in rows.values()])
    left_out = "\n".join(f"- Left out: `{name}`: {reason}." for name, reason in record.data["left_out"].items())
    return f"{asked['decoding'][0].upper()}{asked['decoding'][1:]}", table, _reading(rows, first), left_out


def _cells(row: Row, asked: Mapping[str, Any]) -> list[str]:
    return [
        f"`{row['cache']}`",
        f"{asked['requests'] * asked['max_tokens'] / row['forwards']:.2f}",
        percent_text(row["accuracy"], row["accuracy_interval"]),
        f"{100 * row['agreement_with_none']:.1f} %",
        f"{row['work_ratio_to_none']:.2f}x",
        f"{row['ratio_to_none']:.1f}x",
    ]


def _reading(rows: Mapping[str, Row], first: Row) -> str:
    """Which caches lose answers here, and which compute less than `none` under this decoding but take much longer."""
    none = rows["none"]
    found = {name: judged(row, none) for name, row in rows.items() if name != "none"}
    lost, kept = ([name for name, each in found.items() if each is what] for what in (Shown.LOST, Shown.KEPT))
    fewer = [name for name in found if rows[name]["accuracy"] < none["accuracy"] and name not in (*lost, *kept)]
    slow = [
        name
        for name, row in rows.items()
        if row["work_ratio_to_none"] > none["work_ratio_to_none"]
        and row["ratio_to_none"] < CLEARLY * none["ratio_to_none"]
    ]
    parts = ["This decoding loses answers without a cache too."] if judged(none, first) is Shown.LOST else []
    parts += [f"Fewer right answers than `none`: {_listed(lost)}."] if lost else []
    parts += [f"Fewer, which shows no loss at this size: {_listed(fewer)}."] if fewer else []
    parts += [f"A loss of {100 * MARGIN:g} points is excluded: {_listed(kept)}."] if kept else []
    parts += [] if lost or fewer else ["No cache has fewer right answers than `none`."]
    parts += [f"Less work than `none`, and slower: {_listed(slow)}."] if slow else []
    return " ".join(parts)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
