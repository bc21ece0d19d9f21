"""dKV-Cache (arXiv 2505.15781): a token's K/V are cached one step after it is decoded."""

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias, get_args

import numpy as np
from numpy.typing import NDArray

from remask.checks.fields import declare
from remask.checks.values import Choice, OrNull, Whole
from remask.errors import ConfigError
from remask.plan import Mask, Plan, Spans, View
from remask.policies.base import ALWAYS, CachePolicy, RequestFacts, Traits

Shift: TypeAlias = Literal["un", "right", "un_right"]
_INTERVAL = OrNull(Whole(1)), "Steps from one full pass to the next; None: only those that begin a block or a request."


@dataclass(frozen=True, slots=True)
class _Delayed(CachePolicy):
    """Base class of the variants. A pass that transfers nothing still caches the rows decoded in the last step."""

    def plan(self, view: View) -> Plan:
        return Plan(view.over_rows(self._rows(view)), view.candidates, refreshes=self._is_refresh(view))

    @abstractmethod
    def _is_refresh(self, view: View) -> bool:
        """Whether the pass recomputes rows that other passes read from the cache."""

    @abstractmethod
    def _rows(self, view: View) -> Mask:
        """The rows that the pass computes, bool [T]."""


@dataclass(frozen=True, slots=True)
class DkvDecode(_Delayed):
    """`dkv-decode`: noisy rows, and those decoded one step ago; everything every `refresh_interval` steps.

    On LLaDA steps are counted within the block, whose first two passes are full. On Dream steps are counted over the
    request, and `shift` says when a row counts as decoded (section 4.3): when the position that it predicts is decoded
    ("un", the default), when its own position is ("right": the row to the right of the one that predicted the token),
    or when both are ("un_right").

    Under "right" a row may count as decoded while the position that it predicts is still noisy. Such a row is computed
    for its logits, but its K/V in the cache are kept. The paper measures that this harms.
    """

    refresh_interval: int | None = declare(8, *_INTERVAL)
    shift: Shift | None = declare(None, Choice(get_args(Shift)), "When a row counts as decoded, on Dream.")

    def check(self, facts: RequestFacts) -> None:
        if self.shift is not None and not facts.shift:
            raise ConfigError(f"shift={self.shift!r} is for models whose rows predict the next position (Dream)")

    def plan(self, view: View) -> Plan:
        """As the base class; under "right" rows that predict are live too, but keep their cached K/V."""
        plan = _Delayed.plan(self, view)
        if self.shift != "right":
            return plan
        (span,) = plan.spans
        predictor_rows = np.append(plan.predict[1:], False)  # row p predicts position p + 1
        frozen = predictor_rows & ~span.rows
        if not frozen.any():
            return plan
        return plan.over(Spans([replace(span, rows=span.rows | predictor_rows, frozen=frozen)]))

    def _rows(self, view: View) -> Mask:
        if self._is_refresh(view):
            return view.everything
        decoded_steps = _decoded_steps(view, self.shift or "un") if view.shift else view.settled
        uncached: Mask = decoded_steps > view.step - 2
        return uncached

    def _is_refresh(self, view: View) -> bool:
        step = view.step if view.shift else view.block_step
        is_due = step == 0 if self.refresh_interval is None else step % self.refresh_interval == 0
        return is_due or (step == 1 and not view.shift)


@dataclass(frozen=True, slots=True)
class DkvPrefill(_Delayed):
    """`dkv-prefill`: computes the prompt but its last row once, the rest in every step. Caches no decoded tokens."""

    traits = Traits(by_clock=True)

    def repeats(self, view: View) -> int:
        return ALWAYS if view.step > 0 else 0

    def _rows(self, view: View) -> Mask:
        return view.everything if self._is_refresh(view) else _uncached_after_prefill(view)

    def _is_refresh(self, view: View) -> bool:
        return view.step == 0


@dataclass(frozen=True, slots=True)
class DkvPd(DkvDecode):
    """`dkv-pd`: the prompt as in `dkv-prefill`, decoded tokens as in `dkv-decode`; refreshes leave the prompt out."""

    def _rows(self, view: View) -> Mask:
        if view.step == 0:
            return view.everything
        return DkvDecode._rows(self, view) & _uncached_after_prefill(view)


