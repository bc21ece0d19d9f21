"""Writes docs/when-bicache.md, its picture included, from the result files in benchmarks/results.

    python -m remask_lab pages when-bicache [--results FOLDER] [--output FILE]

Reads the records of `remask bench` of the bundled models, those of `python -m remask_lab pages real-weights` of SmolLM2
and its training log, and those of `scripts/gpu` of an H200. Measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from remask.checks import BUNDLED, BUNDLED_TARIFF, SMOLLM2
from remask.errors import RecordError
from remask.machine.disk import write_whole
from remask.policies.earned import BOUND
from remask_lab.bench.plot import Row, quality_bars
from remask_lab.drawing import PointLabel, label, legend_below, new_figure, place_labels, save_figure
from remask_lab.gpu.results import benchmark_table, read_kept
from remask_lab.pages.page import PAGES, RESULTS, fill
from remask_lab.pages.real_weights import FOLDER, read_all, read_training, rows_by_cache
from remask_lab.pages.real_weights_benches import DEPTHS
from remask_lab.records.interval import judge_answers, percent_text
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import Record, read_record
from remask_lab.similarity.probe import limits_of
from remask_lab.similarity.rule import DepthRule, ProfileSettings, depth_at
from remask_lab.speed.command import command_parser, run_command

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NAME, PICTURE = "when-bicache", "when-bicache.png"
QUESTIONS, STEPS = 1319, 128
"""Questions of GSM8K's test split, and steps of a response of 256 tokens, two a step as in the BiCache paper."""


@dataclass(frozen=True, slots=True)
class Kind:
    """The bench of one kind of weights on one task.

    Attributes:
        model, task: their names in records.
        title: the name of the task on the page.
        rule_depth: the depth that the paper's rule gives for such requests.
        layers: the number of layers of the model.
        rows: the results by cache.
        depths: the results of BiCache by depth; that of all layers is `reuse`'s.
    """

    model: str
    task: str
    title: str
    _: KW_ONLY
    rule_depth: int
    layers: int
    rows: Mapping[str, Row]
    depths: Mapping[int, Row]

    @property
    def name(self) -> str:
        return f"`{self.model}`, {self.title}"

    @property
    def losing_depth(self) -> int | None:
        """The least measured depth that certainly loses answers; None if there is none."""
        none = self.rows["none"]
        losing = (depth for depth, row in sorted(self.depths.items()) if judge_answers(row, none).loses)
        return next(losing, None)

    @property
    def safe_depth(self) -> int:
        """The largest measured depth below `losing_depth`; 0 if there is none."""
        losing = self.losing_depth
        return max((depth for depth in self.depths if losing is None or depth < losing), default=0)

    @property
    def verdict(self) -> str:
        """How the depth of the rule compares with the depths that lose answers."""
        losing = self.losing_depth
        if losing is None:
            return "no depth loses answers"
        if losing <= self.rule_depth:
            return f"too bold: {losing} loses answers"
        return "right: the next one loses answers" if losing == self.rule_depth + 1 else "not too bold"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and its picture. Returns 0, or 2 if a result file cannot be used."""
    parser = command_parser(__doc__, f"pages {NAME}")
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="default benchmarks/results")
    parser.add_argument("--output", default=str(PAGES[NAME]), help="the page; its picture goes into images beside it")
    args = parser.parse_args(argv)
    return run_command(partial(_run, Path(args.results), Path(args.output)))


def _run(results: Path, output: Path) -> None:
    """Write the picture and the page."""
    measured_kinds = kinds(results)
    caches = read_all(results / FOLDER.name)["town-caches"]
    (output.parent / "images").mkdir(exist_ok=True)
    save_figure(picture(measured_kinds, caches), output.parent / "images" / PICTURE, "a shared prefix")
    write_whole("the page", output, page(results, measured_kinds))


def kinds(results: Path) -> list[Kind]:
    """The kinds of the page: the bundled models, then SmolLM2 on pages of each length.

    Raises `RecordError` if a file is missing or no record.
    """
    real = read_all(results / FOLDER.name)
    page_kinds = []
    for name in (BUNDLED, BUNDLED_TARIFF):
        record = read_record(results / f"bench.{name}.json", "bench")
        depth = rows_by_cache(record)["bicache"]["prefix_depth"]
        page_kinds.append(_kind(record, record.about["settings"]["name"], depth))
    rule_depths = {(case["model"], case["task"]): min(case["rule"]) for case in _cases(real)}
    for part, shops in DEPTHS.items():
        record = real[part]
        depth = rule_depths[SMOLLM2, record.about["settings"]["name"]]
        page_kinds.append(_kind(record, f"town, {shops} shops", depth))
    return page_kinds


def _cases(real: Mapping[str, Record]) -> list[dict[str, Any]]:
    """The depths by first predictions and by rules, of each model and task. Raises `RecordError` without the part."""
    if "outputs" not in real:
        raise RecordError(f"{FOLDER.name} has no part 'outputs', which the page reads")
    return list(real["outputs"].data["cases"])


def _kind(record: Record, title: str, rule_depth: float) -> Kind:
    """The kind of a bench's record."""
    about, rows = record.about, rows_by_cache(record)
    layers = about["layers"]
    depths = {
        int(row["prefix_depth"]): row for cache, row in rows.items() if cache.startswith("bicache") and "+" not in cache
    }
    depths[layers] = rows["reuse"]
    names = about["model"], about["settings"]["name"], title
    return Kind(*names, rule_depth=int(rule_depth), layers=layers, rows=rows, depths=depths)


