"""Server settings. The constructor checks them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remask.checks.fields import declared
from remask.checks.values import listed, whole
from remask.errors import ConfigError
from remask.server.limits import ServerLimits


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ServerLimits):
    """Settings of one server, beside its limits. The engine's limits are in `EngineConfig`.

    Attributes:
        model_names: names that requests may give as `model`; answers carry the first one by default.
        api_keys: accepted keys; without any, every request is accepted. Never shown, never logged.
        sampling: defaults for the sampling parameters that a request leaves out, before the model's own.
        seed: makes the seeds of requests without one reproducible; with None they are random.
        priority_keys: keys that let in as `api_keys` do. Where there are any, only their requests may have a negative
            `priority`.
        allowed_origins: origins whose web pages may call the server from a browser (CORS); none by default.
        allowed_hosts: names under which the server may be called, beside `localhost` and all addresses; `*` is any.
            Where there are keys any name is taken, as a page of another site has none.
    """

    model_names: Sequence[str]
    api_keys: Sequence[str] = field(default=(), repr=False)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    priority_keys: Sequence[str] = field(default=(), repr=False)
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = listed("served_model_name", self.model_names, "names")
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"served_model_name must be at least one name that is not empty, got {names!r}")
        for kind in ("api_key", "priority_key"):
            keys = getattr(self, f"{kind}s")
            if not all(isinstance(key, str) and key.isascii() and key.strip() == key != "" for key in keys):
                raise ConfigError(f"every {kind} must be ASCII text that is not empty and has no spaces at its ends")
        whole("seed", self.seed, low=0, optional=True)
        for name, limit in declared(ServerLimits).items():
            limit.check(name, getattr(self, name))
        for host in listed("allowed_hosts", self.allowed_hosts, "names"):
            if not isinstance(host, str) or not host or any(mark in host for mark in "/@ ,"):
                raise ConfigError(f"allowed_hosts takes names such as models.example.org, or '*', got {host!r}")
        for origin in self.allowed_origins:
            if origin == "*" or not origin.startswith(("http://", "https://")):
                raise ConfigError(f"allowed_origins takes origins such as https://example.org, got {origin!r}")
