"""Grids: policies at every combination of settings, each beside `none` in the same run.

Among them may be dKV-Cache without its delay: an ablation that shows what the delay is worth. No command serves it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from typing import Any

from tqdm import tqdm

from remask.checks.values import real, whole
from remask.depth.rule import check_tau, depth_entries
from remask.depth.table import DepthTable
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.plan import Plan, View
from remask.plan.spans import Span
from remask.policies import CachePolicy
from remask.policies.base import RequestFacts
from remask.policies.bicache import DepthLookup
from remask.policies.registry import POLICIES
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender, described
from remask_lab.bench.workload import Workload
from remask_lab.records.record import Record, Sweep


@dataclass(frozen=True, slots=True)
class UndelayedDecode(CachePolicy):
    """Computes the noisy rows only, and all rows at a block's first step and every `refresh_interval` steps after it.

    This is the ablation of dKV-Cache (arXiv 2505.15781, section 3 and figure 3) with M_t in place of M_(t-1). The K/V
    of a decoded token are those of its noisy position until the next refresh. `dkv-decode` computes a decoded token
    once more before it keeps the K/V.
    """

    refresh_interval: int | None = 8

    def __post_init__(self) -> None:
        whole("refresh_interval", self.refresh_interval, low=1, optional=True)

    def check(self, facts: RequestFacts) -> None:
        """Refuses rows that predict another position: the paper's ablation is of LLaDA."""
        if facts.shift:
            raise ConfigError(
                "the ablation of dkv-decode's delay is defined for models whose rows predict their own position "
                "(LLaDA), not Dream"
            )

    def plan(self, view: View) -> Plan:
        """One span over the rows that are not cached."""
        interval = self.refresh_interval
        due = view.block_step == 0 or (interval is not None and view.block_step % interval == 0)
        return Plan((Span(range(view.layers), view.everything if due else view.noisy.copy()),), view.candidates)


UNDELAYED = "dkv-decode without delay"
TAU = "tau"
"""An axis of policies that look a depth up: the similarity that a layer must exceed."""


@dataclass(frozen=True, slots=True)
class Point:
    """One combination. `settings` are the policy's and `sampling` the sampler's, those that the grid varies."""

    cache: str
    settings: Mapping[str, Any]
    sampling: Mapping[str, Any]
    prompt_tokens: int | None
    concurrency: int

    @property
    def axes(self) -> dict[str, Any]:
        """Everything that sets it apart from other points, in one mapping."""
        sampling = {f"sampling.{name}" if name in self.settings else name: at for name, at in self.sampling.items()}
        length = {} if self.prompt_tokens is None else {"prompt_tokens": self.prompt_tokens}
        return {"cache": self.cache, **self.settings, **sampling, **length, "concurrency": self.concurrency}


@dataclass(frozen=True, slots=True)
class GridRow:
    """A measured point.

    `speed`, `work` and `flops` are the gains over `none` in time, row-layers and FLOPs, `agreement` the share of tokens
    that equal those of `none`; `..._none` are its own figures. `accuracy` is None where the workload has no answers.
    Memory is in bytes, at the peak.
    """

    axes: Mapping[str, Any]
    accuracy: float | None
    accuracy_none: float | None
    agreement: float
    speed: float
    work: float
    flops: float
    tokens_s: float
    tokens_s_none: float
    memory: int
    memory_none: int
    cache_ratio: float

    @property
    def quality(self) -> float:
        """Accuracy, or agreement where there are no answers."""
        return self.agreement if self.accuracy is None else self.accuracy

    @property
    def quality_none(self) -> float:
        """That of `none`."""
        return 1.0 if self.accuracy_none is None else self.accuracy_none


@dataclass(frozen=True, slots=True)
class Grid:
    """What is varied: every policy is run at every combination of the values, of the settings that it takes.

    Attributes:
        caches: policies, or compositions.
        settings: values of each setting of theirs; at least one policy takes it.
        sampling: values of each sampling parameter.
        prompt_tokens: lengths of random prompts; None stands for the model's usual workload.
        concurrency: requests run at a time.
        fixed: settings, by policy, that all points share.
        without_delay: `dkv-decode` is also run without its delay (`UndelayedDecode`).
    """

    caches: tuple[str, ...]
    settings: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    sampling: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    prompt_tokens: Sequence[int | None] = (None,)
    concurrency: Sequence[int] = (8,)
    fixed: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    without_delay: bool = False

    def points(self, llm: LLM) -> list[Point]:
        """All combinations, those of one workload side by side. Raises `ConfigError` on settings that cannot be."""
        for name in self.fixed:
            if name not in self.caches:
                raise ConfigError(f"--cache-config names {name!r}, which is not among --cache {','.join(self.caches)}")
        taken = {name: self._taken(llm, name) for name in self.caches}
        known = dict.fromkeys(setting for own in taken.values() for setting in own)
        for name in self.settings:
            if name not in known:
                raise ConfigError(
                    f"--grid varies {name!r}, which {' and '.join(self.caches)} cannot take; known: "
                    f"{', '.join(known) or 'no setting at all'}"
                )
        if self.without_delay:
            if "dkv-decode" not in self.caches:
                raise ConfigError("--without-delay takes the delay from dkv-decode; name that in --cache")
            taken[UNDELAYED] = ("refresh_interval",)
        return [
            Point(cache, settings, sampling, length, concurrency)
            for length, sampling, concurrency in product(self.prompt_tokens, _all(self.sampling), self.concurrency)
            for cache, own in taken.items()
            for settings in _all({name: values for name, values in self.settings.items() if name in own})
        ]

    def policy(self, llm: LLM, point: Point) -> CachePolicy:
        """The policy of a point. Raises `ConfigError` on values out of range."""
        if point.cache != UNDELAYED:
            settings = {**self.fixed.get(point.cache, {}), **point.settings}
            tau = settings.pop(TAU, None)
            real(TAU, tau, low=0, high=1, optional=True)
            return llm.session.policy(
                point.cache, settings, None if tau is None else lambda: lookup_at(llm.depth_table, tau)
            )
        own = {**self.fixed.get("dkv-decode", {}), **point.settings}
        return UndelayedDecode(own.get("refresh_interval", UndelayedDecode().refresh_interval))

    def _taken(self, llm: LLM, name: str) -> tuple[str, ...]:
        """Settings that a policy takes; they do not depend on a depth table."""
        llm.session.policy(name, self.fixed.get(name), lambda: DepthLookup({}))
        return (*setting_names(name), *([TAU] if "bicache" in name.split("+") else []))


