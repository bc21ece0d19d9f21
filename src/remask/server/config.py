"""Server settings. The constructor checks them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remask.core.checks import listed, real, whole
from remask.errors import ConfigError
from remask.server.protocol import MAX_ITEMS

CHARS_A_TOKEN = 64  # far more than text has on average, so that only what cannot fit is refused by its characters
MAX_WORKERS = 256
MAX_TIMEOUT_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Settings of one server. The engine's limits are in `EngineConfig`.

    Attributes:
        model_names: names that requests may give as `model`; answers carry the first one by default.
        api_keys: accepted keys; without any, every request is accepted. Never shown, never logged.
        sampling: defaults for the sampling parameters that a request leaves out.
        seed: makes the seeds of requests without one reproducible; with None they are random.
        max_queue: most requests that wait for the engine; further ones are refused with 429.
        drain_timeout: seconds that accepted requests have to finish when the server stops.
        max_body_bytes: largest request body; a larger one is refused with 413.
        max_messages: most messages in a conversation.
        step_limit: seconds that one step of the engine may take; `/health` reports a longer one.
        max_choices: most answers to one request: `n` times its prompts.
        max_prompt_chars: most characters of one prompt, or of a conversation altogether. By default `CHARS_A_TOKEN`
            for each token of the longest canvas.
        max_request_chars: most characters of all prompts of one request. By default 4 times those of one prompt.
        text_workers: threads that tokenize. Long texts never hold the last one.
        header_timeout: seconds in which a request's line and headers must arrive.
        body_timeout: seconds in which its body must arrive.
        keep_alive_timeout: seconds that a connection stays open between two requests.
        max_connections: most connections at a time.
        max_priority: how far a request may put itself before others: its `priority` is at least the negative of this.
        priority_keys: keys that let in as `api_keys` do. Where there are any, only their requests may have a negative
            `priority`.
        allowed_origins: origins whose web pages may call the server from a browser (CORS); none by default.
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
    max_prompt_chars: int | None = None
    max_request_chars: int | None = None
    text_workers: int = 4
    header_timeout: float = 10.0
    body_timeout: float = 60.0
    keep_alive_timeout: float = 5.0
    max_connections: int = 1024
    max_priority: int = 0
    priority_keys: Sequence[str] = field(default=(), repr=False)
    step_limit: float = 30.0
    allowed_origins: Sequence[str] = ()

    def __post_init__(self) -> None:
        names = listed("served_model_name", self.model_names, "names")
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"served_model_name must be at least one name that is not empty, got {names!r}")
        for kind in ("api_key", "priority_key"):
            keys = getattr(self, f"{kind}s")
            if not all(isinstance(key, str) and key.isascii() and key.strip() == key != "" for key in keys):
                raise ConfigError(f"every {kind} must be ASCII text that is not empty and has no spaces at its ends")
        whole("max_queue", self.max_queue, low=0)
        whole("seed", self.seed, low=0, optional=True)
        real("drain_timeout", self.drain_timeout, low=0.0)
        real("step_limit", self.step_limit, low=0.0, above=True)
        for name in ("max_body_bytes", "max_connections"):
            whole(name, getattr(self, name), low=1)
        for name in ("max_messages", "max_choices"):
            whole(name, getattr(self, name), low=1, high=MAX_ITEMS)
        for name in ("max_prompt_chars", "max_request_chars"):
            whole(name, getattr(self, name), low=1, optional=True)
        whole("text_workers", self.text_workers, low=2, high=MAX_WORKERS)
        for name in ("header_timeout", "body_timeout", "keep_alive_timeout"):
            real(name, getattr(self, name), low=0.0, high=MAX_TIMEOUT_S, above=True)
        whole("max_priority", self.max_priority, low=0)
        for origin in self.allowed_origins:
            if origin == "*" or not origin.startswith(("http://", "https://")):
                raise ConfigError(f"allowed_origins takes origins such as https://example.org, got {origin!r}")
