"""`remask analyze depth`: what the depth of reuse depends on.

That is the kind of task, the prefix ratio, the number of requests, and the system prompt (BiCache 4.2, 6.4, D).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import cycle, pairwise
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies.bicache import DepthLookup
from remask.session import Session
from remask_lab.arguments import Outcome, open_without_pool
from remask_lab.drawing import K_COLOR, V_COLOR, label, legend_below, new_panels
from remask_lab.instruments.depths import RULES, run_depth, task_prompts
from remask_lab.instruments.watch import check_masked
from remask_lab.records.markdown import text_table
from remask_lab.records.record import about
from remask_lab.similarity.conversations import Conversation, PromptSet
from remask_lab.similarity.options import rule_of
from remask_lab.similarity.profile import Cuts, rule_limits, table_distance
from remask_lab.similarity.prompts import read_prompts, under_system_prompt
from remask_lab.similarity.rule import DepthRule, ProfileSettings, depth_entries

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN = 6  # about how many ratios at which the text compares rules
QUESTIONS = 4  # requests under each system prompt
_COLORS = (K_COLOR, V_COLOR, "#2ca02c", "#7f7f7f", "#9467bd", "#ff7f0e", "#17becf")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def measure(args: argparse.Namespace) -> Outcome:
    """Profile the model on the tasks that `args` name. Raises `ConfigError` as `measure_depths` does."""
    names = ("tau", "samples", "official", "joint", "canvas", "response")
    ratios = None if args.ratios is None else tuple(args.ratios)
    options = {name: getattr(args, name) for name in names}
    settings = ProfileSettings(rule=rule_of(args), ratios=ratios, seed=args.seed, **options)
    llm = open_without_pool(args)
    check_masked(llm)
    tasks = _tasks(llm, args.task)
    if args.system_prompt is not None:
        tasks = {name: under_system_prompt(args.system_prompt, task, llm.loaded) for name, task in tasks.items()}
    report = measure_depths(llm.session, tasks, settings, args.system_prompts, progress=llm.session.progress)
    options |= {name: getattr(args, name) for name in ("task", "ratios", "system_prompts", "system_prompt")}
    options |= {"samples": report.samples, "rule": str(settings.rule)}
    header = f"{llm.loaded.name}: {report.layers} layers, tau {report.tau:g}, {report.definition} similarity"
    facts = about(llm, seed=args.seed, settings=options)
    return Outcome(facts, report, f"{header}\n\n{text(report)}", lambda: figures(report))


def _tasks(llm: LLM, arguments: Sequence[str]) -> dict[str, PromptSet]:
    """The prompts of each `--task NAME=FILE`, or without any those of `task_prompts`."""
    tasks: dict[str, PromptSet] = {}
    for argument in arguments:
        name, separator, path = argument.partition("=")
        if not (name and separator and path):
            raise ConfigError(f"--task must be NAME=FILE, got {argument!r}")
        if name in tasks:
            raise ConfigError(f"--task names {name!r} twice; names must differ")
        tasks[name] = read_prompts(path, llm.loaded)
    return tasks or task_prompts(llm.loaded)


@dataclass(frozen=True, slots=True)
class TaskDepth:
    """Depths on one kind of task in layers, by prefix ratio in percent.

    Attributes:
        source: the prompts, in words.
        table: the depth table by the settings' rule.
        mean, spread: mean and standard deviation over requests of the number of leading layers above tau.
        rules: the depth tables by all rules.
    """

    task: str
    source: str
    table: Mapping[int, int]
    mean: Mapping[int, float]
    spread: Mapping[int, float]
    rules: Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Convergence:
    """The first task's depths after `samples` requests per ratio, compared with those after half of them.

    Attributes:
        distance: L1 distance of the mean depths of single requests, in layers, averaged over ratios; NaN in the first.
        table_distance: the same of the depth tables.
        seconds: time of all requests so far.
    """

    samples: int
    distance: float
    table_distance: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptSpread:
    """The first task's depth under variants of one system prompt (BiCache D.1), with the same questions.

    A variant has the length of the first request's prefix, and half of its tokens are those of another request.

    Attributes:
        prompts: number of system prompts, the first and its variants.
        changed: share of the variants' tokens that differ from the first's.
        spread: by ratio, standard deviation over system prompts of the mean depth of their questions, in layers.
    """

    prompts: int
    changed: float
    spread: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class DepthReport:
    """Depth of reuse on one model, of `samples` requests at each of `ratios`, in percent, ascending."""

    tau: float
    definition: str
    layers: int
    samples: int
    ratios: tuple[int, ...]
    tasks: tuple[TaskDepth, ...]
    over_tasks: Mapping[int, float]  # standard deviation over tasks of their mean depths, per ratio
    convergence: tuple[Convergence, ...]
    system_prompts: PromptSpread

    @property
    def shown(self) -> int:
        """The measured ratio nearest to the paper's 90 %."""
        return min(self.ratios, key=lambda ratio: abs(ratio - 90))


