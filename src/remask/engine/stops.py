"""Where a response ends: stop tokens and stop texts."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class StopTexts:
    """Texts that end a response, and how its tokens become text."""

    texts: tuple[str, ...]
    decode: Decode

    def shortest(self, tokens: Sequence[int]) -> int | None:
        """Length of the shortest lead of `tokens` whose text contains one of the texts; None where no lead does."""
        if not self._stopped(tokens):
            return None
        # The texts of leads grow with the leads, so a binary search finds the shortest.
        low, high = 1, len(tokens)
        while low < high:
            middle = (low + high) // 2
            low, high = (low, middle) if self._stopped(tokens[:middle]) else (middle + 1, high)
        return low

    def _stopped(self, tokens: Sequence[int]) -> bool:
        text = self.decode(tokens)
        return any(stop in text for stop in self.texts)


@dataclass(frozen=True, slots=True)
class StopRule:
    """What ends a response. `texts` is None where a request names no stop text."""

    token_ids: frozenset[int]
    texts: StopTexts | None = None

    def end(self, tokens: Sequence[int]) -> int | None:
        """Length of the response that the first stop in `tokens` leaves, stop token included; None without a stop."""
        end = next((index + 1 for index, token in enumerate(tokens) if token in self.token_ids), None)
        if self.texts is None:
            return end
        shorter = self.texts.shortest(tokens[:end])
        return end if shorter is None else shorter
