"""`SimilarityTable`: the depths that the paper's rule gives one model, and the similarities that they rest on."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Final, Literal, TypeAlias

from remask.errors import ConfigError, RecordError
from remask.llm import LLM
from remask.policies.bicache import DepthLookup
from remask_lab.records.record import Record, about, read_record, write_record
from remask_lab.similarity.rule import DepthRule, check_tau, depth_entries

SUBJECT: Final = "papers profile"
Definition: TypeAlias = Literal["flat", "joint", "official"]


@dataclass(frozen=True, slots=True)
class Growth:
    """One step of the convergence check: how far the table moved when it grew to `samples` requests per ratio.

    `distance` is the L1 distance from the table before, in layers, averaged over the ratios.
    """

    samples: int
    distance: float


@dataclass(frozen=True, slots=True)
class SimilarityTable:
    """The result of profiling one model (BiCache section 5.1).

    Attributes:
        tau: similarity that a layer must exceed.
        definition: the definition of similarity, as in `layer_cosines`.
        samples: requests measured per ratio.
        source: the prompts, in words.
        rule: how depths follow from similarities.
        entries: prefix ratio in percent -> depth b in layers, increasing in both.
        limits: prefix ratio in percent -> for each depth from 1 to `layers` the tau below which the rule gives at least
            that depth. Fewer than `layers` where only the layers that `tau` needs were computed.
        curves: prefix ratio in percent -> mean similarity per layer; empty where not all layers were computed.
        request_depths: prefix ratio in percent -> mean of the depths of single requests, in layers; empty likewise.
        growth: the convergence check.
    """

    model: str
    layers: int
    tau: float
    definition: Definition
    samples: int
    source: str
    rule: DepthRule
    entries: Mapping[int, int]
    request_depths: Mapping[int, float]
    growth: tuple[Growth, ...]
    limits: Mapping[int, tuple[float, ...]]
    curves: Mapping[int, tuple[float, ...]]

    @property
    def lookup(self) -> DepthLookup:
        """The depths at `tau`, as policies look them up."""
        return DepthLookup(self.entries)

    def at(self, tau: float) -> DepthLookup:
        """The depths at another tau, by the same rule. Raises `ConfigError` where they depend on unmeasured layers."""
        check_tau(tau)
        if tau < self.tau and any(len(limits) < self.layers for limits in self.limits.values()):
            raise ConfigError(
                f"the similarities of {self.model!r} were measured in the layers that tau {self.tau:g} needs, so its "
                f"depths at tau {tau:g} are unknown; use {self.tau:g} or more, or measure them without --needed-layers"
            )
        return DepthLookup(depth_entries(self.limits, tau))

    def save(self, path: str | Path, llm: LLM, settings: Mapping[str, Any], seed: int) -> None:
        """Write the table as a record of `llm`. Raises `RecordError` where it cannot be written."""
        write_record(path, Record(SUBJECT, about(llm, seed=seed, settings=settings), self))

    @classmethod
    def load(cls, path: str | Path, fingerprint: str) -> "SimilarityTable":
        """Read the table of the model with that fingerprint.

        Raises `RecordError` where the file holds no table, or that of another model.
        """
        record = read_record(path, SUBJECT)
        if record.about.get("fingerprint") != fingerprint:
            raise RecordError(
                f"{str(path)!r} is of the model {record.about.get('model')!r} "
                f"({record.about.get('fingerprint')}), and another one is loaded ({fingerprint}); measure that"
            )
        try:
            content = {field.name: record.data[field.name] for field in fields(cls)}
            for name in ("entries", "request_depths"):
                content[name] = {int(ratio): depth for ratio, depth in content[name].items()}
            for name in ("limits", "curves"):
                content[name] = {int(ratio): tuple(values) for ratio, values in content[name].items()}
            content["rule"] = DepthRule(**content["rule"])
            content["growth"] = tuple(Growth(**step) for step in content["growth"])
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise RecordError(f"{str(path)!r} holds no similarities: {error}; measure again") from error
        return cls(**content)
