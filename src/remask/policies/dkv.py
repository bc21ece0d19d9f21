"""dKV-Cache (arXiv 2505.15781): a token's K/V are cached one step after it is decoded."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from remask.core.checks import one_of, whole
from remask.core.plan import Mask, Plan, View
from remask.errors import ConfigError
from remask.policies.base import ALWAYS, CachePolicy, RequestFacts

SHIFTS = ("un", "un_right")


@dataclass(frozen=True, slots=True)
class _Delayed(CachePolicy):
    """The base of the variants. A pass that transfers nothing still caches what the last step decoded."""

    def plan(self, view: View) -> Plan:
        """One span over the rows that are not cached."""
        return Plan(view.over_rows(self._rows(view)), view.candidates, refreshes=self._renews(view))

    @abstractmethod
    def _renews(self, view: View) -> bool:
        """Whether rows are computed that are read from the cache at other times."""

    @abstractmethod
    def _rows(self, view: View) -> Mask:
        """Rows that are computed."""


@dataclass(frozen=True, slots=True)
class DkvDecode(_Delayed):
    """`dkv-decode`: noisy rows, and those decoded one step ago; everything every `refresh_interval` steps.

    On LLaDA every block starts anew: its first two passes are full, and steps are counted within it. On Dream steps
    are counted over the request, and a row counts as decoded when the position that it predicts is (`shift="un"`), or
    when its own position is too ("un_right").
    """

    refresh_interval: int | None = 8
    shift: Literal["un", "un_right"] | None = None

    def __post_init__(self) -> None:
        whole("refresh_interval", self.refresh_interval, low=1, optional=True)
        shift: object = self.shift
        if shift == "right":
            raise ConfigError(
                "shift='right' needs logits of rows that were left out, so the authors' code yields NaN; use 'un' "
                "or 'un_right'"
            )
        if shift is not None:
            one_of("shift", shift, SHIFTS)

    def check(self, facts: RequestFacts) -> None:
        """Refuses `shift` on a model whose rows predict their own position."""
        if self.shift is not None and not facts.shift:
            raise ConfigError(f"shift={self.shift!r} is for models whose rows predict the next position (Dream)")

    def _rows(self, view: View) -> Mask:
        return view.everything if self._renews(view) else self._uncached(view)

    def _renews(self, view: View) -> bool:
        clock = view.step if view.shift else view.block_step
        due = clock == 0 if self.refresh_interval is None else clock % self.refresh_interval == 0
        return due or (clock == 1 and not view.shift)

    def _uncached(self, view: View) -> Mask:
        settled = _shifted(view, self.shift or "un") if view.shift else view.settled
        rows: Mask = settled > view.step - 2
        return rows


@dataclass(frozen=True, slots=True)
class DkvPrefill(_Delayed):
    """`dkv-prefill`: the prompt but its last row once, the rest in every step. Decoded tokens are never cached."""

    def repeats(self, view: View) -> int:
        """All steps but the first are the same."""
        return ALWAYS if view.step > 0 else 0

    def _rows(self, view: View) -> Mask:
        return view.everything if self._renews(view) else _after_prefill(view)

    def _renews(self, view: View) -> bool:
        return view.step == 0


@dataclass(frozen=True, slots=True)
class DkvPd(DkvDecode):
    """`dkv-pd`: the prompt as in `dkv-prefill`, decoded tokens as in `dkv-decode`; refreshes leave the prompt out."""

    def _rows(self, view: View) -> Mask:
        if view.step == 0:
            return view.everything
        return DkvDecode._rows(self, view) & _after_prefill(view)


@dataclass(frozen=True, slots=True)
class DkvGreedy(_Delayed):
    """`dkv-greedy`: rows decoded by this step and the last, and a window around the former; everything on refreshes.

    It needs a decoding order that is known before the pass. Steps are counted within the block.

    Attributes:
        refresh_interval: everything is computed every so many steps.
        window: noisy rows computed beside each position that this step decodes.
    """

    refresh_interval: int | None = 8
    window: int = 4

    def __post_init__(self) -> None:
        whole("refresh_interval", self.refresh_interval, low=1, optional=True)
        whole("window", self.window, low=0)

    def check(self, facts: RequestFacts) -> None:
        """Refuses samplers that choose after the pass, rows that predict another position, and too wide a window."""
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
        """As described above; only the positions that the step decodes are predicted."""
        assert view.decoding.order is not None
        predict = np.zeros(view.length, dtype=np.bool_)
        predict[view.decoding.order] = True
        return Plan(view.over_rows(self._rows(view)), predict, refreshes=self._renews(view))

    def _renews(self, view: View) -> bool:
        interval = self.refresh_interval
        return view.block_step == 0 or (interval is not None and view.block_step % interval == 0)

    def _rows(self, view: View) -> Mask:
        if self._renews(view):
            return view.everything
        assert view.decoding.order is not None
        rows = np.zeros(view.length, dtype=np.bool_)
        rows[view.settled == view.step - 1] = True
        rows[view.decoding.order] = True
        reachable = view.settled >= view.step - 1  # noisy before the last step's transfers
        for position in view.decoding.order.tolist():
            self._add_window(rows, reachable, position)
        return rows

    def _add_window(self, rows: Mask, reachable: Mask, position: int) -> None:
        added = 0
        for distance in range(1, len(rows)):
            for place in (position - distance, position + distance):
                if added < self.window and 0 <= place < len(rows) and reachable[place] and not rows[place]:
                    rows[place] = True
                    added += 1
            if added == self.window:
                return


def _shifted(view: View, shift: str) -> NDArray[np.int32]:
    """Step at whose end a row counts as decoded, on a model whose row p predicts position p + 1.

    The last row predicts nothing: under "un" it counts from the end of step 0 on, as the original's roll makes it
    follow the first token; under "un_right" it follows the row before it.
    """
    settled = view.settled
    if shift == "un":
        return np.append(settled[1:], np.int32(0))
    later = np.maximum(settled[:-1], settled[1:])
    return np.append(later, later[-1:])


def _after_prefill(view: View) -> Mask:
    """Rows that the prefill cache does not hold: the prompt's last and all after it."""
    return view.rows(view.prompt - 1, view.length)
