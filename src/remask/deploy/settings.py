"""What a fleet of replicas is made of, checked as it is made."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from remask.core.checks import real, whole
from remask.deploy.routing import Spill
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, UnknownNameError
from remask.models.source import BUNDLED, BUNDLED_SAMPLING
from remask.server.config import ServerConfig

ROUTINGS = ("prefix", "round-robin")
MODEL_FIELDS = ("cache_config", "dtype", "device", "load_format", "depth_table")


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Replicas of one model, plain data throughout, as it travels to other machines.

    Attributes:
        model: folder or hub id, which every machine must be able to read; or `bundled`.
        cache: cache policy of requests that name none.
        llm: further arguments of `LLM`: `cache_config`, `dtype`, `device`, `load_format`, `depth_table`.
        engine: fields of `EngineConfig`, for each replica.
        server: fields of `ServerConfig`, for each replica.
        chat_template: Jinja text in place of the model's own.
        min_replicas, max_replicas: how many there are; between the two, load decides.
        target_ongoing_requests: open requests per replica that autoscaling aims at; by default `max_num_seqs`.
        upscale_delay_s, downscale_delay_s: seconds for which the load must ask for more, or fewer, replicas.
        routing: `prefix` sends a prefix to the replica that holds it; `round-robin` to one after the other.
        balance: open requests that a replica may have before prefixes spill over, as a multiple of the mean.
        num_cpus, num_gpus: what Ray sets aside for a replica.

    Raises `ConfigError` on settings that cannot be used.
    """

    model: str = BUNDLED
    cache: str = "bicache"
    llm: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict, repr=False)  # holds the API keys
    chat_template: str | None = None
    min_replicas: int = 1
    max_replicas: int = 1
    target_ongoing_requests: float | None = None
    upscale_delay_s: float = 30.0
    downscale_delay_s: float = 600.0
    routing: str = "prefix"
    balance: float = 1.25
    num_cpus: float = 1.0
    num_gpus: float = 0.0

    def __post_init__(self) -> None:
        _known("llm", self.llm, MODEL_FIELDS)
        _known("engine", self.engine, [each.name for each in fields(EngineConfig)])
        _known("server", self.server, [each.name for each in fields(ServerConfig)])
        whole("min_replicas", self.min_replicas, low=1)
        whole("max_replicas", self.max_replicas, low=1)
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas must be at least min_replicas ({self.min_replicas}), got {self.max_replicas}"
            )
        real("target_ongoing_requests", self.target_ongoing_requests, low=0.0, above=True, optional=True)
        real("upscale_delay_s", self.upscale_delay_s, low=0.0)
        real("downscale_delay_s", self.downscale_delay_s, low=0.0)
        if self.routing not in ROUTINGS:
            raise UnknownNameError("routing", self.routing, ROUTINGS)
        real("num_cpus", self.num_cpus, low=0.0)
        real("num_gpus", self.num_gpus, low=0.0)
        self.spill  # noqa: B018 - checks engine and balance
        self.server_config  # noqa: B018

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "FleetSettings":
        """Settings by name, as from JSON or YAML. Raises `ConfigError` on unknown names."""
        _known("setting", values, [each.name for each in fields(cls)])
        return cls(**values)

    @property
    def engine_config(self) -> EngineConfig:
        """Limits of each replica's engine."""
        return EngineConfig(**self.engine)

    @property
    def server_config(self) -> ServerConfig:
        """How each replica answers."""
        usual: dict[str, Any] = {"model_names": [self.model]}
        if self.model == BUNDLED:
            usual["sampling"] = BUNDLED_SAMPLING[BUNDLED]
        return ServerConfig(**{**usual, **self.server})

    @property
    def spill(self) -> Spill:
        """When a replica counts as loaded."""
        return Spill(self.engine_config.max_num_seqs, self.balance)

    @property
    def most_open(self) -> int:
        """Requests that a replica lets in, so that its own 429 comes first."""
        return 2 * (self.engine_config.max_num_seqs + self.server_config.max_queue) + 64

    @property
    def scaling(self) -> dict[str, Any]:
        """Ray Serve's options that say how many replicas there are."""
        if self.min_replicas == self.max_replicas:
            return {"num_replicas": self.min_replicas}
        target = self.target_ongoing_requests or float(self.engine_config.max_num_seqs)
        return {
            "autoscaling_config": {
                "min_replicas": self.min_replicas,
                "max_replicas": self.max_replicas,
                "target_ongoing_requests": target,
                "upscale_delay_s": self.upscale_delay_s,
                "downscale_delay_s": self.downscale_delay_s,
            }
        }

    @property
    def shutdown_s(self) -> float:
        """Seconds that a replica gets to end its requests in."""
        return math.ceil(self.server_config.drain_timeout) + 5.0


def _known(kind: str, values: Mapping[str, Any], names: Any) -> None:
    for name in values:
        if name not in names:
            raise UnknownNameError(kind if kind == "setting" else f"setting of {kind!r}", name, names)
