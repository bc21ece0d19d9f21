"""What a request says beside its prompt and its sampling parameters. Each term is declared here, and nowhere else."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from remask.core.checks import LARGEST, POSITIONS, Real, Settings, Text, Whole
from remask.core.fields import check, declare, parse

PRIORITY_STEP_S = 10.0  # a request of the next higher priority number begins as if it had arrived so much later


@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one request, in a JSONL line and in a body alike. `None` leaves a choice to the command or server.

    Raises `ConfigError` when made, naming the field, the value and what is allowed.
    """

    prefix_length: int | None = declare(
        None,
        Whole(0, POSITIONS),
        "Leading prompt tokens that may be shared with other requests, 0 for none; by default everything before the "
        "last user turn of a conversation, and nothing of a text or of token ids.",
    )
    cache: str | None = declare(
        None,
        Text(1024, noun="the name of a cache policy"),
        "Cache policy, or a composition such as `bicache+block-dual`; null takes the default of the command or server.",
    )
    cache_config: Mapping[str, Any] | None = declare(
        None, Settings("settings of the policy", 64), "Settings of the cache policy."
    )
    cache_salt: str = declare(
        "",
        Text(1024, empty=True),
        "Only requests of the same salt share stored prefixes; one per tenant keeps them apart.",
    )
    priority: int = declare(
        0,
        Whole(-LARGEST),
        "Requests of lower priority numbers begin first, equal ones in order of arrival. "
        f"Each number weighs as much as {PRIORITY_STEP_S:g} seconds of waiting.",
    )
    deadline_s: float | None = declare(
        None,
        Real(0, 1e8, above=True),
        'Seconds from arrival after which the request ends with "timeout"; null sets no deadline.',
    )

    def __post_init__(self) -> None:
        check(self)

    @classmethod
    def from_mapping(cls, values: object) -> "Terms":
        """Terms from JSON-like values. Raises `ConfigError` on unknown names and on values of the wrong kind."""
        return parse(cls, values, "a request", "term")
