"""Writes docs/when-bicache.md, its picture included, from the result files in benchmarks/results.

    python -m remask_lab pages when-bicache [--results FOLDER] [--output FILE]

Reads `remask bench`'s files of the bundled models, what `python -m remask_lab pages real-weights` keeps of SmolLM2 and
its training, and what `scripts/gpu` keeps of an H200. Measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
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
"""Of GSM8K's test split, and of a response of 256 tokens at two a step, as the BiCache paper has it."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of weights on its task.

    Attributes:
        model, task: as records name them.
        title: of the task, as the page names it.
        said: the depth that the paper's rule gives for such requests, of `layers`.
        rows: of a bench, by cache; BiCache's by depth in `depths`, and in all layers as `reuse`.
    """

    model: str
    task: str
    title: str
    said: int
    layers: int
    rows: Mapping[str, Row]
    depths: Mapping[int, Row]

    @property
    def name(self) -> str:
        return f"`{self.model}`, {self.title}"

    @property
    def broken(self) -> int | None:
        """The least depth that was measured and is shown to lose answers."""
        none = self.rows["none"]
        lost = (depth for depth, row in sorted(self.depths.items()) if judge_answers(row, none).loses)
        return next(lost, None)

    @property
    def deepest(self) -> int:
        """The deepest depth that was measured before `broken`; 0 where none was."""
        return max((depth for depth in self.depths if self.broken is None or depth < self.broken), default=0)

    @property
    def verdict(self) -> str:
        if self.broken is None:
            return "no depth loses answers"
        if self.broken <= self.said:
            return f"too bold: {self.broken} loses answers"
        return "right: the next one loses answers" if self.broken == self.said + 1 else "not too bold"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the page and its picture. Returns 0, or 2 where a result file cannot be used."""
    parser = command_parser(__doc__, f"pages {NAME}")
    parser.add_argument("--results", default=str(RESULTS), metavar="FOLDER", help="default benchmarks/results")
    parser.add_argument("--output", default=str(PAGES[NAME]), help="the page; its picture goes into images beside it")
    args = parser.parse_args(argv)
    return run_command(partial(_run, Path(args.results), Path(args.output)))


def _run(results: Path, output: Path) -> None:
    measured = kinds(results)
    caches = read_all(results / FOLDER.name)["town-caches"]
    (output.parent / "images").mkdir(exist_ok=True)
    save_figure(picture(measured, caches), output.parent / "images" / PICTURE, "a shared prefix")
    write_whole("the page", output, page(results, measured))


def kinds(results: Path) -> list[Kind]:
    """The toys, then SmolLM2 on questions about a page. Raises `RecordError` where a file is missing or no record."""
    real = read_all(results / FOLDER.name)
    found = []
    for name in (BUNDLED, BUNDLED_TARIFF):
        record = read_record(results / f"bench.{name}.json", "bench")
        found.append(_kind(record, record.about["settings"]["name"], rows_by_cache(record)["bicache"]["prefix_depth"]))
    rules = {(each["model"], each["task"]): min(each["rule"]) for each in _cases(real)}
    for part, shops in DEPTHS.items():
        record = real[part]
        said = rules[SMOLLM2, record.about["settings"]["name"]]
        found.append(_kind(record, f"town, {shops} shops", said))
    return found


def _cases(real: Mapping[str, Record]) -> list[dict[str, Any]]:
    """What first predictions say, by model and task. Raises `RecordError` where they were not measured."""
    if "outputs" not in real:
        raise RecordError(f"{FOLDER.name} has no part 'outputs', which the page reads")
    return list(real["outputs"].data["cases"])


def _kind(record: Record, title: str, said: float) -> Kind:
    about, rows = record.about, rows_by_cache(record)
    layers = about["layers"]
    depths = {
        int(row["prefix_depth"]): row for cache, row in rows.items() if cache.startswith("bicache") and "+" not in cache
    }
    task = about["settings"]["name"]
    return Kind(about["model"], task, title, int(said), layers, rows, depths | {layers: rows["reuse"]})


