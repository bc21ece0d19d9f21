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
    """What a response is made of: fixed tokens, and holes that are denoised. A plain response is one hole."""

    tokens: tuple[int, ...]  # the fixed token of each place of the response, `OPEN` in holes
    holes: tuple[Hole, ...]  # ascending; they cover the places that are `OPEN`. Neighbours may touch
    padding: tuple[int, ...] = ()  # tokens that fill up a hole and are no part of its text
    fill_only: bool = False  # the answer shows what stands in the holes, and not the fixed parts

    @classmethod
    def plain(cls, length: int) -> "Template":
        """A response of `length` places without fixed parts."""
        return cls((OPEN,) * length, (Hole(0, length),))

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def pinned(self) -> Mask:
        """Which places have fixed tokens, bool [response]."""
        mask: Mask = np.asarray(self.tokens, dtype=np.int64) != OPEN
        return mask

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
        mask = np.zeros(len(self), dtype=np.bool_)
        for hole in self.holes if self.padding else ():
            mask[hole.start : hole.start + hole.least] = True
        return mask

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


@dataclass(frozen=True, slots=True)
class _Entered:
    """The parts of an entered plan that a later plan may repeat: its spans, limits and hook."""

    spans: Spans
    sees: Reach | None
    hook: LayerHook | None
    may_change: bool


@dataclass(frozen=True, slots=True)
class _Replaced:
    """Entries that a plan replaced: `written` of its rows and `kept` of its saves, in the order of its spans."""

    spans: tuple[Span, ...]
    written: tuple[NDArray[np.int32], ...]
    kept: tuple[Mask | None, ...]
    lead: NDArray[np.int64]


