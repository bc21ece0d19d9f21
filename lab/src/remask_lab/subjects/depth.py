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
from remask_lab.asked import Outcome, open_without_pool
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

SHOWN = 6  # ratios at which rules are compared in the text, or a few more
QUESTIONS = 4  # requests under each system prompt
_COLORS = (K_COLOR, V_COLOR, "#2ca02c", "#7f7f7f", "#9467bd", "#ff7f0e", "#17becf")

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


def measure(args: argparse.Namespace) -> Outcome:
    """Profile the model on the tasks that `args` name."""
    own = {name: getattr(args, name) for name in ("tau", "samples", "official", "joint", "canvas", "response", "seed")}
    ratios = None if args.ratios is None else tuple(args.ratios)
    settings = ProfileSettings(rule=rule_of(args), ratios=ratios, **own)
    llm = open_without_pool(args)
    check_masked(llm)
    tasks = _tasks(llm, args.task)
    if args.system_prompt is not None:
        tasks = {name: under_system_prompt(args.system_prompt, own, llm.loaded) for name, own in tasks.items()}
    report = measure_depths(llm.session, tasks, settings, args.system_prompts, progress=llm.session.progress)
    more = {name: getattr(args, name) for name in ("task", "ratios", "system_prompts", "system_prompt")}
    del own["seed"]
    given = own | more | {"samples": report.samples, "rule": str(settings.rule)}
    header = f"{llm.loaded.name}: {report.layers} layers, tau {report.tau:g}, {report.definition} similarity"
    facts = about(llm, seed=args.seed, settings=given)
    return Outcome(facts, report, f"{header}\n\n{text(report)}", lambda: figures(report))


def _tasks(llm: LLM, given: Sequence[str]) -> dict[str, PromptSet]:
    tasks: dict[str, PromptSet] = {}
    for item in given:
        name, equals, path = item.partition("=")
        if not (name and equals and path):
            raise ConfigError(f"--task must be NAME=FILE, got {item!r}")
        if name in tasks:
            raise ConfigError(f"--task names {name!r} twice; names must differ")
        tasks[name] = read_prompts(path, llm.loaded)
    return tasks or task_prompts(llm.loaded)


@dataclass(frozen=True, slots=True)
class TaskDepth:
    """Depth on one kind of task, per ratio in percent, in layers.

    `table` is the depth table's by the settings' rule; `mean` and `spread` (standard deviation) those of the numbers of
    leading layers above tau of single requests. `rules` are the depths that each rule would put into the table.
    """

    task: str
    source: str
    table: Mapping[int, int]
    mean: Mapping[int, float]
    spread: Mapping[int, float]
    rules: Mapping[str, Mapping[int, int]]


@dataclass(frozen=True, slots=True)
class Convergence:
    """The first task's table after `samples` requests per ratio, against that after half of them.

    `distance` is of the means of single requests' depths, `table_distance` of the tables: L1 in layers, mean over
    ratios; NaN at the first. `seconds` is the time that all requests so far took.
    """

    samples: int
    distance: float
    table_distance: float
    seconds: float


@dataclass(frozen=True, slots=True)
class PromptSpread:
    """The first task's depth under variants of one system prompt (BiCache D.1), with the same questions.

    A variant has the length of the first request's prefix, and half of its tokens are those of another request.
    `changed` is the share of tokens that differ from the first of so many `prompts`, on average; `spread`, per ratio,
    the standard deviation over system prompts of the mean depth of their questions, in layers.
    """

    prompts: int
    changed: float
    spread: Mapping[int, float]


@dataclass(frozen=True, slots=True)
class DepthReport:
    """Depth of reuse on one model. `ratios` are percents, ascending; `samples` requests were measured per ratio."""

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
    longest = min(prompts.canvas for prompts in tasks.values())
    canvas = settings.canvas or min(longest, session.model.config.max_length)
    response = settings.response or min(prompts.response for prompts in tasks.values())
    settings = replace(settings, samples=samples, canvas=canvas, response=response)
    cuts = {name: Cuts(session, prompts, settings) for name, prompts in tasks.items()}
    first = next(iter(cuts.values()))
    total = len(first.ratios) * (samples * len(cuts) + system_prompts * QUESTIONS)
    found: list[TaskDepth] = []
    convergence: tuple[Convergence, ...] = ()
    with tqdm(total=total, desc="profiling", unit="canvas", disable=not progress) as bar:
        for name, own in cuts.items():
            start, measured, seconds = time.perf_counter(), [], []  # [ratios, layers] of each request, when it was done
            for number in range(samples):
                measured.append(own.measure(number, bar.update))
                seconds.append(time.perf_counter() - start)
            found.append(_task(name, tasks[name].source, own.ratios, measured, settings))
            convergence = convergence or _convergence(own.ratios, measured, seconds, settings)
        spread = _system_prompts(first, system_prompts, settings.tau, bar.update)
    means = [list(task.mean.values()) for task in found]
    return DepthReport(
        tau=settings.tau,
        definition=first.definition,
        layers=session.model.config.layers,
        samples=samples,
        ratios=first.ratios,
        tasks=tuple(found),
        over_tasks=dict(zip(first.ratios, np.std(means, axis=0).tolist(), strict=True)),
        convergence=convergence,
        system_prompts=spread,
    )


