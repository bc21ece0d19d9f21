"""Writes docs/lab/real-weights.md from the result files in benchmarks/results/real-weights, and measures them.

    python -m remask_lab pages real-weights [--measure SIZE] [--parts NAME ...] [--published FILE] [--documents FOLDER]

Without `--measure` only the page is written. Each part has a file as soon as it is measured, and a file that is there
is kept: the same command goes on after an interruption, and removing a file measures its part anew. The part `town` is
`bench.smollm2.json` beside the folder, where the README finds it.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from itertools import groupby
from operator import itemgetter
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
    measure,
    parts,
    possible,
)
from remask_lab.pages.page import PAGES, RESULTS, fill
from remask_lab.pages.page import made as machine_of
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
"""What the training's log calls what it holds out, and what it is."""
LOOKED_UP = {GENERATED: "pages that were drawn", BY_HAND: "pages that were written by hand"}
PROMISED = 0.85  # nats, at most, of half-masked answers
WORK, TIME = "work saved", "time saved"
FEW = 6  # questions, of fewer than which the page has no table
SHOWN = 10  # prompts, from the first on, whose answers the page has


def main(argv: Sequence[str] | None = None) -> int:
    """Measure what is asked for, and write the page. Returns 0, or 2 after printing an error that the user can mend."""
    parser = command_parser(__doc__, "pages real-weights")
    parser.add_argument("--measure", choices=tuple(SIZES), metavar="SIZE", help=f"how much: {', '.join(SIZES)}")
    parser.add_argument("--parts", nargs="+", metavar="NAME", help="measure these alone (default: all)")
    parser.add_argument("--published", metavar="FILE", help=f"GSM8K's test.jsonl, which the part {PUBLISHED} reads")
    parser.add_argument("--documents", nargs="+", metavar="FOLDER", help="HTML in English, which documents-* read")
    parser.add_argument("--device", default="cpu", help="float32 on a CPU, the default; bfloat16 elsewhere")
    parser.add_argument("--folder", default=str(FOLDER), help="of the result files")
    parser.add_argument(
        "--output",
        default=str(PAGES["real-weights"]),
        help="the page; its picture goes into images beside it",
    )
    return run_command(partial(_run, parser.parse_args(argv)))


def _run(args: argparse.Namespace) -> None:
    folder, output = Path(args.folder), Path(args.output)
    if args.measure:
        folder.mkdir(parents=True, exist_ok=True)
        published = None if args.published is None else Path(args.published)
        size, documents = SIZES[args.measure], tuple(map(Path, args.documents or ()))
        source = Source(device=args.device, published=published, documents=documents)
        for name in args.parts or [each for each in parts(size) if possible(each, source)]:
            if not _file(folder, name).exists():
                print(f"measuring {name}", file=sys.stderr)
                write_record(_file(folder, name), measure(name, size, source))
    records = read_all(folder)
    if "profile" in records:
        (output.parent / "images").mkdir(exist_ok=True)
        save_figure(_picture(records["profile"]), output.parent / "images" / PICTURE, f"{BUNDLED} and {SMOLLM2}")
    write_whole("the page", output, page(records, read_training(folder)))


def _file(folder: Path, part: str) -> Path:
    return folder.parent / f"bench.{SMOLLM2}.json" if part == "town" else folder / f"{part}.json"


def read_all(folder: Path) -> dict[str, Record]:
    """The parts that are kept, by name. Raises `RecordError` where a file is none of them, or none is there."""
    known = dict.fromkeys(name for size in SIZES.values() for name in parts(size))
    for path in folder.glob("*.json"):
        if path.stem not in known:
            raise RecordError(f"{path.name} is no part of this page; its parts: {', '.join(known)}")
    found = {name: _file(folder, name) for name in known if _file(folder, name).exists()}
    if not found:
        raise RecordError(f"there are no results in {str(folder)!r}; --measure makes them")
    return {name: read_record(path, BENCH if is_bench(name) else SUBJECT) for name, path in found.items()}


