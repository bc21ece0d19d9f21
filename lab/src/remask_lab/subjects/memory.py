"""`remask analyze memory`: what cache policies keep between passes, measured and by formula.

`docs/lab/analysis.md` states the formula in words.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from operator import mul
from typing import TYPE_CHECKING, Any

from remask.cli.options import object_option
from remask.engine.report import MemoryReport
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.model.config import ModelConfig
from remask.policies import CachePolicy
from remask_lab.asked import Outcome, open_with_requests, separated, shape_settings
from remask_lab.bench.contenders import Contender, LeftOut, contender, every_contender
from remask_lab.bench.workload import Workload
from remask_lab.drawing import K_COLOR, label, new_panels
from remask_lab.observe import ObservedPass, observe_passes
from remask_lab.records.markdown import markdown_table
from remask_lab.records.record import about

if TYPE_CHECKING:
    from matplotlib.figure import Figure

STORES = ("prefixes", "pages")  # how a memory report names what the store holds
_PARTS = {
    "kv": ("K and V", K_COLOR),
    "outputs": ("attention and FFN outputs", "#c0392b"),
    "states": ("hidden states of requests", "#e67e22"),
    "store": ("K and V of the shared prefix", "#5dade2"),
    "boundary": ("hidden states of the shared prefix", "#f5b041"),
    "unused": ("slots without a token", "#bfbfbf"),
}


def measure(args: argparse.Namespace) -> Outcome:
    """Run the requests that `args` shape under every policy that `args` name."""
    settings = object_option("--cache-config", args.cache_config)
    llm, workload = open_with_requests(args)
    rows, left_out = _contenders(args, llm, workload, settings)
    uses = []
    for row in rows:
        work = [task.request.with_policy(row.policy) for task in (row.workload or workload).tasks]
        uses.append(measure_memory(llm, row.name, work))
    facts = about(llm, seed=args.seed, settings=shape_settings(args) | {"cache_config": settings})
    data = {"rows": [asdict(use) | {"formula_total": use.formula.total, "share": use.share} for use in uses]}
    lines = [text(uses), *(f"Left out: {left.name}: {left.reason}" for left in left_out)]
    return Outcome(facts, data, "\n".join(lines), figures=lambda: figures(uses))


def _contenders(
    args: argparse.Namespace, llm: LLM, workload: Workload, settings: dict[str, Any]
) -> tuple[list[Contender], list[LeftOut]]:
    """`--caches`, or every policy that the model can have, and those that are left out then.

    Raises `ConfigError` on a policy that cannot run, and on settings of one that is not measured.
    """
    left_out: list[LeftOut] = []
    if args.caches is None:
        rows, left_out = every_contender(llm, workload, settings)
    else:
        rows = [contender(llm, name, settings.get(name), workload) for name in separated(args.caches)]
    known = [row.name for row in rows] + [left.name for left in left_out]
    for name in settings:
        if name not in known:
            raise ConfigError(f"--cache-config names {name!r}, which is not measured; measured are {', '.join(known)}")
    return rows, left_out


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that requests of one shape keep from pass to pass, in slots that hold a token.

    Attributes:
        kv: K and V of the requests' own canvases.
        outputs: attention and FFN outputs of the same positions.
        states: hidden states that requests keep themselves, and signals of self-conditioning beside their K and V.
        store: K and V of shared prefixes, each held once.
        boundary: hidden states of shared prefixes, and signals beside their K and V.
    """

    kv: int = 0
    outputs: int = 0
    states: int = 0
    store: int = 0
    boundary: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind."""
        return asdict(self)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A policy's memory at its peak, measured and as the formula has it.

    Attributes:
        cache: the policy's name.
        formula: what it should be.
        measured: bytes of the pages in use and of hidden states.
        unused: bytes of `measured` in slots that hold no token, at the ends of pages.
        weights: bytes of the model.
    """

    cache: str
    formula: Footprint
    measured: int
    unused: int
    weights: int

    @property
    def share(self) -> float:
        """What is measured, as a share of the model's bytes."""
        return self.measured / self.weights


@dataclass(frozen=True, slots=True)
class Crowd:
    """Requests of one shape that run together under one policy.

    Attributes:
        requests: how many.
        canvas: T, positions of each canvas.
        prefix: P, leading tokens that all of them share, and that the store has room for.
        guided: each has a second, unconditional canvas, which shares nothing.
    """

    requests: int
    canvas: int
    prefix: int = 0
    guided: bool = False


