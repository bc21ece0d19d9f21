"""The ledger against a replay of the same rules, one row and one layer at a time, on random histories of plans.

Plans come again with the same spans, which the ledger enters without a look at them, those that may change while
they run are revised, and some are taken back.
"""

from copy import deepcopy
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remask.errors import PlanError
from remask.plan.canvas import LEASED, UNWRITTEN, Ledger
from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Mask, Span, Spans, TopRho
from tests.engine.own_policies import Revive


class RefusedError(Exception):
    """A rule was broken."""


class Replay:
    """What each row of each layer was written at, and whose inputs are kept."""

    def __init__(self, layers: int, length: int, prefix: PrefixHit | None) -> None:
        self.length, self.prefix, self.step = length, prefix, -1
        self.lent = set(range(0 if prefix is None else prefix.length))
        self.written = [[UNWRITTEN] * length for _ in range(layers)]
        self.kept: list[set[int]] = [set() for _ in range(layers)]
        for layer in range(0 if prefix is None else prefix.layers):
            for row in self.lent:
                self.written[layer][row] = LEASED

    def entered(self, plan: Plan) -> "Replay":
        """The state after `plan`. Raises `RefusedError`."""
        new = deepcopy(self)
        new.step += 1
        live = set(range(self.length))
        for span in plan.spans:
            here = ones(span.rows)
            for layer in span.layers:
                self._check_joining(here - live, layer)
                if layer == span.layers.start and span.save is not None:
                    new.kept[layer] |= ones(span.save)
                new._write(layer, span, plan)
                live = here
        if plan.hook is not None and any(len(kept) < self.length for kept in new.kept[1:]):
            raise RefusedError
        return new

    def _check_joining(self, rows: set[int], layer: int) -> None:
        lent = self.prefix is not None and layer == self.prefix.boundary
        for row in rows:
            if row not in self.kept[layer] and not (lent and row in self.lent):
                raise RefusedError

    def _write(self, layer: int, span: Span, plan: Plan) -> None:
        held = set() if span.held is None else ones(span.held)
        among = set() if span.pick is None else ones(span.pick.candidates)
        frozen = set() if span.frozen is None else ones(span.frozen)
        attending = set()
        for row in ones(span.rows):
            if row in held or row in among:
                if self.written[layer][row] < 0:
                    raise RefusedError
                if span.pick is not None:
                    attending.add(row)
                continue
            attending.add(row)
            if row in frozen:
                continue
            if self.written[layer][row] == LEASED and self.prefix is not None and not self.prefix.copied:
                raise RefusedError
            self.written[layer][row] = self.step
        seen = self.length
        if plan.sees is not None:
            seen = max((int(plan.sees[row]) for row in attending), default=0)
        if UNWRITTEN in self.written[layer][:seen]:
            raise RefusedError


def ones(mask: Mask) -> set[int]:
    return set(np.flatnonzero(mask).tolist())


LAYERS, LENGTH = 3, 5
often = st.lists(st.sampled_from([True, True, True, False]), min_size=LENGTH, max_size=LENGTH)
masks = often.map(lambda bits: np.array(bits, dtype=np.bool_))


@st.composite
def some_spans(draw: st.DrawFn) -> Spans:
    """Any spans, most of them nearly whole, or nearly every plan would be refused at once."""
    cuts = draw(st.sampled_from([(0, 3), (0, 1, 3), (0, 2, 3), (0, 1, 2, 3)]))
    spans = []
    whole = draw(st.booleans())
    for start, stop in pairwise(cuts):
        rows = np.ones(LENGTH, dtype=np.bool_) if whole else draw(masks)
        kind = draw(st.sampled_from(["plain", "plain", "frozen", "held", "pick"]))
        save = draw(st.sampled_from([None, rows])) if start else None
        spans.append(
            Span(
                range(start, stop),
                rows,
                frozen=draw(masks) if kind == "frozen" else None,
                save=save,
                pick=TopRho(rows & draw(masks), 0) if kind == "pick" else None,
                held=draw(masks) if kind == "held" else None,
            )
        )
    return Spans(spans)


SEES = (None, np.array([2, 2, 3, 5, 5]), np.array([5] * 5), np.array([1, 2, 3, 4, 5]))
SAVED = Spans(
    Span(
        range(layer, layer + 1),
        np.ones(LENGTH, dtype=np.bool_),
        save=np.ones(LENGTH, dtype=np.bool_) if layer else None,
    )
    for layer in range(LAYERS)
)
NOTHING, ONE = np.zeros(LENGTH, dtype=np.bool_), np.arange(LENGTH) == 0


@settings(max_examples=200)
@given(st.data())
def test_it_is_what_a_replay_says(data: st.DataObject) -> None:
    hits = [PrefixHit(2, 1), PrefixHit(3, 2), PrefixHit(2, 1, 2), PrefixHit(3, 3), PrefixHit(2, 3, copied=True)]
    prefix = data.draw(st.sampled_from([None, None, *hits]))
    ledger, replay = Ledger(LAYERS, LENGTH, prefix), Replay(LAYERS, LENGTH, prefix)
    known = [SAVED, *data.draw(st.lists(some_spans(), min_size=1, max_size=3))]
    before: Replay | None = None
    plan: Plan | None = None
    for _ in range(data.draw(st.integers(1, 10))):
        spans = data.draw(st.sampled_from(known))
        sees = SEES[data.draw(st.sampled_from([0, 0, 0, 1, 2, 3]))]
        layered = len(spans) == LAYERS
        hook = Revive(ONE, 1) if layered and data.draw(st.booleans()) else None
        revises = plan is not None and plan.may_change and data.draw(st.booleans())
        start = before if revises and before is not None else replay
        plan_now = Plan(spans, NOTHING, sees=sees, hook=hook)
        act = ledger.revise if revises else ledger.enter
        repeats = plan is not None and plan.spans is plan_now.spans and plan.sees is sees
        rolled_back = repeats and not revises and hook is None and data.draw(st.booleans())
        try:
            after = start.entered(plan_now)
        except RefusedError:
            with pytest.raises(PlanError):
                act(plan_now)
        else:
            if rolled_back:
                ledger.enter(plan_now)
                if data.draw(st.booleans()):
                    assert ledger.written.tolist() == after.written
                ledger.roll_back()
                plan = None
            else:
                act(plan_now)
                before, replay, plan = start, after, plan_now
        assert ledger.step == replay.step
        assert [ones(kept) for kept in ledger.saved] == replay.kept
        if data.draw(st.booleans()):  # looking at it must not matter, nor must leaving it
            assert ledger.written.tolist() == replay.written
    assert ledger.written.tolist() == replay.written
