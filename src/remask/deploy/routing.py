"""Which replica gets a request: the one that holds what it shares, with spill-over from overloaded replicas.

In rendezvous hashing (Thaler and Ravishankar 1998) every replica has a score for every prefix, and the highest score
wins. A replica that joins or leaves moves only the prefixes that it wins, 1/n of all. The load limit comes from
consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam 2018): a factor above the mean load.
"""

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash

from remask.checks.values import check_real, check_whole


def rank_replicas(identity: bytes, replicas: Iterable[str]) -> list[str]:
    """Return `replicas` in the order in which they should hold the prefix, whatever the order of the argument."""
    return sorted(replicas, key=lambda replica: (-_score(identity, replica), replica))


def _score(identity: bytes, replica: str) -> int:
    """Return the score of a replica for a prefix: a hash of both, with the length of the name to keep them apart."""
    name = replica.encode()
    return int(xxhash.xxh64(len(name).to_bytes(4, "little") + name + identity).intdigest())


@dataclass(frozen=True, slots=True)
class Spill:
    """The rule by which a replica counts as overloaded.

    Attributes:
        slots: requests that a replica runs at a time; with fewer open requests it is never overloaded.
        balance: open requests that a replica may have, as a multiple of the mean over all; above 1.

    Raises `ConfigError` on values out of range.
    """

    slots: int = 8
    balance: float = 1.25

    def __post_init__(self) -> None:
        check_whole("slots", self.slots, low=1)
        check_real("balance", self.balance, low=1.0, above=True)

    def limit(self, loads: Mapping[str, int]) -> int:
        """Return the most open requests that a replica may have, the request to be placed included."""
        return max(self.slots, math.ceil(self.balance * (sum(loads.values()) + 1) / len(loads)))

    def order(self, identity: bytes | None, loads: Mapping[str, int]) -> list[str]:
        """Return all replicas, the best one for the request first. `loads` maps replicas to their open requests.

        Replicas that are not overloaded come before overloaded ones, both in the order of `rank_replicas`. For a
        request without a prefix the order is that of the loads; equal loads keep the order of `loads`.
        """
        if identity is None:
            return sorted(loads, key=lambda replica: loads[replica])
        limit = self.limit(loads) if loads else 0
        return sorted(rank_replicas(identity, loads), key=lambda replica: loads[replica] >= limit)


def prefix_identity(body: Any) -> bytes | None:
    """Return bytes that are equal for requests that can share a stored prefix; None if a request shares nothing.

    The identity of a conversation is its opening: the messages before the first user turn, or that turn if it is the
    first message. So all turns of a conversation, and all conversations with one system prompt, go to one replica,
    which holds their prefixes of all lengths. The opening ends earlier if the last `cache_control` marker, of a message
    or of a part of its content, or `prefix_length` does. `prefix_length` counts tokens, but is applied to characters
    here: a token has at least one character. `cache_salt` is part of the identity. The model is not, because a fleet
    serves one model.

    A body that the server refuses may have any identity.
    """
    if not isinstance(body, Mapping) or body.get("cache") == "none":
        return None
    length = body.get("prefix_length")
    if isinstance(length, bool) or not isinstance(length, int | None) or length == 0:
        return None
    opening: Any = None
    messages = _conversation(body)
    if messages is not None:
        opening = _conversation_opening(messages, length)
    elif length is not None:
        prompt = body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            prompt = prompt[0]  # of several prompts
        opening = prompt[:length] if isinstance(prompt, list | str) else None
    if not opening:
        return None
    return json.dumps([body.get("cache_salt") or "", opening], sort_keys=True).encode()


def _conversation(body: Mapping[str, Any]) -> Sequence[Any] | None:
    """Return the messages of a body, with the system prompt that other APIs have in a field of its own as the first.

    Returns None for a body without messages, such as one with a prompt.
    """
    messages, system = body.get("messages"), body.get("system")
    if messages is None and "input" in body:
        messages, system = body["input"], body.get("instructions")
        messages = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
    if not isinstance(messages, list):
        return None
    return messages if system is None else [{"role": "system", "content": system}, *messages]


def _conversation_opening(messages: Sequence[Any], length: int | None) -> str | list[tuple[Any, str]] | None:
    """Return the first `length` characters of a conversation, or if that is None its opening, by role and text.

    Returns None if the messages share nothing or are invalid.
    """
    if not all(isinstance(message, Mapping) for message in messages):
        return None
    if length is not None:
        return "\n".join(f"{message.get('role')}: {_text(message)}" for message in messages)[:length]
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    markers = [index for index, message in enumerate(messages) if _has_marker(message)]
    if not markers and not users:
        return None
    prefix_end = markers[-1] + 1 if markers else users[-1]  # as the server finds the shared prefix
    opening_end = max(users[0], 1) if users else len(messages)  # an opening is never empty
    return [(message.get("role"), _text(message)) for message in messages[: min(prefix_end, opening_end)]]


def _has_marker(part: Any) -> bool:
    """Whether a message or a part of its content, such as a block of a tool's result, has a `cache_control` marker."""
    if not isinstance(part, Mapping):
        return False
    content = part.get("content")
    inner = content if isinstance(content, list) else []
    return bool(part.get("cache_control")) or any(_has_marker(block) for block in inner)


def _text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list):
        return "".join(str(part.get("text", "")) for part in content if isinstance(part, Mapping))
    return str(content)
