"""Server settings, checked as they are made."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remask.core.checks import listed, real, whole
from remask.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """How one server answers. What the engine may do is in `EngineConfig`.

    Attributes:
        model_names: names that requests may give as `model`; the first one is told in answers.
        api_keys: whoever sends one of them is let in; empty lets everybody in. Never shown, never logged.
        sampling: sampling parameters of requests that leave them out.
        seed: makes the seeds drawn for requests without one reproducible; None draws them at random.
        max_queue: requests that may wait beside those that run; more are told to come again (429).
        drain_timeout: seconds that accepted requests get to end in when the server is told to stop.
        max_body_bytes: longest request body (413).
        max_messages: most messages in a conversation.
        max_choices: most answers to one request: `n` times its prompts.
        allowed_origins: web pages of these origins may call the server from a browser (CORS); none by default.
    """

    model_names: Sequence[str]
    api_keys: Sequence[str] = field(default=(), repr=False)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    max_queue: int = 256
    drain_timeout: float = 30.0
    max_body_bytes: int = 4 << 20
    max_messages: int = 1024
    max_choices: int = 128
    allowed_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = listed("served_model_name", self.model_names, "names")
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"served_model_name must be at least one name that is not empty, got {names!r}")
        if not all(isinstance(key, str) and key.isascii() and key.strip() == key != "" for key in self.api_keys):
            raise ConfigError("every api_key must be ASCII text that is not empty and has no spaces at its ends")
        whole("max_queue", self.max_queue, low=0)
        whole("seed", self.seed, low=0, optional=True)
        real("drain_timeout", self.drain_timeout, low=0.0)
        for name in ("max_body_bytes", "max_messages", "max_choices"):
            whole(name, getattr(self, name), low=1)
        for origin in self.allowed_origins:
            if origin == "*" or not origin.startswith(("http://", "https://")):
                raise ConfigError(f"allowed_origins takes origins such as https://example.org, got {origin!r}")