def lookup_at(table: DepthTable, tau: float) -> DepthLookup:
    """The table at another tau, by the same rule. Raises `ConfigError` where it holds no similarities."""
    check_tau(tau)
    if not table.limits:
        raise ConfigError(
            f"the depth table of {table.model!r} holds no similarities ({table.source}), so its depths at tau "
            f"{tau:g} are unknown; measure one with 'remask profile --output FILE' and name it with --depth-table"
        )
    if tau < table.tau and any(len(limits) < table.layers for limits in table.limits.values()):
        raise ConfigError(
            f"the depth table of {table.model!r} was measured in the layers that tau {table.tau:g} needs, so its "
            f"depths at tau {tau:g} are unknown; use {table.tau:g} or more, or measure it without --needed-layers"
        )
    return DepthLookup(depth_entries(table.limits, tau))


def setting_names(spec: str) -> tuple[str, ...]:
    """The settings that `spec` takes, as `settings_of` names them, whether their defaults are shown or not.

    Raises `UnknownNameError` on a name that does not exist.
    """
    found: list[str] = []
    for name in spec.split("+"):
        found += [f"{name}.{key}" if key in found else key for key in POLICIES.get(name).settings]
    return tuple(found)


MakeWorkload = Callable[[Mapping[str, Any], int | None], Workload]
"""Returns the requests under some sampling parameters, with random prompts of a length where one is given."""


def run_grid(
    llm: LLM, grid: Grid, make_workload: MakeWorkload, rounds: int, sweep: Sweep, progress: bool
) -> list[GridRow]:
    """The rows of all points of `grid`; those that `sweep` holds are not measured again.

    Each point is a bench of its own: the policy and `none` take turns over the same requests, `rounds` times, after a
    turn that measures what is cached. Raises `ConfigError`, before anything is measured, where a point cannot run.
    """
    jobs = []
    for point in grid.points(llm):
        try:
            workload = make_workload(point.sampling, point.prompt_tokens)
            contenders = [Contender("none", llm.session.policy("none"))]
            if point.cache != "none":
                contenders.append(Contender(point.cache, grid.policy(llm, point)))
            for contender in contenders:
                llm.engine.check(workload.tasks[0].request.with_policy(contender.policy))
        except ConfigError as error:
            raise ConfigError(f"at {described(point.axes)}: {error}") from error
        # Where the sampling varies, how few answers it leaves is what is asked.
        measure = partial(_measure, llm, contenders, workload, point.concurrency, rounds, answers=not point.sampling)
        jobs.append((point, measure))
    bar = tqdm(jobs, desc="grid", unit="point", disable=not progress)
    return [_row(point.axes, sweep.row(asdict(point), measure)) for point, measure in bar]


def rows_of(record: Record) -> list[GridRow]:
    """The rows of a grid's result file."""
    return [_row(Point(**row["point"]).axes, row["result"]) for row in record.data["rows"]]


def _all(values: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Every combination of a value each; one that is empty where nothing is varied."""
    return [dict(zip(values, chosen, strict=True)) for chosen in product(*values.values())]


def _measure(
    llm: LLM, contenders: Sequence[Contender], workload: Workload, concurrency: int, rounds: int, *, answers: bool
) -> dict[str, Any]:
    config = replace(llm.session.engine_config, max_num_seqs=concurrency)
    record = run_bench(llm, workload, contenders, rounds, config, False, detail=True, alone=False, answers=answers)
    none, *others = record.data["results"]
    return {"none": none, "policy": others[0] if others else none}


def _row(axes: Mapping[str, Any], result: Mapping[str, Any]) -> GridRow:
    policy, none = result["policy"], result["none"]
    return GridRow(
        axes=axes,
        accuracy=policy["accuracy"],
        accuracy_none=none["accuracy"],
        agreement=policy["agreement_with_none"],
        speed=policy["ratio_to_none"],
        work=policy["work_ratio_to_none"],
        flops=policy["flops_saved"],
        tokens_s=policy["throughput_tok_s"],
        tokens_s_none=none["throughput_tok_s"],
        memory=policy["peak_memory_bytes"],
        memory_none=none["peak_memory_bytes"],
        cache_ratio=policy["cache_ratio"],
    )
