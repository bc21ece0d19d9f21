"""A bench result as a Markdown table, and as CSV."""

import csv
import io
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from remask_lab.bench.audited import AUDITED
from remask_lab.bench.bench import LEAST_ACCURACY
from remask_lab.bench.contenders import described
from remask_lab.records.interval import percent_text
from remask_lab.records.machine import processor_text
from remask_lab.records.markdown import NONE, markdown_table, number_text, percent
from remask_lab.records.record import Record, number_format

Result: TypeAlias = Mapping[str, Any]
Column: TypeAlias = tuple[str, Callable[[Result], str]]

WARNING = "⚠"
NOTHING = "="  # beside work or FLOPs that are those of the baseline


def table(record: Record, *, detail: bool = False, parts: bool = True) -> str:
    """Returns the results of a bench's `record`, one row a policy, and notes on the conditions of the measurement.

    `detail` adds what a detailed bench measures, `parts` how much of each part of the answers is right. A warning sign
    marks a policy that computes less than its baseline and is slower, an equals sign one that saves nothing.
    Efficiencies are not shown where the rounds differ too much for them.
    """
    audited = any(result.get("divergence_nats") is not None for result in record.data["results"])
    columns = [_judged(column, record) for column in (DETAILED if detail else SHORT) if audited or column is not MOVED]
    rows = [[cell(result) for _, cell in columns] for result in record.data["results"]]
    return "\n\n".join(
        [markdown_table([name for name, _ in columns], rows, aligned=True), *_notes(record, detail, parts)]
    )


def csv_text(record: Record) -> str:
    """Returns the results of a bench's `record` as CSV: a header, and a line for each row of the table.

    Columns have the names and units of the record, unrounded. The ends of an interval or a range are two columns,
    `..._low` and `..._high`; what was measured `alone` has this name before its own, and objects are JSON.
    """
    rows = [_flat(result) for result in record.data["results"]]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(result: Result, before: str = "") -> dict[str, Any]:
    """A result by its columns' names, each of which begins with `before`."""
    cells: dict[str, Any] = {}
    for name, value in result.items():
        if name == "alone":
            cells |= _flat(value, "alone_")
        elif name in ("accuracy_interval", "divergence_interval", "ratio_range"):
            ends = (None, None) if value is None else value
            cells |= {f"{before}{name}_{end}": each for end, each in zip(("low", "high"), ends, strict=True)}
        else:
            cells[before + name] = json.dumps(value) if isinstance(value, Mapping | bool | list) else value
    return cells


def _accuracy(result: Result) -> str:
    share = result["accuracy"]
    return NONE if share is None else percent_text(share, result["accuracy_interval"])


def _moved(result: Result) -> str:
    """Mean and interval in nats."""
    nats = result.get("divergence_nats")
    if nats is None:
        return NONE
    low, high = result["divergence_interval"]
    return f"{nats:.3f}" + ("" if low is None else f" ({max(low, 0):.3f} to {high:.3f})")


def _speed(compared: Result) -> str:
    """The median, and the range over rounds where they differ."""
    low, high = (f"{ratio:.2f}" for ratio in compared["ratio_range"])
    spread = "" if low == high else f" ({low} to {high})"
    return f"{compared['ratio_to_none']:.2f}x{spread}" + (f" {WARNING}" if compared["slower_with_less_work"] else "")


def _saved(result: Result, saved: float) -> str:
    nothing = result["cache"] != result["baseline"] and saved <= 1
    return f"{saved:.2f}x" + (f" {NOTHING}" if nothing else "")


def _efficiency(result: Result) -> str:
    """The share of the baseline's FLOPs a second, with its range over the rounds; nothing where noise hides it.

    Fewer FLOPs take no more of the machine than they need: a share above 1 comes from noise.
    """
    low, high = (speed / result["flops_saved"] for speed in result["ratio_range"])
    kept = result["efficiency_kept"]
    if result["cache"] == result["baseline"]:
        return "100 %"
    if kept > 1:
        return NONE
    return f"{100 * kept:.0f} %" + (f" ({100 * low:.0f} to {100 * high:.0f})" if high > low else "")


def _staleness(result: Result) -> str:
    return ("<= " if result["staleness_is_upper_bound"] else "") + f"{result['staleness']:.2f}"


MOVED: Column = ("nats moved", _moved)
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
    ("work saved", lambda result: _saved(result, result["work_ratio_to_none"])),
    ("prefix hits", lambda result: str(result["prefix_hits"])),
    ("cache memory", lambda result: f"{result['peak_memory_bytes'] / 1e6:.1f} MB"),
)
DETAILED: tuple[Column, ...] = (
    ("method", lambda result: str(result["cache"])),
    ("settings", lambda result: described(result["settings"])),
    ACCURACY,
    AGREEMENT,
    MOVED,
    ("speed", _speed),
    ("speed alone", lambda result: _speed(result["alone"])),
    ("forwards", lambda result: str(result["forwards"])),
    ("row-layers", lambda result: f"{result['row_layers'] / 1e6:.3f} M"),
    ("TFLOPs", lambda result: f"{result['flops'] / 1e12:.3g}"),
    ("FLOPs saved", lambda result: _saved(result, result["flops_saved"])),
    ("efficiency kept", _efficiency),
    ("cache ratio", lambda result: percent(result["cache_ratio"])),
    ("staleness", _staleness),
    ("extra memory", lambda result: f"{result['extra_memory_bytes'] / 1e6:+.1f} MB"),
)


