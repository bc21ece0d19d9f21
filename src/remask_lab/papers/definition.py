"""A published table as data: its numbers, where they stand, and what of ours each of its rows is.

A table of ours alone has no section [published]; its source says what it answers.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from remask.errors import ConfigError, UnknownNameError

FOLDER = Path(__file__).parent / "tables"
MEASURES = ("bench", "detailed", "operations", "autoregressive")
SCALES = ("bundled", "paper")
KINDS = ("masked", "uniform")
WORKLOADS = ("questions", "texts", "random")


@dataclass(frozen=True, slots=True)
class Metric:
    """What one number of a published cell is; `show` says how it is written, by default with its unit after it."""

    name: str
    unit: str
    show: str | None = None

    def text(self, value: float) -> str:
        """`value` as a table shows it."""
        return (f"{{:,}} {self.unit}" if self.show is None else self.show).format(value)


@dataclass(frozen=True, slots=True)
class Scale:
    """How a table is measured, on which model, unless the command says otherwise.

    Attributes:
        model: what `--model` takes; a preset with `load_format` "dummy".
        workload: `name` is "questions" (those of a bundled model, or GSM8K), "texts" or "random"; `requests`, shared
            `prefixes`, and the lengths in tokens of random prompts: `prefix_tokens` shared, `prompt_tokens` after them.
            `prompt_tokens` is the length of texts, too.
        sampling: sampling parameters.
        concurrency: requests run at a time.
        rounds: turns of each contender.
        load_format, dtype: as on the command line.
    """

    model: str
    workload: Mapping[str, Any]
    sampling: Mapping[str, Any]
    load_format: str = "auto"
    dtype: str = "auto"
    concurrency: int = 1
    rounds: int = 1


@dataclass(frozen=True, slots=True)
class Row:
    """A row of a published table, and our contender for it.

    Attributes:
        name: as published; with what tells it from others where the published rows and columns were turned.
        published: numbers by column, in the order of the table's metrics; None where none was published.
        missing: why we have nothing beside it; None where we do.
        measure: "bench", "detailed" (with FLOPs), "autoregressive", or "operations" (of which `operation` is one).
        cache, settings: our policy.
        sampling, workload: what differs from the scale's; `without` names sampling parameters to leave out.
        steps: share of the scale's steps.
        concurrency: requests run at a time, in place of the scale's; the same for a row and its baseline.
        tau: threshold at which the depth table is read; None takes the table's own.
        baseline: name of the row that this one is compared with; None: the table's first. Operations are compared with
            those of "none".
        at: by scale, `sampling` and `workload` that hold there alone.
    """

    name: str
    published: Mapping[str, tuple[float | None, ...]]
    missing: str | None = None
    measure: str = "bench"
    operation: str | None = None
    cache: str = "none"
    settings: Mapping[str, Any] | None = None
    sampling: Mapping[str, Any] | None = None
    without: tuple[str, ...] = ()
    workload: Mapping[str, Any] | None = None
    steps: float | None = None
    concurrency: int | None = None
    tau: float | None = None
    baseline: str | None = None
    at: Mapping[str, Mapping[str, Any]] | None = None


@dataclass(frozen=True, slots=True)
class Table:
    """One published table.

    Attributes:
        name: of the file, and on the command line.
        title: what it is about.
        paper, source: where the numbers stand.
        setting: on what they were measured, as published; None where nothing was.
        kind: of model that it is about.
        metrics: what the numbers of a cell are.
        columns: published columns, in order.
        rows: in order; baselines among them.
        scales: "bundled" and "paper".
        notes: what a reader must know to compare.
    """

    name: str
    title: str
    paper: str
    source: str
    setting: str | None
    kind: str
    metrics: tuple[Metric, ...]
    columns: tuple[str, ...]
    rows: tuple[Row, ...]
    scales: Mapping[str, Scale]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> Row:
        """The row called `name`. Raises `UnknownNameError` without one."""
        for row in self.rows:
            if row.name == name:
                return row
        raise UnknownNameError(f"row of {self.name}", name, [row.name for row in self.rows])

    def baseline(self, row: Row) -> Row:
        """The row that `row` is compared with; a baseline is compared with itself."""
        return self.rows[0] if row.baseline is None else self.row(row.baseline)

    @property
    def identity(self) -> str:
        """Stands for what is measured: the scales and our part of the rows, not their published numbers."""
        ours = [{name: value for name, value in _plain(row).items() if name != "published"} for row in self.rows]
        scales = {name: _plain(scale) for name, scale in self.scales.items()}
        text = json.dumps({"rows": ours, "scales": scales}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def table_names() -> list[str]:
    """Names of all tables, sorted; numbers in them by value."""
    return sorted((path.stem for path in FOLDER.glob("*.toml")), key=_order)


def _order(name: str) -> list[tuple[int, str]]:
    return [(int(part) if part.isdigit() else 1000, part) for part in name.split("-")]


def load_table(name: str) -> Table:
    """Read a table.

    Raises `UnknownNameError` where there is none of that name, and `ConfigError` where its file says something that
    cannot be.
    """
    if name not in table_names():
        raise UnknownNameError("table", name, table_names())
    return read_table(FOLDER / f"{name}.toml")


def read_table(path: Path) -> Table:
    """Read the table in a file. Raises `ConfigError` where it says something that cannot be."""
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
        return _table(path.stem, raw)
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        said = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path.name}: {said}") from error


def _table(name: str, raw: dict[str, Any]) -> Table:
    published = raw.pop("published", None)
    if published is None:
        published = {"setting": None, "metrics": (), "columns": ()}
        raw["rows"] = [{"published": {}} | row for row in raw["rows"]]
    metrics = tuple(_made(Metric, "metric", metric) for metric in published.pop("metrics"))
    columns = tuple(published.pop("columns"))
    rows = tuple(_row(row, columns, len(metrics)) for row in raw.pop("rows"))
    scales = {key: _made(Scale, f"scale {key}", value) for key, value in raw.pop("scales").items()}
    raw |= {"name": name, "setting": published.pop("setting"), "metrics": metrics, "columns": columns, "rows": rows}
    raw |= {"scales": scales, "notes": tuple(raw.get("notes", ()))}
    if published:
        raise ConfigError(f"published: unknown {', '.join(published)}")
    table: Table = _made(Table, "table", raw)
    _check(table)
    return table


def _row(raw: dict[str, Any], columns: tuple[str, ...], metrics: int) -> Row:
    cells = {}
    for column, values in raw["published"].items():
        if column not in columns:
            raise UnknownNameError(f"column in row {raw['name']!r}", column, columns)
        if len(values) > metrics:
            raise ConfigError(f"row {raw['name']!r}: {column} has {len(values)} numbers for {metrics} metrics")
        cells[column] = tuple(None if math.isnan(value) else value for value in values)
    row: Row = _made(Row, f"row {raw['name']!r}", raw | {"published": cells})
    return row


def _check(table: Table) -> None:
    if table.kind not in KINDS:
        raise UnknownNameError("kind", table.kind, KINDS)
    if set(table.scales) != set(SCALES):
        raise ConfigError(f"scales are {', '.join(table.scales)}; a table has {' and '.join(SCALES)}")
    for scale in table.scales.values():
        if scale.workload["name"] not in WORKLOADS:
            raise UnknownNameError("workload", scale.workload["name"], WORKLOADS)
    if len({row.name for row in table.rows}) != len(table.rows):
        raise ConfigError("two rows have one name")
    for row in table.rows:
        if row.measure not in MEASURES:
            raise UnknownNameError(f"measure of row {row.name!r}", row.measure, MEASURES)
        if (row.operation is None) is (row.measure == "operations"):
            raise ConfigError(f"row {row.name!r}: operation goes with the measure 'operations', and only with that")
        for scale_name, own in (row.at or {}).items():
            if scale_name not in SCALES or not set(own) <= {"sampling", "workload"}:
                raise ConfigError(f"row {row.name!r}: at takes {', '.join(SCALES)}, each with sampling and workload")
        baseline = table.baseline(row)
        if baseline.missing is not None:
            raise ConfigError(f"row {row.name!r}: its baseline {baseline.name!r} has nothing of ours")
        if baseline.concurrency != row.concurrency:
            raise ConfigError(f"row {row.name!r}: concurrency is not that of its baseline {baseline.name!r}")
        if row.concurrency is not None and (row.concurrency < 1 or row.measure not in ("bench", "detailed")):
            raise ConfigError(f"row {row.name!r}: concurrency takes numbers from 1, with the measures of a bench alone")


def _made(kind: Any, what: str, raw: Mapping[str, Any]) -> Any:
    """A dataclass from a table of TOML, whose unknown keys are errors."""
    known = [field.name for field in fields(kind)]
    for key in raw:
        if key not in known:
            raise UnknownNameError(f"key of {what}", key, known)
    return kind(**raw)


def _plain(item: Any) -> dict[str, Any]:
    return {field.name: getattr(item, field.name) for field in fields(item)}
