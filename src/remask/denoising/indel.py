"""Blocks whose tokens move: a model that writes DELETE and INSERT, which are applied after each pass (LLaDA2.2).

`Levenshtein` is the rule of the authors' decoder, and `JointThresholdIndel` SGLang's variant of it. Both were written
from descriptions. Positions here are counted within the block.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.denoising import select
from remask.plan.spans import Mask

Tokens: TypeAlias = NDArray[np.int64]
Probabilities: TypeAlias = NDArray[np.float32]
EndReason: TypeAlias = Literal["stable", "budget", "cap"]
Writes: TypeAlias = tuple[tuple[int, int], ...]  # pairs of a position and a token
Pick: TypeAlias = Callable[[Probabilities], int]  # picks one of m positions by their probabilities, float32 [m]

MAX_ESCAPES = 5
"""Attempts of one step to leave a state in which the block has been before."""


@dataclass(frozen=True, slots=True)
class EditTokens:
    """The ids of the tokens by which a model deletes a position, or inserts a mask before its token."""

    delete: int
    insert: int

    def matches(self, tokens: Tokens) -> Mask:
        """Which of `tokens` are DELETE or INSERT, bool of their shape."""
        result: Mask = (tokens == self.delete) | (tokens == self.insert)
        return result


@dataclass(frozen=True, slots=True)
class TokenCandidates:
    """The predictions of a pass for the n positions of a block.

    Attributes:
        tokens: the k most probable tokens of each but the mask, descending, int64 [n, k].
        probabilities: their probabilities, float32 [n, k].
        drawn: for each position a drawn token, its probability, and another drawn token that is neither DELETE nor
            INSERT, [n] each; None if the most probable tokens are written.
    """

    tokens: Tokens
    probabilities: Probabilities
    drawn: tuple[Tokens, Probabilities, Tokens] | None = None

    @classmethod
    def of(cls, numbers: NDArray[np.float32], *, drawn: bool) -> "TokenCandidates":
        """Unpack the `numbers` of `sampling.device_reads.MostProbable`, float32 [width, n]; `drawn`: with draws.

        Their rows are the k most probable tokens, the k log-probabilities of these and, if `drawn`, the three of
        `TokenCandidates.drawn`.
        """
        if not drawn:
            tokens, logprobs = np.split(numbers, 2)
            return cls(tokens.T.astype(np.int64), np.exp(logprobs.T))
        ranked = cls.of(numbers[:-3], drawn=False)
        drawn_tokens, probabilities, plain_tokens = numbers[-3:]
        return replace(ranked, drawn=(drawn_tokens.astype(np.int64), probabilities, plain_tokens.astype(np.int64)))

    def best(self, position: int, *excluded: int) -> int | None:
        """The most probable token of `position` that is not `excluded`; None if all k tokens are."""
        return next((token for token in self.tokens[position].tolist() if token not in excluded), None)


@dataclass(frozen=True, slots=True)
class Limits:
    """Parameters of a block.

    Attributes:
        threshold: a mask is filled by a token that is more probable than this.
        edit_threshold: a token is replaced by one that is more probable than this.
        max_post_steps: passes without masks to fill after which the block ends.
        steps: passes among which the masks of the block are shared; `Levenshtein` only.
        max_steps: passes of the block at most, the last of which leaves no mask; `Levenshtein` only.
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
        fills, edits: the filled masks and the replaced tokens, before DELETE and INSERT are applied.
        original_count, inserted_count: masks before the pass: those that the block began with, and inserted ones.
        post_steps: passes that count towards `Limits.max_post_steps`.
        is_last: the pass left no mask, and wrote neither DELETE nor INSERT.
        escapes: the changes that were made to leave a repeated state.
    """

    fills: Writes
    edits: Writes
    original_count: int
    inserted_count: int
    post_steps: int
    is_last: bool
    escapes: Writes


class IndelBlock(ABC):
    """One block in progress. `choose` applies the predictions of a pass, until the block has an `end_reason`.

    Attributes:
        tokens: tokens of the positions that are denoised, int64 [n].
        original: whether a mask is one that the block began with, bool [n]; without meaning for other tokens.
        step: passes so far.
        post_steps: passes that count towards `Limits.max_post_steps`, the next one included.
        end_reason: why the block is done; None until it is.
        draws: whether masks may be filled with drawn tokens.
    """

    draws: ClassVar[bool] = True
    _ends_with_last: ClassVar[bool] = False

    def __init__(self, length: int, mask_id: int, edit_tokens: EditTokens, limits: Limits) -> None:
        self.tokens: Tokens = np.full(length, mask_id, dtype=np.int64)
        self.original: Mask = np.ones(length, dtype=np.bool_)
        self.step = 0
        self.post_steps = 0
        self.end_reason: EndReason | None = None
        self._mask_id = mask_id
        self._edit_tokens = edit_tokens
        self._limits = limits
        self._past_states: set[bytes] = set()
        self._count_pass()

    @property
    def candidate_count(self) -> int:
        """How many of the most probable tokens of a position the next pass needs, the mask not counted."""
        return 3  # at most two of them are excluded

    @property
    def masks(self) -> Mask:
        """Which positions are masked, bool [n]."""
        result: Mask = self.tokens == self._mask_id
        return result

    def choose(self, candidates: TokenCandidates, pick: Pick) -> Round:
        """Apply the predictions of a pass, and return what was done. Updates all attributes.

        The pass fills masks and replaces tokens, escapes from a repeated state at positions that `pick` chooses, and
        then applies the DELETE and INSERT that it wrote. If it is the last one it fills all masks, and writes neither.
        """
        old_tokens, masks = self.tokens, self.masks
        original_count = int((masks & self.original).sum())
        best, best_probabilities = candidates.tokens[:, 0], candidates.probabilities[:, 0]
        fill_tokens, fill_probabilities, plain_tokens = best, best_probabilities, None
        if candidates.drawn is not None:
            fill_tokens, fill_probabilities, plain_tokens = candidates.drawn
        filled = self._choose_fills(masks, fill_probabilities, original_count)
        edited = ~masks & (best_probabilities > self._limits.edit_threshold) & (best != old_tokens)
        is_last = self._is_last_pass(bool((masks & self.original & ~filled).any()), original_count)
        if is_last:
            filled = masks
        new_tokens = np.where(filled, fill_tokens, np.where(edited, best, old_tokens))
        written = filled | edited
        escapes: Writes = ()
        if is_last:
            self._replace_edit_tokens(new_tokens, written, filled, candidates, plain_tokens)
        elif written.any():
            probabilities = np.where(filled, fill_probabilities, best_probabilities)
            escapes = self._escape(new_tokens, probabilities, candidates, pick)
        self._record(new_tokens, written)
        result = Round(
            fills=_writes(new_tokens, filled),
            edits=_writes(new_tokens, edited),
            original_count=original_count,
            inserted_count=int(masks.sum()) - original_count,
            post_steps=self.post_steps,
            is_last=is_last,
            escapes=escapes,
        )
        self._apply_edits(new_tokens)
        self.step += 1
        if self._is_stable(old_tokens, written):
            self.end_reason = "stable"
        elif is_last and self._ends_with_last:
            self.end_reason = "budget"
        else:
            self._count_pass()
        return result

    def _replace_edit_tokens(
        self, new_tokens: Tokens, written: Mask, filled: Mask, candidates: TokenCandidates, plain_tokens: Tokens | None
    ) -> None:
        """Replace DELETE and INSERT among the `written` ones of `new_tokens` by other tokens, in place."""
        for position in np.flatnonzero(written & self._edit_tokens.matches(new_tokens)).tolist():
            if filled[position] and plain_tokens is not None:
                new_tokens[position] = plain_tokens[position]
            else:
                token = candidates.best(position, self._edit_tokens.delete, self._edit_tokens.insert)
                assert token is not None
                new_tokens[position] = token

    @staticmethod
    @abstractmethod
    def max_passes(length: int, limits: Limits) -> int:
        """How many passes a block of `length` positions may take."""

    @abstractmethod
    def _count_pass(self) -> None:
        """Count the next pass in `post_steps`, or end the block."""

    @abstractmethod
    def _choose_fills(self, masks: Mask, probabilities: Probabilities, original_count: int) -> Mask:
        """Which masks are filled, bool [n]. `original_count` of `masks` are those that the block began with."""

    @abstractmethod
    def _is_last_pass(self, unfilled: bool, original_count: int) -> bool:
        """Whether the pass must fill all masks, and delete and insert nothing.

        `unfilled`: the positions of `_choose_fills` leave some of the `original_count` masks that the block began with.
        """

    @abstractmethod
    def _escape(
        self, new_tokens: Tokens, probabilities: Probabilities, candidates: TokenCandidates, pick: Pick
    ) -> Writes:
        """Change `new_tokens`, in place, if the block would repeat an earlier state. Returns what was changed.

        `probabilities` are those of `new_tokens` as the pass wrote them, float32 [n]; they are not updated by changes.
        `pick` chooses among the positions that the pass changes.
        """

    @abstractmethod
    def _record(self, new_tokens: Tokens, written: Mask) -> None:
        """Record the tokens of a pass, of which it wrote those at `written`, before DELETE and INSERT are applied."""

    def _is_stable(self, old_tokens: Tokens, written: Mask) -> bool:  # noqa: ARG002
        """Whether the block is done: the pass changed no token, and no mask is left."""
        return np.array_equal(self.tokens, old_tokens) and not self.masks.any()

    def _choose_by_threshold(self, masks: Mask, probabilities: Probabilities, least: int) -> Mask:
        """Which masks are above the threshold, bool [n], but at least the `least` most probable ones."""
        above = masks & (probabilities > self._limits.threshold)
        if above.sum() >= least:
            return above
        positions = np.flatnonzero(masks)
        filled = np.zeros_like(masks)
        filled[positions[select.top(probabilities[positions], least)]] = True
        return filled

    def _apply_edits(self, new_tokens: Tokens) -> None:
        """Apply DELETE and INSERT from left to right, and cut or fill up with masks to the length of the block."""
        tokens: list[int] = []
        original: list[bool] = []
        old_tokens = self.tokens.tolist()
        for position, token in enumerate(new_tokens.tolist()):
            if token == self._edit_tokens.delete:
                continue
            if token == self._edit_tokens.insert:
                tokens.append(self._mask_id)
                original.append(False)
                token = old_tokens[position]
            tokens.append(token)
            original.append(bool(self.original[position]))
        mask_count = max(0, len(new_tokens) - len(tokens))
        self.tokens = np.array(tokens + [self._mask_id] * mask_count, dtype=np.int64)[: len(new_tokens)]
        self.original = np.array(original + [False] * mask_count, dtype=np.bool_)[: len(new_tokens)]


class Levenshtein(IndelBlock):
    """The authors' rule. A pass fills an even share of the masks, by `Limits.steps`, and all inserted masks."""

    @staticmethod
    def max_passes(length: int, limits: Limits) -> int:  # noqa: ARG004
        """`Limits.max_steps`: a model may insert masks forever."""
        return limits.max_steps

    def _count_pass(self) -> None:
        """See the base class. Masks that the block began with reset the count."""
        masks = self.masks
        self.post_steps = 0 if (masks & self.original).any() else self.post_steps + 1
        if not masks.any() and self.post_steps > self._limits.max_post_steps:
            self.end_reason = "budget"
        elif self.step == self._limits.max_steps:
            self.end_reason = "cap"

    def _choose_fills(self, masks: Mask, probabilities: Probabilities, original_count: int) -> Mask:
        limits = self._limits
        if self.step >= limits.steps:
            return masks
        share = len(masks) // limits.steps + int(self.step < len(masks) % limits.steps)
        return self._choose_by_threshold(masks, probabilities, share + int(masks.sum()) - original_count)

    def _is_last_pass(self, unfilled: bool, original_count: int) -> bool:
        max_post_steps = self._limits.max_post_steps
        if self.step + 1 == self._limits.max_steps:
            return True
        if max_post_steps:
            return self.post_steps >= max_post_steps
        return original_count > 0 and not unfilled

    def _escape(
        self, new_tokens: Tokens, probabilities: Probabilities, candidates: TokenCandidates, pick: Pick
    ) -> Writes:
        """See the base class: what repeats is the block after a pass. Makes up to `MAX_ESCAPES` changes."""
        escapes: list[tuple[int, int]] = []
        while new_tokens.tobytes() in self._past_states and len(escapes) < MAX_ESCAPES:
            positions = np.flatnonzero(new_tokens != self.tokens)
            if not len(positions):
                break
            position = int(positions[pick(probabilities[positions])])
            token = candidates.best(position, int(new_tokens[position]))
            assert token is not None
            new_tokens[position] = token
            escapes.append((position, token))
        return tuple(escapes)

    def _record(self, new_tokens: Tokens, written: Mask) -> None:  # noqa: ARG002
        self._past_states.add(new_tokens.tobytes())


