"""Writes docs/caches.md from the result files in benchmarks/results/caches, and measures them.

    python -m remask_lab.pages.caches [--measure MODEL ...] [--decodings NAME ...] [--requests N]

Without `--measure` only the page is written. Each decoding of a model is one run, and has a file.
"""

import argparse
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from remask.engine.config import EngineConfig
from remask.errors import ConfigError, RemaskError, UnknownNameError
from remask.llm import LLM
from remask.machine.disk import write_whole
from remask_lab.bench.decodings import BASELINE, GRIDS, RANDOM_ORDER, SUBJECT, measure
from remask_lab.bench.rows import Row
from remask_lab.pages.results import RESULTS, ROOT
from remask_lab.records.interval import percent_text
from remask_lab.records.machine import processor_text
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, read_record, write_record

CLEARLY = 0.8  # one turn's speed over another's, below which it counts as slower
FOLDER, PAGE = RESULTS / "caches", ROOT / "docs" / "caches.md"
HEAD = """# Caches under every way of decoding

`python -m remask_lab.pages.caches --measure bundled-tariff bundled-transit bundled-uniform` measures what stands
here and writes this page. [Cache policies](policies.md) says what each cache does, [Sampling](sampling.md) what each
decoding does. Each table is one run. All rows of a model are compared with `none` in as many steps as tokens
(`bundled-uniform`: in twice as many, as a token may change again), which takes part in every run.

- **Tokens a step**: positions of the response over passes. Where a threshold decides how many, caches differ. A
  response that ends early runs fewer passes.
- **As `none`**: share of tokens that are those of the row that all are compared with.
- **Work**: row-layers of that row over those of this one. These counts do not depend on the machine.
- **Time**: the same of seconds, of one turn on a machine that does other things too: its order of magnitude counts.

Questions are held-out ones of the model's own task; right answers have 95 % intervals. `bicache` and
`bicache+block-dual` share prefixes between requests too.

`bundled-tariff` names independent facts, so it answers in few steps whatever is cached: there the tables say what a
cache computes. `bundled-transit` and `bundled-uniform`, whose steps build on one another, say what it loses.
"""
OVERVIEW = """## Caches within a request

Right answers (95 % interval) and work, at one token a step. `dkv-greedy` needs an order that is drawn beforehand.
"""
LOSSES = """## Combinations that lose answers

Those of a cache and a decoding whose interval lies below that of `none` under the same decoding:
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and write the page. Returns 0, or 2 after printing an error that the user can mend."""
    parser = argparse.ArgumentParser(
        prog="python -m remask_lab.pages.caches",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--measure", nargs="+", choices=tuple(GRIDS), default=(), metavar="MODEL")
    parser.add_argument("--decodings", nargs="+", metavar="NAME", help="measure these alone (default: all)")
    parser.add_argument("--requests", type=int, default=48, metavar="N", help="of each model (default 48)")
    parser.add_argument("--folder", default=str(FOLDER), help="of the result files")
    parser.add_argument("--output", default=str(PAGE), help="the page")
    args = parser.parse_args(argv)
    try:
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
    except RemaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def page(records: Sequence[Record]) -> str:
    """The page of all models; the records of one model follow one another."""
    parts = [HEAD.rstrip(), OVERVIEW.rstrip(), _overview(records), LOSSES.rstrip(), _losses(records)]
    for model, own in groupby(records, lambda record: str(record.about["model"])):
        parts.append(f"## `{model}`")
        for number, record in enumerate(own):
            parts += [_about(record)] * (number == 0) + [*_section(record)]
    return "\n\n".join(parts) + "\n"


def _overview(records: Sequence[Record]) -> str:
    """One table of all caches and models, at one token a step."""
    cells: dict[str, dict[str, str]] = {}
    for record in records:
        model, decoding = record.about["model"], record.about["settings"]["decoding"]
        if decoding not in (next(iter(GRIDS[model].decodings)), RANDOM_ORDER):
            continue
        for row in record.data["results"]:
            if row["cache"] == BASELINE:
                continue
            low, high = row["accuracy_interval"]
            shown = f"{100 * row['accuracy']:.0f} % ({100 * low:.0f} to {100 * high:.0f}), "
            name = f"`{row['cache']}`" + (f", {RANDOM_ORDER}" if decoding == RANDOM_ORDER else "")
            cells.setdefault(name, {})[model] = f"{shown}{row['work_ratio_to_none']:.2f}x"
    models = list(dict.fromkeys(record.about["model"] for record in records))
    rows = [[name, *(own.get(model, "-") for model in models)] for name, own in cells.items()]
    return markdown_table(["cache", *(f"`{model}`" for model in models)], rows)


def _about(record: Record) -> str:
    about, asked = record.about, record.about["settings"]
    over = f" over {asked['prefixes']} prefixes" if asked["prefixes"] else ""
    return (
        f"{asked['requests']} questions{over}, {asked['max_tokens']} tokens in blocks of {asked['block_length']}, "
        f"{asked['concurrency']} at a time, seed {about['seed']}, {about['machine']['dtype']} on "
        f"{processor_text(about['machine'])}, commit {about['commit']}, {about['date']}."
    )


def _section(record: Record) -> Iterator[str]:
    asked, rows = record.about["settings"], {row["cache"]: row for row in record.data["results"]}
    first = rows.pop(BASELINE)
    yield f"### {asked['decoding'][0].upper()}{asked['decoding'][1:]} (`{record.about['model']}`)"
    titles = ["cache", "tokens a step", "right answers", "as `none`", "work", "time"]
    yield markdown_table(titles, [_cells(row, asked) for row in rows.values()])
    yield _reading(rows, first)
    if record.data["left_out"]:
        yield "\n".join(f"- Left out: `{name}`: {reason}." for name, reason in record.data["left_out"].items())


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
    fewer = [name for name, row in rows.items() if row["accuracy"] < none["accuracy"]]
    lost = [name for name in fewer if _loses(rows[name], none)]
    within = [name for name in fewer if name not in lost]
    slow = [
        name
        for name, row in rows.items()
        if row["work_ratio_to_none"] > none["work_ratio_to_none"]
        and row["ratio_to_none"] < CLEARLY * none["ratio_to_none"]
    ]
    parts = ["This decoding loses answers without a cache too."] if _loses(none, first) else []
    parts += [f"Fewer right answers than `none`, beyond both intervals: {_listed(lost)}."] if lost else []
    parts += [f"Fewer, within the intervals: {_listed(within)}."] if within else []
    parts += [] if fewer else ["No cache loses answers."]
    parts += [f"Less work than `none`, and slower: {_listed(slow)}."] if slow else []
    return " ".join(parts)


def _loses(row: Row, other: Row) -> bool:
    """Whether the 95 % interval of a row's right answers lies below that of another one."""
    return bool(row["accuracy_interval"][1] < other["accuracy_interval"][0])


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _losses(records: Sequence[Record]) -> str:
    """All pairs of a decoding and a cache that lose answers of `none` under the same decoding."""
    lines = []
    for record in records:
        rows = {row["cache"]: row for row in record.data["results"]}
        lost = [name for name, row in rows.items() if name != BASELINE and _loses(row, rows["none"])]
        if lost:
            lines.append(f"- `{record.about['model']}`, {record.about['settings']['decoding']}: {_listed(lost)}.")
    return "\n".join(lines) or "None of those measured."


if __name__ == "__main__":
    sys.exit(main())
