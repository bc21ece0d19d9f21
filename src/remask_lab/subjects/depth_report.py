"""What a measurement of depth came to, and what it shows in words."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, slots=True)
class TaskDepth:
    """Depth on one kind of task, per ratio in percent, in layers.

    `table` is the depth table's, of mean similarities; `mean` and `spread` (standard deviation) those of the depths of
    single requests.
    """

    task: str
    source: str
    table: Mapping[int, int]
    mean: Mapping[int, float]
    spread: Mapping[int, float]


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
    """The first task's depth under other system prompts of the same length, with the same questions.

    Attributes:
        prompts: how many.
        changed: share of their tokens that differ from the first one's, on average.
        spread: per ratio, standard deviation over system prompts of the mean depth of their questions, in layers.
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


def reading(report: DepthReport) -> str:
    """What the numbers show, in one paragraph."""
    parts = [_by_task(report), _by_ratio(report)]
    last = report.convergence[-1]
    time_taken = f"{last.samples} requests per ratio took {last.seconds:.1f} s"
    if len(report.convergence) > 1:
        before = report.convergence[-2].samples
        parts.append(
            f"Going from {before} to {last.samples} requests per ratio moves the mean depths by {last.distance:.3f} "
            f"layers and the table by {last.table_distance:.3f}; {time_taken}."
        )
    else:
        parts.append(f"{time_taken}.")
    changed = report.system_prompts
    worst = max(changed.spread, key=lambda ratio: changed.spread[ratio])
    parts.append(
        f"Under {changed.prompts} system prompts that differ in {100 * changed.changed:.0f} % of their tokens, depth "
        f"has a standard deviation of {np.mean(list(changed.spread.values())):.3f} layers on average over the ratios"
        + (f", and of {changed.spread[worst]:.3f} at most (at {worst} %)." if changed.spread[worst] else ".")
    )
    return " ".join(parts)


def _by_task(report: DepthReport) -> str:
    ratio = report.shown
    depths = {task.task: task.mean[ratio] for task in report.tasks}
    if len(depths) == 1:
        ((task, depth),) = depths.items()
        return f"At r = {ratio} % the depth on {task} is {depth:.2f} of {report.layers} layers."
    low, high = min(depths, key=lambda t: depths[t]), max(depths, key=lambda t: depths[t])
    within = np.mean([task.spread[ratio] for task in report.tasks])
    return (
        f"At r = {ratio} % the mean depth lies between {depths[low]:.2f} ({low}) and {depths[high]:.2f} ({high}) of "
        f"{report.layers} layers: a standard deviation of {report.over_tasks[ratio]:.2f} over {len(depths)} tasks, and "
        f"of {within:.2f} over the requests of one."
    )


def _by_ratio(report: DepthReport) -> str:
    low, high = report.ratios[0], report.ratios[-1]
    if low == high:
        return "One ratio shows no trend."
    falls = sum(b < a for task in report.tasks for a, b in pairwise(task.mean.values()))
    first, last = (np.mean([task.mean[ratio] for task in report.tasks]) for ratio in (low, high))
    how = "never falling on the way" if not falls else f"with {falls} falls from one ratio to the next on the way"
    return f"From r = {low} % to {high} % it goes from {first:.2f} to {last:.2f}, {how}."