def read_training(folder: Path) -> list[dict[str, Any]]:
    """The events of the adapter's training; empty where its log is not kept."""
    path = folder / TRAINING
    return [dict(line.record) for line in read_lines(path)] if path.exists() else []


def page(records: Mapping[str, Record], training: Sequence[Mapping[str, Any]]) -> str:
    solved = [(name.removeprefix(SHOTS), each) for name, each in records.items() if name.startswith(SHOTS)]
    reuse = [
        (f"{shots} shots, {record.about['settings']['requests']} questions:", rows_by_cache(record)["reuse"])
        for shots, record in solved
        if "reuse" in rows_by_cache(record)
    ]
    rows = rows_by_cache(records["town"]) if "town" in records else {}
    text = fill(
        "real-weights",
        parts=records,
        town=records.get("town"),
        rows=rows,
        deep=rows.get(f"bicache depth={DEEP}"),
        by_cache=rows_by_cache,
        lookups=[(LOOKED_UP[written], records[name]) for name, written in LOOKUPS.items() if name in records],
        earning=_earning,
        similarity=records.get(SIMILARITY),
        profile=records["profile"].data if "profile" in records else None,
        published=records[PUBLISHED].data if PUBLISHED in records else None,
        added=[f"{asked} {_nats(row, 'loss_over_none')}" for asked, row in reuse],
        continued=_continued(records),
        held_out=[records[name] for name in (*HELD_OUT, PUBLISHED) if name in records],
        training=_training(training),
        promised=f"{PROMISED:g}",
        picture=PICTURE,
        canvas=CANVAS,
        share=_share,
        number=_number,
        verdict=_verdict,
        bound=_bound,
        loses=lambda row, none: judge_answers(row, none).loses,
        made=_made,
        decoded=decoding_text,
        depths=_depths,
        lowest=lambda table: min(map(min, table["curves"].values())),
        similarities=_similarities,
        towns=_towns,
        solutions=_solutions,
        left_out=partial(_left_out, set[str]()),
        few=FEW,
        shown=SHOWN,
        losses=_losses,
        passes=_passes,
        outputs=_outputs,
        row_share=ROWS,
    )
    answers = records["answers"].data["answers"][:SHOWN] if "answers" in records else []
    # As they are, indented: what they hold is then neither markup nor a fenced block of the page's own.
    blocks = ("\n".join(f"    {line}".rstrip() for line in each["answer"].split("\n")) for each in answers)
    return text + "".join(f"\n**{each['prompt']}**\n\n{block}\n" for each, block in zip(answers, blocks, strict=True))


def _continued(records: Mapping[str, Record]) -> list[tuple[str, str, Record]]:
    """Title, what was asked and record of each bench that judges no answers, of `FEW` questions or more."""
    found = []
    for name, record in sorted(records.items()):
        settings = record.about["settings"]
        if settings.get("requests", FEW) < FEW:
            continue
        if name.startswith(DOCUMENTS):
            found.append((f"Documents, prefix {name.removeprefix(DOCUMENTS)} %", "documents and their ends", record))
        elif name.startswith(SHOTS):
            shots = name.removeprefix(SHOTS)
            prompts = f"{settings['prefixes']} system prompts of rules and {shots} worked examples"
            found.append((f"GSM8K, {shots} shots", f"questions of the test split over {prompts}", record))
    return found


def _verdict(row: Row, none: Row) -> str:
    over = _points(row["accuracy_over_none"], row["accuracy_over_none_interval"])
    return (
        f"`{row['cache']}` {judge_answers(row, none).value} ({over}), for {row['work_ratio_to_none']:.1f}x less work."
    )


def _bound(data: Mapping[str, Any]) -> str:
    """Where the loss of the published answers lies beside `PROMISED`, by its interval."""
    low, high = data["loss_interval"]
    return "at most" if high <= PROMISED else "above" if low > PROMISED else "about"


def rows_by_cache(record: Record) -> dict[str, Row]:
    return {row["cache"]: row for row in record.data["results"]}