def measure_depths(
    session: Session,
    tasks: Mapping[str, PromptSet],
    settings: ProfileSettings | None = None,
    system_prompts: int = 8,
    progress: bool = False,
) -> DepthReport:
    """Profile a model on each of `tasks` with the same settings, and on the first also under changed system prompts.

    Canvases are cut as `profile` cuts them, all to one length and one number of masks that every task has. Raises
    `ConfigError` where `Cuts` does, without tasks, and for fewer than two system prompts.
    """
    if not tasks:
        raise ConfigError("there is no task to profile on")
    if system_prompts < 2:
        raise ConfigError(f"changed system prompts need at least 2 of them, got {system_prompts}")
    settings = settings or ProfileSettings()
    samples = settings.samples or 16
    default_canvas = min(prompts.canvas for prompts in tasks.values())
    canvas = settings.canvas or min(default_canvas, session.model.config.max_length)
    response = settings.response or min(prompts.response for prompts in tasks.values())
    settings = replace(settings, samples=samples, canvas=canvas, response=response)
    cuts = {name: Cuts(session, prompts, settings) for name, prompts in tasks.items()}
    first = next(iter(cuts.values()))
    canvases = len(first.ratios) * (samples * len(cuts) + system_prompts * QUESTIONS)
    task_depths: list[TaskDepth] = []
    convergence: tuple[Convergence, ...] = ()
    with tqdm(total=canvases, desc="profiling", unit="canvas", disable=not progress) as bar:
        for name, task_cuts in cuts.items():
            start = time.perf_counter()
            measured, seconds = [], []  # similarities [ratios, layers] of each request, and the time until its end
            for number in range(samples):
                measured.append(task_cuts.measure(number, bar.update))
                seconds.append(time.perf_counter() - start)
            task_depths.append(_task_depth(name, tasks[name].source, task_cuts.ratios, measured, settings))
            convergence = convergence or _convergence(task_cuts.ratios, measured, seconds, settings)
        spread = _system_prompts(first, system_prompts, settings.tau, bar.update)
    mean_depths = [list(task.mean.values()) for task in task_depths]
    return DepthReport(
        tau=settings.tau,
        definition=first.definition,
        layers=session.model.config.layers,
        samples=samples,
        ratios=first.ratios,
        tasks=tuple(task_depths),
        over_tasks=dict(zip(first.ratios, np.std(mean_depths, axis=0).tolist(), strict=True)),
        convergence=convergence,
        system_prompts=spread,
    )


def _depths(measured: Sequence[Floats], tau: float) -> Ints:
    """Numbers of leading layers above `tau` of single requests, int64 [requests, ratios]."""
    return np.array([[run_depth(curve, tau) for curve in request.tolist()] for request in measured])


