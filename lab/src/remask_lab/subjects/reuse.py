"""`remask analyze reuse`: how far reused K/V are from fresh ones in deep layers, and what plain reuse destroys.

Three ways to reuse a shared prefix's K/V in deep layers are compared with a full recompute, step by step (BiCache
figure 5, O3). Then `none`, `reuse` and `bicache` run side by side (BiCache figure 2, table 1).
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from tqdm import tqdm

from remask.depth.similarity import Measure, PrefixProbe, layer_cosines
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask_lab.asked import Outcome, check_least, described, heading, open_workload
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import contender
from remask_lab.bench.workload import Workload
from remask_lab.drawing import K_COLOR, V_COLOR, label, legend_below, new_panels
from remask_lab.instruments.depths import states
from remask_lab.instruments.series import Floats, Table, as_table, mean_of_known, padded
from remask_lab.instruments.watch import Passes, check_masked, leading_kv
from remask_lab.observe import ObservedPass
from remask_lab.records.interval import Shown, judged
from remask_lab.records.markdown import percent, text_table
from remask_lab.records.record import about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row: TypeAlias = Mapping[str, Any]  # what `run_bench` reports of one policy

ANOTHER, ONCE, PERIODIC = "another request", "once", "periodic"
SETTINGS = (ANOTHER, ONCE, PERIODIC)
_WORDS = {ANOTHER: "another request's", ONCE: "computed once", PERIODIC: "refreshed"}
_LOSS = 0.5  # share of what no cache gives below which the reading speaks of a collapse
_SHARES = {
    "accuracy": "accuracy",
    "rules": "the share that follows the rules",
    "format": "the share in the asked format",
    "names": "the share of right names",
}
_SUFFER = {"rules": "the rules suffer", "format": "the format suffers"}
_STYLES: Mapping[str, tuple[str, str]] = {ANOTHER: ("black", ".-"), ONCE: (K_COLOR, ".-"), PERIODIC: (V_COLOR, ".--")}
_BARS = ("#7f7f7f", V_COLOR, K_COLOR)


def measure(args: argparse.Namespace) -> Outcome:
    """Compare K/V in the first requests that `args` shape, then run all of them under three policies."""
    check_least(args, traced=1, concurrency=1, rounds=1)
    llm, workload = open_workload(args)
    check_masked(llm)
    requests = [task.request for task in workload.tasks[: args.traced]]
    report = measure_reuse(llm, requests, args.depth, args.refresh_interval, progress=llm.session.progress)
    own = {"refresh_interval": args.refresh_interval} | ({} if args.depth is None else {"depth": args.depth})
    rows = measure_collapse(llm, workload, own, args.rounds, llm.session.progress)
    settings = described(workload) | own | {name: getattr(args, name) for name in ("traced", "concurrency", "rounds")}
    return Outcome(
        about(llm, seed=args.seed, settings=settings),
        {"deep": report, "collapse": rows},
        f"{heading(llm, workload)}\n\n{text(report, rows)}",
        f"{reading(report)} {collapse_reading(rows)}",
        lambda: {"reuse-deep": _deep(report), "reuse-collapse": _collapse(rows)},
    )


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """How much the prefix K/V that are read in deep layers are like those of a pass without a cache.

    Attributes:
        requests, steps: how many; steps are those of the longest request.
        layers: of the model. `depth`: per request, its shallow layers, whose K/V come from the store in all settings.
        refresh_interval: R of the periodic setting.
        similarity: per setting, mean over requests, [layers][steps].
        deep: per setting, mean over each request's deep layers and over requests, step by step.
        deep_mean: per setting, mean of all deep layers, steps and requests.
    """

    requests: int
    steps: int
    layers: int
    depth: tuple[int, ...]
    refresh_interval: int
    similarity: Mapping[str, Table]
    deep: Mapping[str, tuple[float, ...]]
    deep_mean: Mapping[str, float]


def reading(report: ReuseReport) -> str:
    """What the comparison of K/V shows, in one paragraph."""
    means = report.deep_mean
    once = [value for value in report.deep[ONCE] if not math.isnan(value)]
    shallow = sorted(set(report.depth))
    depth = f"{shallow[0]}" if len(shallow) == 1 else f"{shallow[0]} to {shallow[-1]}"
    said = (
        f"In the layers above depth {depth} (of {report.layers}), K/V from another request have a mean similarity of "
        f"{means[ANOTHER]:.3f} to fresh ones, K/V computed once in the request {means[ONCE]:.3f}, and K/V refreshed "
        f"every {report.refresh_interval} steps {means[PERIODIC]:.3f}."
    )
    order = sorted(SETTINGS, key=lambda name: means[name], reverse=True)
    said += f" Best is {_WORDS[order[0]]}, then {_WORDS[order[1]]}, then {_WORDS[order[2]]}."
    if report.steps <= report.refresh_interval:
        return f"{said} No request lasts longer than one refresh interval, so the last two are the same."
    return f"{said} Computed once, it goes from {once[0]:.3f} in the first step to {once[-1]:.3f} in step {len(once)}."


def shares(row: Row) -> dict[str, float]:
    """What a row says of quality, as shares: accuracy and the parts where there are answers, and agreement."""
    answered = {} if row["accuracy"] is None else {"accuracy": row["accuracy"], **row["parts"]}
    return {**answered, "agreement": row["agreement_with_none"]}


def collapse_reading(rows: Sequence[Row]) -> str:
    """What the runs show, in one paragraph."""
    none, *caches = rows
    return " ".join(_sentence(none, row) for row in caches)


def _sentence(none: Row, row: Row) -> str:
    said = f"{row['cache']} runs at {row['ratio_to_none']:.2f} times the speed of no cache"
    if row["accuracy"] is None:
        return f"{said}; {100 * row['agreement_with_none']:.1f} % of its tokens are those of no cache."
    before, after = shares(none), shares(row)
    changes = [f"{what} {_change(before[name], after[name])}" for name, what in _SHARES.items() if name in before]
    said += f"; {', '.join(changes)}: "
    if after["accuracy"] >= before["accuracy"]:
        return f"{said}no accuracy is lost."
    if judged(row, none) is not Shown.LOST:
        return f"{said}a loss within the 95 % interval of the difference."
    if after["accuracy"] >= _LOSS * before["accuracy"]:
        loss = 100 * (before["accuracy"] - after["accuracy"])
        return f"{said}a loss of {loss:.1f} points, beyond the 95 % interval."
    if not _SUFFER.keys() <= row["parts"].keys():
        return f"{said}accuracy collapses."
    worse = min(_SUFFER, key=lambda name: after[name] - before[name])
    return f"{said}accuracy collapses, and of the two parts of the system prompt {_SUFFER[worse]} most."


def _change(before: float, after: float) -> str:
    return f"stays at {percent(before)}" if before == after else f"goes from {percent(before)} to {percent(after)}"


def measure_reuse(
    llm: LLM,
    requests: Sequence[Request],
    depth: int | None = None,
    refresh_interval: int = 8,
    measure: Measure = "flat",
    progress: bool = False,
) -> ReuseReport:
    """Run `requests` in three settings and compare, step by step, the prefix K/V that were read with fresh ones.

    "another request" is `reuse`: the K/V of the prefix alone. "once" and "periodic" are `bicache` at `depth` (None: the
    depth table's) that refreshes at step 0 only, or every `refresh_interval` steps. Fresh K/V are those of a pass over
    the same canvas, as that request has come to it, without any cache.

    Raises `ConfigError`, before anything runs, where `Passes` refuses a request, one cannot run, or has no deep layers.
    """
    passes = Passes(llm, requests)
    own = {} if depth is None else {"depth": depth}
    policies = {
        ANOTHER: llm.session.policy("reuse"),
        ONCE: llm.session.policy("bicache", {**own, "refresh_interval": None}),
        PERIODIC: llm.session.policy("bicache", {**own, "refresh_interval": refresh_interval}),
    }
    for policy in policies.values():
        passes.check(requests, policy)
    depths = [_depth(passes, request, policies[PERIODIC], llm.model.config.layers) for request in requests]
    probe = PrefixProbe(llm.model, passes.max_tokens)

    def similarity(observed: ObservedPass) -> Floats:
        """Of the K/V that a pass read at the prefix to fresh ones, [layers]."""
        fresh = states(probe, observed.tokens.tolist(), count)
        found: Floats = layer_cosines(leading_kv(observed, count), fresh, measure).mean(axis=0)
        return found

    seen: dict[str, list[Floats]] = {name: [] for name in SETTINGS}
    for request in tqdm(requests, desc="requests", unit="req", disable=not progress):
        count = passes.prefix(request)
        for name, policy in policies.items():
            seen[name].append(np.stack(passes.run(request, policy, similarity), axis=-1))  # [layers, steps]
    return summarise(seen, depths, refresh_interval)


def summarise(seen: Mapping[str, Sequence[Floats]], depths: Sequence[int], refresh_interval: int) -> ReuseReport:
    """The report of one array [layers, steps] a request and setting; they are not changed."""
    steps = max(trace.shape[1] for traces in seen.values() for trace in traces)
    similarity, deep, mean = {}, {}, {}
    for name, traces in seen.items():
        every = padded(traces, steps)
        similarity[name] = as_table(mean_of_known(every))
        below = np.stack([request[depth:].mean(axis=0) for request, depth in zip(every, depths, strict=True)])
        deep[name] = tuple(mean_of_known(below).tolist())
        mean[name] = float(np.nanmean(below))
    layers = len(next(iter(similarity.values())))
    return ReuseReport(len(depths), steps, layers, tuple(depths), refresh_interval, similarity, deep, mean)


def _depth(passes: Passes, request: Request, policy: CachePolicy, layers: int) -> int:
    canvas = len(request.prompt_token_ids) + request.params.max_tokens
    depth = policy.boundary(passes.prefix(request), canvas, layers)
    if not 0 < depth < layers:
        what = "no shallow layers" if depth == 0 else "no deep ones"
        raise ConfigError(
            f"at depth {depth} of {layers} layers, request {request.id!r} has {what}; give a depth of 1 to {layers - 1}"
        )
    return depth


def measure_collapse(
    llm: LLM, workload: Workload, bicache: Mapping[str, Any], rounds: int, progress: bool = False
) -> list[Row]:
    """`none`, `reuse` and `bicache` with these settings, side by side, as `run_bench` reports them.

    Where the workload has answers, `parts` holds the shares of its parts (`Task.parts`). Raises `ConfigError` where a
    policy cannot run.
    """
    settings = {"none": {}, "reuse": {}, "bicache": bicache}
    rows = [contender(llm, name, own, workload) for name, own in settings.items()]
    results: list[Row] = run_bench(llm, workload, rows, rounds, llm.session.engine_config, progress).data["results"]
    return results


def text(report: ReuseReport, rows: Sequence[Row]) -> str:
    """One line a setting, then one a policy."""
    settings = text_table(
        SETTINGS,
        {
            "K/V of the prefix in deep layers": str,
            "mean similarity": lambda name: f"{report.deep_mean[name]:.4f}",
            "last step": lambda name: f"{report.deep[name][-1]:.4f}",
        },
    )
    policies: dict[str, Callable[[Row], str]] = {
        "cache": lambda row: str(row["cache"]),
        "tok/s": lambda row: f"{row['throughput_tok_s']:.0f}",
        "speed": lambda row: f"{row['ratio_to_none']:.2f}x",
        **{kind: lambda row, kind=kind: percent(shares(row)[kind]) for kind in shares(rows[0])},  # type: ignore[misc]
    }
    return f"{settings}\n\n{text_table(rows, policies)}"


def _deep(report: ReuseReport) -> Figure:
    """Similarity over steps in deep layers, and by layer, in the three settings."""
    title = f"prefix K/V that deep layers read, against fresh ones ({report.requests} requests)"
    figure, (left, right) = new_panels(title, 2, sharey=True)
    words = {
        ANOTHER: "from another request",
        ONCE: "computed once",
        PERIODIC: f"refreshed every {report.refresh_interval} steps",
    }
    for name in SETTINGS:
        color, line = _STYLES[name]
        told = f"{words[name]}: {report.deep_mean[name]:.3f}"
        left.plot(range(1, report.steps + 1), report.deep[name], line, color=color, linewidth=1.4, label=told)
        by_layer = np.nanmean(np.array(report.similarity[name]), axis=1)
        right.plot(range(1, report.layers + 1), by_layer, line, color=color, linewidth=1.4)
    depths = sorted(set(report.depth))
    for depth in depths:
        right.axvline(depth + 0.5, color="gray", linestyle=":", linewidth=1)
    right.plot([], [], ":", color="gray", label=f"depth {' and '.join(map(str, depths))}")
    label(left, "mean of the layers above depth", "denoising step", "cosine similarity", grid="both", ticks=10)
    label(right, "by layer, mean over steps", "layer", grid="both", ticks=10)
    legend_below(figure, 4)
    return figure


def _collapse(rows: Sequence[Row]) -> Figure:
    """Throughput and quality of the three policies."""
    title = "plain reuse of a shared prefix in all layers, beside BiCache"
    figure, (left, right) = new_panels(title, 2, width_ratios=(2, 3))
    names = [row["cache"] for row in rows]
    bars = left.bar(names, [row["throughput_tok_s"] for row in rows], color=_BARS)
    left.bar_label(bars, [f"{row['ratio_to_none']:.2f}x" for row in rows], fontsize="small")
    left.margins(y=0.15)
    kinds = list(shares(rows[0]))
    places = np.arange(len(kinds))
    for index, (row, color) in enumerate(zip(rows, _BARS, strict=True)):
        values = [100 * share for share in shares(row).values()]
        bars = right.bar(places + 0.27 * (index - 1), values, 0.25, color=color, label=row["cache"])
        right.bar_label(bars, fmt="%.0f", fontsize="x-small")
    right.set_xticks(places, kinds)
    right.set_ylim(0, 112)
    label(left, "throughput", y="tokens per second", grid="y")
    label(right, "quality, and by part of the answer" if len(kinds) > 1 else "quality", y="share (%)", grid="y")
    legend_below(figure, 3, right, "outside lower right")
    return figure
