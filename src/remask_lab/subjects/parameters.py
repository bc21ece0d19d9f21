"""Sweeps of BiCache's two parameters: throughput and accuracy over tau and over R (BiCache figure 9, table 4)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from tqdm import tqdm

from remask.core.depth import DepthLookup
from remask.depth.profile import check_tau, depth_entries
from remask.depth.table import DepthTable
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender
from remask_lab.bench.workload import Workload
from remask_lab.records.sweep import Sweep
from remask_lab.subjects.sweep_report import PARAMETERS, Parameter, Row

CACHES = ("bicache", "bicache+block-dual")

Point: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Grid:
    """What is swept: each of `taus` at R = `refresh_interval`, and each of `refresh_intervals` at `tau`.

    The defaults are the paper's. Raises `ConfigError` on values that no run could have.
    """

    taus: tuple[float, ...] = (0.91, 0.93, 0.95, 0.97, 0.99)
    refresh_intervals: tuple[int, ...] = (8, 16, 32, 64)
    tau: float = 0.97
    refresh_interval: int = 16
    caches: tuple[str, ...] = CACHES

    def __post_init__(self) -> None:
        for tau in (*self.taus, self.tau):
            check_tau(tau)
        for cache in self.caches:
            if cache.split("+")[0] != "bicache":
                raise ConfigError(f"tau and R are bicache's: a cache must begin with it, got {cache!r}")

    def points(self, parameter: Parameter) -> list[Point]:
        """Cache by cache, the settings that the sweep of `parameter` runs."""
        settings = {
            "tau": [(tau, self.refresh_interval) for tau in self.taus],
            "refresh_interval": [(self.tau, interval) for interval in self.refresh_intervals],
        }[parameter]
        return [
            {"cache": cache, "tau": tau, "refresh_interval": interval}
            for cache in self.caches
            for tau, interval in settings
        ]


def run_sweep(
    llm: LLM, workload: Workload, grid: Grid, sweep: Sweep, rounds: int, progress: bool = False
) -> dict[Parameter, list[Row]]:
    """Measure at every point of `grid` what `sweep` does not hold yet; returns the rows of each parameter's sweep.

    At each point the policy and `none` take turns on the workload as `run_bench` has it, so that `ratio_to_none` does
    not depend on what else the machine did at the others. Depths at a tau follow from the similarities in the depth
    table. Raises `ConfigError`, before anything is measured, where it has none, or a point cannot run.
    """
    table = llm.depth_table
    if not table.curves:
        raise ConfigError(
            f"the depth table of {table.model!r} holds no similarities ({table.source}), so nobody knows its depths at "
            "another tau; measure one with 'remask profile --output FILE' and name it with --depth-table"
        )
    rows = {
        parameter: [_contender(llm, workload, table, p) for p in grid.points(parameter)] for parameter in PARAMETERS
    }
    none = Contender("none", llm.policy("none"))
    found: dict[Parameter, list[Row]] = {parameter: [] for parameter in PARAMETERS}
    with tqdm(total=sum(map(len, rows.values())), desc="sweep", unit="point", disable=not progress) as bar:
        for parameter, contenders in rows.items():
            for point, row in zip(grid.points(parameter), contenders, strict=True):

                def measure(row: Contender = row) -> Mapping[str, Any]:
                    results = run_bench(llm, workload, [none, row], rounds, llm.engine_config, False).data["results"]
                    return {**results[1], "none": results[0]}

                found[parameter].append({**point, **sweep.row(point, measure)})
                bar.update()
    return found


def _contender(llm: LLM, workload: Workload, table: DepthTable, point: Point) -> Contender:
    lookup = DepthLookup(depth_entries(table.curves, point["tau"]))
    policy = llm.policy(point["cache"], {"refresh_interval": point["refresh_interval"]}, lambda: lookup)
    llm.engine.check(workload.tasks[0].request.with_policy(policy))
    return Contender(point["cache"], policy)
