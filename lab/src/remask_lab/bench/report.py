"""A bench result as a Markdown table, and as CSV."""

import csv
import io
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from remask_lab.bench.audited import AUDITED
from remask_lab.bench.bench import LEAST_ACCURACY
from remask_lab.bench.contenders import settings_text
from remask_lab.records.interval import percent_text
from remask_lab.records.machine import processor_text
from remask_lab.records.markdown import NONE, markdown_table, number_text, percent
from remask_lab.records.record import Record, number_format

Result: TypeAlias = Mapping[str, Any]
Column: TypeAlias = tuple[str, Callable[[Result], str]]

WARNING = "⚠"
NOTHING = "="  # marks saved work or FLOPs that are none


def table(record: Record, *, detail: bool = False, parts: bool = True) -> str:
    """The results of a bench's `record` as a Markdown table, one row a policy, and notes on how they were measured.

    `detail` adds what a detailed bench measures, `parts` the scores of the parts of the answers. `WARNING` marks a
    policy that computes less than its baseline and is slower, `NOTHING` one that saves nothing. Efficiencies above
    100 %, which come from noise, are left out. If the metric is agreement, losses stand in the place of accuracies.
    """
    audited = any(result.get("divergence_nats") is not None for result in record.data["results"])
    columns = [column for column in (DETAILED if detail else SHORT) if audited or column is not MOVED]
    if _by_agreement(record):
        columns[columns.index(ACCURACY)] = LOSS
    rows = [[cell(result) for _, cell in columns] for result in record.data["results"]]
    return "\n\n".join(
        [markdown_table([name for name, _ in columns], rows, aligned=True), *_notes(record, detail, parts)]
    )