@dataclass(frozen=True, slots=True)
class DkvGreedy(_Delayed):
    """`dkv-greedy`: rows decoded by this step and the last, and a window around them; everything on refreshes.

    It needs a decoding order that is known before the pass. Steps are counted within the block.
    """

    refresh_interval: int | None = declare(8, *_INTERVAL)
    window: int = declare(4, Whole(0), "w, rows computed around each position of `centre`.")
    centre: Literal["current", "previous"] = declare(
        "current",
        Choice(("current", "previous")),
        "The window is around the positions that this step decodes, as in the authors' code (`current`), or that the "
        "last step decoded, which the paper's text found better (`previous`).",
    )
    extent: Literal["noisy", "interval"] = declare(
        "noisy",
        Choice(("noisy", "interval")),
        "A window holds the w nearest noisy positions, as in the authors' code (`noisy`), or whatever stands from "
        "ceil(w / 2) positions before its centre to floor(w / 2) after it, as in section 4.2 (`interval`).",
        unset="noisy",
    )

    traits = Traits(by_clock=True)

    def check(self, facts: RequestFacts) -> None:
        """Raise `ConfigError` on samplers that choose after the pass, shifted models, and too wide a window."""
        if not facts.ordered:
            raise ConfigError("dkv-greedy plans by an order drawn beforehand; use remasking 'random' or 'order'")
        if facts.shift:
            raise ConfigError(
                "dkv-greedy is defined for models whose rows predict their own position (LLaDA), not Dream"
            )
        if self.window > facts.response:
            raise ConfigError(
                f"window={self.window} exceeds the response's {facts.response} positions; use a window from 0 "
                f"to {facts.response}, or a longer response"
            )

    def plan(self, view: View) -> Plan:
        """Only the positions that the step decodes are predicted."""
        assert view.decoding.order is not None
        predict = np.zeros(view.length, dtype=np.bool_)
        predict[view.decoding.order] = True
        return Plan(view.over_rows(self._rows(view)), predict, refreshes=self._is_refresh(view))

    def _is_refresh(self, view: View) -> bool:
        interval = self.refresh_interval
        return view.block_step == 0 or (interval is not None and view.block_step % interval == 0)

    def _rows(self, view: View) -> Mask:
        """Rows decoded by the last step and by this one, and windows around one of the two. All rows on a refresh."""
        if self._is_refresh(view):
            return view.everything
        assert view.decoding.order is not None
        previous: Mask = view.settled == view.step - 1
        rows = previous.copy()
        rows[view.decoding.order] = True
        noisy_before = view.settled >= view.step - 1  # before the last step's transfers
        centres = view.decoding.order if self.centre == "current" else np.flatnonzero(previous)
        for centre in centres.tolist():
            if self.extent == "noisy":
                self._add_window(rows, noisy_before, centre)
            else:
                rows[max(0, centre - -(-self.window // 2)) : centre + self.window // 2 + 1] = True
        return rows

    def _add_window(self, rows: Mask, noisy: Mask, centre: int) -> None:
        """Add the `window` positions nearest to `centre` to the mask `rows` that are `noisy` and not in it yet."""
        count = 0
        for distance in range(1, len(rows)):
            for position in (centre - distance, centre + distance):
                if count < self.window and 0 <= position < len(rows) and noisy[position] and not rows[position]:
                    rows[position] = True
                    count += 1
            if count == self.window:
                return


def _decoded_steps(view: View, shift: str) -> NDArray[np.int32]:
    """Return the step at whose end each row counts as decoded, int32 [T], if row p predicts position p + 1.

    The last row predicts nothing. Under "un" it counts as decoded at the end of step 0, because the authors' code rolls
    the array and so gives it the first token's step. Under "un_right" it has the step of the row before it, and under
    "right" the step of its own token.
    """
    settled = view.settled
    if shift == "un":
        return np.append(settled[1:], np.int32(0))
    if shift == "right":
        return settled
    steps = np.maximum(settled[:-1], settled[1:])
    return np.append(steps, steps[-1:])


def _uncached_after_prefill(view: View) -> Mask:
    """Return the rows that the prefill does not cache, bool [T]: the prompt's last and all after it."""
    return view.rows(view.prompt - 1, view.length)