def page(results: Path, page_kinds: Sequence[Kind]) -> str:
    """The text of the page, from the folder of results and its `kinds`.

    Raises `RecordError` if results of an H200 or a part of the real weights are missing.
    """
    gpu = next((result for result in read_kept(results / "gpu") if "H200" in result["gpu"]), None)
    if gpu is None:
        raise RecordError(f"{results / 'gpu'} holds nothing of an H200, whose steps the page counts")
    real = read_all(results / FOLDER.name)
    return fill(
        NAME,
        picture=PICTURE,
        answers=_answer_table(page_kinds),
        phases=_phases(read_training(results / FOLDER.name)),
        town=next(kind for kind in page_kinds if kind.model == SMOLLM2),
        refresh=rows_by_cache(real["town-refresh"]),
        caches=rows_by_cache(real["town-caches"]),
        change=_change_text,
        predictors=predictor_table(_cases(real), page_kinds),
        benchmark=benchmark_table(gpu, QUESTIONS, STEPS),
    )


def _answer_table(page_kinds: Sequence[Kind]) -> str:
    """The right answers of each kind without a cache, at all layers, and at the largest depth that the rule allows."""
    caches = [f"`{cache}` right" for cache in ("none", "reuse", "bicache")]
    titles = ["weights, task", "depth by similarity", *caches, "the depth is"]
    rows = []
    for kind in page_kinds:
        depth = max((depth for depth in kind.depths if depth <= kind.rule_depth), default=0)
        shares = [
            percent_text(row["accuracy"], row["accuracy_interval"])
            for row in (kind.rows["none"], kind.rows["reuse"], kind.depths[depth])
        ]
        shares[-1] += f" at {depth}"
        rows.append([kind.name, f"{kind.rule_depth} of {kind.layers}", *shares, kind.verdict])
    return markdown_table(titles, rows)


def _change_text(row: Row) -> str:
    """The accuracy of a cache minus that of its baseline, in points, with its interval."""
    low, high = (100 * end for end in row["accuracy_over_none_interval"])
    return f"{100 * row['accuracy_over_none']:+.1f} points ({low:+.1f} to {high:+.1f})"


