"""Blocks whose tokens move: a model that writes DELETE and INSERT, which are carried out after each pass (LLaDA2.2).

`Levenshtein` is the rule of the authors' decoder, and `JointThresholdIndel` SGLang's variant of it. Both were written
from descriptions. A block is a list of places behind the prompt; nothing here knows of canvases.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.denoising import select
from remask.plan.spans import Mask

Tokens: TypeAlias = NDArray[np.int64]
Chances: TypeAlias = NDArray[np.float32]
Ended: TypeAlias = Literal["stable", "budget", "cap"]

ESCAPES = 5
"""Tries of one step to leave a state in which the block has been before."""


@dataclass(frozen=True, slots=True)
class EditTokens:
    """The tokens that a model writes to delete the place where they stand, and to insert a mask before its token."""

    delete: int
    insert: int

    def among(self, tokens: Tokens) -> Mask:
        """Which of `tokens` are one of the two, bool of their shape."""
        found: Mask = (tokens == self.delete) | (tokens == self.insert)
        return found


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """What a pass says of each of the n places of a block.

    Attributes:
        tokens: the most probable tokens, the first one first, int64 [n, k]; the mask is not among them.
        chances: their probabilities, float32 [n, k].
        drawn: a drawn token of each place, its probability, and a drawn token that is neither DELETE nor INSERT, [n]
            each; None: the most probable ones are taken.
    """

    tokens: Tokens
    chances: Chances
    drawn: tuple[Tokens, Chances, Tokens] | None = None

    @classmethod
    def of(cls, numbers: NDArray[np.float32], *, drawn: bool) -> "TokenCandidates":
        """Those that `sampling.device_reads.MostProbable` has read, float32 [width, n]; `drawn` above temperature 0."""
        count = (len(numbers) - 3 * drawn) // 2
        tokens, chances = numbers[:count].T.astype(np.int64), np.exp(numbers[count : 2 * count].T)
        if not drawn:
            return cls(tokens, chances)
        ids, chance, plain = numbers[2 * count :]
        return cls(tokens, chances, (ids.astype(np.int64), chance, plain.astype(np.int64)))

    def best(self, place: int, *barred: int) -> int | None:
        """The most probable token of a place that is none of `barred`; None: all that are known are."""
        return next((token for token in self.tokens[place].tolist() if token not in barred), None)


@dataclass(frozen=True, slots=True)
class Limits:
    """Parameters of a block.

    Attributes:
        threshold, edit_threshold: masks and tokens are replaced by tokens that are more probable than these.
        max_post_steps: passes without masks to fill, after which the block ends.
        steps: passes among which the masks of the block are shared; `Levenshtein` only.
        max_steps: passes of the block at most, the last of which leaves no mask; the same.
    """

    threshold: float
    edit_threshold: float
    max_post_steps: int
    steps: int = 1
    max_steps: int = 1


@dataclass(frozen=True, slots=True)
class Round:
    """What a pass did to a block.

    Attributes:
        fills, edits: place and token of the masks and of the tokens that were replaced, before DELETE and INSERT.
        original, new: masks before the pass, those that the block began with and others.
        post: what counts towards `Limits.max_post_steps`.
        last: the pass left no mask, and wrote neither DELETE nor INSERT.
        escapes: place and token of each try to leave a state that was there before.
    """

    fills: tuple[tuple[int, int], ...]
    edits: tuple[tuple[int, int], ...]
    original: int
    new: int
    post: int
    last: bool
    escapes: tuple[tuple[int, int], ...]


class IndelBlock(ABC):
    """The places of one block that are denoised, in progress. `choose` takes a pass, until the block has `ended`.

    Attributes:
        tokens: int64 [n].
        original: which places the block began with as masks, bool [n]; it counts only where a mask stands.
        step: passes so far.
        post: what counts towards `Limits.max_post_steps` in the next pass.
        ended: why the block is done; None while it is not.
        draws: whether masks may be filled with drawn tokens.
    """

    draws: ClassVar[bool] = True
    _ends_with_last: ClassVar[bool] = False

    def __init__(self, places: int, mask: int, edit_tokens: EditTokens, limits: Limits) -> None:
        self.tokens: Tokens = np.full(places, mask, dtype=np.int64)
        self.original: Mask = np.ones(places, dtype=np.bool_)
        self.step = self.post = 0
        self.ended: Ended | None = None
        self._mask, self._edit_tokens, self._limits = mask, edit_tokens, limits
        self._seen: set[bytes] = set()
        self._count()

    @property
    def candidates(self) -> int:
        """How many of the most probable tokens of a place the next pass needs, the mask not counted."""
        return 3  # the best one that is not DELETE or INSERT, or not the one that stands there

    @property
    def masks(self) -> Mask:
        """Places that are masked, bool [n]."""
        found: Mask = self.tokens == self._mask
        return found

    def choose(self, found: TokenCandidates, pick: Callable[[Chances], int]) -> Round:
        """Write what a pass found. `pick` chooses one of some places by their probabilities [m], for an escape."""
        old, masks = self.tokens, self.masks
        original = int((masks & self.original).sum())
        best, sure = found.tokens[:, 0], found.chances[:, 0]
        drawn, chances, plain = (best, sure, None) if found.drawn is None else found.drawn
        filled = self._filled(masks, chances, original)
        edited = ~masks & (sure > self._limits.edit_threshold) & (best != old)
        last = self._last(bool((masks & self.original & ~filled).any()), original)
        if last:
            filled = masks
        new = np.where(filled, drawn, np.where(edited, best, old))
        sure = np.where(filled, chances, sure)
        written = filled | edited
        escapes: tuple[tuple[int, int], ...] = ()
        if last:
            for place in np.flatnonzero(written & self._edit_tokens.among(new)).tolist():
                if filled[place] and plain is not None:
                    new[place] = plain[place]
                else:
                    better = found.best(place, self._edit_tokens.delete, self._edit_tokens.insert)
                    assert better is not None
                    new[place] = better
        elif written.any():
            escapes = self._escape(new, sure, found, pick)
        self._note(new, written)
        fills, edits = (
            tuple((place, int(new[place])) for place in np.flatnonzero(which).tolist()) for which in (filled, edited)
        )
        done = Round(fills, edits, original, int(masks.sum()) - original, self.post, last, escapes)
        self._carry_out(new)
        self.step += 1
        if self._stable(old, written):
            self.ended = "stable"
        elif last and self._ends_with_last:
            self.ended = "budget"
        else:
            self._count()
        return done

    @staticmethod
    @abstractmethod
    def most_steps(places: int, limits: Limits) -> int:
        """Passes that a block of so many places may take."""

    @abstractmethod
    def _count(self) -> None:
        """Count the pass that comes next, or end the block."""

    @abstractmethod
    def _filled(self, masks: Mask, chances: Chances, original: int) -> Mask:
        """The masks that are filled, bool [n]; `original` of them were there when the block began."""

    @abstractmethod
    def _last(self, unfilled: bool, original: int) -> bool:
        """Whether the pass fills what is masked, and ends the changes of places.

        `unfilled`: it leaves some of the `original` masks of the block.
        """

    @abstractmethod
    def _escape(
        self, new: Tokens, sure: Chances, found: TokenCandidates, pick: Callable[[Chances], int]
    ) -> tuple[tuple[int, int], ...]:
        """Change `new` where the block has been there before; the places and tokens that were tried."""

    @abstractmethod
    def _note(self, new: Tokens, written: Mask) -> None:
        """Remember what a pass wrote, before DELETE and INSERT are carried out."""

    def _stable(self, old: Tokens, written: Mask) -> bool:  # noqa: ARG002
        return np.array_equal(self.tokens, old) and not self.masks.any()

    def _by_threshold(self, masks: Mask, chances: Chances, least: int) -> Mask:
        """The masks above the threshold, or the `least` most probable ones where these are fewer."""
        sure = masks & (chances > self._limits.threshold)
        if sure.sum() >= least:
            return sure
        places, filled = np.flatnonzero(masks), np.zeros_like(masks)
        filled[places[select.top(chances[places], least)]] = True
        return filled

    def _carry_out(self, new: Tokens) -> None:
        """Delete and insert places from left to right, and keep the number of places."""
        tokens, original, old = [], [], self.tokens.tolist()
        for place, token in enumerate(new.tolist()):
            if token == self._edit_tokens.delete:
                continue
            if token == self._edit_tokens.insert:
                tokens.append(self._mask)
                original.append(False)
                token = old[place]
            tokens.append(token)
            original.append(bool(self.original[place]))
        short = max(0, len(new) - len(tokens))
        self.tokens = np.array(tokens + [self._mask] * short, dtype=np.int64)[: len(new)]
        self.original = np.array(original + [False] * short, dtype=np.bool_)[: len(new)]


class Levenshtein(IndelBlock):
    """The authors' rule. Masks are shared evenly among `Limits.steps`, and masks that were inserted come on top."""

    @staticmethod
    def most_steps(places: int, limits: Limits) -> int:  # noqa: ARG004
        """`Limits.max_steps`: a model may insert masks forever."""
        return limits.max_steps

    def _count(self) -> None:
        masks = self.masks
        self.post = 0 if (masks & self.original).any() else self.post + 1
        if not masks.any() and self.post > self._limits.max_post_steps:
            self.ended = "budget"
        elif self.step == self._limits.max_steps:
            self.ended = "cap"

    def _filled(self, masks: Mask, chances: Chances, original: int) -> Mask:
        limits = self._limits
        if self.step >= limits.steps:
            return masks
        share = len(masks) // limits.steps + (self.step < len(masks) % limits.steps)
        return self._by_threshold(masks, chances, share + int(masks.sum()) - original)

    def _last(self, unfilled: bool, original: int) -> bool:
        most = self._limits.max_post_steps
        if self.step + 1 == self._limits.max_steps:
            return True
        return self.post >= most if most else original > 0 and not unfilled

    def _escape(
        self, new: Tokens, sure: Chances, found: TokenCandidates, pick: Callable[[Chances], int]
    ) -> tuple[tuple[int, int], ...]:
        tried = list[tuple[int, int]]()
        while new.tobytes() in self._seen and len(tried) < ESCAPES:
            places = np.flatnonzero(new != self.tokens)
            if not len(places):
                break
            place = int(places[pick(sure[places])])
            other = found.best(place, int(new[place]))
            assert other is not None
            new[place] = other
            tried.append((place, other))
        return tuple(tried)

    def _note(self, new: Tokens, written: Mask) -> None:  # noqa: ARG002
        self._seen.add(new.tobytes())