def _task_depth(
    name: str, source: str, ratios: Sequence[int], measured: Sequence[Floats], settings: ProfileSettings
) -> TaskDepth:
    """The depths of one task from `measured`, the similarities [ratios, layers] of each request."""
    depths = _depths(measured, settings.tau)
    lookups = {rule: _lookup(rule, ratios, measured, settings.tau) for rule in RULES}
    tables = {rule: {ratio: lookup.depth(ratio, 100) for ratio in ratios} for rule, lookup in lookups.items()}
    return TaskDepth(
        task=name,
        source=source,
        table=tables[settings.rule],
        mean=dict(zip(ratios, depths.mean(axis=0).tolist(), strict=True)),
        spread=dict(zip(ratios, depths.std(axis=0).tolist(), strict=True)),
        rules={str(rule): table for rule, table in tables.items()},
    )


def _lookup(rule: DepthRule, ratios: Sequence[int], measured: Sequence[Floats], tau: float) -> DepthLookup:
    """The depth table that `rule` makes of these similarities."""
    return DepthLookup(depth_entries(rule_limits(rule, ratios, measured), tau))


def _convergence(
    ratios: Sequence[int], measured: Sequence[Floats], seconds: Sequence[float], settings: ProfileSettings
) -> tuple[Convergence, ...]:
    """Compare the depths after 1, 2, 4, ... and all requests, each with those before; `seconds` by request."""
    total = len(measured)
    depths = _depths(measured, settings.tau)
    sizes = [2**power for power in range(total.bit_length()) if 2**power < total] + [total]
    rows = [
        Convergence(samples=sizes[0], distance=float("nan"), table_distance=float("nan"), seconds=seconds[sizes[0] - 1])
    ]
    for before, after in pairwise(sizes):
        distance = np.abs(depths[:after].mean(axis=0) - depths[:before].mean(axis=0)).mean()
        smaller, larger = (_lookup(settings.rule, ratios, measured[:size], settings.tau) for size in (before, after))
        of_tables = table_distance(smaller, larger, ratios)
        rows.append(
            Convergence(samples=after, distance=float(distance), table_distance=of_tables, seconds=seconds[after - 1])
        )
    return tuple(rows)


def _system_prompts(cuts: Cuts, prompts: int, tau: float, tick: Callable[[], object]) -> PromptSpread:
    """Depths under the prefix of request 0 and its variants by requests 1 to `prompts` - 1, with later questions."""
    template = cuts.draw(0).tokens[: cuts.canvas]
    heads = [list(template), *(_variant(template, cuts.draw(number), number) for number in range(1, prompts))]
    mean_depths = []
    for head in heads:
        measured = [cuts.measure(prompts + number, tick, head) for number in range(QUESTIONS)]
        mean_depths.append(_depths(measured, tau).mean(axis=0))
    prefixes = np.array([head[: max(cut.prefix for cut in cuts.cut(prompts, heads[0]))] for head in heads])
    return PromptSpread(
        prompts=prompts,
        changed=float((prefixes[1:] != prefixes[0]).mean()),
        spread=dict(zip(cuts.ratios, np.std(mean_depths, axis=0).tolist(), strict=True)),
    )