def _share(value: float, interval: Sequence[float | None]) -> str:
    """A share in percent with its interval, within 0 and 100; without where nothing varied."""
    low, high = interval
    if low is None or high is None or low == high:
        return f"{100 * value:.1f} %"
    return f"{100 * value:.1f} % ({100 * max(0, low):.1f} to {100 * min(1, high):.1f})"


def _points(value: float, interval: Sequence[float]) -> str:
    low, high = interval
    if low == high:
        return "no answer differs"
    return f"{100 * value:+.1f} points, {100 * max(-1, low):+.1f} to {100 * min(1, high):+.1f}"


def _number(value: float, interval: Sequence[float | None], form: str = ".3f") -> str:
    low, high = interval
    if low is None or high is None or low == high:
        return format(value, form)
    return f"{value:{form}} ({low:{form}} to {high:{form}})"


def _nats(row: Row, key: str) -> str:
    return _number(row[key], row[f"{key}_interval"], "+.3f") if key in row else "-"


def _made(record: Record) -> str:
    made, conditions = f"{number_format(record.about)} {machine_of(record)}", record.data.get("conditions", {})
    if not conditions.get("busy"):
        return made
    if not _timed(record):
        return f"{made} {record.about['settings']['concurrency']} at a time, beside other benches."
    others = conditions["others"]
    return f"{made} Others used {others['used']:.1f} of its {others['cores']} cores."


def _timed(record: Record) -> bool:
    """Whether a bench's times say something: those of many that share a GPU do not."""
    return not ("gpu" in record.about["machine"] and record.data.get("conditions", {}).get("busy"))


def _cost_titles(record: Record) -> list[str]:
    return [WORK, TIME] if _timed(record) else [WORK]


def _depths(profile: Mapping[str, Any]) -> str:
    ratios = list(profile["tables"][SMOLLM2]["depths"])
    rows = [
        [f"`{name}`, {table['layers']} layers", *(str(table["depths"][ratio]) for ratio in ratios)]
        for name, table in profile["tables"].items()
    ]
    return markdown_table(["model", *(f"{ratio} %" for ratio in ratios)], rows)


def _picture(record: Record) -> Figure:
    """Mean similarity over layers, a line a ratio, of the toy and of the pretrained model side by side."""
    from matplotlib import colormaps

    figure, panels = new_panels("K/V of a prefix alone against the whole canvas", 2, sharey=True)
    for axes, (name, table) in zip(panels, record.data["tables"].items(), strict=True):
        for place, (ratio, curve) in enumerate(table["curves"].items()):
            color = colormaps["viridis"](0.9 * place / max(1, len(table["curves"]) - 1))
            axes.plot(range(1, len(curve) + 1), curve, ".-", color=color, label=f"r = {ratio} %")
        axes.axhline(table["tau"], color="#c0392b", linestyle="--", linewidth=1, label=f"tau = {table['tau']:g}")
        label(axes, name, "layer", "mean cosine similarity" if name == BUNDLED else "", grid="both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside right center", fontsize="small", frameon=False)
    return figure


def _similarities(data: Mapping[str, Any]) -> str:
    layers = [1, *range(5, data["layers"] + 1, 5)]
    rows = [[name, *(f"{data[name.lower()][layer - 1][0]:.3f}" for layer in layers)] for name in ("K", "V")]
    return markdown_table(["layer", *map(str, layers)], rows)


def _towns(record: Record) -> str:
    kinds = list(rows_by_cache(record)["none"]["parts"])
    titles = ["cache", "right", *kinds, "over its baseline", "tokens as there", *_cost_titles(record)]
    titles.append("K/V and states")
    rows = []
    for row in record.data["results"]:
        over = _points(row["accuracy_over_none"], row["accuracy_over_none_interval"])
        rows.append(
            [
                _name(row),
                _share(row["accuracy"], row["accuracy_interval"]),
                *(f"{100 * row['parts'][kind]:.0f} %" for kind in kinds),
                "-" if row["cache"] == row["baseline"] else over,
                *_costs(row, timed=_timed(record)),
            ]
        )
    return markdown_table(titles, rows)