class JointThresholdIndel(IndelBlock):
    """SGLang's variant: a mask more than were inserted is filled at least, and passes after the masks count once."""

    draws = False
    _ends_with_last = True

    @staticmethod
    def most_steps(places: int, limits: Limits) -> int:
        """A pass for each place, those without masks to fill, and a last one."""
        return places + limits.max_post_steps + 2

    def __init__(self, places: int, mask: int, edit_tokens: EditTokens, limits: Limits) -> None:
        self._written: list[set[int]] = [set() for _ in range(places)]
        super().__init__(places, mask, edit_tokens, limits)

    @property
    def candidates(self) -> int:
        """One more than have been written at one place, for an escape."""
        return max(3, 2 + max(map(len, self._written), default=0))

    def _count(self) -> None:
        self.post += not (self.masks & self.original).any()

    def _filled(self, masks: Mask, chances: Chances, original: int) -> Mask:
        return self._by_threshold(masks, chances, 1 + int(masks.sum()) - original) if original else masks

    def _last(self, unfilled: bool, original: int) -> bool:  # noqa: ARG002
        most = self._limits.max_post_steps
        if self.step > len(self.tokens) + most:
            return True
        return self.post >= most if most else not unfilled

    def _escape(
        self, new: Tokens, sure: Chances, found: TokenCandidates, pick: Callable[[Chances], int]
    ) -> tuple[tuple[int, int], ...]:
        state = self.tokens.tobytes()
        if state not in self._seen:
            self._seen.add(state)
            return ()
        places = np.flatnonzero(new != self.tokens)
        if not len(places):
            return ()
        place = int(places[pick(sure[places])])
        other = found.best(place, *self._written[place])
        if other is None:
            return ()
        new[place] = other
        return ((place, other),)

    def _note(self, new: Tokens, written: Mask) -> None:
        for place in np.flatnonzero(written).tolist():
            self._written[place].add(int(new[place]))

    def _stable(self, old: Tokens, written: Mask) -> bool:
        return not written.any() or super()._stable(old, written)
