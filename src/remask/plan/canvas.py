"""The canvas: a request's whole token sequence, and which positions are final. Templates of responses."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from remask.plan.plan import NEVER
from remask.plan.spans import Mask

OPEN = -1
"""In a `Template`: the token of a place that is to be denoised."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Places of a response, `start` to before `stop`, that are denoised. The first `least` of them hold no padding."""

    start: int
    stop: int
    least: int = 0

    @property
    def variable(self) -> bool:
        """Whether its text may take fewer tokens than it has places."""
        return self.least < self.stop - self.start


@dataclass(frozen=True, slots=True)
class Template:
    """What a response is made of: fixed tokens, and holes that are denoised. A plain response is one hole.

    Attributes:
        tokens: the fixed token of each place of the response, `OPEN` in holes.
        holes: ascending; they cover the places that are `OPEN`. Neighbours may touch.
        padding: tokens that fill up a hole and are no part of its text.
        fill_only: the answer shows what stands in the holes, and not the fixed parts.
    """

    tokens: tuple[int, ...]
    holes: tuple[Hole, ...]
    padding: tuple[int, ...] = ()
    fill_only: bool = False

    @classmethod
    def plain(cls, length: int) -> "Template":
        """A response of `length` places without fixed parts."""
        return cls((OPEN,) * length, (Hole(0, length),))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pinned(self) -> Mask:
        """Which places have fixed tokens, bool [response]."""
        found: Mask = np.asarray(self.tokens, dtype=np.int64) != OPEN
        return found

    @property
    def open_places(self) -> int:
        """Number of places that are denoised."""
        return sum(hole.stop - hole.start for hole in self.holes)

    @property
    def tail(self) -> int:
        """Where the hole at the end of the response begins, in which a stop ends all of it; its length without one."""
        return self.holes[-1].start if self.holes[-1].stop == len(self) else len(self)

    @property
    def unpadded(self) -> Mask:
        """Which places must not hold padding, bool [response]."""
        found = np.zeros(len(self), dtype=np.bool_)
        for hole in self.holes if self.padding else ():
            found[hole.start : hole.start + hole.least] = True
        return found

    def shown(self, stop: int, start: int = 0) -> list[int]:
        """The places from `start` to before `stop` that the answer shows."""
        return [place for place in range(start, stop) if not self.fill_only or self.tokens[place] == OPEN]


class Canvas:
    """A prompt, then positions to be denoised: the response, and the rest of the model's canvas.

    `noisy` says which positions are not final. It is never inferred from `token == mask_id`, because a prompt may
    contain the mask token as text.
    """

    def __init__(
        self,
        prompt: Sequence[int],
        noise: Sequence[int] | NDArray[np.int64],
        response: int,
        template: Template | None = None,
    ) -> None:
        """`noise` holds the tokens after the prompt. The first `response` of them belong to the response.

        The fixed tokens of a `template` of `response` places are written at once, and are as final as the prompt.
        """
        self.prompt, self.end = len(prompt), len(prompt) + response
        self.tokens: NDArray[np.int64] = np.concatenate(
            [np.asarray(prompt, dtype=np.int64), np.asarray(noise, dtype=np.int64)]
        )
        self.noisy: Mask = np.arange(len(self.tokens)) >= self.prompt
        if template is not None:
            fixed = np.flatnonzero(template.pinned)
            self.tokens[self.prompt + fixed] = np.asarray(template.tokens, dtype=np.int64)[fixed]
            self.noisy[self.prompt + fixed] = False
        self.settled: NDArray[np.int32] = np.where(self.noisy, NEVER, -1).astype(np.int32)
        self._lead = 0

    @classmethod
    def masked(cls, prompt: Sequence[int], response: int, mask_id: int, template: Template | None = None) -> "Canvas":
        """A prompt and `response` masks, but where the `template` has fixed tokens."""
        return cls(prompt, [mask_id] * response, response, template)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def response(self) -> NDArray[np.int64]:
        """The response's tokens, noise included; a view of the canvas."""
        return self.tokens[self.prompt : self.end]

    @property
    def settled_lead(self) -> int:
        """Number of response positions, counted from the first one, that are final with no gap between them."""
        begin = self.prompt + self._lead
        if begin < self.end and not self.noisy[begin]:  # it never falls, so the search goes on where it ended
            rest = self.noisy[begin : self.end]
            self._lead += int(rest.argmax()) or len(rest)
        return self._lead

    def write(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Put tokens at noisy positions, which stay noisy."""
        self.tokens[positions] = tokens

    def settle(self, positions: NDArray[np.int64], step: int) -> None:
        """Make positions final at the end of `step`, with the tokens that they have. Final ones stay as they are."""
        fresh = positions[self.noisy[positions]]
        self.noisy[fresh] = False
        self.settled[fresh] = step

    def grow(self, count: int, mask_id: int) -> None:
        """Append `count` masks to the response, which ends the canvas. What is final counts as given from now on."""
        self.tokens = np.concatenate([self.tokens, np.full(count, mask_id, dtype=np.int64)])
        self.noisy = np.concatenate([self.noisy, np.ones(count, dtype=np.bool_)])
        self.settled = np.where(self.noisy, NEVER, -1).astype(np.int32)
        self.end += count

    def ahead(self, positions: NDArray[np.int64], step: int) -> Self:
        """This canvas once `step` has made `positions` final, whose tokens are not known. Changes nothing here."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.noisy, other.settled = self.noisy.copy(), self.settled.copy()
        other.settle(positions, step)
        return other
