"""Writes docs/lab/results.md, and the tables that the README quotes, from the result files in benchmarks/results.

    python -m remask_lab pages results [--results FOLDER] [--output FILE] [--readme FILE]

Reads the files that `python -m remask_lab papers` and `remask bench` write. Each file of a table has its own section,
with its model and machine. The README quotes a file of `remask bench` between `<!-- table: NAME.json -->` and
`<!-- end of table -->`, and with the name `gpu` the results of `scripts/gpu` in the folder `gpu`.
"""

import argparse
import re
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from remask import __version__
from remask.checks import SMOLLM2
from remask.errors import ConfigError, RecordError
from remask.machine.disk import write_whole
from remask_lab.bench.report import table as bench_table
from remask_lab.gpu.results import read_kept, speed_table
from remask_lab.pages.claims import claims_table, read_claims
from remask_lab.pages.page import PAGES, README, RESULTS, fill
from remask_lab.papers.definition import PaperTable, load_table, table_names
from remask_lab.papers.measure import SUBJECT
from remask_lab.papers.show import beside, notes, published
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, read_record
from remask_lab.speed.command import command_parser, run_command

QUOTED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
SEVERAL = 4  # records with one note, from which on it stands in a common section
ELSEWHERE = (f"bench.{SMOLLM2}",)  # benches that are on the page of real weights
BENCH, DEPTH, GPU = "bench", "analyze depth", "gpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the README's tables. Returns 0, or 2 if a result file cannot be used."""
    parser = command_parser(__doc__, "pages results")
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="default benchmarks/results")
    parser.add_argument("--output", default=str(PAGES["results"]), metavar="FILE", help="default docs/lab/results.md")
    parser.add_argument("--readme", default=str(README), metavar="FILE", help="default README.md")
    return run_command(partial(_run, parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    """Write both files, after both texts are made: an error leaves both as they were."""
    records = read_all(args.results)
    gpus = read_kept(Path(args.results) / "gpu")
    text = page(records)
    readme = update_quotes(Path(args.readme).read_text(encoding="utf-8"), records, gpus)
    write_whole("the page", args.output, text)
    write_whole("the README", args.readme, readme)


def read_all(folder: str | Path) -> dict[str, Record]:
    """The records of a folder's JSON files by file name, in order of the names.

    Raises `ConfigError` without the folder, and `RecordError` if a file is no record, or has a subject that the page
    does not show.
    """
    if not Path(folder).is_dir():
        raise ConfigError(f"there is no folder of results {str(folder)!r}")
    records = {}
    for path in sorted(Path(folder).glob("*.json")):
        record = read_record(path)
        if record.subject not in (SUBJECT, BENCH, DEPTH):
            raise RecordError(f"{path.name} holds {record.subject!r}; the page shows {SUBJECT!r}, {BENCH!r}, {DEPTH!r}")
        records[path.name] = record
    return records


def page(records: Mapping[str, Record]) -> str:
    """The text of the page, from records by file name.

    Raises `RecordError` if a record is incomplete, of an unknown table, or of another version of its table.
    """
    tables, benches, depths = (
        {name: record for name, record in records.items() if record.subject == subject}
        for subject in (SUBJECT, BENCH, DEPTH)
    )
    by_table: dict[str, dict[str, Record]] = {table: {} for table in table_names()}
    for name, record in tables.items():
        table = record.about["settings"]["table"]
        if table not in by_table:
            raise RecordError(f"{name} is of table {table!r}, which is none of ours")
        by_table[table][name] = record
    common = _common_notes(tables)
    definitions = [load_table(table) for table in by_table]
    return fill(
        "results",
        claims=claims_table(read_claims(), tables.values()),
        common=_notes_by_files(common, list(tables)),
        tables=[
            (f"{table.name}: {table.title}", _table_section(table, by_table[table.name], common))
            for table in definitions
        ],
        variants=[_variants(record) for record in depths.values()],
        benches=[
            (stem, _bench_section(record, detailed=True))
            for name, record in benches.items()
            if (stem := Path(name).stem) not in ELSEWHERE
        ],
    )


def _common_notes(records: Mapping[str, Record]) -> dict[str, list[str]]:
    """The notes that at least `SEVERAL` records of tables have, each with the names of their files."""
    names_by_note: dict[str, list[str]] = {}
    for name, record in records.items():
        try:
            texts = notes(load_table(record.about["settings"]["table"]), record)
        except RecordError as error:
            raise RecordError(f"{name}: {error}") from error
        for text in texts:
            names_by_note.setdefault(text, []).append(name)
    return {text: names for text, names in names_by_note.items() if len(names) >= SEVERAL}


def _notes_by_files(common: Mapping[str, Sequence[str]], all_names: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The `common` notes, grouped by a text that lists their files, or all files but the others if these are fewer."""
    tables = Counter(name.partition(".")[0] for name in all_names)
    groups: dict[str, list[str]] = {}
    for text, names in common.items():
        others = [name for name in all_names if name not in names]
        shorter = others if len(others) < len(names) else names
        files = (name if tables[(table := name.partition(".")[0])] > 1 else table for name in shorter)
        listing = ", ".join(f"`{file}`" for file in files)
        title = listing if shorter is names else f"All but {listing}" if shorter else "All"
        groups.setdefault(title, []).append(f"{text.rstrip('.')}.")
    return list(groups.items())


def _variants(record: Record) -> dict[str, Any]:
    """The template's values about variants of a system prompt in which half of the tokens differ (BiCache, D.1)."""
    data = record.data
    prompts, task = data["system_prompts"], data["tasks"][0]
    spread = prompts["spread"]
    titles = ["prefix ratio", "mean depth, layers", "standard deviation over variants, layers"]
    rows = [[f"{ratio} %", f"{task['mean'][ratio]:.2f}", f"{deviation:.3f}"] for ratio, deviation in spread.items()]
    return {
        "about": record.about,
        "settings": record.about["settings"],
        "dtype": record.about["machine"]["dtype"],
        "table": markdown_table(titles, rows),
        "prompts": prompts["prompts"],
        "changed": f"{100 * prompts['changed']:.0f}",
        "spread": f"{sum(spread.values()) / len(rows):.3f}",
        "task": task["task"],
        "tau": f"{data['tau']:g}",
    }


def update_quotes(text: str, records: Mapping[str, Record], gpus: Sequence[Mapping[str, Any]] = ()) -> str:
    """`text` with its quoted tables replaced by those of `records`, and of the results `gpus` of `scripts/gpu`.

    Raises `RecordError` if it names a file that does not exist, or if a table has no end.
    """

    def replacement(match: re.Match[str]) -> str:
        begin, name, end = match.groups()
        if name == GPU and gpus:
            return f"{begin}{speed_table(gpus)}\n{end}"
        if name not in records or records[name].subject != BENCH:
            raise RecordError(f"the README quotes {name}, which is no result file of 'remask bench'")
        return f"{begin}{_bench_section(records[name])}\n{end}"

    begins, tables = text.count("<!-- table: "), len(QUOTED.findall(text))
    if tables != begins:
        raise RecordError(f"the README begins {begins} tables and ends {tables} with a line '<!-- end of table -->'")
    return QUOTED.sub(replacement, text)


def _table_section(table: PaperTable, records: Mapping[str, Record], common: Collection[str]) -> str:
    """The published numbers beside those of `records`, each under a heading of its own if there are several.

    Notes in `common` are left out.
    """
    if not records:
        command = f"python -m remask_lab papers {table.name}"
        return f"{published(table)}\n\nNo results of ours are kept: `{command}` makes them."
    blocks = []
    for name, record in records.items():
        model, machine = record.about["model"], record.about["machine"]
        if len(records) > 1:
            blocks.append(f"### {model}, {machine['dtype']} on {machine.get('gpu', machine['cpu'])} ({name})")
        blocks.append(_with_version(record, beside(table, record, common)))
    return "\n\n".join(blocks)


def _bench_section(record: Record, *, detailed: bool = False) -> str:
    """The table of a bench and its notes, with all columns that the record has if it is `detailed`."""
    text = bench_table(record, detail=detailed and "alone" in record.data["results"][0], parts=detailed)
    return _with_version(record, text)


def _with_version(record: Record, text: str) -> str:
    """`text`, after a warning if the record belongs to another version of the package."""
    version = record.about["versions"]["remask"]
    if version == __version__:
        return text
    return f"**Measured with remask {version}; this is {__version__}.**\n\n{text}"