def _by_agreement(record: Record) -> bool:
    return bool(record.about["settings"].get("metric") == "agreement")


def _judged(column: Column, record: Record) -> Column:
    """A column of the table; where answers are not judged, the loss stands in the place of the accuracy."""
    return LOSS if column is ACCURACY and _by_agreement(record) else column


def decoding_text(record: Record) -> str:
    """How the answers of a bench were decoded, with the passes that the first row's took: what was asked for and done.

    A threshold is said where there is one, as it decides how many steps an answer takes.
    """
    work, first = record.about["settings"], record.data["results"][0]
    sampling = work.get("sampling", {})
    threshold, whole = sampling.get("threshold"), "" if sampling.get("ignore_eos") else "at most "
    sure = "" if threshold is None else f", all tokens of at least {threshold:g} in a step"
    passes = f"{first['forwards'] / work['requests']:.1f} passes an answer under `{first['cache']}`"
    steps = f"{'at most ' if threshold is not None else ''}{work['steps']} steps{sure}"
    return f"{whole}{work['max_tokens']} tokens in {steps} ({passes}), blocks of {work['block_length']}"


def _notes(record: Record, detail: bool, parts: bool) -> list[str]:
    about, results = record.about, record.data["results"]
    work, machine = about["settings"], about["machine"]
    count, length = work["prefixes"], work["canvas_length"]
    shared = f" over {count} shared prefixes, prefix ratio {work['prefix_ratio']}" if count else ""
    # A uniform model's noise after the response costs time too.
    canvas = "" if length is None else f" on canvases of {length}"
    rounds = f"{work['rounds']} rounds{', a share of the requests each' if work.get('divided') else ''}"
    notes = [
        f"{work['requests']} requests{shared}, {work['concurrency']} at a time, {decoding_text(record)}{canvas}, seed "
        f"{about['seed']}, medians of {rounds}; {about['model']}, {number_format(about)} on {processor_text(machine)}, "
        f"commit {about['commit'] or 'unknown'}."
    ]
    if detail:
        notes.append(
            f"Speed alone: the first {work['alone_requests']} requests, one at a time. Cache ratio: share of the K/V "
            "that a pass does not compute. Staleness: passes since the K/V attended to were written; <= where rows are "
            "chosen on the device. Speed is FLOPs saved times efficiency kept, which has its range over the rounds, or "
            "is - where it would be above 100 %: only noise makes that. Extra memory: at the peak, beyond the "
            "baseline's."
        )
    if any(result.get("divergence_nats") is not None for result in results):
        notes.append(
            "Nats moved: KL divergence from what the exact pass predicts, at the position that moves most, mean and "
            f"95 % interval over at most {AUDITED} audited requests: of prefixes at the first step, else at one by "
            "chance."
        )
    others = [result for result in results if result["baseline"] not in ("none", result["cache"])]
    notes += [f"{result['cache']} is compared with {result['baseline']!r}, not with 'none'." for result in others]
    if _by_agreement(record):
        notes.append(
            "Loss: of the tokens of the reference answers, written in random order, each read in the step that writes "
            "it; answers of the model's own are not judged."
        )
        unread = [result for result in results if result["no_loss"] is not None]
        notes += [f"{result['cache']} has no loss: {result['no_loss']}" for result in unread]
    judged = [] if _by_agreement(record) else results
    bases = [result for result in judged if result["cache"] == result["baseline"] and result["accuracy"] is not None]
    notes += [
        f"{base['cache']} answers hardly anything itself: rows that are compared with it show work, and no quality."
        for base in bases
        if base["accuracy"] < LEAST_ACCURACY
    ]
    shares = {row["cache"]: row.get("parts", {}) for row in judged}
    if parts and len({name for each in shares.values() for name in each}) > 1:
        told = [
            f"{cache} {', '.join(f'{name} {share:.3f}' for name, share in each.items())}"
            for cache, each in shares.items()
        ]
        notes.append(f"Parts of answers: {'; '.join(told)}.")
    notes += [
        f"{result['cache']} read no shared prefix: {result['prefix_note']}."
        for result in results
        if result.get("prefix_note") and result["cache"] != result["baseline"]
    ]
    if any(result["cache"] != result["baseline"] and result["work_ratio_to_none"] <= 1 for result in results):
        notes.append(f"{NOTHING} Saves nothing at these settings: it computes what its baseline computes.")
    if any(each["slower_with_less_work"] for result in results for each in (result, result.get("alone", result))):
        notes.append(f"{WARNING} Slower than its baseline although it computes fewer row-layers.")
    if busy := record.data.get("conditions", {}).get("busy"):
        notes.append(busy)
    notes += [f"Left out: {left['name']}: {left['reason']}" for left in record.data.get("left_out", ())]
    return notes
