"""A paper's table in Markdown, with our results beside the published numbers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from remask.errors import RecordError
from remask_lab.papers.definition import Metric, PaperRow, PaperTable, Scale
from remask_lab.papers.resolve import resolve
from remask_lab.records.interval import percent_text
from remask_lab.records.machine import processor_text
from remask_lab.records.markdown import narrow_tables
from remask_lab.records.record import Record, as_json

Result: TypeAlias = Mapping[str, Any]
Column: TypeAlias = tuple[str, Callable[[Result], str | None]]

NONE = "-"
ASKED = {"questions": "questions of the model's own task", "texts": "texts", "random": "random tokens"}


def published(table: PaperTable) -> str:
    """Returns the published numbers alone, and their sources."""
    grid = narrow_tables(_names(table), {"row": _columns(table, table.columns)})
    return "\n\n".join([grid, *_sources(table)])


def beside(table: PaperTable, record: Record) -> str:
    """Returns the published numbers with the `record`'s beside them, and notes on how both were measured.

    Raises `RecordError` where the record belongs to another version of the table, or lacks a row.
    """
    results = results_of(table, record)
    columns = [
        (header, cell)
        for header, cell in _OURS
        if any(cell(result) is not None for result in results.values())
        and (cell is not _prefix or len(_prefixes(results)) > 1)
    ]
    found = [results.get(row.name) for row in table.rows]
    ours = [
        (header, [NONE if result is None else cell(result) or NONE for result in found]) for header, cell in columns
    ]
    published, said = _compared(table, record.about["settings"]["scale"])
    grids = narrow_tables(_names(table), {"published": _columns(table, published), "ours": ours})
    return "\n\n".join([grids, *said, *_sources(table), *_conditions(table, record, results)])


def _names(table: PaperTable) -> list[str]:
    return [row.name for row in table.rows]


def _columns(table: PaperTable, headers: Sequence[str]) -> list[tuple[str, list[str]]]:
    """The published columns under `headers`."""
    cells = [_published(table, row) for row in table.rows]
    return [(header, [row[index] for row in cells]) for index, header in enumerate(headers)]


def _compared(table: PaperTable, scale: str) -> tuple[list[str], list[str]]:
    """Headers of the published columns, those that `scale` does not run marked, and a sentence that says so."""
    run = table.scales[scale].counterparts
    if not table.columns or set(run) == set(table.columns):
        return list(table.columns), []
    if not run:
        said = "No published column is run at this scale: ours answers other questions on another model."
        return list(table.columns), [f"{said} Compare directions and ratios."]
    marked = [column if column in run else f"{column} *" for column in table.columns]
    return marked, [f"* Not run at this scale: ours is beside {' and '.join(run)}."]


def results_of(table: PaperTable, record: Record) -> dict[str, Result]:
    """Returns the record's result for each row that we measure, by the row's name.

    Raises `RecordError` where the record belongs to another table or another version of it, or lacks a row.
    """
    settings = record.about["settings"]
    if settings["table"] != table.name:
        raise RecordError(f"these results are of table {settings['table']}, not {table.name}")
    if settings["identity"] != table.identity:
        raise RecordError(
            f"these results of table {table.name} were measured from another version of its definition; measure again"
        )
    asked = {name: settings[name] for name in ("workload", "sampling", "concurrency")}
    known = Scale(record.about["model"], **asked)
    results: dict[str, Result] = {}
    for row in table.rows:
        if row.missing is not None:
            continue
        point = as_json(resolve(table, row, settings["scale"], known).point)
        found = [item["result"] for item in record.data["rows"] if item["point"] == point]
        if not found:
            raise RecordError(f"these results of table {table.name} lack {row.name!r}; run the same command again")
        results[row.name] = found[0] if row.operation is None else _operation(found[0], row.operation)
    return results


def _operation(result: Result, operation: str) -> Result:
    """The times of one operation, from those of all."""
    if "left_out" in result:
        return result
    times = {name: spent[operation] for name, spent in result.items()}
    return times | {"overhead": [spent["overhead"] for spent in result.values()]}


def _published(table: PaperTable, row: PaperRow) -> list[str]:
    return [_cell(table.metrics, row.published.get(column, ())) for column in table.columns]


def _cell(metrics: Sequence[Metric], values: Sequence[float | None]) -> str:
    shown = [metric.text(value) for metric, value in zip(metrics, values, strict=False) if value is not None]
    text = ", ".join(shown)
    # A number in brackets belongs to the number before it.
    return text.replace(", (", " (").replace(", [", " [").replace(" to, ", " to ") or NONE


def _throughput(result: Result) -> str | None:
    return f"{result['throughput_tok_s']:.0f}" if "throughput_tok_s" in result else None


def _ratio(key: str) -> Callable[[Result], str | None]:
    return lambda result: None if result.get(key) is None else f"{result[key]:.2f}x"


def _accuracy(result: Result) -> str | None:
    if result.get("accuracy") is None:
        return None
    return percent_text(result["accuracy"], result["accuracy_interval"])


def _agreement(result: Result) -> str | None:
    return f"{100 * result['agreement_with_none']:.1f} %" if "agreement_with_none" in result else None


def _perplexity(result: Result) -> str | None:
    if "perplexity" not in result:
        return None
    low, high = result["perplexity_interval"]
    return f"{result['perplexity']:.2f} ({low:.2f} to {high:.2f})"


def _prefix(result: Result) -> str | None:
    return f"{100 * result['prefix_ratio']:.1f} %" if result.get("prefix_ratio") else None


def _depth(result: Result) -> str | None:
    return f"{result['prefix_depth']:.1f}" if result.get("prefix_depth") else None


def _prefixes(results: Mapping[str, Result]) -> set[str]:
    return {shown for result in results.values() if (shown := _prefix(result)) is not None}


def _spent(name: str) -> Callable[[Result], str | None]:
    return lambda result: f"{result[name]:,.0f} ms" if name in result else None


def _reduction(result: Result) -> str | None:
    return f"{result['baseline_ms'] / result['ours_ms']:.2f}x" if result.get("ours_ms") else None


_OURS: tuple[Column, ...] = (
    ("prefix ratio", _prefix),
    ("depth", _depth),
    ("tok/s", _throughput),
    ("speed", _ratio("ratio_to_none")),
    ("work saved", _ratio("work_ratio_to_none")),
    ("FLOPs saved", _ratio("flops_saved")),
    ("accuracy (95 % interval)", _accuracy),
    ("agreement", _agreement),
    ("perplexity (95 % interval)", _perplexity),
    ("baseline", _spent("baseline_ms")),
    ("cached", _spent("ours_ms")),
    ("reduction", _reduction),
)


def _sources(table: PaperTable) -> list[str]:
    if table.setting is None:
        lines = [f"Ours alone; it belongs to {table.paper}, {table.source}."]
    else:
        cells = ", ".join(f"{metric.name} in {metric.unit}" for metric in table.metrics)
        lines = [f"Published: {table.paper}, {table.source}; {table.setting}. In each cell: {cells}."]
    lines += table.notes
    lines += [f"{row.name}: nothing of ours. {row.missing}" for row in table.rows if row.missing is not None]
    return lines


def _conditions(table: PaperTable, record: Record, results: Mapping[str, Result]) -> list[str]:
    about, settings = record.about, record.about["settings"]
    work, machine = settings["workload"], about["machine"]
    sampling = ", ".join(f"{name}={value}" for name, value in settings["sampling"].items())
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    ratios = _prefixes(results)
    shared = f", prefix ratio {ratios.pop()}" if len(ratios) == 1 else ""
    # Texts share no prefix; tables of other workloads without one write one of no tokens.
    prefixes = min(work["prefixes"], work["requests"]) if work.get("prefix_tokens") and work["name"] != "texts" else 0
    over = f" over {prefixes} shared {'prefix' if prefixes == 1 else 'prefixes'}" if prefixes else ""
    made = f"commit {about['commit'] or 'unknown'}, {about['date']}"
    batches = {row.concurrency or settings["concurrency"] for row in table.rows if row.missing is None}
    busy = f"{batches.pop()} at a time" if len(batches) == 1 else "at a time as many as the row says"
    own = table.scales[settings["scale"]]
    weights = ", random weights" if own.random_weights and own.model == about["model"] else ""
    lines = [
        f"Ours: `{about['model']}` ({about['parameters'] / 1e6:,.2f} M parameters{weights}), "
        f"{work['requests']} requests, "
        f"{ASKED[work['name']]}{over}{shared}, {busy}; {sampling}; rounds {settings['rounds']}, seed {about['seed']}; "
        f"{machine['dtype']} on {processor_text(machine)}; {made}; {versions}. Speed, work saved and agreement are "
        "against the row's baseline, measured beside it in the same run; throughput counts tokens up to the end token."
    ]
    lines += _failures(table, results)
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
    return [*lines, *_baselines(table)]


def _failures(table: PaperTable, results: Mapping[str, Result]) -> list[str]:
    """Which rows lose answers beyond their interval, or that none does: then the table could not show a loss."""
    judged = {name: result for name, result in results.items() if result.get("accuracy") is not None}
    if not judged:
        return ["No answers are judged here: the table shows work, time and agreement."]
    lost = [
        name
        for name, result in judged.items()
        # An interval may end a rounding error short of its share.
        if max(result["accuracy"], result["accuracy_interval"][1])
        < judged[table.baseline(table.row(name)).name]["accuracy"]
    ]
    if not lost:
        return ["No row loses answers beyond its interval: the table shows work and time, and no cache's loss."]
    return [f"Fewer right answers than their baseline, beyond the interval: {', '.join(lost)}."]


def _baselines(table: PaperTable) -> list[str]:
    """A note that names the baselines, where not all rows are compared with the first one."""
    compared: dict[str, list[str]] = {}
    for row in table.rows:
        baseline = table.baseline(row)
        if row.missing is None and row.measure != "operations" and baseline is not row:
            compared.setdefault(baseline.name, []).append(row.name)
    if set(compared) <= {table.rows[0].name}:
        return []
    baselines = (f"{name!r} for {', '.join(map(repr, rows))}" for name, rows in compared.items())
    return [f"Baselines: {'; '.join(baselines)}."]
