"""Settings of a fleet of replicas. The constructor checks them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

from remask.checkpoint.bundled import BUNDLED
from remask.checks.fields import declared
from remask.checks.values import real, whole
from remask.deploy.routing import Spill
from remask.engine.config import EngineConfig
from remask.errors import ConfigError, UnknownNameError
from remask.server.config import ServerConfig
from remask.server.limits import IntakeLimits, ServerLimits

ROUTINGS = ("prefix", "round-robin")
MODEL_FIELDS = (
    "cache_config",
    "dtype",
    "device",
    "load_format",
    "check_weights",
    "depth_table",
    "threads",
    "tensor_parallel",
    "quantization",
)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Replicas of one model. All fields are plain data, because they are sent to other machines.

    Attributes:
        model: `bundled`, or a folder or hub id that every machine can read.
        cache: cache policy of requests that do not name one.
        llm: further arguments of `LLM`: `cache_config`, `dtype`, `device`, `load_format`,
            `check_weights`, `depth_table`, `threads`, `tensor_parallel`, `quantization`.
        engine: fields of `EngineConfig`, for each replica.
        server: fields of `ServerConfig`, for each replica, without the limits of connections.
        chat_template: Jinja text that replaces the model's own template.
        min_replicas, max_replicas: limits of the number of replicas; autoscaling moves between them.
        target_ongoing_requests: open requests per replica that autoscaling aims at; by default `max_num_seqs`.
        upscale_delay_s, downscale_delay_s: seconds that a high, or low, load must last before replicas are added, or
            removed.
        routing: `prefix` sends a request to the replica that holds its prefix; `round-robin` takes replicas in turn.
        balance: open requests that a replica may have before prefixes spill over, as a multiple of the mean.
        num_cpus, num_gpus: resources that Ray reserves for a replica, on one machine. The processes of a replica with
            `tensor_parallel` are children of its actor, and share them.

    Raises `ConfigError` on invalid settings.
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
        _check_names("llm", self.llm, MODEL_FIELDS)
        _check_names("engine", self.engine, [each.name for each in fields(EngineConfig)])
        # The limits of connections are not among them: those are Ray Serve's.
        connections = declared(ServerLimits).keys() - declared(IntakeLimits).keys()
        _check_names("server", self.server, {each.name for each in fields(ServerConfig)} - connections)
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
        ranks = self.llm.get("tensor_parallel", 1)
        whole("tensor_parallel", ranks, low=1)
        if 0 < self.num_gpus < ranks:
            raise ConfigError(
                f"num_gpus={self.num_gpus:g} is too few for a replica of tensor_parallel={ranks}: every process has a "
                f"GPU; use num_gpus={ranks}"
            )
        self.spill  # noqa: B018 - checks engine and balance
        self.server_config  # noqa: B018

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "FleetSettings":
        """Return settings from names and values, as read from JSON or YAML. Raises `ConfigError` on unknown names."""
        _check_names("setting", values, [each.name for each in fields(cls)])
        return cls(**values)

    @property
    def engine_config(self) -> EngineConfig:
        """The engine settings of each replica."""
        return EngineConfig(**self.engine)

    @property
    def server_config(self) -> ServerConfig:
        """The server settings of each replica."""
        return ServerConfig(**{"model_names": [self.model], **self.server})

    @property
    def spill(self) -> Spill:
        """The rule by which a replica counts as overloaded."""
        return Spill(self.engine_config.max_num_seqs, self.balance)

    @property
    def max_open_requests(self) -> int:
        """Most requests that Ray passes to a replica: enough that the replica's own limit (429) is reached first."""
        return 2 * (self.engine_config.max_num_seqs + self.server_config.max_queue) + 64

    @property
    def scaling(self) -> dict[str, Any]:
        """Ray Serve's options for the number of replicas."""
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
        """Seconds that a replica has to finish its requests when it stops."""
        return math.ceil(self.server_config.drain_timeout) + 5.0


def _check_names(kind: str, values: Mapping[str, Any], names: Any) -> None:
    for name in values:
        if name not in names:
            raise UnknownNameError(kind if kind == "setting" else f"setting of {kind!r}", name, names)