class JointThresholdIndel(IndelBlock):
    """SGLang's variant: a pass fills at least one mask more than were inserted, and `post_steps` is never reset."""

    draws = False
    _ends_with_last = True

    @staticmethod
    def max_passes(length: int, limits: Limits) -> int:
        """A pass for each position, `Limits.max_post_steps` passes without masks to fill, and a last one."""
        return length + limits.max_post_steps + 2

    def __init__(self, length: int, mask_id: int, edit_tokens: EditTokens, limits: Limits) -> None:
        self._past_tokens: list[set[int]] = [set() for _ in range(length)]
        super().__init__(length, mask_id, edit_tokens, limits)

    @property
    def candidate_count(self) -> int:
        """More than were ever written at one position, so that an escape finds a new one."""
        return max(3, 2 + max(map(len, self._past_tokens), default=0))

    def _count_pass(self) -> None:
        self.post_steps += int(not (self.masks & self.original).any())

    def _choose_fills(self, masks: Mask, probabilities: Probabilities, original_count: int) -> Mask:
        least = 1 + int(masks.sum()) - original_count
        return self._choose_by_threshold(masks, probabilities, least) if original_count else masks

    def _is_last_pass(self, unfilled: bool, original_count: int) -> bool:  # noqa: ARG002
        max_post_steps = self._limits.max_post_steps
        if self.step > len(self.tokens) + max_post_steps:
            return True
        return self.post_steps >= max_post_steps if max_post_steps else not unfilled

    def _escape(
        self, new_tokens: Tokens, probabilities: Probabilities, candidates: TokenCandidates, pick: Pick
    ) -> Writes:
        """See the base class: what repeats is the block before a pass.

        Changes one token at most, to one that was never written at its position.
        """
        state = self.tokens.tobytes()
        if state not in self._past_states:
            self._past_states.add(state)
            return ()
        positions = np.flatnonzero(new_tokens != self.tokens)
        if not len(positions):
            return ()
        position = int(positions[pick(probabilities[positions])])
        token = candidates.best(position, *self._past_tokens[position])
        if token is None:
            return ()
        new_tokens[position] = token
        return ((position, token),)

    def _record(self, new_tokens: Tokens, written: Mask) -> None:
        for position, token in _writes(new_tokens, written):
            self._past_tokens[position].add(token)

    def _is_stable(self, old_tokens: Tokens, written: Mask) -> bool:
        return not written.any() or super()._is_stable(old_tokens, written)


def _writes(tokens: Tokens, written: Mask) -> Writes:
    """The positions in `written`, bool [n], with their `tokens` [n]."""
    return tuple((position, int(tokens[position])) for position in np.flatnonzero(written).tolist())