def _depths(measured: Sequence[Floats], tau: float) -> Ints:
    """Depths of single requests, [requests, ratios]."""
    return np.array([[run_depth(curve, tau) for curve in request.tolist()] for request in measured])


def _task(
    name: str, source: str, ratios: Sequence[int], measured: Sequence[Floats], settings: ProfileSettings
) -> TaskDepth:
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
    return DepthLookup(depth_entries(rule_limits(rule, ratios, measured), tau))


def _convergence(
    ratios: Sequence[int], measured: Sequence[Floats], seconds: Sequence[float], settings: ProfileSettings
) -> tuple[Convergence, ...]:
    last, depths = len(measured), _depths(measured, settings.tau)
    sizes = [2**power for power in range(last.bit_length()) if 2**power < last] + [last]
    rows = [Convergence(sizes[0], float("nan"), float("nan"), seconds[sizes[0] - 1])]
    for before, after in pairwise(sizes):
        distance = np.abs(depths[:after].mean(axis=0) - depths[:before].mean(axis=0)).mean()
        smaller, larger = (_lookup(settings.rule, ratios, measured[:size], settings.tau) for size in (before, after))
        of_tables = table_distance(smaller, larger, ratios)
        rows.append(Convergence(after, float(distance), of_tables, seconds[after - 1]))
    return tuple(rows)


def _system_prompts(cuts: Cuts, prompts: int, tau: float, tick: Callable[[], object]) -> PromptSpread:
    """Request 0 lends its prefix, those up to `prompts` - 1 what changes in it, the ones after them their questions."""
    template = cuts.draw(0).tokens[: cuts.canvas]
    heads = [list(template), *(_variant(template, cuts.draw(number), number) for number in range(1, prompts))]
    means = []
    for head in heads:
        measured = [cuts.measure(prompts + number, tick, head) for number in range(QUESTIONS)]
        means.append(_depths(measured, tau).mean(axis=0))
    longest = np.array([head[: max(cut.prefix for cut in cuts.cut(prompts, heads[0]))] for head in heads])
    return PromptSpread(
        prompts=prompts,
        changed=float((longest[1:] != longest[0]).mean()),
        spread=dict(zip(cuts.ratios, np.std(means, axis=0).tolist(), strict=True)),
    )


def _variant(template: Sequence[int], other: Conversation, seed: int) -> list[int]:
    """`template` with half of its tokens from the same places of `other`, behind its system prompt if all share one."""
    variant, donor = np.array(template), np.array(other.tokens[other.system or 0 :][: len(template)])
    differing = np.random.default_rng(seed).permutation(np.flatnonzero(variant != donor))[: (len(template) + 1) // 2]
    variant[differing] = donor[differing]
    return [int(token) for token in variant]


def text(report: DepthReport) -> str:
    """Mean depths by ratio, a column a task. Then what each rule makes of the first task, at a few ratios."""
    depths = text_table(
        report.ratios,
        {
            "ratio %": str,
            **{task.task: lambda ratio, own=task.mean: f"{own[ratio]:.2f}" for task in report.tasks},  # type: ignore[misc]
            "std over tasks": lambda ratio: f"{report.over_tasks[ratio]:.2f}",
            "over prompts": lambda ratio: f"{report.system_prompts.spread[ratio]:.2f}",
        },
    )
    first, few = report.tasks[0], report.ratios[:: max(1, len(report.ratios) // SHOWN)]
    columns: dict[str, Callable[[str], str]] = {f"depth by rule on {first.task}, at": str}
    columns |= {f"{ratio} %": lambda rule, at=ratio: str(first.rules[rule][at]) for ratio in few}  # type: ignore[misc]
    return f"{depths}\n\n{text_table(first.rules, columns)}"


def figures(report: DepthReport) -> dict[str, Figure]:
    """Depth by task and ratio, and what moves it."""
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
    how = "small is stable: left, under twice as many requests; right, under other system prompts"
    figure, (distance, seconds, prompts) = new_panels(title, 3, width=10.0, how=how)
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
    places = np.arange(len(spread))
    prompts.bar(places, list(spread.values()), color=K_COLOR)
    prompts.axhline(float(np.mean(list(spread.values()))), color="black", linestyle=":", label="mean over ratios")
    few = places[:: max(1, len(places) // 8)]
    prompts.set_xticks(few, [str(list(spread)[place]) for place in few])
    x, y = "N, requests per ratio", "mean change of depth (layers)"
    label(distance, "change from N / 2 to N requests", x, y, grid="both", floor=True)
    label(seconds, "profiling time", x, "time (s)", grid="both", floor=True)
    title, y = f"{report.system_prompts.prompts} system prompts", "standard deviation of depth (layers)"
    label(prompts, title, "prefix ratio r (%)", y, grid="both", floor=True)
    for axes in (distance, prompts):
        axes.legend(fontsize="small")
    return figure
