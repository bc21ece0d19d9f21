"""`remask analyze first-predictions`: how far a first step's predictions move by the depth of reuse.

What layers reuse of a shared prefix is judged by what it does to predictions, where the BiCache paper judges it by how
similar K and V stay.
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from torch import Tensor
from tqdm import tqdm

from remask.checks.values import real
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.asked import Outcome, depths_option, described, heading, open_workload
from remask_lab.drawing import K_COLOR, V_COLOR, label, legend_below, new_panels, percent_bars
from remask_lab.instruments.depths import first_predictions, states
from remask_lab.instruments.watch import Passes, check_masked
from remask_lab.records.interval import mean_interval, percent_text
from remask_lab.records.markdown import percent, text_table
from remask_lab.records.record import about
from remask_lab.similarity.probe import KV, PrefixProbe, layer_cosines, limits_of
from remask_lab.similarity.rule import DepthRule, ProfileSettings, check_tau, depth_at

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REQUESTS = 16  # of a task, where no number is asked for
NATS = 0.1
"""By so much at most the most changed prediction of a first step may move, in the mean over requests."""
ROUNDED = ("int8", "fp8")  # what products of such weights read is rounded too


def measure(args: argparse.Namespace) -> Outcome:
    """Compare the first predictions of the requests that `args` name or shape."""
    real("--nats", args.nats, low=0)
    check_tau(args.tau)
    depths_option(args.depths, 0)
    if args.input is None and args.requests is None:
        args.requests = REQUESTS
    llm, workload = open_workload(args)
    check_masked(llm)
    layers = llm.loaded.config.layers
    depths = depths_option(args.depths, layers) or usual_depths(layers)
    requests = [task.request for task in workload.tasks]
    report = measure_predictions(
        llm, requests, workload.clusters, depths, args.nats, args.tau, progress=llm.session.progress
    )
    facts = about(llm, seed=args.seed, settings=described(workload) | {"nats": args.nats, "tau": args.tau})
    told = f"{heading(llm, workload)}\n\n{text(report)}"
    words = {"model": args.model, "input": args.input, "task": args.task, "task-settings": args.task_settings}
    asked = " ".join(f"--{name} {shlex.quote(word)}" for name, word in words.items() if word is not None)
    return Outcome(facts, report, f"{told}\n\n{reading(report, asked)}", lambda: figures(report))


@dataclass(frozen=True, slots=True)
class Shift:
    """How far predictions at one depth are from those at depth 0. Intervals are 95 % over prefixes.

    Attributes:
        depth: leading layers that read the prefix from the store.
        nats: KL divergence of the position that moves most, from depth 0 to this one; mean over requests.
        mean_nats: the same of the mean over a request's positions.
        same: share of positions whose most probable token is the same, mean over requests.
    """

    depth: int
    nats: float
    nats_interval: tuple[float, float]
    mean_nats: float
    mean_nats_interval: tuple[float, float]
    same: float
    same_interval: tuple[float, float]


@dataclass(frozen=True, slots=True)
class FirstPredictions:
    """What first predictions say of depths.

    Attributes:
        requests, prefixes: how many, and over how many shared prefixes.
        prefix_tokens, canvas_tokens: means over requests.
        layers: of the model.
        shifts: by depth, ascending.
        bound: nats up to which predictions count as unchanged.
        depth: the deepest one of `shifts` up to which all stay within the bound; 0 where the first does not.
        tau: similarity that a layer must exceed in the paper's rule.
        rule: depth of each request by that rule; a table takes the least.
        quantization: of the weights.
    """

    requests: int
    prefixes: int
    prefix_tokens: float
    canvas_tokens: float
    layers: int
    shifts: tuple[Shift, ...]
    bound: float
    depth: int
    tau: float
    rule: tuple[int, ...]
    quantization: str | None = None


def usual_depths(layers: int) -> list[int]:
    """1, 2, 3, 4, 6, 8, 12 and so forth, each half as deep again or a third, and all `layers`."""
    return sorted({depth for power in range(layers) for depth in (2**power, 3 * 2**power) if depth < layers} | {layers})


def measure_predictions(
    llm: LLM,
    requests: Sequence[Request],
    clusters: Sequence[Hashable],
    depths: Sequence[int],
    bound: float = NATS,
    tau: float = ProfileSettings().tau,
    progress: bool = False,
    seen: Callable[[KV, KV], None] | None = None,
) -> FirstPredictions:
    """Compare what the first step of each of `requests` predicts at `depths` with what it predicts without a cache.

    Requests of one of `clusters` share a prefix. The canvas is the one with which the engine begins; all of its noisy
    positions are compared. `seen` is given K and V of each request's prefix, alone and on the canvas. Raises
    `ConfigError`, before anything runs, where `Passes` refuses a request, there is no depth, or the model does not have
    one.
    """
    check_tau(tau)
    if not any(depths):
        raise ConfigError(f"depths must be layers from 1 to the model's {llm.model.config.layers}, got {list(depths)}")
    depths, passes = sorted(set(depths)), Passes(llm, requests)
    for depth in depths:
        passes.check(requests, llm.session.policy("bicache", {"depth": depth}))
    probe = PrefixProbe(llm.model, passes.max_tokens)
    moved: list[list[tuple[float, float, float]]] = []  # [requests][depths]
    curves, canvases = [], []
    for request in tqdm(requests, desc="requests", unit="req", disable=not progress):
        canvas, count = passes.canvas(request), passes.prefix(request)
        (_, none), *_ = first_predictions(llm.model, canvas, count, (0,))
        moved.append([_moved(none, found) for _, found in first_predictions(llm.model, canvas, count, depths)])
        alone = states(probe, request.prompt_token_ids[:count])
        within = states(probe, canvas.tokens.tolist(), count)
        curves.append(layer_cosines(alone, within).mean(axis=0))
        if seen is not None:
            seen(alone, within)
        canvases.append(len(canvas))
    shifts = []
    for depth, rows in zip(depths, zip(*moved, strict=True), strict=True):
        nats, mean_nats, same = zip(*rows, strict=True)
        told = _mean(nats, clusters), _mean(mean_nats, clusters), _mean(same, clusters, most=1.0)
        shifts.append(Shift(depth, *told[0], *told[1], *told[2]))
    return FirstPredictions(
        requests=len(requests),
        prefixes=len(set(clusters)),
        prefix_tokens=float(np.mean([passes.prefix(request) for request in requests])),
        canvas_tokens=float(np.mean(canvases)),
        layers=llm.model.config.layers,
        shifts=tuple(shifts),
        bound=bound,
        depth=deepest({shift.depth: shift.nats for shift in shifts}, bound),
        tau=tau,
        rule=tuple(depth_at(limits, tau) for limits in limits_of(DepthRule(), np.array(curves)).tolist()),
        quantization=llm.loaded.quantization,
    )


def _moved(none: Tensor, found: Tensor) -> tuple[float, float, float]:
    """Greatest and mean KL divergence of rows [N, V] of log-probabilities, and how many keep their best token."""
    nats = (none.exp() * (none - found)).sum(-1).clamp(min=0)  # rounding makes it negative
    same = none.argmax(-1) == found.argmax(-1)
    return float(nats.max()), float(nats.mean()), float(same.float().mean())


def _mean(
    values: Sequence[float], clusters: Sequence[Hashable], most: float = math.inf
) -> tuple[float, tuple[float, float]]:
    """The mean of `values` from 0 to `most`, and its interval, as far as it lies there."""
    low, high = np.clip(mean_interval(values, clusters), 0.0, most).tolist()
    return float(np.mean(values)), (low, high)


def deepest(nats: Mapping[int, float], bound: float = NATS) -> int:
    """The depth up to which all of `nats`, by depth, stay within the bound; 0 where the least depth does not."""
    beyond = min((depth for depth, moved in nats.items() if moved > bound), default=math.inf)
    return max((depth for depth in nats if depth < beyond), default=0)


def reading(report: FirstPredictions, asked: str = "--model MODEL --input FILE") -> str:
    """What the numbers show, and how to go on; `asked` are the options that name the model and the requests."""
    held = next((shift for shift in report.shifts if 0 < shift.depth == report.depth), None)
    beyond = next((shift for shift in report.shifts if shift.depth > report.depth), None)
    if held is not None:
        said = (
            f"Up to depth {held.depth} of {report.layers} first predictions move by at most {report.bound:g} nats "
            f"where they move most: {_nats(held)} there, and {100 * held.same:.1f} % of the best tokens stay"
        )
        said += "" if beyond is None else f"; at depth {beyond.depth}, the next one measured, it is {_nats(beyond)}"
    else:
        said = f"No depth that was measured stays within {report.bound:g} nats"
        if beyond is not None:
            said += f": at depth {beyond.depth} first predictions move by {_nats(beyond)} where they move most"
    said += (
        f". The paper's rule gives depth {min(report.rule)} at tau {report.tau:g} on the same requests (mean "
        f"of their own: {np.mean(report.rule):.1f})."
    )
    if held is not None and held.nats_interval[1] > report.bound:
        said += " The interval reaches beyond the bound, so requests over more prefixes may give a lower depth."
    if report.quantization in ROUNDED:
        said += (
            f" With weights in {report.quantization} activations are rounded, which alone moves predictions and makes "
            "the depth too low: measure with --quantization none, and use the depth with any."
        )
    if held is None and beyond is not None and beyond.depth > 1:
        return f"{said} Lower depths were not measured: give --depths {','.join(map(str, range(1, beyond.depth)))}."
    if held is None and report.quantization in ROUNDED:
        return said
    if held is None:
        return f"{said} Not even one layer may read the prefix from the store: --cache none."
    depths = ",".join(str(shift.depth) for shift in (held, beyond) if shift is not None)
    return (
        f"{said} To use the depth, give --cache bicache --cache-config '{json.dumps({'depth': report.depth})}'. First "
        f"steps are no proof of answers; this settles it: remask bench {asked} --caches none,reuse --depths {depths}"
    )


def _nats(shift: Shift) -> str:
    low, high = shift.nats_interval
    return f"{shift.nats:.3f}" + ("" if math.isnan(low) else f" ({low:.3f} to {high:.3f})")


def _share(shift: Shift) -> str:
    alone = math.isnan(shift.same_interval[0])
    return percent(shift.same) if alone else percent_text(shift.same, shift.same_interval)


def text(report: FirstPredictions) -> str:
    """One line a depth."""
    return text_table(
        report.shifts,
        {
            "depth": lambda shift: str(shift.depth),
            "nats where it moves most": _nats,
            "mean": lambda shift: f"{shift.mean_nats:.4f}",
            "best token stays": _share,
        },
    )


def figures(report: FirstPredictions) -> dict[str, Figure]:
    """Nats by depth beside the bound, and how many best tokens stay."""
    ratio = 100 * report.prefix_tokens / report.canvas_tokens
    title = f"a first step's predictions by depth ({report.requests} requests, r = {ratio:.0f} %)"
    figure, (left, right) = new_panels(title, 2, sharex=True)
    depths = [shift.depth for shift in report.shifts]
    nats = [shift.nats for shift in report.shifts]
    bars = [[abs(shift.nats_interval[side] - shift.nats) for shift in report.shifts] for side in (0, 1)]
    left.errorbar(
        depths, nats, yerr=bars, fmt="o-", color=K_COLOR, markersize=5, capsize=2, label="most changed position"
    )
    left.plot(depths, [shift.mean_nats for shift in report.shifts], ".--", color=K_COLOR, label="mean of positions")
    left.axhline(report.bound, color=V_COLOR, linestyle="--", linewidth=1.2, label=f"bound: {report.bound:g} nats")
    left.set_yscale("symlog", linthresh=report.bound or NATS)
    left.set_ylim(bottom=0)
    same = [shift.same for shift in report.shifts]
    share = percent_bars(same, [shift.same_interval for shift in report.shifts])
    right.errorbar(
        depths, [100 * value for value in same], yerr=share, fmt="o-", color=K_COLOR, markersize=5, capsize=2
    )
    right.set_ylim(-4, 106)
    for axes in (left, right):
        axes.axvline(
            report.depth, color="grey", linewidth=5, alpha=0.3, label=f"depth {report.depth}: within the bound"
        )
        rule = min(report.rule)
        axes.axvline(rule, color="black", linestyle=":", linewidth=1.2, label=f"depth {rule}: the paper's rule")
    label(left, "distance from no cache (bars: 95 %)", "depth b", "KL divergence (nats)", grid="both", ticks=10)
    label(right, "most probable token is the same", "depth b", "share of positions (%)", grid="both", ticks=10)
    legend_below(figure, 3, left)
    return {"first-predictions": figure}