def page(results: Path, found: Sequence[Kind]) -> str:
    gpu = next((each for each in read_kept(results / "gpu") if "H200" in each["gpu"]), None)
    if gpu is None:
        raise RecordError(f"{results / 'gpu'} holds nothing of an H200, whose steps the page counts")
    real = read_all(results / FOLDER.name)
    return fill(
        NAME,
        picture=PICTURE,
        answers=_answers(found),
        phases=_phases(read_training(results / FOLDER.name)),
        town=next(kind for kind in found if kind.model == SMOLLM2),
        refresh=rows_by_cache(real["town-refresh"]),
        caches=rows_by_cache(real["town-caches"]),
        over=_over,
        judges=judges(_cases(real), found),
        benchmark=benchmark_table(gpu, QUESTIONS, STEPS),
    )


def _answers(found: Sequence[Kind]) -> str:
    titles = [
        "weights, task",
        "depth by similarity",
        "`none` right",
        "`reuse` right",
        "`bicache` right",
        "the depth is",
    ]
    rows = []
    for kind in found:
        allowed = max((depth for depth in kind.depths if depth <= kind.said), default=0)
        shares = [
            percent_text(row["accuracy"], row["accuracy_interval"])
            for row in (kind.rows["none"], kind.rows["reuse"], kind.depths[allowed])
        ]
        shares[-1] += f" at {allowed}"
        rows.append([kind.name, f"{kind.said} of {kind.layers}", *shares, kind.verdict])
    return markdown_table(titles, rows)


def _over(row: Row) -> str:
    """How many more of the questions a cache answers right than its baseline, in points."""
    low, high = (100 * each for each in row["accuracy_over_none_interval"])
    return f"{100 * row['accuracy_over_none']:+.1f} points ({low:+.1f} to {high:+.1f})"


def judges(cases: Sequence[Mapping[str, Any]], found: Sequence[Kind]) -> str:
    """How many layers each way to judge allows, beside what answers said where they were compared."""
    answers = {(kind.model, kind.task): str(kind.deepest) for kind in found}
    rows = []
    for case in cases:
        model, task = case["model"], case["task"]
        nats = {int(depth): moved["nats"] for depth, moved in case["depths"].items()}
        said = [min(case["rule"]), min(case["rule_by_rows"]), _deepest(nats)]
        ratio, deepest = f"{100 * case['prefix_ratio']:.0f} %", answers.get((model, task), "-")
        rows.append([f"`{model}`, {task}", ratio, *map(str, said), deepest])
    return markdown_table(
        ["weights, task", "prefix", "rule", "by rows", "first predictions", "answers hold up to"], rows
    )


def _deepest(nats: Mapping[int, float]) -> int:
    """The depth up to which all of `nats`, by depth, stay within the bound; 0 where the least depth does not."""
    beyond = min((depth for depth, moved in nats.items() if moved > BOUND), default=math.inf)
    return max((depth for depth in nats if depth < beyond), default=0)


def _phases(training: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Of each phase of the adapter's training the loss on documents that reuse adds, and that no prefix at all adds.

    Raises `RecordError` where the paper's rule does not allow all layers there, as the page says.
    """
    phases = []
    for reuse in (event["reuse"] for event in training if event["event"] == "held out"):
        curve = (np.array(reuse["other"]["k"]) + reuse["other"]["v"]) / 2
        if depth_at(limits_of(DepthRule(), curve).tolist(), ProfileSettings().tau) < len(curve):
            raise RecordError("the training's log has documents on which the paper's rule does not allow all layers")
        (added, half), (alone, wide) = reuse["other"]["loss"], reuse["alone"]
        phases.append({"added": f"{added:+.3f} ± {half:.3f}", "alone": f"{alone:+.2f} ± {wide:.2f}"})
    return phases


def picture(found: Sequence[Kind], caches: Record) -> Figure:
    """Right answers over the work that is saved: a curve over depths a kind, and every cache on the real weights."""
    figure = new_figure(
        "right answers over work saved",
        5.2,
        how="bars: 95 %; numbers: depth, the last is reuse; grey: other caches on smollm2, 8 shops",
    )
    axes = figure.subplots()
    labels: list[PointLabel] = []
    for index, kind in enumerate(found):
        color, rows = f"C{index}", [kind.depths[depth] for depth in sorted(kind.depths)]
        points = [(row["work_ratio_to_none"], 100 * row["accuracy"]) for row in rows]
        axes.errorbar(
            [1, *(x for x, _ in points)],
            [100 * kind.rows["none"]["accuracy"], *(y for _, y in points)],
            yerr=quality_bars([kind.rows["none"], *rows]),
            fmt="o-",
            markersize=4,
            capsize=2,
            linewidth=1.2,
            color=color,
            label=kind.name.replace("`", ""),
        )
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
