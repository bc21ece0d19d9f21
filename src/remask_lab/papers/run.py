"""Measuring a table: row by row into a result file, which an interrupted run goes on with."""

from pathlib import Path

from tqdm import tqdm

from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.papers.cell import cell_of
from remask_lab.papers.definition import Scale, Table
from remask_lab.papers.measure import Bench
from remask_lab.records.record import Record, about
from remask_lab.records.sweep import Sweep

SUBJECT = "paper"


def check_kind(table: Table, llm: LLM) -> None:
    """Raise `ConfigError` where `table` is about another kind of model."""
    kind = llm.loaded.config.kind
    if kind != table.kind:
        usual = table.scales["bundled"].model
        raise ConfigError(
            f"table {table.name} is about {table.kind} models, and {llm.loaded.name!r} is {kind.replace('_', '-')}; "
            f"give a {table.kind} one with --model, such as {usual!r}"
        )


def run_table(
    table: Table, scale_name: str, scale: Scale, bench: Bench, path: str | Path | None, progress: bool = False
) -> Record:
    """Measure all rows of `table`; with a `path`, each is in that file as soon as it is known, and measured once.

    The record's data are {"rows": [{"point", "result"}]}, a row for every different measurement.

    Raises `ConfigError` where the model is of another kind, or a baseline cannot run, and `RecordError` where the file
    holds another measurement.
    """
    check_kind(table, bench.llm)
    settings = {
        "table": table.name,
        "identity": table.identity,
        "scale": scale_name,
        "workload": scale.workload,
        "sampling": scale.sampling,
        "concurrency": scale.concurrency,
        "rounds": bench.rounds,
        "prompts": None if bench.prompts is None else Path(bench.prompts).name,
        "judge": None if bench.judge is None else bench.judge.name,
        "ar_model": bench.ar_model,
    }
    sweep = Sweep(path, SUBJECT, about(bench.llm, seed=bench.seed, settings=settings))
    rows = [row for row in table.rows if row.missing is None]
    for row in tqdm(rows, desc=table.name, unit="row", disable=not progress):
        cell = cell_of(table, row, scale_name, scale)
        sweep.row(cell.point, lambda cell=cell: bench.measure(cell))  # type: ignore[misc]
    return sweep.record
