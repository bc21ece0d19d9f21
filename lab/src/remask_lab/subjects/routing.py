"""`remask analyze routing`: which experts the rows of a mixture go to, from step to step and beside no caching.

Requests with a shared prefix run one at a time under each policy. A row that reads older K/V has another hidden state,
so its router may choose other experts; a row that is not computed keeps the output of those it went to last.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy, settings_of
from remask_lab.asked import Outcome, compared_policies, described, open_workload
from remask_lab.bench.names import COMPARED_CACHES
from remask_lab.bench.workload import token_agreement
from remask_lab.drawing import distinct_line, label, legend_below, new_panels
from remask_lab.instruments.series import Floats, Series
from remask_lab.instruments.watch import NONE, Watcher, check_uncached
from remask_lab.observe import ObservedPass, RoutedRows, observe_routes
from remask_lab.records.markdown import shown, text_table
from remask_lab.records.record import about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Sets = NDArray[np.int32]
"""Experts of a row, ascending, by layer with experts and position: [layers, T, k]; -1 where it was never computed."""


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` name under every policy."""
    llm, workload = open_workload(args)
    workload = workload.seeded
    named = compared_policies(args, COMPARED_CACHES[llm.loaded.config.kind])
    policies = [(one.name, llm.session.policy(one.name, one.settings)) for one in named if one.name != "none"]
    report = measure_routing(llm, [task.request for task in workload.tasks], policies, progress=llm.session.progress)
    facts = about(llm, settings=described(workload))
    return Outcome(facts, asdict(report), text(report), reading(report), lambda: figures(report))


@dataclass(frozen=True, slots=True)
class Routing:
    """One policy. Shares are over all passes of all requests, one for each layer with experts; NaN where none is known.

    Attributes:
        cache, settings: the policy.
        between: of the rows that a pass computed and an earlier pass of the request too, those that go to other
            experts than then.
        moved: of the rows that a pass computed, those that go to other experts than without a cache in the same step.
        kept: of the rows that a pass left out, those whose last experts are not the ones they would go to in this step
            without a cache.
        agreement: share of the response's tokens that are those without a cache.
    """

    cache: str
    settings: dict[str, Any]
    between: Series
    moved: Series
    kept: Series
    agreement: float


@dataclass(frozen=True, slots=True)
class RoutingReport:
    """Expert choices under each policy; `none` comes first. `layers` are those with experts, counted from 1."""

    model: str
    experts: int
    active: int
    layers: tuple[int, ...]
    requests: int
    policies: tuple[Routing, ...]


def reading(report: RoutingReport) -> str:
    """The report in a paragraph."""
    none, *others = report.policies
    parts = [
        f"Without a cache {_share(none.between)} of the rows go to another set of {report.active} of {report.experts} "
        f"experts than in the step before, most in layer {_most(report, none.between)}."
        if not _unknown(none.between)
        else "No request has two passes, so nothing is known of changes between steps."
    ]
    for each in others:
        sentence = f"Under {each.cache} {_share(each.moved)} of the computed rows go to other experts than without it"
        if not _unknown(each.kept):
            sentence += (
                f", and {_share(each.kept)} of those left out were computed by others than they would be now"
                f", most in layer {_most(report, each.kept)}"
            )
        parts.append(f"{sentence}; {100 * each.agreement:.1f} % of the tokens are the same.")
    return " ".join(parts)


def _unknown(shares: Series) -> bool:
    return all(math.isnan(share) for share in shares)


def _share(shares: Series) -> str:
    """The mean over layers."""
    return f"{100 * float(np.nanmean(shares)):.1f} %"


def _most(report: RoutingReport, shares: Series) -> int:
    return report.layers[int(np.nanargmax(shares))]


def text(report: RoutingReport) -> str:
    """One line a layer and policy."""
    return text_table(
        [(each, place) for each in report.policies for place in range(len(report.layers))],
        {
            "cache": lambda row: row[0].cache,
            "layer": lambda row: str(report.layers[row[1]]),
            "between steps %": lambda row: shown(".2f", 100 * row[0].between[row[1]]),
            "moved %": lambda row: shown(".2f", 100 * row[0].moved[row[1]]),
            "kept %": lambda row: shown(".2f", 100 * row[0].kept[row[1]]),
        },
    )


def measure_routing(
    llm: LLM, requests: Sequence[Request], policies: Sequence[tuple[str, CachePolicy]], progress: bool = False
) -> RoutingReport:
    """Run `requests` under `none` and under `policies`, one at a time, each with an empty prefix store.

    Raises `ConfigError` where the model has no experts, there is no request, or one cannot run or asks for guidance.
    """
    tracer = RouteTracer(llm)
    if not requests:
        raise ConfigError("there is no request to measure; give one at least")
    for item in requests:
        check_uncached(item, "routes")
        for _, policy in policies:
            tracer.watcher.engine.check(item.with_policy(policy))
    counts = {name: Counts(len(tracer.layers)) for name, _ in [("none", NONE), *policies]}
    for item in tqdm(requests, desc="requests", unit="req", disable=not progress):
        reference = tracer.trace(item.with_policy(NONE))
        for name, policy in [("none", NONE), *policies]:
            counts[name].add(reference if name == "none" else tracer.trace(item.with_policy(policy)), reference)
    mixture = llm.loaded.config.mixture
    assert mixture is not None
    settings = {"none": {}, **{name: settings_of(policy) for name, policy in policies}}
    return RoutingReport(
        llm.loaded.name,
        mixture.experts,
        mixture.active,
        tuple(layer + 1 for layer in tracer.layers),
        len(requests),
        tuple(counts[name].summary(name, settings[name]) for name in counts),
    )


