"""Writes docs/lab/results.md, and the tables that the README quotes, from the result files in benchmarks/results.

    python -m remask_lab pages results [--results FOLDER] [--output FILE] [--readme FILE]

Reads the files that `python -m remask_lab papers` and `remask bench` write. Each file of a table has its own section,
with its model and machine. The README quotes a file of `remask bench` between `<!-- table: NAME.json -->` and
`<!-- end of table -->`, and by the name `gpu` what the folder `gpu` keeps of `scripts/gpu`.
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
SEVERAL = 4  # records of which a note is not repeated in each table's section
ELSEWHERE = (f"bench.{SMOLLM2}",)  # benches whose page is that of real weights
BENCH, DEPTH, GPU = "bench", "analyze depth", "gpu"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the README's tables. Returns 0, or 2 where a result file cannot be used."""
    parser = command_parser(__doc__, "pages results")
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="default benchmarks/results")
    parser.add_argument("--output", default=str(PAGES["results"]), metavar="FILE", help="default docs/lab/results.md")
    parser.add_argument("--readme", default=str(README), metavar="FILE", help="default README.md")
    return run_command(partial(_run, parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    records = read_all(args.results)
    gpus = read_kept(Path(args.results) / "gpu")
    text = page(records)
    readme = quoted(Path(args.readme).read_text(encoding="utf-8"), records, gpus)
    write_whole("the page", args.output, text)
    write_whole("the README", args.readme, readme)


def read_all(folder: str | Path) -> dict[str, Record]:
    """Read a folder's JSON files as records by file name, in order of the names.

    Raises `ConfigError` without the folder, and `RecordError` where a file is no record, or has a subject that the page
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
    """Returns the page.

    Raises `RecordError` where a record is incomplete, or of another version of its table.
    """
    of_tables, benches, depths = (
        {name: record for name, record in records.items() if record.subject == subject}
        for subject in (SUBJECT, BENCH, DEPTH)
    )
    known = table_names()
    for name, record in of_tables.items():
        if record.about["settings"]["table"] not in known:
            raise RecordError(f"{name} is of table {record.about['settings']['table']!r}, which is none of ours")
    common = _common(of_tables)
    shown = []
    for table in map(load_table, known):
        own = {name: each for name, each in of_tables.items() if each.about["settings"]["table"] == table.name}
        shown.append((f"{table.name}: {table.title}", _measured(table, own, common)))
    return fill(
        "results",
        claims=claims_table(read_claims(), of_tables.values()),
        common=_grouped(common, list(of_tables)),
        tables=shown,
        variants=[_variants(record) for record in depths.values()],
        benches=[
            (stem, _bench(record, detailed=True))
            for name, record in benches.items()
            if (stem := Path(name).stem) not in ELSEWHERE
        ],
    )


def _common(records: Mapping[str, Record]) -> dict[str, list[str]]:
    """What `SEVERAL` records of tables and more say alike, by the files that do."""
    said: dict[str, list[str]] = {}
    for name, record in records.items():
        try:
            texts = notes(load_table(record.about["settings"]["table"]), record)
        except RecordError as error:
            raise RecordError(f"{name}: {error}") from error
        for text in texts:
            said.setdefault(text, []).append(name)
    return {text: names for text, names in said.items() if len(names) >= SEVERAL}


def _grouped(common: Mapping[str, Sequence[str]], known: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Notes in `common` by the files of tables that have them, which are named, or all but the others."""
    tables = Counter(name.partition(".")[0] for name in known)
    texts: dict[str, list[str]] = {}
    for text, names in common.items():
        others = [name for name in known if name not in names]
        few = others if len(others) < len(names) else names
        files = (name if tables[(table := name.partition(".")[0])] > 1 else table for name in few)
        listed = ", ".join(f"`{file}`" for file in files)
        where = listed if few is names else f"All but {listed}" if few else "All"
        texts.setdefault(where, []).append(f"{text.rstrip('.')}.")
    return list(texts.items())


def _variants(record: Record) -> dict[str, Any]:
    """BiCache's appendix D.1: how far the depth moves where half of a system prompt's tokens are others."""
    data = record.data
    prompts, task = data["system_prompts"], data["tasks"][0]
    spread = prompts["spread"]
    titles = ["prefix ratio", "mean depth, layers", "standard deviation over variants, layers"]
    rows = [[f"{ratio} %", f"{task['mean'][ratio]:.2f}", f"{each:.3f}"] for ratio, each in spread.items()]
    return {
        "about": record.about,
        "asked": record.about["settings"],
        "dtype": record.about["machine"]["dtype"],
        "table": markdown_table(titles, rows),
        "prompts": prompts["prompts"],
        "changed": f"{100 * prompts['changed']:.0f}",
        "spread": f"{sum(spread.values()) / len(rows):.3f}",
        "task": task["task"],
        "tau": f"{data['tau']:g}",
    }


def quoted(text: str, records: Mapping[str, Record], gpus: Sequence[Mapping[str, Any]] = ()) -> str:
    """Returns `text` with the tables that it quotes, of `records` and of what is kept of `gpus`.

    Raises `RecordError` where it names a file that is not there, and where a table has no end.
    """

    def fill_in(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name == GPU and gpus:
            return f"{begin}{speed_table(gpus)}\n{end}"
        if name not in records or records[name].subject != BENCH:
            raise RecordError(f"the README quotes {name}, which is no result file of 'remask bench'")
        return f"{begin}{_bench(records[name])}\n{end}"

    found, tables = text.count("<!-- table: "), QUOTED.findall(text)
    if len(tables) != found:
        raise RecordError(
            f"the README begins {found} tables and ends {len(tables)} with a line '<!-- end of table -->'"
        )
    return QUOTED.sub(fill_in, text)


def _measured(table: PaperTable, records: Mapping[str, Record], known: Collection[str]) -> str:
    """The published numbers beside those of `records`, each under a heading of its own where there are several.

    Notes that are `known` are left out.
    """
    if not records:
        command = f"python -m remask_lab papers {table.name}"
        return f"{published(table)}\n\nNo results of ours are kept: `{command}` makes them."
    parts = []
    for name, record in records.items():
        model, machine = record.about["model"], record.about["machine"]
        if len(records) > 1:
            parts.append(f"### {model}, {machine['dtype']} on {machine.get('gpu', machine['cpu'])} ({name})")
        parts.append(_marked(record, beside(table, record, known)))
    return "\n\n".join(parts)


def _bench(record: Record, *, detailed: bool = False) -> str:
    return _marked(
        record, bench_table(record, detail=detailed and "alone" in record.data["results"][0], parts=detailed)
    )


def _marked(record: Record, text: str) -> str:
    """`text`, after a warning where the record belongs to another version of the package."""
    version = record.about["versions"]["remask"]
    if version == __version__:
        return text
    return f"**Measured with remask {version}; this is {__version__}.**\n\n{text}"
