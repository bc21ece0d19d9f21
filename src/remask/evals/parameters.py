"""Sweeps of BiCache's two parameters: throughput and accuracy over tau and over R (BiCache figure 9, table 4)."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from tqdm import tqdm

from remask.core.depth import DepthLookup
from remask.errors import ConfigError
from remask.evals.bench import run_bench
from remask.evals.contenders import Contender
from remask.evals.sweep import Sweep
from remask.evals.workload import Workload
from remask.llm import LLM
from remask.profiling.depth_table import DepthTable
from remask.profiling.profile import check_tau, depth_entries

Parameter = Literal["tau", "refresh_interval"]
PARAMETERS: tuple[Parameter, ...] = ("tau", "refresh_interval")
NAMES: Mapping[Parameter, str] = {"tau": "tau", "refresh_interval": "R"}
CACHES = ("bicache", "bicache+block-dual")

Point = Mapping[str, Any]
Row = Mapping[str, Any]


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
    llm.engine.check(workload.tasks[0].request, policy)
    return Contender(point["cache"], policy)


def reading(rows: Mapping[Parameter, Sequence[Row]]) -> str:
    """What the sweeps show, in one paragraph."""
    parts = []
    for parameter in PARAMETERS:
        of_parameter = rows[parameter]
        for cache in dict.fromkeys(row["cache"] for row in of_parameter):
            own = sorted((row for row in of_parameter if row["cache"] == cache), key=lambda row: row[parameter])
            if len(own) > 1:
                parts.append(_sentence(cache, parameter, own))
    return " ".join(parts) or "A single point shows no trend."


def _sentence(cache: str, parameter: Parameter, rows: Sequence[Row]) -> str:
    name = NAMES[parameter]
    first, last = rows[0], rows[-1]
    speeds = [row["ratio_to_none"] for row in rows]
    text = (
        f"{cache}: as {name} grows from {first[parameter]:g} to {last[parameter]:g}, throughput goes from "
        f"{speeds[0]:.2f} to {speeds[-1]:.2f} times that without a cache ({min(speeds):.2f} to {max(speeds):.2f} over "
        f"all values), and the work saved from {first['work_ratio_to_none']:.2f}x to {last['work_ratio_to_none']:.2f}x"
    )
    depths = first["prefix_depth"], last["prefix_depth"]
    if depths[0] != depths[1]:
        text += f", as the depth goes from {depths[0]:.1f} to {depths[1]:.1f} layers"
    return f"{text}; {_quality(parameter, rows)}"


def _quality(parameter: Parameter, rows: Sequence[Row]) -> str:
    """Accuracy where the workload has answers, else agreement with `none`."""
    if rows[0]["accuracy"] is None:
        values = [row["agreement_with_none"] for row in rows]
        what = "agreement with no cache"
    else:
        values = [row["accuracy"] for row in rows]
        what = "accuracy"
    low, high = min(values), max(values)
    if low == high:
        return f"{what} is {100 * low:.1f} % throughout."
    best = ", ".join(f"{row[parameter]:g}" for row, value in zip(rows, values, strict=True) if value == high)
    text = f"{what} lies between {100 * low:.1f} % and {100 * high:.1f} %, highest at {NAMES[parameter]} = {best}"
    if rows[0]["accuracy"] is not None:
        overlap = max(row["accuracy_interval"][0] for row in rows) <= min(row["accuracy_interval"][1] for row in rows)
        text += ", with 95 % intervals that " + ("all overlap" if overlap else "do not all overlap")
    return text + "."