def formula(config: ModelConfig, item: int, policy: CachePolicy, crowd: Crowd, page: int) -> Footprint:
    """Bytes that `crowd` keeps under `policy`, with numbers of `item` bytes and pages of `page` slots.

    Slots that hold no token, at the ends of pages, are not counted.
    """
    w, c, traits = config.widths(item), crowd, policy.traits
    pages = traits.sharing == "pages"
    depth = policy.boundary(c.prefix, c.canvas, w.layers) if c.prefix else 0
    # Positions that the store holds for all in each layer, and those in which the requests have no slots of their own.
    if pages:
        stored = leased = [c.prefix // page * page] * w.layers
    else:
        reads = policy.leased_layers(depth, w.layers)
        stored = [c.prefix * (depth > 0)] * w.layers
        leased = [c.prefix * (layer < reads) for layer in range(w.layers)]
    inputs = c.requests * ("inputs" in traits.keeps and depth > 0)  # until their first pass has run
    canvases = c.requests * (2 if c.guided else 1)
    own = [canvases * c.canvas - c.requests * count * (not traits.copies) for count in leased]
    keys, between = w.keys_of(range(w.layers)), w.layers - 1
    signal = w.item * w.hidden * (w.signal > 0)
    return Footprint(
        kv=w.item * 2 * sum(map(mul, keys, own)),
        outputs=w.item * 2 * w.hidden * (sum(own) + sum(stored)) * ("outputs" in traits.keeps),
        states=(canvases * ("attention" in traits.keeps) + inputs) * c.canvas * between * w.item * w.hidden
        + signal * own[0],
        store=w.item * 2 * sum(map(mul, keys, stored)),
        boundary=w.item * w.hidden * c.prefix * between * (depth > 0) + signal * stored[0],
    )


def measure_memory(llm: LLM, cache: str, work: Sequence[Request]) -> MemoryUse:
    """Memory of the requests of `work`, which are alike and under one policy, once all of them have begun.

    They run on an engine of their own until then, and are cancelled. `cache` is the policy's name. Raises `ConfigError`
    where one cannot run, or where the limits of `llm` do not let all of them run together.
    """
    engine = llm.session.new_engine()
    peaks: list[MemoryReport] = []  # each larger than the ones before

    def observe(passes: Sequence[ObservedPass]) -> None:  # noqa: ARG001
        report = engine.memory_report()
        if not peaks or report.bytes > peaks[-1].bytes:
            peaks.append(report)

    observe_passes(engine, observe)
    for item in work:
        engine.add(item)
    while engine.waiting and engine.busy:
        engine.step()
    for item in work:
        engine.cancel(item.id)
    while engine.busy:
        engine.step()
    running = [holder for holder in peaks[-1].holders if holder.name not in STORES] if peaks else []
    if len(running) < len(work):
        raise ConfigError(
            f"{len(work)} requests never ran together: raise "
            f"max_num_seqs={llm.session.engine_config.max_num_seqs}, or lengthen"
            " the responses"
        )
    first, policy = work[0], work[0].policy
    guided = first.params.cfg_scale > 0
    crowd = Crowd(len(work), running[0].tokens // (2 if guided else 1), first.prefix_length, guided)
    expected = formula(llm.loaded.config, llm.model.dtype.itemsize, policy, crowd, engine.pool.page_size)
    unused = engine.pool.bytes_of(peaks[-1].wasted)
    return MemoryUse(cache, expected, peaks[-1].bytes, unused, llm.loaded.weights.nbytes)


def text(uses: Sequence[MemoryUse]) -> str:
    """The table, in megabytes, and what it shows."""
    header = ["cache", "K/V", "outputs", "hidden states", "shared K/V", "shared states", "formula", "measured"]
    rows = []
    for use in uses:
        sizes = (*use.formula.parts.values(), use.formula.total, use.measured, use.unused)
        cells = [f"{size / 1e6:.3f}" if size else "-" for size in sizes]
        rows.append([use.cache, *cells, f"{100 * use.share:.2f} %"])
    table = markdown_table([*header, "unused slots", "of the weights"], rows)
    most, least = max(uses, key=lambda use: use.measured), min(uses, key=lambda use: use.measured)
    return (
        f"{table}\n\nMB (10^6 bytes) with all requests in memory. Measured = formula + unused slots, those at the ends "
        f"of pages. {most.cache} holds most, {most.measured / 1e6:.3f} MB or {100 * most.share:.2f} % of the weights, "
        f"and {least.cache} least, {least.measured / 1e6:.3f} MB."
    )


def figures(uses: Sequence[MemoryUse]) -> dict[str, Figure]:
    """A bar a policy."""
    figure, (axes,) = new_panels("memory of cache policies", 1, height=1.6 + 0.32 * len(uses))
    names, left = [use.cache for use in uses], [0.0] * len(uses)
    for part, (name, color) in _PARTS.items():
        sizes = [use.formula.parts.get(part, use.unused) / 1e6 for use in uses]
        if any(sizes):
            axes.barh(names, sizes, left=left, color=color, label=name)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    for at, use in enumerate(uses):
        axes.text(left[at], at, f" {100 * use.share:.1f} %", va="center", fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(left))
    label(axes, x="MB; in percent: of the weights", grid="x")
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return {"memory": figure}
