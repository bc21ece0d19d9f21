"""A paper's table in Markdown, with our results beside the published numbers."""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Final, TypeAlias

from remask.checks.fields import by_path
from remask.errors import RecordError
from remask.request.sampling_params import SamplingParams
from remask_lab.papers.definition import Metric, PaperRow, PaperTable, Scale, resolve
from remask_lab.records.interval import judged, percent_text
from remask_lab.records.machine import processor_text
from remask_lab.records.markdown import NONE, narrow_tables, percent
from remask_lab.records.record import Record, as_json, number_format

Result: TypeAlias = Mapping[str, Any]
Cell: TypeAlias = Callable[[Result], str]

REQUESTS = {"questions": "questions of the model's task", "texts": "texts", "random": "random tokens"}
PREFIX = "prefix ratio"
# Our columns: the key of a result that each shows, and how; a result without the key has no cell.
OURS: Mapping[str, tuple[str, Cell]] = {
    PREFIX: ("prefix_ratio", lambda result: percent(result["prefix_ratio"])),
    "depth": ("prefix_depth", lambda result: f"{result['prefix_depth']:.1f}"),
    "tok/s": ("throughput_tok_s", lambda result: f"{result['throughput_tok_s']:.0f}"),
    "speed": ("ratio_to_none", lambda result: f"{result['ratio_to_none']:.2f}x"),
    "work saved": ("work_ratio_to_none", lambda result: f"{result['work_ratio_to_none']:.2f}x"),
    "FLOPs saved": ("flops_saved", lambda result: f"{result['flops_saved']:.2f}x"),
    "accuracy (95 % interval)": (
        "accuracy",
        lambda result: percent_text(result["accuracy"], result["accuracy_interval"]),
    ),
    "agreement": ("agreement_with_none", lambda result: percent(result["agreement_with_none"])),
    "perplexity (95 % interval)": (
        "perplexity",
        lambda result: "{:.2f} ({:.2f} to {:.2f})".format(result["perplexity"], *result["perplexity_interval"]),
    ),
    "baseline": ("baseline_ms", lambda result: f"{result['baseline_ms']:,.0f} ms"),
    "cached": ("ours_ms", lambda result: f"{result['ours_ms']:,.0f} ms"),
    "reduction": ("ours_ms", lambda result: f"{result['baseline_ms'] / result['ours_ms']:.2f}x"),
}
BLANK_AT_0 = (PREFIX, "depth", "reduction")  # columns in which 0 says that there is nothing
COLUMNS: Final = (
    "Speed, work saved and agreement are against a baseline measured beside the row in the same run: the nearest row "
    "above at 1.00x and 100.0 %, unless another is named. Throughput counts tokens up to the end token."
)
UNRUN: Final = (
    "No published column is run at this scale: ours answers other questions on another model. Compare directions and "
    "ratios."
)
NO_LOSS: Final = "No row loses answers by the 95 % interval: the table shows work and time, and no cache's loss."


def published(table: PaperTable) -> str:
    """The published numbers of `table` in Markdown, with their source and the table's notes."""
    grid = narrow_tables([row.name for row in table.rows], {"row": _columns(table, table.columns)})
    return "\n\n".join([grid, *_sources(table), *table.notes, *_missing(table)])


def beside(table: PaperTable, record: Record, omitted: Collection[str] = ()) -> str:
    """The published numbers in Markdown with the `record`'s beside them, and notes on how both were measured.

    Notes among `omitted` are left out, as they are printed elsewhere (see `notes`). Raises `RecordError` where the
    record belongs to another version of the table, or lacks a row.
    """
    results = results_of(table, record)
    columns = [(header, [_our_cell(header, results.get(row.name, {})) for row in table.rows]) for header in OURS]
    ratios = set(dict(columns)[PREFIX]) - {NONE}
    ours = [(name, cells) for name, cells in columns if set(cells) != {NONE} and (name != PREFIX or len(ratios) > 1)]
    headers, remarks = _marked_headers(table, record.about["settings"]["scale"])
    grids = narrow_tables([row.name for row in table.rows], {"published": _columns(table, headers), "ours": ours})
    paragraphs = [*remarks, *_sources(table), *_remarks(table, record), *_missing(table)]
    paragraphs += _conditions(table, record, results, ratios, omitted)
    return "\n\n".join([grids, *(text for text in paragraphs if text not in omitted)])