def csv_text(record: Record) -> str:
    """The results of a bench's `record` as CSV: a header, and a line for each row of the table.

    Columns have the names and units of the record, unrounded. An interval or a range takes two columns, `..._low` and
    `..._high`; the columns of rounds with one request at a time begin with `alone_`; objects and lists are JSON.
    """
    rows = [_flat(result) for result in record.data["results"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(result: Result, prefix: str = "") -> dict[str, Any]:
    """The cells of a result by the names of their columns, which begin with `prefix`."""
    cells: dict[str, Any] = {}
    for name, value in result.items():
        if name == "alone":
            cells |= _flat(value, "alone_")
        elif name in ("accuracy_interval", "divergence_interval", "ratio_range"):
            low, high = (None, None) if value is None else value
            cells |= {f"{prefix}{name}_low": low, f"{prefix}{name}_high": high}
        else:
            cells[prefix + name] = json.dumps(value) if isinstance(value, Mapping | bool | list) else value
    return cells


def _accuracy(result: Result) -> str:
    """The share of right answers with its interval; `NONE` if no answer is judged."""
    share = result["accuracy"]
    return NONE if share is None else percent_text(share, result["accuracy_interval"])


def _divergence(result: Result) -> str:
    """Mean and interval in nats."""
    nats = result.get("divergence_nats")
    if nats is None:
        return NONE
    low, high = result["divergence_interval"]
    return f"{nats:.3f}" + ("" if low is None else f" ({max(low, 0):.3f} to {high:.3f})")


def _speed(times: Result) -> str:
    """The median of the rounds' speeds, as a multiple of the baseline's, and their range if they differ."""
    low, high = (f"{ratio:.2f}" for ratio in times["ratio_range"])
    spread = "" if low == high else f" ({low} to {high})"
    return f"{times['ratio_to_none']:.2f}x{spread}" + (f" {WARNING}" if times["slower_with_less_work"] else "")


def _saving(result: Result, ratio: float) -> str:
    """The baseline's work as a multiple of the row's, with `NOTHING` if it is no larger."""
    nothing = result["cache"] != result["baseline"] and ratio <= 1
    return f"{ratio:.2f}x" + (f" {NOTHING}" if nothing else "")


def _efficiency(result: Result) -> str:
    """FLOPs a second as a share of the baseline's, with the range over the rounds; `NONE` if the share is above 1.

    Fewer FLOPs do not use a machine better, so a share above 1 comes from noise.
    """
    if result["cache"] == result["baseline"]:
        return "100 %"
    share = result["efficiency_kept"]
    if share > 1:
        return NONE
    low, high = (speed / result["flops_saved"] for speed in result["ratio_range"])
    return f"{100 * share:.0f} %" + (f" ({100 * low:.0f} to {100 * high:.0f})" if high > low else "")


def _staleness(result: Result) -> str:
    """The mean age of K/V in passes, after "<=" if only a bound of it is known."""
    return ("<= " if result["staleness_is_upper_bound"] else "") + f"{result['staleness']:.2f}"


MOVED: Column = ("nats moved", _divergence)
ACCURACY: Column = ("accuracy (95 % interval)", _accuracy)
LOSS: Column = ("loss (nats a token)", lambda result: number_text(".3f", result["loss"]))
AGREEMENT: Column = ("agreement", lambda result: percent(result["agreement_with_none"]))
SHORT: tuple[Column, ...] = (
    ("cache", lambda result: str(result["cache"])),
    ACCURACY,
    AGREEMENT,
    MOVED,
    ("tok/s", lambda result: f"{result['throughput_tok_s']:.0f}"),
    ("speed", _speed),
    ("work saved", lambda result: _saving(result, result["work_ratio_to_none"])),
    ("prefix hits", lambda result: str(result["prefix_hits"])),
    ("cache memory", lambda result: f"{result['peak_memory_bytes'] / 1e6:.1f} MB"),
)
DETAILED: tuple[Column, ...] = (
    ("method", lambda result: str(result["cache"])),
    ("settings", lambda result: settings_text(result["settings"])),
    ACCURACY,
    AGREEMENT,
    MOVED,
    ("speed", _speed),
    ("speed alone", lambda result: _speed(result["alone"])),
    ("forwards", lambda result: str(result["forwards"])),
    ("row-layers", lambda result: f"{result['row_layers'] / 1e6:.3f} M"),
    ("TFLOPs", lambda result: f"{result['flops'] / 1e12:.3g}"),
    ("FLOPs saved", lambda result: _saving(result, result["flops_saved"])),
    ("efficiency kept", _efficiency),
    ("cache ratio", lambda result: percent(result["cache_ratio"])),
    ("staleness", _staleness),
    ("extra memory", lambda result: f"{result['extra_memory_bytes'] / 1e6:+.1f} MB"),
)


def _by_agreement(record: Record) -> bool:
    return bool(record.about["settings"].get("metric") == "agreement")


def decoding_text(record: Record) -> str:
    """How the answers of a bench were decoded, and how many passes an answer of the first row took.

    It names a threshold, which decides how many steps an answer takes.
    """
    settings, row = record.about["settings"], record.data["results"][0]
    sampling = settings.get("sampling", {})
    threshold = sampling.get("threshold")
    tokens = f"{'' if sampling.get('ignore_eos') else 'at most '}{settings['max_tokens']} tokens"
    steps = f"{settings['steps']} steps"
    if threshold is not None:
        steps = f"at most {steps}, all tokens of at least {threshold:g} in a step"
    passes = f"{row['forwards'] / settings['requests']:.1f} passes an answer under `{row['cache']}`"
    return f"{tokens} in {steps} ({passes}), blocks of {settings['block_length']}"


def _notes(record: Record, detail: bool, parts: bool) -> list[str]:
    """The notes below a table: the settings, the meaning of columns, then what rows have in particular."""
    results = record.data["results"]
    notes = [_settings_note(record)]
    if detail:
        notes.append(
            f"Speed alone: the first {record.about['settings']['alone_requests']} requests, one at a time. Cache "
            "ratio: share of the K/V that a pass does not compute. Staleness: passes since the K/V attended to were "
            "written; <= where rows are chosen on the device. Speed is FLOPs saved times efficiency kept, which has "
            "its range over the rounds, or is - where it would be above 100 %: only noise makes that. Extra memory: at "
            "the peak, beyond the baseline's."
        )
    if any(result.get("divergence_nats") is not None for result in results):
        notes.append(
            "Nats moved: KL divergence from what the exact pass predicts, at the position that moves most, mean and "
            f"95 % interval over at most {AUDITED} audited requests: of prefixes at the first step, else at one by "
            "chance."
        )
    others = [result for result in results if result["baseline"] not in ("none", result["cache"])]
    notes += [f"{result['cache']} is compared with {result['baseline']!r}, not with 'none'." for result in others]
    notes += _loss_notes(results) if _by_agreement(record) else _accuracy_notes(results, parts)
    notes += [
        f"{result['cache']} read no shared prefix: {result['prefix_note']}."
        for result in results
        if result.get("prefix_note") and result["cache"] != result["baseline"]
    ]
    if any(result["cache"] != result["baseline"] and result["work_ratio_to_none"] <= 1 for result in results):
        notes.append(f"{NOTHING} Saves nothing at these settings: it computes what its baseline computes.")
    if any(times["slower_with_less_work"] for result in results for times in (result, result.get("alone", result))):
        notes.append(f"{WARNING} Slower than its baseline although it computes fewer row-layers.")
    if busy := record.data.get("conditions", {}).get("busy"):
        notes.append(busy)
    notes += [f"Left out: {policy['name']}: {policy['reason']}" for policy in record.data.get("left_out", ())]
    return notes


def _settings_note(record: Record) -> str:
    """The requests, their decoding, the rounds, the model, the machine and the commit, in one sentence."""
    about = record.about
    settings = about["settings"]
    count, length = settings["prefixes"], settings["canvas_length"]
    prefixes = f" over {count} shared prefixes, prefix ratio {settings['prefix_ratio']}" if count else ""
    # A uniform model's noise after the response costs time too.
    canvas = "" if length is None else f" on canvases of {length}"
    rounds = f"{settings['rounds']} rounds{', a share of the requests each' if settings.get('divided') else ''}"
    return (
        f"{settings['requests']} requests{prefixes}, {settings['concurrency']} at a time, {decoding_text(record)}"
        f"{canvas}, seed {about['seed']}, medians of {rounds}; {about['model']}, {number_format(about)} on "
        f"{processor_text(about['machine'])}, commit {about['commit'] or 'unknown'}."
    )


def _loss_notes(results: Sequence[Result]) -> list[str]:
    """The meaning of losses, and why rows have none."""
    note = (
        "Loss: of the tokens of the reference answers, written in random order, each read in the step that writes it; "
        "answers of the model's own are not judged."
    )
    failures = [result for result in results if result["no_loss"] is not None]
    return [note, *(f"{result['cache']} has no loss: {result['no_loss']}" for result in failures)]


def _accuracy_notes(results: Sequence[Result], parts: bool) -> list[str]:
    """A warning for each baseline that answers too little, and with `parts` the scores of answers that have several."""
    notes = [
        f"{result['cache']} answers hardly anything itself: rows that are compared with it show work, and no quality."
        for result in results
        if result["cache"] == result["baseline"]
        and result["accuracy"] is not None
        and result["accuracy"] < LEAST_ACCURACY
    ]
    scores = {result["cache"]: result.get("parts", {}) for result in results}
    if parts and len({name for by_name in scores.values() for name in by_name}) > 1:
        texts = [
            f"{cache} {', '.join(f'{name} {score:.3f}' for name, score in by_name.items())}"
            for cache, by_name in scores.items()
        ]
        notes.append(f"Parts of answers: {'; '.join(texts)}.")
    return notes
