"""The canvas: a request's whole token sequence, and which positions are final. Templates of responses.

Its ledger replays plans on the host, and refuses one that reads K/V which were never written.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from remask.errors import PlanError
from remask.plan.hooks import LayerHook
from remask.plan.plan import NEVER, Plan, PrefixHit, Reach
from remask.plan.spans import Mask, Span, Spans

OPEN = -1  # in a `Template`: the token of a place that is to be denoised
UNWRITTEN, LEASED = -2, -1
"""In a `Ledger`: K/V that no pass has written, and those of the store."""


@dataclass(frozen=True, slots=True)
class Hole:
    """Denoised places of a response, `start` to `stop` - 1. The first `min_length` of them hold no padding."""

    start: int
    stop: int
    min_length: int = 0

    @property
    def variable(self) -> bool:
        """Whether its text may take fewer tokens than it has places."""
        return self.min_length < self.stop - self.start


@dataclass(frozen=True, slots=True)
class Template:
    """The fixed tokens of a response, and its holes, which are denoised. A plain response is one hole."""

    tokens: tuple[int, ...]  # the fixed token of each place of the response, `OPEN` in holes
    holes: tuple[Hole, ...]  # ascending; they cover the places that are `OPEN`, and may be adjacent
    padding: tuple[int, ...] = ()  # tokens that fill up a hole and are no part of its text
    fill_only: bool = False  # the answer has the text of the holes, without the fixed parts

    @classmethod
    def plain(cls, length: int) -> "Template":
        """A response of `length` places without fixed parts."""
        return cls((OPEN,) * length, (Hole(0, length),))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pinned(self) -> Mask:
        """Places with fixed tokens, bool [response]."""
        mask: Mask = np.asarray(self.tokens, dtype=np.int64) != OPEN
        return mask

    @property
    def open_places(self) -> int:
        """Number of places that are denoised."""
        return sum(hole.stop - hole.start for hole in self.holes)

    @property
    def tail(self) -> int:
        """The first place of the hole that ends the response, in which a stop ends all of it.

        The length of the response if it does not end with a hole.
        """
        last = self.holes[-1]
        return last.start if last.stop == len(self) else len(self)

    @property
    def unpadded(self) -> Mask:
        """Places that must not hold padding, bool [response]."""
        mask = np.zeros(len(self), dtype=np.bool_)
        for hole in self.holes if self.padding else ():
            mask[hole.start : hole.start + hole.min_length] = True
        return mask

    def answer_places(self, stop: int, start: int = 0) -> list[int]:
        """The places from `start` to `stop` - 1 whose tokens are part of the answer."""
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

        The fixed tokens of the `template`, which has `response` places, are written at once and are final.
        """
        self.prompt = len(prompt)
        self.end = self.prompt + response
        self.tokens: NDArray[np.int64] = np.concatenate(
            [np.asarray(prompt, dtype=np.int64), np.asarray(noise, dtype=np.int64)]
        )
        self.noisy: Mask = np.arange(len(self.tokens)) >= self.prompt
        if template is not None:
            fixed = np.flatnonzero(template.pinned)
            self.tokens[self.prompt + fixed] = np.asarray(template.tokens, dtype=np.int64)[fixed]
            self.noisy[self.prompt + fixed] = False
        self.settled: NDArray[np.int32] = np.where(self.noisy, NEVER, -1).astype(np.int32)  # see `View.settled`
        self._settled_lead = 0

    @classmethod
    def masked(cls, prompt: Sequence[int], response: int, mask_id: int, template: Template | None = None) -> "Canvas":
        """A prompt and `response` masks. The fixed tokens of the `template` replace masks."""
        return cls(prompt, [mask_id] * response, response, template)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def response(self) -> NDArray[np.int64]:
        """The response's tokens, noise included; a view of the canvas."""
        return self.tokens[self.prompt : self.end]

    @property
    def settled_lead(self) -> int:
        """Number of leading response positions that are final."""
        start = self.prompt + self._settled_lead  # the lead never decreases, so the search resumes here
        if start < self.end and not self.noisy[start]:
            noisy = self.noisy[start : self.end]
            self._settled_lead += int(noisy.argmax()) or len(noisy)  # argmax is 0 if nothing is noisy
        return self._settled_lead

    def write(self, positions: NDArray[np.int64], tokens: NDArray[np.int64]) -> None:
        """Put tokens at noisy positions, which stay noisy."""
        self.tokens[positions] = tokens

    def settle(self, positions: NDArray[np.int64], step: int) -> None:
        """Make positions final at the end of `step`, with the tokens that they have. Final ones do not change."""
        newly_settled = positions[self.noisy[positions]]
        self.noisy[newly_settled] = False
        self.settled[newly_settled] = step

    def grow(self, count: int, mask_id: int) -> None:
        """Append `count` masks to the response, which must end the canvas.

        The step in which a final position settled becomes -1, as if the position belonged to the prompt.
        """
        self.tokens = np.concatenate([self.tokens, np.full(count, mask_id, dtype=np.int64)])
        self.noisy = np.concatenate([self.noisy, np.ones(count, dtype=np.bool_)])
        self.settled = np.where(self.noisy, NEVER, -1).astype(np.int32)
        self.end += count

    def with_settled(self, positions: NDArray[np.int64], step: int) -> Self:
        """A copy in which `step` has made `positions` final. It shares `tokens`, as those there may be unknown yet."""
        other = object.__new__(type(self))
        vars(other).update(vars(self))
        other.noisy = self.noisy.copy()
        other.settled = self.settled.copy()
        other.settle(positions, step)
        return other


