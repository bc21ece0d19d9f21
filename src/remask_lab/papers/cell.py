"""What is measured for one row at one scale, with everything resolved."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from remask.core.sampling import SamplingParams
from remask_lab.bench.fewer_steps import with_steps
from remask_lab.papers.definition import Row, Scale, Table


@dataclass(frozen=True, slots=True)
class Cell:
    """One measurement. Rows that ask for the same one share it.

    Attributes:
        measure: how it is measured.
        cache, settings, tau: the policy, and the threshold at which it reads the depth table.
        sampling: sampling parameters, those of the scale included.
        workload: the requests.
        concurrency: how many of them are run at a time.
        baseline: what it is compared with; None where it is the baseline.
    """

    measure: str
    cache: str
    settings: Mapping[str, Any]
    tau: float | None
    sampling: Mapping[str, Any]
    workload: Mapping[str, Any]
    concurrency: int
    baseline: "Cell | None"

    @property
    def params(self) -> SamplingParams:
        """The sampling parameters, checked."""
        return SamplingParams.from_mapping(dict(self.sampling))

    @property
    def point(self) -> dict[str, Any]:
        """The measurement as a sweep knows it."""
        return asdict(self)


def cell_of(table: Table, row: Row, scale_name: str, scale: Scale) -> Cell:
    """What is measured for `row`. `scale` may differ from the table's own by what the command says.

    Raises `ConfigError` on sampling parameters that cannot be.
    """
    if row.measure == "operations":
        own = _cell(row, scale_name, scale, None)
        return replace(own, baseline=replace(own, measure="bench", cache="none", settings={}))
    baseline = table.baseline(row)
    return _cell(row, scale_name, scale, None if baseline is row else _cell(baseline, scale_name, scale, None))


def _cell(row: Row, scale_name: str, scale: Scale, baseline: Cell | None) -> Cell:
    own = (row.at or {}).get(scale_name, {})
    kept = {name: value for name, value in scale.sampling.items() if name not in row.without}
    sampling = {**kept, **(row.sampling or {}), **own.get("sampling", {})}
    if row.steps is not None:
        full = SamplingParams.from_mapping(sampling)
        assert full.steps is not None
        shorter = with_steps(full, row.steps * full.steps)
        sampling |= {"steps": shorter.steps, "block_length": shorter.block_length}
    # The command's choice of workload stands; a row changes its lengths alone.
    workload = {**scale.workload, **(row.workload or {}), **own.get("workload", {})}
    concurrency = scale.concurrency if row.concurrency is None else row.concurrency
    return Cell(row.measure, row.cache, row.settings or {}, row.tau, sampling, workload, concurrency, baseline)


def with_requests(scale: Scale, requests: int | None, rounds: int | None, workload: str | None) -> Scale:
    """`scale` with what the command says in place of its own."""
    own = dict(scale.workload)
    if requests is not None:
        own["requests"] = requests
    if workload is not None:
        own["name"] = workload
    return replace(scale, workload=own, rounds=scale.rounds if rounds is None else rounds)