class Ledger:
    """Step at which each K/V row was last written, int32 [layers, length]; `LEASED` for rows of the store.

    One ledger belongs to one canvas. `apply` is called before a plan runs, so a bad plan never reaches the device.

    Rows that are written or kept stay so. So a plan over the same spans as the last one needs no check. It only changes
    the step of its rows, which is recorded once other rows are written.
    """

    def __init__(self, layers: int, length: int, prefix: PrefixHit | None) -> None:
        self.layers = layers
        self.kept = np.zeros((layers, length), dtype=np.bool_)  # rows whose input to a layer is kept
        self.prefix = prefix
        self.step = -1
        self._written = np.full((layers, length), UNWRITTEN, dtype=np.int32)
        self._lead = np.zeros(layers, dtype=np.int64)  # leading positions of a layer that are all written or leased
        self._least = 0  # the least of `_lead`
        self._leased = np.zeros(length, dtype=np.bool_) if prefix is None else prefix.rows(length)
        if prefix is not None:
            self._written[: prefix.layers, self._leased] = LEASED
            self._lead[: prefix.layers] = prefix.lead
        self._last: _Entered | None = None  # the last plan
        self._stamped = -1  # step that `_written` has for its rows
        self._replaced: _Replaced | None = None  # by the last plan, where that may change

    @property
    def written(self) -> NDArray[np.int32]:
        """Step at which each row was last written, int32 [layers, length]."""
        self._put_down()
        return self._written

    def enter(self, plan: Plan) -> None:
        """Record `plan`, which fits the canvas, as the next step.

        Raises `PlanError`, and records nothing, where the plan writes leased rows, attends to K/V that were never
        written, or restores a row that has no boundary state. A plan whose hook may make any row live is refused too
        where the hidden states of a row are not kept.
        """
        last = self._last
        if last is not None and last.spans is plan.spans and last.sees is plan.sees and last.hook is plan.hook:
            self._replaced = _Replaced((), (), (), self._lead) if last.may_change else None
            self.step += 1
            return
        layers = len(self._written)
        if plan.layers != layers:
            raise PlanError(f"a plan of {plan.layers} layers for a model of {layers}")
        self._check(plan)
        self._put_down()
        self._record(_Entered(plan.spans, plan.sees, plan.hook, plan.may_change))

    def roll_back(self) -> None:
        """Forget the last step, whose plan repeated the one before. Its rows are written again before they are read."""
        self.step -= 1

    def revise(self, plan: Plan) -> None:
        """Record `plan` in place of the last plan, which picked rows or had a hook that changes plans.

        Raises `PlanError` as `enter` does, where the plan does not fit the canvas, and where the last plan could not
        change.
        """
        replaced, entered, recorded = self._replaced, self._last, self.step
        if replaced is None or entered is None:
            raise PlanError(
                "the last plan neither picks rows nor has a hook that changes plans, so none can take its place"
            )
        plan.check(self._written.shape[1])
        self._take_back(replaced)
        try:
            self.enter(plan)
        except PlanError:
            if replaced.spans:
                self._record(entered)
            self.step, self._replaced = recorded, replaced
            raise

    def _check(self, plan: Plan) -> None:
        joins = dict(plan.spans.joins)  # before layer 0 every row can be embedded
        for span in plan.spans:
            layers, rows = span.layers, span.written
            part = self._written[layers.start : layers.stop]
            if layers.start in joins:
                self._check_restored(layers.start, joins[layers.start])
            still = None if plan.hook is None else plan.hook.adding(span)
            if span.computed is not span.rows or still is not None:
                adding = span.rows & ~span.computed
                if still is not None:
                    adding |= still
                if (part[:, adding] < 0).any():
                    raise PlanError(f"layers {layers}: rows add cached outputs that were never computed")
            hit = self.prefix
            if hit is not None and not hit.copied and layers.start < hit.layers and (rows & self._leased).any():
                raise PlanError(f"layers {layers}: leased rows are read-only; freeze them or leave them out")
            reach = plan.reach(span)
            if self._least < reach:
                lead = min(int(self._lead[layers.start : layers.stop].min()), reach)
                missing = (part[:, lead:reach] == UNWRITTEN) & ~rows[lead:reach]
                if missing.any():
                    layer, position = np.argwhere(missing)[0]
                    raise PlanError(
                        f"layer {layers.start + layer} attends to position {lead + position}, whose K/V were never "
                        "written"
                    )
        if plan.hook is None or not plan.hook.revives:
            return
        for span in plan.spans[1:]:
            saved = self.kept[span.layers.start]
            saved = saved if span.save is None else saved | span.save
            if not saved.all():
                raise PlanError(
                    f"the plan's hook may make all rows live, but of position {np.flatnonzero(~saved)[0]} no input to "
                    f"layer {span.layers.start} is kept"
                )

    def _check_restored(self, layer: int, rows: Mask) -> None:
        missing = rows & ~self.kept[layer]
        if self.prefix is not None and layer == self.prefix.boundary:
            missing &= ~self._leased
        if missing.any():
            last = np.flatnonzero(missing)[-1]
            raise PlanError(f"position {last} joins at layer {layer}, where no boundary state is stored or kept")

    def _record(self, plan: _Entered) -> None:
        self._replaced = self._copied(plan.spans) if plan.may_change else None
        self.step += 1
        for span in plan.spans:
            if span.save is not None:
                self.kept[span.layers.start] |= span.save
        self._last = plan
        self._stamp(plan.spans)
        self._lengthen()

    def _put_down(self) -> None:
        """Bring `_written` up to date."""
        if self._last is not None and self._stamped != self.step:
            self._stamp(self._last.spans)

    def _stamp(self, spans: Spans) -> None:
        for span in spans:
            self._written[span.layers.start : span.layers.stop, span.written_index] = self.step
        self._stamped = self.step

    def _lengthen(self) -> None:
        lead, length = self._least, self._written.shape[1]
        if lead < length:
            gaps = self._written[:, lead:] == UNWRITTEN
            self._lead = np.where(gaps.any(axis=1), lead + gaps.argmax(axis=1), length)
            self._least = int(self._lead.min())

    def _copied(self, spans: Spans) -> _Replaced:
        written = tuple(
            self._written[span.layers.start : span.layers.stop, span.written_index].copy() for span in spans
        )
        saves = tuple(None if span.save is None else self.kept[span.layers.start].copy() for span in spans)
        return _Replaced(spans, written, saves, self._lead)

    def _take_back(self, replaced: _Replaced) -> None:
        """Undo the last plan. Where it repeated the spans of the plan before, nothing but the step has changed."""
        self.step -= 1
        self._replaced = None
        if not replaced.spans:
            return
        for span, written, saves in zip(replaced.spans, replaced.written, replaced.kept, strict=True):
            self._written[span.layers.start : span.layers.stop, span.written_index] = written
            if saves is not None:
                self.kept[span.layers.start] = saves
        self._lead, self._least, self._last = replaced.lead, int(replaced.lead.min()), None
