"""How a conversation is cut into canvases of given prefix ratios."""

from collections.abc import Sequence
from dataclasses import dataclass

from remask.core.depth import percent
from remask.depth.conversations import Conversation
from remask.errors import ConfigError

RATIOS = (*range(5, 100, 5), 97, 98, 99)  # finer at the end, where depth rises fastest
SHORTEST_REST = 8  # tokens after the prefix below which a default ratio is left out


@dataclass(frozen=True, slots=True)
class Cut:
    """A canvas: `prompt`, whose first `prefix` tokens are the shared prefix, followed by `masks` masks."""

    prompt: tuple[int, ...]
    prefix: int
    masks: int


def reachable(ratios: Sequence[int] | None, canvas: int) -> tuple[int, ...]:
    """Return the ratios to measure, ascending. None takes those of `RATIOS` that fit.

    Raises `ConfigError` if a given ratio cannot be reached exactly on a canvas of this length, or if none fits.
    """
    reached = {r for r in range(100) if percent(_longest(r, canvas), canvas) == r and _longest(r, canvas) < canvas}
    if ratios is None:
        chosen = [r for r in RATIOS if r in reached and canvas - _longest(r, canvas) >= SHORTEST_REST]
        if not chosen:
            raise ConfigError(f"a canvas of {canvas} tokens is too short to profile; choose a longer one")
        return tuple(chosen)
    for ratio in ratios:
        if ratio not in reached:
            raise ConfigError(
                f"a canvas of {canvas} tokens cannot be cut at a prefix ratio of {ratio} %; choose a longer canvas"
            )
    return tuple(sorted(set(ratios)))


def _longest(ratio: int, canvas: int) -> int:
    """Return the prefix length of the longest canvas at this ratio."""
    return max(1, round(ratio * canvas / 100))


def cut_at(first: Conversation, last: Sequence[int], ratio: int, canvas: int, response: int) -> Cut:
    """Cut a canvas of at most `canvas` tokens at `ratio` percent: the head of `first`, the tail of `last`, and masks.

    The prefix ends with a turn of `first` if that makes it long enough.
    """
    longest = _longest(ratio, canvas)
    prefix = max((end for end in first.ends if longest <= 2 * end <= 2 * longest), default=longest)
    total = canvas if prefix == longest else round(100 * prefix / ratio)
    if total > canvas or percent(prefix, total) != ratio:
        prefix, total = longest, canvas
    rest = total - prefix
    masks = min(response, rest // 2)
    return Cut((*first.tokens[:prefix], *last[len(last) - rest + masks :]), prefix, masks)
