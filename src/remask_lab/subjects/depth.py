"""What the depth of reuse depends on: task, prefix ratio, number of requests, system prompt (BiCache 4.2, 6.4, D)."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.core.depth import DepthLookup
from remask.depth.conversations import PromptSet
from remask.depth.profile import (
    Cuts,
    ProfileSettings,
    Subject,
    depth_entries,
    mean_curves,
    run_depth,
    table_distance,
)
from remask.errors import ConfigError
from remask_lab.subjects.depth_report import Convergence, DepthReport, PromptSpread, TaskDepth

Ints = NDArray[np.int64]
SAMPLES = 16  # requests per ratio and task, where nobody says how many
QUESTIONS = 4  # requests under each system prompt


def measure_depths(
    llm: Subject,
    tasks: Mapping[str, PromptSet],
    settings: ProfileSettings | None = None,
    system_prompts: int = 8,
    progress: bool = False,
) -> DepthReport:
    """Profile `llm` on each of `tasks` with the same settings, and on the first also under changed system prompts.

    Canvases are cut as `profile` cuts them, all to one length and one number of masks that every task has. Raises
    `ConfigError` where `Cuts` does, without tasks, and for fewer than two system prompts.
    """
    if not tasks:
        raise ConfigError("there is no task to profile on")
    if system_prompts < 2:
        raise ConfigError(f"changed system prompts need at least 2 of them, got {system_prompts}")
    settings = settings or ProfileSettings()
    samples = settings.samples or SAMPLES
    longest = min(prompts.canvas for prompts in tasks.values())
    canvas = settings.canvas or min(longest, llm.model.config.max_length)
    response = settings.response or min(prompts.response for prompts in tasks.values())
    settings = replace(settings, samples=samples, canvas=canvas, response=response)
    cuts = {name: Cuts(llm, prompts, settings) for name, prompts in tasks.items()}
    first = next(iter(cuts.values()))
    total = len(first.ratios) * (samples * len(cuts) + system_prompts * QUESTIONS)
    found: list[TaskDepth] = []
    convergence: tuple[Convergence, ...] = ()
    with tqdm(total=total, desc="profiling", unit="canvas", disable=not progress) as bar:
        for name, own in cuts.items():
            measured, seconds = _measure(own, samples, bar.update)
            found.append(_task(name, tasks[name].source, own.ratios, measured, settings.tau))
            convergence = convergence or _convergence(own.ratios, measured, seconds, settings.tau)
        spread = _system_prompts(first, system_prompts, settings.tau, bar.update)
    means = [list(task.mean.values()) for task in found]
    return DepthReport(
        tau=settings.tau,
        definition=first.definition,
        layers=llm.model.config.layers,
        samples=samples,
        ratios=first.ratios,
        tasks=tuple(found),
        over_tasks=dict(zip(first.ratios, np.std(means, axis=0).tolist(), strict=True)),
        convergence=convergence,
        system_prompts=spread,
    )


def _measure(cuts: Cuts, samples: int, tick: Callable[[], object]) -> tuple[list[NDArray[np.float64]], list[float]]:
    """Similarities [ratios, layers] of each request, and the seconds since the first began when each was done."""
    start = time.perf_counter()
    measured, seconds = [], []
    for number in range(samples):
        measured.append(cuts.measure(number, tick))
        seconds.append(time.perf_counter() - start)
    return measured, seconds


def _depths(measured: Sequence[NDArray[np.float64]], tau: float) -> Ints:
    """Depths of single requests, [requests, ratios]."""
    return np.array([[run_depth(curve, tau) for curve in request.tolist()] for request in measured])


def _task(
    name: str, source: str, ratios: Sequence[int], measured: Sequence[NDArray[np.float64]], tau: float
) -> TaskDepth:
    depths, lookup = _depths(measured, tau), _lookup(ratios, measured, tau)
    return TaskDepth(
        task=name,
        source=source,
        table={ratio: lookup.depth(ratio, 100) for ratio in ratios},
        mean=dict(zip(ratios, depths.mean(axis=0).tolist(), strict=True)),
        spread=dict(zip(ratios, depths.std(axis=0).tolist(), strict=True)),
    )


def _lookup(ratios: Sequence[int], measured: Sequence[NDArray[np.float64]], tau: float) -> DepthLookup:
    return DepthLookup(depth_entries(mean_curves(ratios, measured), tau))


def _convergence(
    ratios: Sequence[int], measured: Sequence[NDArray[np.float64]], seconds: Sequence[float], tau: float
) -> tuple[Convergence, ...]:
    sizes, depths = _sizes(len(measured)), _depths(measured, tau)
    rows = [Convergence(sizes[0], float("nan"), float("nan"), seconds[sizes[0] - 1])]
    for before, after in pairwise(sizes):
        distance = np.abs(depths[:after].mean(axis=0) - depths[:before].mean(axis=0)).mean()
        smaller, larger = (_lookup(ratios, measured[:size], tau) for size in (before, after))
        of_tables = table_distance(smaller, larger, ratios)
        rows.append(Convergence(after, float(distance), of_tables, seconds[after - 1]))
    return tuple(rows)


def _sizes(last: int) -> list[int]:
    """Powers of two below `last`, and `last`."""
    return [2**power for power in range(last.bit_length()) if 2**power < last] + [last]


def _system_prompts(cuts: Cuts, prompts: int, tau: float, tick: Callable[[], object]) -> PromptSpread:
    """Requests 0 to `prompts` - 1 lend their prefixes, the ones after them their questions."""
    means = []
    for head in range(prompts):
        measured = [cuts.measure(prompts + number, tick, head) for number in range(QUESTIONS)]
        means.append(_depths(measured, tau).mean(axis=0))
    length = round(cuts.ratios[-1] * cuts.canvas / 100)
    heads = np.array([cuts.draw(head).tokens[:length] for head in range(prompts)])
    return PromptSpread(
        prompts=prompts,
        changed=float((heads[1:] != heads[0]).mean()),
        spread=dict(zip(cuts.ratios, np.std(means, axis=0).tolist(), strict=True)),
    )
