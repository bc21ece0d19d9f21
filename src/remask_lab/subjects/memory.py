"""`remask analyze memory`: what cache policies keep between passes, measured and by formula.

`docs/analysis.md` states the formula in words.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from remask.cli.options import object_option
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.model.config import ModelConfig
from remask.observe import ObservedPass, observe_passes
from remask.policies import CachePolicy
from remask_lab.arguments.common import separated
from remask_lab.asked.shape import open_with_requests, settings_of
from remask_lab.bench.contenders import Contender, LeftOut, contender, every_contender
from remask_lab.bench.workload import Workload
from remask_lab.drawing import K_COLOR, new_figure, save_figures
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import Record, about

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
    facts = about(llm, seed=args.seed, settings=settings_of(args) | {"cache_config": settings})
    record = Record("analyze memory", facts, {"rows": [as_row(use) for use in uses]})
    lines = [text(uses), *(f"Left out: {left.name}: {left.reason}" for left in left_out)]
    return Outcome("\n".join(lines), record, partial(plot_memory, uses, llm.loaded.name))


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
        states: hidden states that requests keep themselves.
        store: K and V of shared prefixes, each held once.
        boundary: hidden states of shared prefixes.
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


def as_row(use: MemoryUse) -> dict[str, Any]:
    """A row of the result file: the parts, and what follows from them."""
    return asdict(use) | {"formula_total": use.formula.total, "share": use.share}


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
    # Position-layers that the store holds for all, in which the requests have no slots of their own.
    leased = c.prefix // page * page * w.layers if pages else c.prefix * policy.leased_layers(depth, w.layers)
    stored = leased if pages else c.prefix * w.layers * (depth > 0)
    leased *= not traits.copies
    inputs = c.requests * ("inputs" in traits.keeps and depth > 0)  # until their first pass has run
    canvases = c.requests * (2 if c.guided else 1)
    own = canvases * c.canvas * w.layers - c.requests * leased
    between = w.layers - 1
    return Footprint(
        kv=w.item * 2 * w.keys * own,
        outputs=w.item * 2 * w.hidden * (own + stored) * ("outputs" in traits.keeps),
        states=(canvases * ("attention" in traits.keeps) + inputs) * c.canvas * between * w.item * w.hidden,
        store=w.item * 2 * w.keys * stored,
        boundary=w.item * w.hidden * c.prefix * between * (depth > 0),
    )


def measure_memory(llm: LLM, cache: str, work: Sequence[Request]) -> MemoryUse:
    """Memory of the requests of `work`, which are alike and under one policy, once all of them have begun.

    They run on an engine of their own until then, and are cancelled. `cache` is the policy's name. Raises `ConfigError`
    where one cannot run, or where the limits of `llm` do not let all of them run together.
    """
    engine = llm.new_engine()
    for item in work:
        engine.add(item)
    peak = _Peak(engine)
    while engine.waiting and engine.busy:
        engine.step()
    for item in work:
        engine.cancel(item.id)
    while engine.busy:
        engine.step()
    if peak.together < len(work):
        raise ConfigError(
            f"{len(work)} requests never ran together: raise max_num_seqs={llm.engine_config.max_num_seqs}, or lengthen"
            " the responses"
        )
    first, policy = work[0], work[0].policy
    guided = first.params.cfg_scale > 0
    crowd = Crowd(len(work), peak.tokens // (2 if guided else 1), first.prefix_length, guided)
    expected = formula(llm.loaded.config, llm.model.dtype.itemsize, policy, crowd, engine.pool.page_size)
    return MemoryUse(cache, expected, peak.measured, peak.unused, llm.loaded.weights.nbytes)


class _Peak:
    """The memory of an engine in the pass in which most is held.

    Attributes:
        measured, unused: bytes held, and those of them in slots without a token.
        together: requests in memory then.
        tokens: positions of one request's canvases.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.measured = self.unused = self.together = self.tokens = 0
        observe_passes(engine, self._observe)

    def _observe(self, passes: Sequence[ObservedPass]) -> None:  # noqa: ARG002
        report = self.engine.memory_report()
        if report.bytes <= self.measured:
            return
        running = [holder for holder in report.holders if holder.name not in STORES]
        self.measured, self.unused = report.bytes, report.wasted * self.engine.pool.bytes_per_token
        self.together, self.tokens = len(running), running[0].tokens


def text(uses: Sequence[MemoryUse]) -> str:
    """The table, in megabytes, and what it shows."""
    lines = [
        "| cache | K/V | outputs | hidden states | shared K/V | shared states | formula | measured | unused slots | "
        "of the weights |",
        "|---" * 10 + "|",
    ]
    for use in uses:
        sizes = (*use.formula.parts.values(), use.formula.total, use.measured, use.unused)
        cells = [use.cache, *(f"{size / 1e6:.3f}" if size else "-" for size in sizes), f"{100 * use.share:.2f} %"]
        lines.append(f"| {' | '.join(cells)} |")
    most = max(uses, key=lambda use: use.measured)
    least = min(uses, key=lambda use: use.measured)
    lines += [
        "",
        "MB (10^6 bytes) with all requests in memory. Measured = formula + unused slots, those at the ends of pages. "
        f"{most.cache} holds most, {most.measured / 1e6:.3f} MB or {100 * most.share:.2f} % of the weights, and "
        f"{least.cache} least, {least.measured / 1e6:.3f} MB.",
    ]
    return "\n".join(lines)


def plot_memory(uses: Sequence[MemoryUse], model: str, folder: str | Path) -> list[Path]:
    """Draw a bar a policy into `memory.png` in `folder`, which is made if it is not there; its path is returned.

    Raises `ConfigError` where the folder cannot be made.
    """
    figure = new_figure("memory of cache policies", 1.6 + 0.32 * len(uses))
    axes = figure.subplots()
    names = [use.cache for use in uses]
    left = [0.0] * len(uses)
    for part, (label, color) in _PARTS.items():
        sizes = [use.formula.parts.get(part, use.unused) / 1e6 for use in uses]
        if any(sizes):
            axes.barh(names, sizes, left=left, color=color, label=label)
        left = [begin + size for begin, size in zip(left, sizes, strict=True)]
    for at, use in enumerate(uses):
        axes.text(left[at], at, f" {100 * use.share:.1f} %", va="center", fontsize="small")
    axes.invert_yaxis()
    axes.set_xlim(0, 1.12 * max(left))
    axes.set_xlabel("MB; in percent: of the weights")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")
    return save_figures({"memory": figure}, folder, model)