@dataclass(frozen=True, slots=True)
class RoutedPass:
    """One pass: `before` and `after` it, where each row of the canvas went last, and what it computed, [layers, T]."""

    step: int
    before: Sets
    after: Sets
    computed: NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class RouteTrace:
    """The passes of one request, and its response."""

    passes: tuple[RoutedPass, ...]
    tokens: tuple[int, ...]


class RouteTracer:
    """Runs requests of one model one at a time under any policy, and follows the choices of its routers.

    Raises `ConfigError` where the model has no experts.
    """

    def __init__(self, llm: LLM) -> None:
        self.watcher = Watcher(llm, prefix_match="exact")
        observe_routes(self.watcher.engine, self._note)
        mixture, count = llm.loaded.config.mixture, llm.loaded.config.layers
        assert mixture is not None
        self.layers = [layer for layer in range(count) if layer not in mixture.dense_layers]
        self._active = mixture.active
        self._begin(0)

    def trace(self, item: Request) -> RouteTrace:
        """Run a request to its end, its prefix-only pass included. Raises `ConfigError` where it cannot run."""
        passes: list[RoutedPass] = []
        self.watcher.engine.store.drop()  # so that the prefix-only pass is seen
        self._begin(self.watcher.engine.check(item).decoding.length)

        def observe(seen: ObservedPass) -> None:
            passes.append(RoutedPass(seen.step, self._before, self._sets.copy(), self._computed.copy()))

        tokens = self.watcher.run(item, observe)
        return RouteTrace(tuple(passes), tokens)

    def _begin(self, length: int) -> None:
        self._sets: Sets = np.full((len(self.layers), length, self._active), -1, dtype=np.int32)
        self._before, self._last = self._sets, -1
        self._computed = np.zeros(self._sets.shape[:2], dtype=np.bool_)

    def _note(self, rows: RoutedRows) -> None:
        # Layers of a pass follow each other, so where they do not go on another pass has begun.
        if rows.layer <= self._last:
            self._before = self._sets.copy()
            self._computed[:] = False
        self._last = rows.layer
        place, positions = self.layers.index(rows.layer), rows.positions.cpu().numpy()
        self._sets[place, positions] = np.sort(rows.experts.cpu().numpy(), axis=1)
        self._computed[place, positions] = True


class Counts:
    """Rows that differ, and rows that were compared, by layer; see `Routing` for what is compared."""

    def __init__(self, layers: int) -> None:
        self._between, self._moved, self._kept = (np.zeros((2, layers)) for _ in range(3))
        self._agreement: list[float] = []

    def add(self, trace: RouteTrace, uncached: RouteTrace) -> None:
        """Add a request. `uncached` is the trace of the same one under `none`."""
        reference = {each.step: each.after for each in uncached.passes}
        for number, each in enumerate(trace.passes):
            if number:
                _count(self._between, each.before, each.after, each.computed)
            if each.step in reference:
                _count(self._moved, each.after, reference[each.step], each.computed)
                _count(self._kept, each.after, reference[each.step], ~each.computed)
        self._agreement.append(token_agreement(trace.tokens, uncached.tokens))

    def summary(self, cache: str, settings: dict[str, Any]) -> Routing:
        """The shares."""
        between, moved, kept = (_shares(counts) for counts in (self._between, self._moved, self._kept))
        return Routing(cache, settings, between, moved, kept, float(np.mean(self._agreement)))


def _count(counts: Floats, these: Sets, those: Sets, rows: NDArray[np.bool_]) -> None:
    """Count those of `rows` [layers, T] that went to different experts, and all of them, where both are known."""
    known = rows & (these[..., 0] >= 0) & (those[..., 0] >= 0)
    counts[0] += (known & (these != those).any(axis=-1)).sum(axis=1)
    counts[1] += known.sum(axis=1)


def _shares(counts: Floats) -> Series:
    return tuple((counts[0] / np.where(counts[1], counts[1], np.nan)).tolist())


def figures(report: RoutingReport) -> dict[str, Figure]:
    """Rows that go elsewhere: by themselves, and because of a cache."""
    figure, axes = new_panels(
        f"rows that go to another set of {report.active} of {report.experts} experts",
        3,
        width=10.5,
        how="left: by themselves, as tokens settle; middle and right: because of the cache",
        sharey=True,
    )
    panels: list[tuple[str, str, Callable[[Routing], Series]]] = [
        ("than when computed before", "% of rows computed again", lambda each: each.between),
        ("than without a cache", "% of computed rows", lambda each: each.moved),
        ("than they would go now", "% of rows left out", lambda each: each.kept),
    ]
    for panel, (title, y, values) in zip(axes, panels, strict=True):
        for index, each in enumerate(report.policies):
            if index or panel is axes[0]:
                distinct_line(panel, index, report.layers, [100 * share for share in values(each)], each.cache)
        label(panel, title, "layer", y, grid="both", ticks=10, floor=True)
    legend_below(figure, len(report.policies), axes[0])
    return {"routing": figure}
