"""Resolves a row of a table at a scale: its policy, sampling, workload and baseline, complete."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from remask.request.sampling_params import SamplingParams
from remask_lab.bench.fewer_steps import with_steps
from remask_lab.papers.definition import PaperRow, PaperTable, Scale


@dataclass(frozen=True, slots=True)
class ResolvedRow:
    """One measurement. Equal ones of several rows are measured once.

    Attributes:
        measure: the way of measuring, as in `PaperRow`.
        cache, settings, tau: the policy, and the threshold for reading the depth table.
        sampling: sampling parameters, the scale's included.
        workload: the requests.
        concurrency: requests that run at a time.
        baseline: the measurement to compare with. None for a baseline.
    """

    measure: str
    cache: str
    settings: Mapping[str, Any]
    tau: float | None
    sampling: Mapping[str, Any]
    workload: Mapping[str, Any]
    concurrency: int
    baseline: "ResolvedRow | None"

    @property
    def params(self) -> SamplingParams:
        """The checked sampling parameters."""
        return SamplingParams.from_mapping(dict(self.sampling))

    @property
    def point(self) -> dict[str, Any]:
        """The point of the measurement in a sweep."""
        return asdict(self)


def resolve(table: PaperTable, row: PaperRow, scale_name: str, scale: Scale) -> ResolvedRow:
    """Returns the measurement of `row`. `scale` is the table's own, with the command's overrides.

    Raises `ConfigError` on invalid sampling parameters.
    """
    if row.measure == "operations":
        own = _resolved(row, scale_name, scale, None)
        return replace(own, baseline=replace(own, measure="bench", cache="none", settings={}))
    baseline = table.baseline(row)
    return _resolved(row, scale_name, scale, None if baseline is row else _resolved(baseline, scale_name, scale, None))


def _resolved(row: PaperRow, scale_name: str, scale: Scale, baseline: ResolvedRow | None) -> ResolvedRow:
    own = (row.at or {}).get(scale_name, {})
    kept = {name: value for name, value in scale.sampling.items() if name not in row.without}
    sampling = {**kept, **(row.sampling or {}), **own.get("sampling", {})}
    if row.steps is not None:
        full = SamplingParams.from_mapping(sampling)
        assert full.steps is not None
        shorter = with_steps(full, row.steps * full.steps)
        sampling |= {"steps": shorter.steps, "block_length": shorter.block_length}
    # The command's workload has priority. A row changes its lengths only.
    workload = {**scale.workload, **(row.workload or {}), **own.get("workload", {})}
    concurrency = scale.concurrency if row.concurrency is None else row.concurrency
    return ResolvedRow(row.measure, row.cache, row.settings or {}, row.tau, sampling, workload, concurrency, baseline)


def override(scale: Scale, requests: int | None, rounds: int | None, workload: str | None) -> Scale:
    """Returns `scale` with the command's overrides."""
    own = dict(scale.workload)
    if requests is not None:
        own["requests"] = requests
    if workload is not None:
        own["name"] = workload
    return replace(scale, workload=own, rounds=scale.rounds if rounds is None else rounds)
