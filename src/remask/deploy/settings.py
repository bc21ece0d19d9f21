"""Settings of a fleet of replicas. The constructor checks them."""

import math
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any

from remask.checkpoint.settings import ModelSettings
from remask.checks import BUNDLED
from remask.checks.fields import check, declare, declared
from remask.checks.values import Choice, Real, Seconds, Whole, check_whole, json_object, shown
from remask.deploy.routing import Spill
from remask.engine.config import AUTO, EngineConfig
from remask.errors import ConfigError, UnknownNameError
from remask.server.config import IntakeLimits, ServerConfig, ServerLimits

# `llm` takes the fields of `ModelSettings` except those that are settings of the fleet or that replicas set themselves.
_EXCLUDED = {"model", "chat_template", "reads", "spare_cores", "skip_bad_adapters", "progress"}
MODEL_FIELDS = (
    *(setting.name for setting in fields(ModelSettings) if setting.name not in _EXCLUDED),
    "cache_config",
    "depth_table",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scaling:
    """How many replicas there are, what each of them gets, and which one a request goes to."""

    min_replicas: int = declare(1, Whole(1), "Minimum number of replicas.")
    max_replicas: int = declare(1, Whole(1), "Maximum number of replicas.")
    target_ongoing_requests: float | None = declare(
        None, Real(0.0, above=True), "Open requests a replica to scale for; by default `max_num_seqs`.", metavar="N"
    )
    upscale_delay_s: float = declare(
        30.0, Seconds(0.0), "Seconds of higher load before one is added.", flags=("--upscale-delay",)
    )
    downscale_delay_s: float = declare(
        600.0, Seconds(0.0), "Seconds of lower load before one is removed.", flags=("--downscale-delay",)
    )
    routing: str = declare("prefix", Choice(("prefix", "round-robin")), "Replicas by their prefixes, or in turn.")
    balance: float = declare(1.25, Real(1.0, above=True), "Multiple of the mean load at which prefixes spill over.")
    num_cpus: float = declare(1.0, Real(0.0), "CPUs set aside per replica.")
    # The processes of a replica with `tensor_parallel` are children of its actor, and share them.
    num_gpus: float = declare(0.0, Real(0.0), "GPUs set aside per replica.")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings(Scaling):
    """Replicas of one model. All fields are plain data, because they are sent to other machines.

    Attributes:
        model: `bundled`, or a folder or hub id that every machine can read.
        cache: cache policy of requests that do not name one.
        llm: further arguments of `LLM`: `cache_config`, `depth_table` and the fields of `ModelSettings`.
        engine: fields of `EngineConfig`, for each replica.
        server: fields of `ServerConfig`, for each replica, without the limits of connections.
        chat_template: Jinja text that replaces the model's own template.

    Raises `ConfigError` on invalid settings.
    """

    model: str = BUNDLED
    cache: str = AUTO
    llm: Mapping[str, Any] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    server: Mapping[str, Any] = field(default_factory=dict, repr=False)  # holds the API keys
    chat_template: str | None = None

    def __post_init__(self) -> None:
        for name in ("llm", "engine", "server"):
            value: object = getattr(self, name)
            if not isinstance(value, Mapping):
                raise ConfigError(f"{name} must be an object of settings by name, got {shown(value)}")
        _check_names("llm", self.llm, MODEL_FIELDS)
        _check_names("engine", self.engine, [setting.name for setting in fields(EngineConfig)])
        # The limits of connections are not among them: those are Ray Serve's.
        connections = declared(ServerLimits).keys() - declared(IntakeLimits).keys()
        _check_names("server", self.server, {setting.name for setting in fields(ServerConfig)} - connections)
        check(self)
        if self.max_replicas < self.min_replicas:
            raise ConfigError(
                f"max_replicas must be at least min_replicas ({self.min_replicas}), got {self.max_replicas}"
            )
        ranks = self.llm.get("tensor_parallel", 1)
        check_whole("tensor_parallel", ranks, low=1)
        if 0 < self.num_gpus < ranks:
            raise ConfigError(
                f"num_gpus={self.num_gpus:g} is too few for a replica of tensor_parallel={ranks}: every process has a "
                f"GPU; use num_gpus={ranks}"
            )
        _ = self.spill, self.server_config  # raises ConfigError on settings of the engine or the server

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> "FleetSettings":
        """Return settings from names and values, as read from JSON or YAML. Raises `ConfigError` on unknown names."""
        _check_names("setting", values, [setting.name for setting in fields(cls)])
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
        """Most requests that Ray passes to a replica: more than its own limit, so that the replica answers 429."""
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


def from_words(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings as `FleetSettings` takes them, of a command line of Ray Serve, which hands all on as texts.

    Texts that are none of a setting's values stay as they are. Raises `ConfigError` on an object that is not JSON.
    """
    numbers = declared(Scaling)
    result = dict(values)
    for name, value in values.items():
        if isinstance(value, str) and name in ("llm", "engine", "server"):
            result[name] = json_object(name, value)
        elif isinstance(value, str) and name in numbers:
            with suppress(ValueError):  # which the check of the field reports
                result[name] = numbers[name].values.from_text(value)
    return result


def _check_names(kind: str, values: Mapping[str, Any], names: Collection[str]) -> None:
    """Raise `UnknownNameError` if a key of `values` is not one of `names`."""
    for name in values:
        if name not in names:
            raise UnknownNameError(kind if kind == "setting" else f"setting of {kind!r}", name, names)
