"""The definition of a table, read from a TOML file: published numbers and their source, and our policy for each row.

A table without published numbers has no section [published]. Its `source` names the passage that it answers.
"""

import hashlib
import json
import math
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from remask.checkpoint.settings import LoadFormat
from remask.checks.values import check_choice
from remask.errors import ConfigError, UnknownNameError
from remask.request.sampling_params import SamplingParams, merge_sampling
from remask_lab.bench.fewer_steps import with_steps

FOLDER = Path(__file__).parent / "tables"
MEASURES = ("bench", "detailed", "operations", "autoregressive")
SCALES = ("bundled", "paper")
KINDS = ("masked", "uniform")
WORKLOADS = ("questions", "texts", "random")

T = TypeVar("T", "Metric", "Scale", "PaperRow", "PaperTable")


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of a published cell. `show` is the format of its text; None prints the number and its unit."""

    name: str
    unit: str
    show: str | None = None

    def text(self, value: float) -> str:
        return (f"{{:,}} {self.unit}" if self.show is None else self.show).format(value)


@dataclass(frozen=True, slots=True)
class Scale:
    """The model and the settings of a measurement of a table, unless the command gives others.

    Attributes:
        model: a value of `--model`; a preset with `load_format` "dummy", as on the command line.
        workload: `name` is "questions" (of a bundled model, or GSM8K), "texts" or "random". `requests` and `prefixes`
            are numbers of requests and of shared prefixes. `prefix_tokens` and `prompt_tokens` are the lengths of
            random shared prefixes and of the prompts after them; the latter is the length of texts too.
        concurrency: requests that run at a time; `rounds` are turns of each contender, over all requests or, where
            they are `divided`, each over its own share of the prefixes.
        counterparts: published columns whose benchmark the workload is. The others are not run at this scale.
    """

    model: str
    workload: Mapping[str, Any]
    sampling: Mapping[str, Any]
    load_format: LoadFormat = "auto"
    dtype: str = "auto"
    concurrency: int = 1
    rounds: int = 1
    divided: bool = False
    counterparts: Sequence[str] = ()

    @property
    def random_weights(self) -> bool:
        """Whether the model has random weights, which show work and speed and no quality."""
        return self.load_format == "dummy"

    def overridden(self, requests: int | None, rounds: int | None, workload: str | None) -> "Scale":
        """This scale with the command's overrides, of which None leaves a setting as it is.

        Without an override, rounds that share the requests are at most as many as these. Raises `ConfigError` where
        `rounds` exceeds the number of prefixes that the rounds share.
        """
        overrides = {"requests": requests, "name": workload}
        workload_changes = {name: value for name, value in overrides.items() if value is not None}
        if rounds is None:
            rounds = min(self.rounds, requests) if self.divided and requests is not None else self.rounds
        prefixes = min(self.workload.get("prefixes", 0), requests or self.workload["requests"])
        if self.divided and rounds > prefixes:
            raise ConfigError(
                f"--rounds: {rounds} rounds cannot share {prefixes} prefixes, as each asks one at least; give at most "
                f"{prefixes}, or more --requests"
            )
        return replace(self, workload={**self.workload, **workload_changes}, rounds=rounds)


@dataclass(frozen=True, slots=True)
class PaperRow:
    """A row of a published table, and our measurement for it.

    Attributes:
        name: as published, made unique where published rows and columns are swapped.
        published: numbers by column, in the order of the table's metrics. None where none was published.
        missing: why we do not measure the row; None where we do.
        measure: "bench", "detailed" (with FLOPs), "autoregressive", or "operations" (of which `operation` is one).
        cache, settings: our policy.
        sampling, workload: overrides of the scale's. `without` names sampling parameters to leave out.
        steps: share of the scale's steps.
        concurrency: requests that run at a time, in place of the scale's. A row and its baseline have the same.
        tau: threshold of the paper's rule, from which depths follow; None takes the depths of the model's table.
        baseline: name of the row to compare with. None takes the table's first row. Operations are compared with
            those of "none".
        at: `sampling` and `workload` that hold at one scale only, by the scale's name.
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
class PaperTable:
    """One published table: the source of its numbers, how they were measured, and its rows.

    Attributes:
        paper, source: the paper, and the table or section in it.
        setting: how the published numbers were measured; None without such numbers.
        metrics: the numbers of a cell, in order.
        notes: facts that a reader needs for the comparison.
    """

    name: str
    title: str
    paper: str
    source: str
    setting: str | None
    kind: str
    metrics: tuple[Metric, ...]
    columns: tuple[str, ...]
    rows: tuple[PaperRow, ...]
    scales: Mapping[str, Scale]
    notes: tuple[str, ...] = ()

    def row(self, name: str) -> PaperRow:
        """The row called `name`. Raises `UnknownNameError` where there is none."""
        rows = {row.name: row for row in self.rows}
        check_choice(f"row of {self.name}", name, rows)
        return rows[name]

    def baseline(self, row: PaperRow) -> PaperRow:
        """The row that `row` is compared with. A baseline is compared with itself."""
        return self.rows[0] if row.baseline is None else self.row(row.baseline)

    @property
    def identity(self) -> str:
        """A hash of everything that our results depend on: the scales and the rows, without the published numbers."""
        rows = [{name: value for name, value in _fields_of(row).items() if name != "published"} for row in self.rows]
        scales = {
            name: {key: value for key, value in _fields_of(scale).items() if key != "counterparts"}
            for name, scale in self.scales.items()
        }
        text = json.dumps({"rows": rows, "scales": scales}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def table_names() -> list[str]:
    """The names of all tables, sorted, numbers in them by their value."""

    def order(name: str) -> list[tuple[int, str]]:
        return [(int(part) if part.isdigit() else 1000, part) for part in name.split("-")]

    return sorted((path.stem for path in FOLDER.glob("*.toml")), key=order)


def load_table(name: str) -> PaperTable:
    """Read a table by its name. Raises `UnknownNameError` where there is none, and `ConfigError` on an invalid file."""
    check_choice("table", name, table_names())
    return read_table(FOLDER / f"{name}.toml")


def read_table(path: Path) -> PaperTable:
    """Read the table in a file. Raises `ConfigError` on an invalid file."""
    try:
        return _table(path.stem, tomllib.loads(path.read_text(encoding="utf-8")))
    except (tomllib.TOMLDecodeError, KeyError, TypeError, ValueError) as error:
        problem = f"{error} is missing" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{path.name}: {problem}") from error


def _table(name: str, content: dict[str, Any]) -> PaperTable:
    """Make a table of a TOML file's content, which is emptied.

    Raises `ConfigError`, `KeyError`, `TypeError` or `ValueError` if it is invalid.
    """
    published = content.pop("published", None)
    if published is None:
        published = {"setting": None, "metrics": (), "columns": ()}
        content["rows"] = [{"published": {}} | row for row in content["rows"]]
    metrics = tuple(_build(Metric, "metric", metric) for metric in published.pop("metrics"))
    columns = tuple(published.pop("columns"))
    rows = tuple(_row(row, columns, len(metrics)) for row in content.pop("rows"))
    scales = {key: _build(Scale, f"scale {key}", settings) for key, settings in content.pop("scales").items()}
    content |= {"name": name, "setting": published.pop("setting"), "metrics": metrics, "columns": columns, "rows": rows}
    content |= {"scales": scales, "notes": tuple(content.get("notes", ()))}
    if published:
        raise ConfigError(f"published: unknown {', '.join(published)}")
    table = _build(PaperTable, "table", content)
    _check(table)
    return table


def _row(content: dict[str, Any], columns: tuple[str, ...], metrics: int) -> PaperRow:
    """Make a row with published numbers in some of `columns`, at most `metrics` in each. NaN stands for no number."""
    cells = {}
    for column, values in content["published"].items():
        check_choice(f"column in row {content['name']!r}", column, columns)
        if len(values) > metrics:
            raise ConfigError(f"row {content['name']!r}: {column} has {len(values)} numbers for {metrics} metrics")
        cells[column] = tuple(None if math.isnan(value) else value for value in values)
    return _build(PaperRow, f"row {content['name']!r}", content | {"published": cells})


def _check(table: PaperTable) -> None:
    """Raise `ConfigError` or `UnknownNameError` where values of a table do not fit together."""
    check_choice("kind", table.kind, KINDS)
    if set(table.scales) != set(SCALES):
        raise ConfigError(f"scales are {', '.join(table.scales)}; a table has {' and '.join(SCALES)}")
    for scale in table.scales.values():
        check_choice("workload", scale.workload["name"], WORKLOADS)
        for column in scale.counterparts:
            check_choice("counterpart", column, table.columns)
    if len({row.name for row in table.rows}) != len(table.rows):
        raise ConfigError("two rows have one name")
    for row in table.rows:
        _check_row(table, row)


def _check_row(table: PaperTable, row: PaperRow) -> None:
    """Raise `ConfigError` where a row contradicts itself, its table's scales or its baseline."""
    check_choice(f"measure of row {row.name!r}", row.measure, MEASURES)
    if (row.operation is None) is (row.measure == "operations"):
        raise ConfigError(f"row {row.name!r}: operation goes with the measure 'operations', and only with that")
    for name, scale in table.scales.items():
        if scale.divided and (row.workload or "workload" in (row.at or {}).get(name, {})):
            raise ConfigError(f"row {row.name!r}: has a workload of its own, which rounds cannot share with others")
    for scale_name, overrides in (row.at or {}).items():
        if scale_name not in SCALES or not set(overrides) <= {"sampling", "workload"}:
            raise ConfigError(f"row {row.name!r}: at takes {', '.join(SCALES)}, each with sampling and workload")
    baseline = table.baseline(row)
    if baseline.missing is not None:
        raise ConfigError(f"row {row.name!r}: its baseline {baseline.name!r} has nothing of ours")
    if baseline.concurrency != row.concurrency:
        raise ConfigError(f"row {row.name!r}: concurrency is not that of its baseline {baseline.name!r}")
    if row.concurrency is not None and (row.concurrency < 1 or row.measure not in ("bench", "detailed")):
        raise ConfigError(f"row {row.name!r}: concurrency takes numbers from 1, with the measures of a bench alone")


def _build(cls: type[T], description: str, content: Mapping[str, Any]) -> T:
    """Make a dataclass of a TOML table. Raises `UnknownNameError`, which names `description`, on an unknown key."""
    names = [field.name for field in fields(cls)]
    for key in content:
        check_choice(f"key of {description}", key, names)
    return cls(**content)


def _fields_of(item: Any) -> dict[str, Any]:
    """The fields of a dataclass by name, not converted."""
    return {field.name: getattr(item, field.name) for field in fields(item)}


@dataclass(frozen=True, slots=True)
class ResolvedRow:
    """A row at a scale: everything that one measurement depends on, and the point of a sweep.

    Rows whose `ResolvedRow`s are equal are measured once. `sampling` and `workload` include the scale's; `baseline` is
    the measurement to compare with, None for a baseline.
    """

    measure: str
    cache: str
    settings: Mapping[str, Any]
    tau: float | None
    sampling: Mapping[str, Any]
    workload: Mapping[str, Any]
    concurrency: int
    baseline: "ResolvedRow | None"

    @property
    def params(self) -> SamplingParams:
        return SamplingParams.from_mapping(dict(self.sampling))


def resolve(table: PaperTable, row: PaperRow, scale_name: str, scale: Scale) -> ResolvedRow:
    """The measurement of `row` at `scale`, which is the table's scale `scale_name` with the command's overrides.

    Operations are compared with those of `none` at the same settings. Raises `ConfigError` on invalid sampling
    parameters.
    """
    resolved = _resolved(row, scale_name, scale)
    baseline = table.baseline(row)
    if row.measure == "operations":
        return replace(resolved, baseline=replace(resolved, measure="bench", cache="none", settings={}))
    return resolved if baseline is row else replace(resolved, baseline=_resolved(baseline, scale_name, scale))


def _resolved(row: PaperRow, scale_name: str, scale: Scale) -> ResolvedRow:
    """The measurement of a row by itself, without a baseline. Raises `ConfigError` on invalid sampling parameters."""
    overrides = (row.at or {}).get(scale_name, {})
    scale_sampling = {name: value for name, value in scale.sampling.items() if name not in row.without}
    try:
        sampling = merge_sampling(scale_sampling, row.sampling or {}, overrides.get("sampling", {}))
    except UnknownNameError:  # a rule of a package that is not installed: results on file can still be shown
        sampling = {**scale_sampling, **(row.sampling or {}), **overrides.get("sampling", {})}
    if row.steps is not None:
        params = SamplingParams.from_mapping(sampling)
        assert params.steps is not None
        shorter = with_steps(params, row.steps * params.steps)
        sampling |= {"steps": shorter.steps, "block_length": shorter.block_length}
    # The command's workload has priority. A row changes its lengths only.
    workload = {**scale.workload, **(row.workload or {}), **overrides.get("workload", {})}
    concurrency = scale.concurrency if row.concurrency is None else row.concurrency
    return ResolvedRow(
        measure=row.measure,
        cache=row.cache,
        settings=row.settings or {},
        tau=row.tau,
        sampling=sampling,
        workload=workload,
        concurrency=concurrency,
        baseline=None,
    )