def _variant(template: Sequence[int], other: Conversation, seed: int) -> list[int]:
    """`template` with half of its tokens replaced by those of `other` at the same positions behind a system prompt."""
    variant, donor = np.array(template), np.array(other.tokens[other.system or 0 :][: len(template)])
    differing = np.random.default_rng(seed).permutation(np.flatnonzero(variant != donor))[: (len(template) + 1) // 2]
    variant[differing] = donor[differing]
    return [int(token) for token in variant]


def text(report: DepthReport) -> str:
    """A table of mean depths by ratio and task, and one of the first task's depths by rule at a few ratios."""
    depths = text_table(
        report.ratios,
        {
            "ratio %": str,
            **{task.task: lambda ratio, mean=task.mean: f"{mean[ratio]:.2f}" for task in report.tasks},  # type: ignore[misc]
            "std over tasks": lambda ratio: f"{report.over_tasks[ratio]:.2f}",
            "over prompts": lambda ratio: f"{report.system_prompts.spread[ratio]:.2f}",
        },
    )
    first, shown = report.tasks[0], report.ratios[:: max(1, len(report.ratios) // SHOWN)]
    columns: dict[str, Callable[[str], str]] = {f"depth by rule on {first.task}, at": str}
    columns |= {f"{ratio} %": lambda rule, at=ratio: str(first.rules[rule][at]) for ratio in shown}  # type: ignore[misc]
    return f"{depths}\n\n{text_table(first.rules, columns)}"


def figures(report: DepthReport) -> dict[str, Figure]:
    """The pictures of a report, by the names of their files."""
    return {"depth-tasks": _draw_tasks(report), "depth-stability": _draw_stability(report)}


def _draw_tasks(report: DepthReport) -> Figure:
    """Depth by task near the paper's ratio, and over all ratios."""
    title = f"depth of reuse by task and ratio (tau = {report.tau:g}, {report.samples} requests per ratio)"
    figure, (left, right) = new_panels(title, 2, width_ratios=(2, 3), sharey=True)
    ratio = report.shown
    for index, (task, color) in enumerate(zip(report.tasks, cycle(_COLORS), strict=False)):
        left.bar(index, task.mean[ratio], yerr=task.spread[ratio], color=color, capsize=3)
        right.plot(list(task.mean), list(task.mean.values()), ".-", color=color, linewidth=1.3, label=task.task)
    left.set_xticks(range(len(report.tasks)), [task.task.replace(" ", "\n") for task in report.tasks], fontsize="small")
    title = f"r = {ratio} % (bars: spread over requests)"
    label(left, title, y=f"mean depth (of {report.layers} layers)", grid="both")
    left.set_ylim(0, report.layers * 1.05)
    label(right, "over the prefix ratio", "prefix ratio r (% of the canvas)", grid="both")
    legend_below(figure, 5, right, "outside lower right")
    return figure


def _draw_stability(report: DepthReport) -> Figure:
    """Convergence over the number of requests, the time it takes, and the spread over system prompts."""
    title = f"what moves the profiled depth of {report.tasks[0].task}"
    caption = "small is stable: left, under twice as many requests; right, under other system prompts"
    figure, (distance, seconds, prompts) = new_panels(title, 3, width=10.0, how=caption)
    sizes = [step.samples for step in report.convergence]
    means, tables = ([getattr(step, name) for step in report.convergence] for name in ("distance", "table_distance"))
    distance.plot(sizes, means, ".-", color=K_COLOR, label="mean over requests")
    distance.plot(sizes, tables, "s--", color=V_COLOR, label="the table's whole layers")
    seconds.plot(sizes, [step.seconds for step in report.convergence], ".-", color=K_COLOR)
    for axes in (distance, seconds):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sizes, [str(size) for size in sizes])
        axes.minorticks_off()
    spread = report.system_prompts.spread
    positions = np.arange(len(spread))
    prompts.bar(positions, list(spread.values()), color=K_COLOR)
    prompts.axhline(float(np.mean(list(spread.values()))), color="black", linestyle=":", label="mean over ratios")
    shown = positions[:: max(1, len(positions) // 8)]
    prompts.set_xticks(shown, [str(list(spread)[position]) for position in shown])
    x, y = "N, requests per ratio", "mean change of depth (layers)"
    label(distance, "change from N / 2 to N requests", x, y, grid="both", floor=True)
    label(seconds, "profiling time", x, "time (s)", grid="both", floor=True)
    title, y = f"{report.system_prompts.prompts} system prompts", "standard deviation of depth (layers)"
    label(prompts, title, "prefix ratio r (%)", y, grid="both", floor=True)
    for axes in (distance, prompts):
        axes.legend(fontsize="small")
    return figure
