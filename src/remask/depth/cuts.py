"""How a conversation is cut into canvases of given prefix ratios."""

from collections.abc import Sequence
from dataclasses import dataclass

from remask.depth.conversations import Conversation
from remask.errors import ConfigError
from remask.policies.depth_lookup import percent

RATIOS = (*range(5, 100, 5), 97, 98, 99)  # finer at the end, where depth rises fastest
SHORTEST_REST = 8  # tokens after the prefix below which a default ratio is left out


@dataclass(frozen=True, slots=True)
class Cut:
    """A canvas: `prompt`, whose first `prefix` tokens are the shared prefix, followed by `masks` masks."""

    prompt: tuple[int, ...]
    prefix: int
    masks: int


def reachable(ratios: Sequence[int] | None, canvas: int, system: int | None = None) -> tuple[int, ...]:
    """Return the ratios to measure, ascending. None takes those of `RATIOS` that fit.

    `system` is the length of the system prompt of all canvases. Raises `ConfigError` if a given ratio cannot be reached
    exactly on a canvas of this length, or with so short a system prompt, or if none fits.
    """
    if system is not None:
        return _behind(system, ratios, canvas)
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


def _behind(system: int, ratios: Sequence[int] | None, canvas: int) -> tuple[int, ...]:
    """As `reachable`, behind a system prompt."""
    found = {ratio: _behind_system(system, ratio, canvas) for ratio in (RATIOS if ratios is None else ratios)}
    fitting = {ratio: lengths[1] - lengths[0] for ratio, lengths in found.items() if lengths is not None}
    if ratios is None:
        ratios = [ratio for ratio, rest in fitting.items() if rest >= SHORTEST_REST]
    missing = [ratio for ratio in ratios if ratio not in fitting]
    if missing or not ratios:
        raise ConfigError(
            f"behind a system prompt of {system} tokens no canvas of up to {canvas} has a prefix ratio of "
            f"{', '.join(map(str, missing)) or 'any measured'} %; use a longer system prompt, or other ratios"
        )
    return tuple(sorted(set(ratios)))


def _longest(ratio: int, canvas: int) -> int:
    """Return the prefix length of the longest canvas at this ratio."""
    return max(1, round(ratio * canvas / 100))


def cut_at(first: Conversation, last: Sequence[int], ratio: int, canvas: int, response: int) -> Cut:
    """Cut a canvas of at most `canvas` tokens at `ratio` percent: the head of `first`, the tail of `last`, and masks.

    The prefix ends with a turn of `first` if that makes it long enough. Where all conversations have one system prompt,
    the prefix is as much of it as fits, however short the canvas gets.
    """
    longest = _longest(ratio, canvas)
    fitting = None if first.system is None else _behind_system(first.system, ratio, canvas)
    if fitting is None:
        prefix = max((end for end in first.ends if longest <= 2 * end <= 2 * longest), default=longest)
        total = canvas if prefix == longest else round(100 * prefix / ratio)
        if total > canvas or percent(prefix, total) != ratio:
            prefix, total = longest, canvas
    else:
        prefix, total = fitting
    rest = total - prefix
    masks = min(response, rest // 2)
    return Cut((*first.tokens[:prefix], *last[len(last) - rest + masks :]), prefix, masks)


def _behind_system(system: int, ratio: int, canvas: int) -> tuple[int, int] | None:
    """Prefix and length of a canvas whose prefix is a system prompt of `system` tokens, or as much of it as fits."""
    for prefix in range(min(system, _longest(ratio, canvas)), 0, -1):
        total = min(canvas, round(100 * prefix / ratio)) if ratio else canvas
        if total > prefix and percent(prefix, total) == ratio:
            return prefix, total
    return None
