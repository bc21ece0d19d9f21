"""Server settings and limits, each limit declared once, and the address that a server listens on.

`ServerConfig` has and checks them, and the commands make their options of them. Nothing here imports PyTorch or the
server, as settings are checked and a port is tried before these.
"""

import re
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from remask.checks.fields import check, declare
from remask.checks.values import Choice, Flag, Seconds, Text, Whole, check_list, check_whole
from remask.errors import ConfigError

CHARS_A_TOKEN = 64  # far more than text has on average, so that only what cannot fit is refused by its characters
MAX_ITEMS = 8192  # messages, parts of a message, and prompts of one body; the server's own limits are below it
MAX_WORKERS = 256
MAX_TIMEOUT_S = 86_400.0

_ORIGIN = re.compile(r"https?://[^\sA-Z/?#@]+")

_TIMEOUT = Seconds(0.0, MAX_TIMEOUT_S, above=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class IntakeLimits:
    """What requests may ask of a server. The engine's limits are in `EngineConfig`."""

    max_queue: int = declare(
        256, Whole(0), "Most requests that wait for the engine; further ones are refused with 429."
    )
    max_client_work: int | None = declare(
        None,
        Whole(1),
        "Most row-layers that the requests of one client (its API key, or else its address) may come to at a time, "
        "waiting or running, by what their sampling parameters say; further ones are refused with 429. By default half "
        "of what the queue holds, if each request takes as many steps as the longest canvas has positions.",
    )
    drain_timeout: float = declare(
        30.0, Seconds(0.0), "Seconds that accepted requests have to finish when the server stops."
    )
    max_body_bytes: int = declare(4 << 20, Whole(1), "Largest request body; a larger one is refused with 413.")
    max_body_items: int = declare(
        1 << 19,
        Whole(1, 2**26),
        "Most values and names in a request's JSON, counted before it is parsed; with more it is refused with 413.",
    )
    max_messages: int = declare(1024, Whole(1, MAX_ITEMS), "Most messages in a conversation.")
    max_choices: int = declare(128, Whole(1, MAX_ITEMS), "Most answers to one request: n times its prompts.")
    max_reads: int = declare(
        4096, Whole(1, 2**20), "Most canvases that the questions of one request may take, read in waves of max_choices."
    )
    max_prompt_chars: int | None = declare(
        None,
        Whole(1),
        "Most characters of one prompt, or of a conversation altogether. By default "
        f"{CHARS_A_TOKEN} for each token of the longest canvas.",
    )
    max_request_chars: int | None = declare(
        None, Whole(1), "Most characters of all prompts of one request. By default 4 times those of one prompt."
    )
    text_workers: int = declare(4, Whole(2, MAX_WORKERS), "Threads that tokenize. Long texts never hold the last one.")
    body_timeout: float = declare(60.0, _TIMEOUT, "Seconds in which a request's body must arrive.")
    step_limit: float = declare(
        30.0, Seconds(0.0, above=True), "Seconds that one step of the engine may take; /health reports a longer one."
    )
    max_priority: int = declare(
        0,
        Whole(0),
        "How far a request may put itself before others: its priority is at least the negative of this.",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLimits(IntakeLimits):
    """The limits of requests and, beside them, what connections to `remask serve` may take.

    Under `remask deploy` the connections are Ray Serve's.
    """

    header_timeout: float = declare(10.0, _TIMEOUT, "Seconds in which a request's line and headers must arrive.")
    keep_alive_timeout: float = declare(5.0, _TIMEOUT, "Seconds that a connection stays open between two requests.")
    max_connections: int = declare(1024, Whole(1), "Most connections at a time; further ones get a 503.")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvEventsConfig:
    """How events of stored pages are published. The names are those of vLLM's `--kv-events-config`."""

    enable_kv_cache_events: bool = declare(True, Flag(), "Whether any are.")
    publisher: str = declare("zmq", Choice(("zmq",)), "What publishes them.")
    endpoint: str = declare("tcp://*:5557", Text(256), "Address at which subscribers connect.")
    replay_endpoint: str | None = declare(None, Text(256), "Address at which missed messages are asked for.")
    topic: str = declare("", Text(256, empty=True), "What subscribers filter by, such as kv@POD@MODEL.")
    buffer_steps: int = declare(10_000, Whole(1), "Messages that are kept for those who missed them.")
    hwm: int = declare(100_000, Whole(0, 2**31 - 1), "Messages that may wait for a slow subscriber; 0: any number.")

    def __post_init__(self) -> None:
        check(self, "kv_events_config.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig(ServerLimits):
    """Settings of one server, beside its limits.

    Attributes:
        model_names: names that requests may give as `model`; answers carry the first one by default.
        api_keys: accepted keys; without any, every request is accepted. Never shown, never logged.
        sampling: defaults for the sampling parameters that a request leaves out, before the model's own.
        seed: makes the seeds of requests without one reproducible; with None they are random.
        priority_keys: keys that let in as `api_keys` do. Where there are any, only their requests may have a negative
            `priority`.
        open_metrics: whether `/metrics` is answered without a key.
        allowed_origins: origins whose web pages may call the server from a browser (CORS); none by default.
        tools_by_form: whether a model whose chat template tells of no tools chooses calls by the form of its answer.
        root_path: the prefix under which a proxy serves this server, such as `/ai`; paths may have it or not.
        allowed_hosts: names under which the server may be called, beside `localhost` and all addresses; `*` is any.
            Where there are keys any name is taken, as a page of another site has none.
        kv_events: publishes which exact pages are stored and removed; None: nothing does.
    """

    model_names: Sequence[str]
    api_keys: Sequence[str] = field(default=(), repr=False)
    sampling: Mapping[str, Any] = field(default_factory=dict)
    seed: int | None = None
    priority_keys: Sequence[str] = field(default=(), repr=False)
    open_metrics: bool = False
    allowed_origins: Sequence[str] = ()
    allowed_hosts: Sequence[str] = ()
    tools_by_form: bool = True
    root_path: str = ""
    kv_events: KvEventsConfig | None = None

    def __post_init__(self) -> None:
        names = check_list("served_model_name", self.model_names, "names")
        if not names or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"served_model_name must be at least one name that is not empty, got {names!r}")
        for kind in ("api_key", "priority_key"):
            keys = getattr(self, f"{kind}s")
            # A text would be taken for a list of its letters, each of which would let everybody in.
            if not isinstance(keys, list | tuple) or not all(
                isinstance(key, str) and key.isascii() and key.strip() == key != "" for key in keys
            ):
                raise ConfigError(
                    f"{kind}s must be a list, and every {kind} ASCII text that is not empty and has no spaces at its "
                    "ends"
                )
        check_whole("seed", self.seed, low=0, optional=True)
        check(self)
        if self.root_path and not re.fullmatch(r"(/[\w.~-]+)+", self.root_path, re.ASCII):
            raise ConfigError(
                f"root_path must be a prefix such as /ai, without a slash at its end, got {self.root_path!r}"
            )
        for host in check_list("allowed_hosts", self.allowed_hosts, "names"):
            if not isinstance(host, str) or not host or any(mark in host for mark in "/@ ,"):
                raise ConfigError(f"allowed_hosts takes names such as models.example.org, or '*', got {host!r}")
        for origin in check_list("allowed_origins", self.allowed_origins, "origins"):
            if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
                raise ConfigError(
                    f"allowed_origins takes origins such as https://example.org, got {origin!r}; write it as browsers "
                    "send it: in lower case, with a port if need be, and with no slash behind that"
                )


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to the address and does not listen yet. Port 0 takes a free port.

    Raises `ConfigError` if the address is in use or does not belong to this machine.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        listener = socket.socket(family, kind, protocol)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
        except OSError:
            listener.close()
            raise
    except (OSError, UnicodeError) as error:
        cause = error.strerror if isinstance(error, OSError) else error
        raise ConfigError(
            f"--host {host} --port {port}: cannot listen there: {cause}; take another port (0 takes a free "
            "one), or an address of this machine"
        ) from error
    return listener


def url_of(listener: socket.socket) -> str:
    """The URL of a bound socket, with brackets around an IPv6 address."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