@dataclass(frozen=True, slots=True)
class _PlanShape:
    """The parts of a plan that decide what it reads and writes. A later plan may repeat them."""

    spans: Spans
    sees: Reach | None
    hook: LayerHook | None
    may_change: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Backup:
    """Entries of a ledger as they were before the last plan overwrote them.

    It has no spans if the last plan repeated the one before it, because then only the step has changed.
    """

    spans: tuple[Span, ...]
    written: tuple[NDArray[np.int32], ...]  # of each span, the steps of the rows that it wrote
    saved: tuple[Mask | None, ...]  # of each span with saves, the row of `Ledger.saved`
    lead: NDArray[np.int64]


class Ledger:
    """The step at which each K/V row of one canvas was last written, int32 [layers, length]; `LEASED` in the store.

    `enter` is called before a plan runs, so a bad plan never reaches the device.

    Rows that are written or saved stay so. Therefore a plan over the same spans as the last one needs no check, and
    changes nothing but the step of its rows. `_written` is updated once a plan has other spans.
    """

    def __init__(self, layers: int, length: int, prefix: PrefixHit | None) -> None:
        self.layers = layers
        self.saved = np.zeros((layers, length), dtype=np.bool_)  # rows whose input to a layer is kept
        self.prefix = prefix
        self.step = -1
        self._written = np.full((layers, length), UNWRITTEN, dtype=np.int32)
        self._lead = np.zeros(layers, dtype=np.int64)  # leading positions of a layer that are all written or leased
        self._min_lead = 0  # over all layers
        self._leased = np.zeros(length, dtype=np.bool_) if prefix is None else prefix.rows(length)
        if prefix is not None:
            self._written[: prefix.layers, self._leased] = LEASED
            self._lead[: prefix.layers] = prefix.lead
        self._last_shape: _PlanShape | None = None  # of the last plan
        self._written_step = -1  # the step that `_written` has for the rows of the last plan
        self._backup: _Backup | None = None  # if the last plan may change

    @property
    def written(self) -> NDArray[np.int32]:
        """Step at which each row was last written, int32 [layers, length]."""
        self._update_written()
        return self._written

    def enter(self, plan: Plan) -> None:
        """Record `plan`, whose arrays have the length of the canvas, as the next step.

        Raises `PlanError`, and records nothing, if the plan writes leased rows, attends to K/V or adds outputs that
        were never computed, or restores a row without a boundary state. If the plan's hook may make any row live, the
        hidden states of all rows must be saved.
        """
        last = self._last_shape
        if last is not None and last.spans is plan.spans and last.sees is plan.sees and last.hook is plan.hook:
            self._backup = _Backup(spans=(), written=(), saved=(), lead=self._lead) if last.may_change else None
            self.step += 1
            return
        if plan.layers != self.layers:
            raise PlanError(f"a plan of {plan.layers} layers for a model of {self.layers}")
        self._check(plan)
        self._update_written()
        self._record(_PlanShape(plan.spans, plan.sees, plan.hook, plan.may_change))

    def roll_back(self) -> None:
        """Forget the last step, whose plan repeated the one before. Its rows are written again before they are read."""
        self.step -= 1

    def revise(self, plan: Plan) -> None:
        """Record `plan` in place of the last plan, which picked rows or had a hook that changes plans.

        Raises `PlanError`, and changes nothing, if `enter` would refuse the plan, the plan does not fit the canvas, or
        the last plan could not change.
        """
        backup = self._backup
        last = self._last_shape
        step = self.step
        if backup is None or last is None:
            raise PlanError(
                "the last plan neither picks rows nor has a hook that changes plans, so none can take its place"
            )
        plan.check(self._written.shape[1])
        self._undo(backup)
        try:
            self.enter(plan)
        except PlanError:
            if backup.spans:
                self._record(last)
            self.step = step
            self._backup = backup
            raise

    def _check(self, plan: Plan) -> None:
        """Raise `PlanError` if `plan` may not be recorded; see `enter`."""
        joins = dict(plan.spans.joins)  # without layer 0, where every row can be embedded
        for span in plan.spans:
            layers = span.layers
            written_steps = self._written[layers.start : layers.stop]
            if layers.start in joins:
                self._check_restored(layers.start, joins[layers.start])
            hook_rows = None if plan.hook is None else plan.hook.adding(span)
            if span.computed is not span.rows or hook_rows is not None:
                adding = span.rows & ~span.computed
                if hook_rows is not None:
                    adding |= hook_rows
                if (written_steps[:, adding] < 0).any():
                    raise PlanError(f"layers {layers}: rows add cached outputs that were never computed")
            hit = self.prefix
            if hit is not None and not hit.copied and layers.start < hit.layers and (span.written & self._leased).any():
                raise PlanError(f"layers {layers}: leased rows are read-only; freeze them or leave them out")
            reach = plan.reach(span)
            if self._min_lead < reach:
                lead = min(int(self._lead[layers.start : layers.stop].min()), reach)
                unwritten = (written_steps[:, lead:reach] == UNWRITTEN) & ~span.written[lead:reach]
                if unwritten.any():
                    layer, position = np.argwhere(unwritten)[0]
                    raise PlanError(
                        f"layer {layers.start + layer} attends to position {lead + position}, whose K/V were never "
                        "written"
                    )
        if plan.hook is not None and plan.hook.revives:
            self._check_saved(plan.spans)

    def _check_saved(self, spans: Spans) -> None:
        """Raise `PlanError` unless the inputs of all rows to each span but the first are kept, or saved by `spans`."""
        for span in spans[1:]:
            saved = self.saved[span.layers.start]
            if span.save is not None:
                saved = saved | span.save
            if not saved.all():
                raise PlanError(
                    f"the plan's hook may make all rows live, but of position {np.flatnonzero(~saved)[0]} no input to "
                    f"layer {span.layers.start} is kept"
                )

    def _check_restored(self, layer: int, rows: Mask) -> None:
        """Raise `PlanError`, which names the first position, unless each of `rows` can restart at `layer`."""
        stateless_rows = rows & ~self.saved[layer]
        if self.prefix is not None and layer == self.prefix.boundary:
            stateless_rows &= ~self._leased
        if stateless_rows.any():
            position = np.flatnonzero(stateless_rows)[0]
            raise PlanError(f"position {position} joins at layer {layer}, where no boundary state is stored or kept")

    def _record(self, shape: _PlanShape) -> None:
        """Make a plan of this `shape`, which has been checked, the next step."""
        self._backup = self._back_up(shape.spans) if shape.may_change else None
        self.step += 1
        for span in shape.spans:
            if span.save is not None:
                self.saved[span.layers.start] |= span.save
        self._last_shape = shape
        self._mark_written(shape.spans)
        self._update_lead()

    def _update_written(self) -> None:
        if self._last_shape is not None and self._written_step != self.step:
            self._mark_written(self._last_shape.spans)

    def _mark_written(self, spans: Spans) -> None:
        for span in spans:
            self._written[span.layers.start : span.layers.stop, span.written_index] = self.step
        self._written_step = self.step

    def _update_lead(self) -> None:
        """Advance `_lead` and `_min_lead` over rows that have been written since."""
        start = self._min_lead
        length = self._written.shape[1]
        if start < length:
            gaps = self._written[:, start:] == UNWRITTEN
            self._lead = np.where(gaps.any(axis=1), start + gaps.argmax(axis=1), length)
            self._min_lead = int(self._lead.min())

    def _back_up(self, spans: Spans) -> _Backup:
        written = tuple(
            self._written[span.layers.start : span.layers.stop, span.written_index].copy() for span in spans
        )
        saved = tuple(None if span.save is None else self.saved[span.layers.start].copy() for span in spans)
        return _Backup(spans=spans, written=written, saved=saved, lead=self._lead)

    def _undo(self, backup: _Backup) -> None:
        """Restore the entries that the last plan has overwritten. `_last_shape` is then unknown, so it becomes None."""
        self.step -= 1
        self._backup = None
        if not backup.spans:
            return
        for span, written, saved in zip(backup.spans, backup.written, backup.saved, strict=True):
            self._written[span.layers.start : span.layers.stop, span.written_index] = written
            if saved is not None:
                self.saved[span.layers.start] = saved
        self._lead = backup.lead
        self._min_lead = int(backup.lead.min())
        self._last_shape = None