def _outputs(cases: Sequence[Mapping[str, Any]]) -> str:
    rows = []
    for told in cases:
        nats = [(depth, _number(each["nats"], each["nats_interval"], ".2f")) for depth, each in told["depths"].items()]
        runs = ([*run] for _, run in groupby(nats, key=itemgetter(1)))
        depths = (f"{'-'.join(dict.fromkeys((run[0][0], run[-1][0])))}: {run[0][1]}" for run in runs)
        about = f"`{told['model']}`, {told['task']}"
        rows.append([about, f"{min(told['rule'])}", f"{min(told['rule_by_rows'])}", "; ".join(depths)])
    return markdown_table(["model, task", "rule", "by rows", "nats by depth"], rows)


def _solutions(record: Record) -> str:
    titles = ["cache", "one pass: same token", "loss added", "whole answer: same tokens", *_cost_titles(record)]
    titles.append("memory")
    rows = []
    for row in record.data["results"]:
        alike = _share(row["pass_agreement"], row["pass_agreement_interval"]) if "pass_agreement" in row else "-"
        rows.append([_name(row), alike, _nats(row, "loss_over_none"), *_costs(row, timed=_timed(record))])
    return markdown_table(titles, rows)


def _earning(record: Record) -> str:
    """What depth audits earned, and what audits computed while the questions were answered."""
    row = rows_by_cache(record).get(EARNED)
    if row is None:
        return ""
    share = row["audit_row_layers"] / (row["row_layers"] + row["audit_row_layers"])
    depth = f"in the mean {row['prefix_depth']:.1f} of {record.about['layers']} layers were read"
    return (
        f"Audits of 24 requests earned the depth of `bicache` as it comes: {depth}. Those that went on are "
        f"{100 * share:.0f} % of all that was computed for it, and no part of the work saved."
    )


def _costs(row: Row, *, timed: bool) -> list[str]:
    """The share of tokens as the baseline has them, then work, time if it is told, and memory."""
    return [
        _share(row["agreement_with_none"], row["agreement_interval"]),
        f"{row['work_ratio_to_none']:.2f}x",
        *([f"{row['ratio_to_none']:.2f}x"] if timed else []),
        f"{row['peak_memory_bytes'] / 1e6:.1f} MB",
    ]


def _name(row: Row) -> str:
    """A cache, and what it is compared with where that is not `none`."""
    beside = "" if row["baseline"] in ("none", row["cache"]) else f" (beside {row['baseline']})"
    return (row["cache"] if " " in row["cache"] else f"`{row['cache']}`") + beside


def _left_out(told: set[str], record: Record) -> str:
    """Which caches were left out of a bench, and why, unless that is among the reasons that were `told`."""
    lines = []
    for policy in record.data["left_out"]:
        name, reason = policy["name"], policy["reason"]
        lines.append(
            f"- Left out: `{name}`" + (", for the same reason as above." if reason in told else f": {reason}.")
        )
        told.add(reason)
    return "\n".join(lines)


def _losses(records: Sequence[Record]) -> str:
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


def _training(training: Sequence[Mapping[str, Any]]) -> str:
    """The held-out losses of the training's log, a column a phase; empty without any."""
    events = [event for event in training if event["event"] == "held out"]
    if not events:
        return ""
    phases = (event["name"] for event in training if event["event"] == "phase")
    columns = ["at first", *(f"after the {name}" for name in phases)][: len(events)]
    rows = [[KINDS[kind], *(f"{event[kind]['loss']:.3f}" for event in events)] for kind in KINDS]
    reuse = [event["reuse"]["other"]["loss"] for event in events]
    rows.append(["added by reuse", *(f"{mean:+.3f} ± {half:.3f}" for mean, half in reuse)])
    return markdown_table(["held out", *columns], rows)


def _passes(passes: Sequence[Mapping[str, Any]]) -> str:
    names = list(passes[0]["seconds"])
    rows = [
        [f"{each['rows']} ({each['read']} read)", *(f"{each['seconds'][name]:.3f} s" for name in names)]
        for each in passes
    ]
    return markdown_table(["rows", *names], rows)