def notes(table: PaperTable, record: Record) -> list[str]:
    """What `beside` says of a record that it may say of others too: on rows, columns, machine, versions and losses.

    Raises `RecordError` as `beside` does.
    """
    failures = _failures(table, results_of(table, record))
    return [*_remarks(table, record), *_machine(record), COLUMNS, *([NO_LOSS] if failures == NO_LOSS else [])]


def _remarks(table: PaperTable, record: Record) -> list[str]:
    """The table's notes, and whether no published column is measured at the record's scale."""
    measured_columns = table.scales[record.about["settings"]["scale"]].counterparts
    return [*([UNRUN] if table.columns and not measured_columns else []), *table.notes]


def _machine(record: Record) -> list[str]:
    """Seed, number format and processor, and versions, a text of each."""
    facts = record.about
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    return [f"seed {facts['seed']}", f"{number_format(facts)} on {processor_text(facts['machine'])}", versions]


def _our_cell(header: str, result: Result) -> str:
    """The cell of a result in one of our columns; `NONE` where the result has no such number."""
    key, cell = OURS[header]
    value = result.get(key)
    return NONE if value is None or (header in BLANK_AT_0 and not value) else cell(result)


def _columns(table: PaperTable, headers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The published columns under `headers`: a header and its cells, one a row."""
    return [
        (header, [_published_cell(table.metrics, row.published.get(column, ())) for row in table.rows])
        for header, column in zip(headers, table.columns, strict=True)
    ]


def _published_cell(metrics: Sequence[Metric], values: Sequence[float | None]) -> str:
    """The published numbers of a cell as text, without those that are None."""
    texts = [metric.text(value) for metric, value in zip(metrics, values, strict=False) if value is not None]
    # A number in brackets belongs to the number before it.
    return ", ".join(texts).replace(", (", " (").replace(", [", " [").replace(" to, ", " to ") or NONE


def _marked_headers(table: PaperTable, scale: str) -> tuple[list[str], list[str]]:
    """Headers of the published columns, a star at those that `scale` does not measure, and what the star says."""
    measured_columns = table.scales[scale].counterparts
    if not measured_columns or set(measured_columns) == set(table.columns):
        return list(table.columns), []
    headers = [column if column in measured_columns else f"{column} *" for column in table.columns]
    return headers, [f"* Not run at this scale: ours is beside {' and '.join(measured_columns)}."]


def results_of(table: PaperTable, record: Record) -> dict[str, Result]:
    """The record's result for each row that we measure, by the row's name.

    Raises `RecordError` where the record belongs to another table or another version of it, or lacks a row.
    """
    settings = record.about["settings"]
    if settings["table"] != table.name:
        raise RecordError(f"these results are of table {settings['table']}, not {table.name}")
    if settings["identity"] != table.identity:
        raise RecordError(
            f"these results of table {table.name} were measured from another version of its definition; measure again"
        )
    overrides = {name: settings[name] for name in ("workload", "sampling", "concurrency")}
    scale = Scale(record.about["model"], **overrides)
    results: dict[str, Result] = {}
    for row in _measured_rows(table):
        point = as_json(resolve(table, row, settings["scale"], scale))
        matches = [item["result"] for item in record.data["rows"] if item["point"] == point]
        if not matches:
            raise RecordError(f"these results of table {table.name} lack {row.name!r}; run the same command again")
        results[row.name] = matches[0] if row.operation is None else _operation(matches[0], row.operation)
    return results


def _measured_rows(table: PaperTable) -> list[PaperRow]:
    return [row for row in table.rows if row.missing is None]


def _operation(result: Result, operation: str) -> Result:
    """Milliseconds of one operation by contender, and the shares of time that the instruments add."""
    if "left_out" in result:
        return result
    times = {name: operation_times[operation] for name, operation_times in result.items()}
    return times | {"overhead": [operation_times["overhead"] for operation_times in result.values()]}


def _sources(table: PaperTable) -> list[str]:
    """Where the published numbers come from, in words; for a table without them what it belongs to."""
    if table.setting is None:
        return [f"Ours alone; it belongs to {table.paper}, {table.source}."]
    cells = ", ".join(metric.name for metric in table.metrics)
    return [f"Published: {table.paper}, {table.source}; {table.setting}. In each cell: {cells}."]


def _missing(table: PaperTable) -> list[str]:
    """Why rows are not measured, a text of each."""
    return [f"{row.name}: nothing of ours. {row.missing}" for row in table.rows if row.missing is not None]


def _conditions(
    table: PaperTable, record: Record, results: Mapping[str, Result], ratios: set[str], omitted: Collection[str]
) -> list[str]:
    """How our results were measured, in words: model, requests, machine, losses, and notes on rows.

    `ratios` are the rows' prefix ratios as text; texts among `omitted` are left out.
    """
    facts, settings = record.about, record.about["settings"]
    workload = settings["workload"]
    sampling = ", ".join(f"{name}={value}" for name, value in by_path(SamplingParams, settings["sampling"]).items())
    ratio_text = f", prefix ratio {next(iter(ratios))}" if len(ratios) == 1 else ""
    # Texts share no prefix; tables of other workloads without one write one of no tokens.
    shares_prefix = workload.get("prefix_tokens") and workload["name"] != "texts"
    prefixes = min(workload["prefixes"], workload["requests"]) if shares_prefix else 0
    prefix_text = f" over {prefixes} shared {'prefix' if prefixes == 1 else 'prefixes'}" if prefixes else ""
    rounds = f"rounds {settings['rounds']}{', a share of the requests each' if settings['divided'] else ''}"
    commit = f"commit {facts['commit'] or 'unknown'}, {facts['date']}"
    seed, processor, versions = _machine(record)
    conditions = "; ".join(text for text in (seed, processor, commit, versions) if text not in omitted)
    batches = {row.concurrency or settings["concurrency"] for row in _measured_rows(table)}
    batch_text = f"{batches.pop()} at a time" if len(batches) == 1 else "at a time as many as the row says"
    table_scale = table.scales[settings["scale"]]
    weights = ", random weights" if table_scale.random_weights and table_scale.model == facts["model"] else ""
    lines = [
        f"Ours: `{facts['model']}` ({facts['parameters'] / 1e6:,.2f} M parameters{weights}), "
        f"{workload['requests']} requests, "
        f"{REQUESTS[workload['name']]}{prefix_text}{ratio_text}, {batch_text}; {sampling}; {rounds}; {conditions}."
        f"{'' if COLUMNS in omitted else f' {COLUMNS}'}",
        _failures(table, results),
    ]
    return lines + _row_notes(table, results)


def _row_notes(table: PaperTable, results: Mapping[str, Result]) -> list[str]:
    """What is special about single rows: a busy machine, rows left out, instruments, and other baselines."""
    lines = []
    disturbed = [name for name, result in results.items() if result.get("busy")]
    if disturbed:
        lines.append(
            f"The machine was busy with other work, so times and their ratios say little of: {', '.join(disturbed)}."
        )
    for row in table.rows:
        result = results.get(row.name, {})
        if "left_out" in result:
            lines.append(f"{row.name}: left out. {result['left_out']}")
        if row.measure == "operations" and row.operation == "total" and "overhead" in result:
            shares = " and ".join(f"{100 * share:.0f} %" for share in result["overhead"])
            lines.append(f"The instruments add {shares} to the times of baseline and cached.")
        if row.measure == "autoregressive" and "model" in result:
            lines.append(
                f"{row.name}: {result['model']} ({result['parameters'] / 1e6:,.2f} M parameters), through transformers "
                "with its KV cache, as many new tokens as the first row's answers have. Speed only."
            )
    last_baseline = table.rows[0]
    for row in _measured_rows(table):
        baseline = table.baseline(row)
        if baseline is row:
            last_baseline = row
        elif row.measure != "operations" and baseline is not last_baseline:
            lines.append(f"The baseline of {row.name!r} is {baseline.name!r}.")
    return lines


def _failures(table: PaperTable, results: Mapping[str, Result]) -> str:
    """Which rows have fewer right answers than their baseline by the 95 % interval, in words."""
    judged_results = {name: result for name, result in results.items() if result.get("accuracy") is not None}
    if not judged_results:
        return "No answers are judged here: the table shows work, time and agreement."
    losing_rows = [
        name
        for name, result in judged_results.items()
        if judged(result, judged_results[table.baseline(table.row(name)).name]).loses
    ]
    if not losing_rows:
        return NO_LOSS
    return f"Fewer right answers than their baseline, by the 95 % interval of the difference: {', '.join(losing_rows)}."