def predictor_table(cases: Sequence[Mapping[str, Any]], page_kinds: Sequence[Kind]) -> str:
    """The depth that each way to predict it allows, beside the one up to which answers hold, for each case.

    Cases without a kind, whose answers were not compared, have "-" there.
    """
    safe_depths = {(kind.model, kind.task): str(kind.safe_depth) for kind in page_kinds}
    rows = []
    for case in cases:
        model, task = case["model"], case["task"]
        nats = {int(depth): shift["nats"] for depth, shift in case["depths"].items()}
        depths = [min(case["rule"]), min(case["rule_by_rows"]), _bounded_depth(nats)]
        ratio = f"{100 * case['prefix_ratio']:.0f} %"
        rows.append([f"`{model}`, {task}", ratio, *map(str, depths), safe_depths.get((model, task), "-")])
    return markdown_table(
        ["weights, task", "prefix", "rule", "by rows", "first predictions", "answers hold up to"], rows
    )


def _bounded_depth(nats: Mapping[int, float]) -> int:
    """The largest depth of `nats`, divergences by depth, up to which all are within `BOUND`; 0 if the first is not."""
    limit = min((depth for depth, value in nats.items() if value > BOUND), default=math.inf)
    return max((depth for depth in nats if depth < limit), default=0)


def _phases(training: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """The losses on documents that reuse and that no prefix add after each phase of the adapter's training.

    Raises `RecordError` if the paper's rule does not allow all layers on these documents, as the page says.
    """
    phases = []
    for reuse in (event["reuse"] for event in training if event["event"] == "held out"):
        curve = (np.array(reuse["other"]["k"]) + reuse["other"]["v"]) / 2
        if depth_at(limits_of(DepthRule(), curve).tolist(), ProfileSettings().tau) < len(curve):
            raise RecordError("the training's log has documents on which the paper's rule does not allow all layers")
        added, added_margin = reuse["other"]["loss"]
        alone, alone_margin = reuse["alone"]
        phases.append({"added": f"{added:+.3f} ± {added_margin:.3f}", "alone": f"{alone:+.2f} ± {alone_margin:.2f}"})
    return phases


def picture(page_kinds: Sequence[Kind], caches: Record) -> Figure:
    """Right answers over saved work: a curve over depths for each kind, and points of caches on the real weights."""
    figure = new_figure(
        "right answers over work saved",
        5.2,
        how="bars: 95 %; numbers: depth, the last is reuse; grey: other caches on smollm2, 8 shops",
    )
    axes = figure.subplots()
    labels: list[PointLabel] = []
    for index, kind in enumerate(page_kinds):
        color = f"C{index}"
        rows = [kind.rows["none"], *(kind.depths[depth] for depth in sorted(kind.depths))]
        ratios = [1, *(row["work_ratio_to_none"] for row in rows[1:])]
        accuracies = [100 * row["accuracy"] for row in rows]
        axes.errorbar(
            ratios,
            accuracies,
            yerr=quality_bars(rows),
            fmt="o-",
            markersize=4,
            capsize=2,
            linewidth=1.2,
            color=color,
            label=kind.name.replace("`", ""),
        )
        points = zip(ratios[1:], accuracies[1:], strict=True)
        labels += [
            PointLabel(str(depth), point, color) for depth, point in zip(sorted(kind.depths), points, strict=True)
        ]
    for row in caches.data["results"]:
        if row["cache"] not in ("none", "reuse", "bicache"):
            point = (row["work_ratio_to_none"], 100 * row["accuracy"])
            axes.errorbar(*point, yerr=quality_bars([row]), fmt="x", color="grey", capsize=2, linewidth=0.5, alpha=0.6)
            labels.append(PointLabel(row["cache"], point, "grey"))
    axes.set_ylim(-5, 108)
    label(axes, "", "work of none, times as much as that of the cache (row-layers)", "right answers (%)", grid="both")
    legend_below(figure, 4)
    place_labels(figure, {axes: labels})
    return figure
