"""The limits of a server, each declared once: its values, its default and its meaning.

`ServerConfig` has and checks them, and the commands make their options of them.
"""

from dataclasses import dataclass

from remask.checks.fields import declare
from remask.checks.values import Real, Whole

CHARS_A_TOKEN = 64  # far more than text has on average, so that only what cannot fit is refused by its characters
MAX_ITEMS = 8192  # messages, parts of a message, and prompts of one body; the server's own limits are below it
MAX_WORKERS = 256
MAX_TIMEOUT_S = 86_400.0

_TIMEOUT = Real(0.0, MAX_TIMEOUT_S, above=True)


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
        30.0, Real(0.0), "Seconds that accepted requests have to finish when the server stops."
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
        30.0, Real(0.0, above=True), "Seconds that one step of the engine may take; /health reports a longer one."
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
