"""Writes docs/results.md, and the tables that the README quotes, from the result files in benchmarks/results.

    python -m remask_lab.pages.results [--results FOLDER] [--output FILE] [--readme FILE]

Reads the files that `python -m remask_lab.papers` and `remask bench` write. Each file of a table has its own section,
with its model and machine. The README quotes a file of `remask bench` between `<!-- table: NAME.json -->` and
`<!-- end of table -->`.
"""

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from remask import __version__
from remask.errors import ConfigError, RecordError, RemaskError
from remask.machine.disk import write_whole
from remask_lab.bench.report import table as bench_table
from remask_lab.pages.claims import claims_table
from remask_lab.papers.definition import PaperTable, load_table, table_names
from remask_lab.papers.measure import SUBJECT
from remask_lab.papers.show import beside, published
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, read_record

ROOT = Path(__file__).parents[3]
RESULTS, PAGE, README = ROOT / "benchmarks" / "results", ROOT / "docs" / "results.md", ROOT / "README.md"
QUOTED = re.compile(r"(<!-- table: (\S+) -->\n).*?(<!-- end of table -->)", re.DOTALL)
BENCH, DEPTH = "bench", "analyze depth"
HEAD = """# Results

`python -m remask_lab.pages.results` writes this page from the result files in `benchmarks/results`. The papers' numbers
are copied from the papers. They come from other models and machines, so compare ratios, not absolute figures.
[Benchmarks](../benchmarks/README.md#the-papers-tables) defines the columns. `python -m remask_lab.pages.stale` says
which of these figures are older than what they measure.

## Claim by claim
**Everything that was run is a model of one to two million parameters, trained for a task of our own.** "yes" and "no"
follow from the kept results by the 95 % intervals, which count
[prefixes, not questions](../benchmarks/README.md#what-remask-bench-measures). Nothing here says what a model of
billions of parameters does.
"""

PUBLISHED_VARIANTS = (
    "Published: BiCache, appendix D.1: variants of one system prompt, at least half of whose tokens differ, 500 "
    "samples a ratio; the standard deviation of the depth is 0.014 on average."
)


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and the README's tables. Returns 0, or 2 where a result file cannot be used."""
    parser = argparse.ArgumentParser(
        prog="python -m remask_lab.pages.results",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="default benchmarks/results")
    parser.add_argument("--output", default=str(PAGE), metavar="FILE", help="default docs/results.md")
    parser.add_argument("--readme", default=str(README), metavar="FILE", help="default README.md")
    args = parser.parse_args(argv)
    try:
        records = read_all(args.results)
        text, readme = page(records), quoted(Path(args.readme).read_text(encoding="utf-8"), records)
        write_whole("the page", args.output, text)
        write_whole("the README", args.readme, readme)
    except RemaskError as error:
        print(f"remask_lab.pages.results: error: {error}", file=sys.stderr)
        return 2
    return 0


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


def page(records: dict[str, Record]) -> str:
    """Returns the page. Raises `RecordError` where a record is incomplete, or of another version of its table."""
    own = {name: record for name, record in records.items() if record.subject == SUBJECT}
    known = table_names()
    for name, record in own.items():
        if record.about["settings"]["table"] not in known:
            raise RecordError(f"{name} is of table {record.about['settings']['table']!r}, which is none of ours")
    parts = [HEAD.rstrip(), claims_table(own.values())]
    for table in map(load_table, known):
        mine = {name: record for name, record in own.items() if record.about["settings"]["table"] == table.name}
        parts.append(f"## {table.name}: {table.title}")
        parts += _measured(table, mine) if mine else [_unmeasured(table)]
    variants = [record for record in records.values() if record.subject == DEPTH]
    parts += ["## bicache-d-1: Depth under variants of a system prompt", *map(_variants, variants)] if variants else []
    benches = {name: record for name, record in records.items() if record.subject == BENCH}
    for name, record in benches.items():
        parts += [f"## {Path(name).stem}", _marked(record, bench_table(record, detail="alone" in _first(record)))]
    return "\n\n".join(parts) + "\n"


def _variants(record: Record) -> str:
    """BiCache's appendix D.1: how far the depth moves where half of a system prompt's tokens are others."""
    about, data = record.about, record.data
    prompts, asked, dtype = data["system_prompts"], about["settings"], about["machine"]["dtype"]
    task, spread = data["tasks"][0], prompts["spread"]
    rows = [[f"{ratio} %", f"{task['mean'][ratio]:.2f}", f"{each:.3f}"] for ratio, each in spread.items()]
    command = (
        f"remask analyze depth --model {about['model']} --dtype {dtype} --samples {asked['samples']} "
        f"--ratios {' '.join(map(str, asked['ratios']))} --system-prompts {asked['system_prompts']}"
    )
    return "\n\n".join(
        [
            markdown_table(["prefix ratio", "mean depth, layers", "standard deviation over variants, layers"], rows),
            PUBLISHED_VARIANTS,
            f"Ours: {prompts['prompts']} system prompts that differ in {100 * prompts['changed']:.0f} % of their "
            f"tokens, a standard deviation of {sum(spread.values()) / len(rows):.3f} layers on average over the "
            "ratios. Their tokens are those of other conversations, where a language model wrote the paper's: ours "
            "change what a prompt says, and not how.",
            f"`{about['model']}` ({about['layers']} layers), task {task['task']}, {asked['samples']} requests a ratio, "
            f"tau {data['tau']:g}, {dtype}; commit {about['commit'] or 'unknown'}, {about['date']}: `{command}`.",
        ]
    )


def quoted(text: str, records: dict[str, Record]) -> str:
    """Returns `text` with the tables that it quotes.

    Raises `RecordError` where it names a file that is not there, and where a table has no end.
    """

    def fill(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in records or records[name].subject != BENCH:
            raise RecordError(f"the README quotes {name}, which is no result file of 'remask bench'")
        return f"{begin}{_marked(records[name], bench_table(records[name]))}\n{end}"

    found, tables = text.count("<!-- table: "), QUOTED.findall(text)
    if len(tables) != found:
        raise RecordError(
            f"the README begins {found} tables and ends {len(tables)} with a line '<!-- end of table -->'"
        )
    return QUOTED.sub(fill, text)


def _measured(table: PaperTable, records: dict[str, Record]) -> list[str]:
    parts = []
    for name, record in records.items():
        about = record.about
        machine = about["machine"]
        if len(records) > 1:
            parts.append(f"### {about['model']}, {machine['dtype']} on {machine.get('gpu', machine['cpu'])} ({name})")
        try:
            text = beside(table, record)
        except RecordError as error:
            raise RecordError(f"{name}: {error}") from error
        parts.append(_marked(record, text))
    return parts


def _unmeasured(table: PaperTable) -> str:
    return f"{published(table)}\n\nNo results of ours are kept: `python -m remask_lab.papers {table.name}` makes them."


def _first(record: Record) -> dict[str, object]:
    first: dict[str, object] = record.data["results"][0]
    return first


def _marked(record: Record, text: str) -> str:
    """`text`, after a warning where the record belongs to another version of the package."""
    version = record.about["versions"]["remask"]
    if version == __version__:
        return text
    return f"**Measured with remask {version}; this is {__version__}.**\n\n{text}"


if __name__ == "__main__":
    sys.exit(main())
