"""Writes docs/lab/real-weights.md from the result files in benchmarks/results/real-weights, and measures them.

    python -m remask_lab pages real-weights [--measure SIZE] [--parts NAME ...] [--published FILE] [--documents FOLDER]

Without `--measure` only the page is written. Each part is written to a file once it is measured, and parts that have a
file are not measured: the same command resumes after an interruption, and removing a file measures its part again. The
file of the part `town` is `bench.smollm2.json` beside the folder, where the README finds it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from remask.checks import BUNDLED, SMOLLM2
from remask.errors import RecordError
from remask.machine.disk import write_whole
from remask_lab.bench.lookup import BY_HAND, GENERATED
from remask_lab.bench.plot import Row
from remask_lab.bench.report import decoding_text
from remask_lab.drawing import label, new_panels, save_figure
from remask_lab.pages.measure_real_weights import (
    HELD_OUT,
    PUBLISHED,
    ROWS,
    SIMILARITY,
    SUBJECT,
    is_possible,
    measure,
    parts,
)
from remask_lab.pages.page import PAGES, RESULTS, fill, origin_text
from remask_lab.pages.real_weights_benches import DEEP, DOCUMENTS, EARNED, LOOKUPS, SHOTS, is_bench
from remask_lab.pages.real_weights_losses import CANVAS
from remask_lab.pages.real_weights_sizes import SIZES, Source
from remask_lab.pages.results import BENCH
from remask_lab.records.interval import judge_answers
from remask_lab.records.jsonl import read_lines
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, number_format, read_record, write_record
from remask_lab.speed.command import command_parser, run_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FOLDER = RESULTS / "real-weights"
TRAINING, PICTURE = "training.jsonl", "real-weights-similarity.png"
KINDS = {
    "document": "documents",
    "talk": "conversations",
    "solved": "GSM8K, worked examples before",
    "town": "`town`",
    **{f"gsm8k-{share}": f"GSM8K, {share} % masked" for share in (25, 50, 75, 100)},
}
"""The held-out data of the training's log by their names there, in words."""
LOOKUP_PAGES = {GENERATED: "pages that were drawn", BY_HAND: "pages that were written by hand"}
PROMISED = 0.85  # nats a token: the largest loss of half-masked answers that was promised
WORK, TIME = "work saved", "time saved"
FEW = 6  # the least number of questions of a bench that has a table on the page
SHOWN = 10  # the number of prompts whose answers are on the page


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what the options name, and write the page. Returns 0, or 2 after printing an error of the user's."""
    parser = command_parser(__doc__, "pages real-weights")
    parser.add_argument("--measure", choices=tuple(SIZES), metavar="SIZE", help=f"how much: {', '.join(SIZES)}")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="measure these alone (default: all)")
    parser.add_argument("--published", metavar="FILE", help=f"GSM8K's test.jsonl, which the part {PUBLISHED} reads")
    parser.add_argument("--documents", nargs="+", metavar="FOLDER", help="HTML in English, which documents-* read")
    parser.add_argument("--device", default="cpu", help="float32 on a CPU, the default; bfloat16 elsewhere")
    parser.add_argument("--folder", default=str(FOLDER), help="of the result files")
    parser.add_argument(
        "--output", default=str(PAGES["real-weights"]), help="the page; its picture goes into images beside it"
    )
    return run_command(partial(_run, parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    """Measure the parts without a file if `--measure` is given, then write the picture and the page."""
    folder, output = Path(args.folder), Path(args.output)
    if args.measure:
        folder.mkdir(parents=True, exist_ok=True)
        published = None if args.published is None else Path(args.published)
        size, documents = SIZES[args.measure], tuple(map(Path, args.documents or ()))
        source = Source(device=args.device, published=published, documents=documents)
        for part in args.parts or [part for part in parts(size) if is_possible(part, source)]:
            if not _file(folder, part).exists():
                print(f"measuring {part}", file=sys.stderr)
                write_record(_file(folder, part), measure(part, size, source))
    records = read_all(folder)
    if "profile" in records:
        (output.parent / "images").mkdir(exist_ok=True)
        save_figure(_picture(records["profile"]), output.parent / "images" / PICTURE, f"{BUNDLED} and {SMOLLM2}")
    write_whole("the page", output, page(records, read_training(folder)))


def _file(folder: Path, part: str) -> Path:
    """The file of a part's record."""
    return folder.parent / f"bench.{SMOLLM2}.json" if part == "town" else folder / f"{part}.json"


def read_all(folder: Path) -> dict[str, Record]:
    """The records of a folder's parts, by name. Raises `RecordError` if it has another file, or no part at all."""
    all_parts = dict.fromkeys(part for size in SIZES.values() for part in parts(size))
    for path in folder.glob("*.json"):
        if path.stem not in all_parts:
            raise RecordError(f"{path.name} is no part of this page; its parts: {', '.join(all_parts)}")
    files = {part: _file(folder, part) for part in all_parts if _file(folder, part).exists()}
    if not files:
        raise RecordError(f"there are no results in {str(folder)!r}; --measure makes them")
    return {part: read_record(path, BENCH if is_bench(part) else SUBJECT) for part, path in files.items()}


def read_training(folder: Path) -> list[dict[str, Any]]:
    """The events of the adapter's training log; empty without the file."""
    path = folder / TRAINING
    return [dict(line.record) for line in read_lines(path)] if path.exists() else []


def page(records: Mapping[str, Record], training: Sequence[Mapping[str, Any]]) -> str:
    """The text of the page, from the records of parts by name and the events of the training log."""
    rows = rows_by_cache(records["town"]) if "town" in records else {}
    text = fill(
        "real-weights",
        parts=records,
        town=records.get("town"),
        rows=rows,
        deep=rows.get(f"bicache depth={DEEP}"),
        by_cache=rows_by_cache,
        lookups=[(LOOKUP_PAGES[written], records[name]) for name, written in LOOKUPS.items() if name in records],
        earned_text=_earned_text,
        similarity=records.get(SIMILARITY),
        profile=records["profile"].data if "profile" in records else None,
        published=records[PUBLISHED].data if PUBLISHED in records else None,
        added_losses=_added_losses(records),
        loss_benches=_loss_benches(records),
        held_out=[records[name] for name in (*HELD_OUT, PUBLISHED) if name in records],
        training=_training_table(training),
        promised=f"{PROMISED:g}",
        picture=PICTURE,
        canvas=CANVAS,
        share=_share,
        number=_number,
        verdict=_verdict,
        bound=_bound,
        loses=lambda row, none: judge_answers(row, none).loses,
        origin=_origin,
        decoding=decoding_text,
        depth_table=_depth_table,
        lowest=lambda table: min(map(min, table["curves"].values())),
        similarity_table=_similarity_table,
        answer_table=_answer_table,
        loss_table=_loss_table,
        left_out=partial(_left_out, set[str]()),
        few=FEW,
        shown=SHOWN,
        held_out_table=_held_out_table,
        pass_table=_pass_table,
        first_step_table=_first_step_table,
        row_share=ROWS,
    )
    # Answers are indented, so that nothing in them is markup or ends a fenced block.
    for case in records["answers"].data["answers"][:SHOWN] if "answers" in records else ():
        answer = "\n".join(f"    {line}".rstrip() for line in case["answer"].split("\n"))
        text += f"\n**{case['prompt']}**\n\n{answer}\n"
    return text


def _added_losses(records: Mapping[str, Record]) -> list[str]:
    """The loss that `reuse` adds to the answers of GSM8K, a text for each number of worked examples."""
    texts = []
    for name, record in records.items():
        if name.startswith(SHOTS) and (row := rows_by_cache(record).get("reuse")) is not None:
            questions = f"{name.removeprefix(SHOTS)} shots, {record.about['settings']['requests']} questions"
            texts.append(f"{questions}: {_nats(row, 'loss_over_none')}")
    return texts


def _loss_benches(records: Mapping[str, Record]) -> list[tuple[str, str, Record]]:
    """Benches of losses with `FEW` questions or more: the title, a description of the requests, and the record."""
    benches = []
    for name, record in sorted(records.items()):
        settings = record.about["settings"]
        if settings.get("requests", FEW) < FEW:
            continue
        if name.startswith(DOCUMENTS):
            benches.append((f"Documents, prefix {name.removeprefix(DOCUMENTS)} %", "documents and their ends", record))
        elif name.startswith(SHOTS):
            shots = name.removeprefix(SHOTS)
            prompts = f"{settings['prefixes']} system prompts of rules and {shots} worked examples"
            benches.append((f"GSM8K, {shots} shots", f"questions of the test split over {prompts}", record))
    return benches


def _verdict(row: Row, none: Row) -> str:
    """A sentence on the answers and the work of a cache against those of `none`."""
    change = _points(row["accuracy_over_none"], row["accuracy_over_none_interval"])
    loss = judge_answers(row, none).value
    return f"`{row['cache']}` {loss} ({change}), for {row['work_ratio_to_none']:.1f}x less work."


def _bound(data: Mapping[str, Any]) -> str:
    """How the interval of a loss compares with `PROMISED`."""
    low, high = data["loss_interval"]
    return "at most" if high <= PROMISED else "above" if low > PROMISED else "about"


def rows_by_cache(record: Record) -> dict[str, Row]:
    """The results of a bench by the names of their caches."""
    return {row["cache"]: row for row in record.data["results"]}


def _share(value: float, interval: Sequence[float | None]) -> str:
    """A share in percent with its interval, cut to 0 to 100, which is left out if it has no width."""
    low, high = interval
    if low is None or high is None or low == high:
        return f"{100 * value:.1f} %"
    return f"{100 * value:.1f} % ({100 * max(0, low):.1f} to {100 * min(1, high):.1f})"


def _points(value: float, interval: Sequence[float]) -> str:
    """A difference of shares in points with its interval."""
    low, high = interval
    if low == high:
        return "no answer differs"
    return f"{100 * value:+.1f} points, {100 * max(-1, low):+.1f} to {100 * min(1, high):+.1f}"


def _number(value: float, interval: Sequence[float | None], form: str = ".3f") -> str:
    """A number with its interval, which is left out if it has no width."""
    low, high = interval
    if low is None or high is None or low == high:
        return format(value, form)
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def _nats(row: Row, key: str) -> str:
    """A difference of losses with its interval, signed; "-" if it was not measured."""
    return _number(row[key], row[f"{key}_interval"], "+.3f") if key in row else "-"


def _origin(record: Record) -> str:
    """The number format, machine, commit and date of a measurement, and what else used the machine."""
    origin = f"{number_format(record.about)} {origin_text(record)}"
    conditions = record.data.get("conditions", {})
    if not conditions.get("busy"):
        return origin
    if not _has_times(record):
        return f"{origin} {record.about['settings']['concurrency']} at a time, beside other benches."
    others = conditions["others"]
    return f"{origin} Others used {others['used']:.1f} of its {others['cores']} cores."


def _has_times(record: Record) -> bool:
    """Whether the times of a bench can be compared, which those of several benches on one GPU cannot."""
    return not ("gpu" in record.about["machine"] and record.data.get("conditions", {}).get("busy"))


def _cost_titles(record: Record) -> list[str]:
    return [WORK, TIME] if _has_times(record) else [WORK]


def _depth_table(profile: Mapping[str, Any]) -> str:
    """The depths of the paper's rule, a line for each model and a column for each prefix ratio."""
    ratios = list(profile["tables"][SMOLLM2]["depths"])
    rows = [
        [f"`{name}`, {table['layers']} layers", *(str(table["depths"][ratio]) for ratio in ratios)]
        for name, table in profile["tables"].items()
    ]
    return markdown_table(["model", *(f"{ratio} %" for ratio in ratios)], rows)


def _picture(record: Record) -> Figure:
    """The mean similarity by layer, a line for each prefix ratio, and a panel for each model."""
    from matplotlib import colormaps

    figure, panels = new_panels("K/V of a prefix alone against the whole canvas", 2, sharey=True)
    for axes, (name, table) in zip(panels, record.data["tables"].items(), strict=True):
        for number, (ratio, curve) in enumerate(table["curves"].items()):
            color = colormaps["viridis"](0.9 * number / max(1, len(table["curves"]) - 1))
            axes.plot(range(1, len(curve) + 1), curve, ".-", color=color, label=f"r = {ratio} %")
        axes.axhline(table["tau"], color="#c0392b", linestyle="--", linewidth=1, label=f"tau = {table['tau']:g}")
        label(axes, name, "layer", "mean cosine similarity" if name == BUNDLED else "", grid="both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    return figure


def _similarity_table(data: Mapping[str, Any]) -> str:
    """The cosine similarities of K and V in every fifth layer."""
    layers = [1, *range(5, data["layers"] + 1, 5)]
    rows = [[name, *(f"{data[name.lower()][layer - 1][0]:.3f}" for layer in layers)] for name in ("K", "V")]
    return markdown_table(["layer", *map(str, layers)], rows)


def _answer_table(record: Record) -> str:
    """The results of a bench that judges answers: right ones, in all and by kind of question, and costs."""
    kinds = list(rows_by_cache(record)["none"]["parts"])
    titles = ["cache", "right", *kinds, "over its baseline", "tokens as there", *_cost_titles(record)]
    titles.append("K/V and states")
    rows = []
    for row in record.data["results"]:
        change = _points(row["accuracy_over_none"], row["accuracy_over_none_interval"])
        rows.append(
            [
                _cache_title(row),
                _share(row["accuracy"], row["accuracy_interval"]),
                *(f"{100 * row['parts'][kind]:.0f} %" for kind in kinds),
                "-" if row["cache"] == row["baseline"] else change,
                *_costs(row, with_time=_has_times(record)),
            ]
        )
    return markdown_table(titles, rows)


def _first_step_table(cases: Sequence[Mapping[str, Any]]) -> str:
    """The divergence of first predictions by depth, beside the depths of the rules. Equal ones share their text."""
    rows = []
    for case in cases:
        texts = {
            depth: _number(shift["nats"], shift["nats_interval"], ".2f") for depth, shift in case["depths"].items()
        }
        ranges = []
        for text, run in groupby(texts, key=texts.__getitem__):
            depths = list(run)
            ranges.append(f"{'-'.join(dict.fromkeys((depths[0], depths[-1])))}: {text}")
        name = f"`{case['model']}`, {case['task']}"
        rows.append([name, f"{min(case['rule'])}", f"{min(case['rule_by_rows'])}", "; ".join(ranges)])
    return markdown_table(["model, task", "rule", "by rows", "nats by depth"], rows)


def _loss_table(record: Record) -> str:
    """The results of a bench of losses: those of single passes, the agreement of whole answers, and costs."""
    titles = ["cache", "one pass: same token", "loss added", "whole answer: same tokens", *_cost_titles(record)]
    titles.append("memory")
    rows = []
    for row in record.data["results"]:
        agreement = _share(row["pass_agreement"], row["pass_agreement_interval"]) if "pass_agreement" in row else "-"
        costs = _costs(row, with_time=_has_times(record))
        rows.append([_cache_title(row), agreement, _nats(row, "loss_over_none"), *costs])
    return markdown_table(titles, rows)


def _earned_text(record: Record) -> str:
    """The depth that audits earned, and the work of audits while questions were answered; empty without audits."""
    row = rows_by_cache(record).get(EARNED)
    if row is None:
        return ""
    share = row["audit_row_layers"] / (row["row_layers"] + row["audit_row_layers"])
    depth = f"in the mean {row['prefix_depth']:.1f} of {record.about['layers']} layers were read"
    return (
        f"Audits of 24 requests earned the depth of `bicache` as it comes: {depth}. Those that went on are "
        f"{100 * share:.0f} % of all that was computed for it, and no part of the work saved."
    )


def _costs(row: Row, *, with_time: bool) -> list[str]:
    """The cells of a row: the agreement of tokens with the baseline's, then work, time if wanted, and memory."""
    return [
        _share(row["agreement_with_none"], row["agreement_interval"]),
        f"{row['work_ratio_to_none']:.2f}x",
        *([f"{row['ratio_to_none']:.2f}x"] if with_time else []),
        f"{row['peak_memory_bytes'] / 1e6:.1f} MB",
    ]


def _cache_title(row: Row) -> str:
    """The name of a cache, and its baseline if that is not `none`."""
    baseline = "" if row["baseline"] in ("none", row["cache"]) else f" (beside {row['baseline']})"
    return (row["cache"] if " " in row["cache"] else f"`{row['cache']}`") + baseline


def _left_out(reasons: set[str], record: Record) -> str:
    """The caches that were left out of a bench, and why. `reasons` are those above on the page; new ones are added."""
    lines = []
    for policy in record.data["left_out"]:
        name, reason = policy["name"], policy["reason"]
        text = ", for the same reason as above." if reason in reasons else f": {reason}."
        lines.append(f"- Left out: `{name}`{text}")
        reasons.add(reason)
    return "\n".join(lines)


def _held_out_table(records: Sequence[Record]) -> str:
    """The losses of half-masked answers of GSM8K."""
    rows = []
    for record in records:
        data = record.data
        part = record.about["settings"]["part"]
        source = "as published" if part == PUBLISHED else "as packaged, no annotations"
        if (weights := HELD_OUT.get(part, "none")) != "none":
            source += f", weights in {weights}"
        loss, right = _number(data["loss"], data["loss_interval"]), _share(data["right"], data["right_interval"])
        rows.append([source, str(data["answers"]), str(data["tokens"]), loss, right])
    titles = ["GSM8K's test answers, half masked", "answers", "tokens", "loss, nats a token", "best token is right"]
    return markdown_table(titles, rows)


def _training_table(training: Sequence[Mapping[str, Any]]) -> str:
    """The held-out losses of the training's log, with a column for each phase; empty without any."""
    events = [event for event in training if event["event"] == "held out"]
    if not events:
        return ""
    phases = (event["name"] for event in training if event["event"] == "phase")
    columns = ["at first", *(f"after the {name}" for name in phases)][: len(events)]
    rows = [[KINDS[kind], *(f"{event[kind]['loss']:.3f}" for event in events)] for kind in KINDS]
    reuse = [event["reuse"]["other"]["loss"] for event in events]
    rows.append(["added by reuse", *(f"{mean:+.3f} ± {half:.3f}" for mean, half in reuse)])
    return markdown_table(["held out", *columns], rows)


def _pass_table(passes: Sequence[Mapping[str, Any]]) -> str:
    """The seconds of single passes, a line for each number of rows."""
    names = list(passes[0]["seconds"])
    lines = []
    for timing in passes:
        seconds = [f"{timing['seconds'][name]:.3f} s" for name in names]
        lines.append([f"{timing['rows']} ({timing['read']} read)", *seconds])
    return markdown_table(["rows", *names], lines)
