from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import PlanError
from remask.plan.plan import NEVER, Plan, PrefixHit, View
from remask.plan.spans import Mask, Span, SpanMemo, Spans, TopRho, crossing
from tests.engine.own_policies import Revive

LENGTH = 6


def mask(*positions: int) -> Mask:
    out = np.zeros(LENGTH, dtype=np.bool_)
    out[list(positions)] = True
    return out


@st.composite
def plans(draw: st.DrawFn) -> Plan:
    widths = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rows = st.lists(st.booleans(), min_size=LENGTH, max_size=LENGTH).map(lambda bits: np.array(bits, dtype=np.bool_))
    spans, at = [], 0
    for width in widths:
        optional = st.none() | rows
        spans.append(Span(range(at, at + width), draw(rows), frozen=draw(optional), save=draw(optional)))
        at += width
    return Plan(tuple(spans), predict=draw(rows), transfer=draw(st.none() | rows))


@pytest.mark.parametrize(
    "layers",
    [
        [range(1, 3)],
        [range(2), range(3, 4)],
        [range(2), range(1, 4)],
        [range(2), range(2)],
        [range(0, 4, 2)],
        [range(2), range(2, 2)],
        [range(0)],
        [range(3, 0, -1)],
    ],
    ids=repr,
)
def test_spans_must_cover_the_layers_in_order(layers: list[range]) -> None:
    with pytest.raises(PlanError, match="cover the layers in order"):
        Plan(tuple(Span(part, mask(0)) for part in layers), predict=mask())


def test_a_plan_without_spans_is_refused() -> None:
    with pytest.raises(PlanError):
        Plan((), predict=mask())


def test_cost_counts_live_rows_times_layers() -> None:
    plan = Plan((Span(range(3), mask(0, 1, 5)), Span(range(3, 7), mask(2))), predict=mask(2))
    assert plan.cost == 3 * 3 + 1 * 4
    assert plan.layers == 7


def test_frozen_rows_are_computed_and_so_cost() -> None:
    assert Span(range(2), mask(0, 1, 2), frozen=mask(0, 1)).cost == 6


@given(plans(), st.data())
def test_cut_changes_nothing_but_the_boundary(plan: Plan, data: st.DataObject) -> None:
    at = data.draw(st.integers(0, plan.layers))
    cut = plan.cut(at)
    assert cut.cost == plan.cost
    assert cut.layers == plan.layers
    assert cut.predict is plan.predict
    assert cut.transfer is plan.transfer
    assert at in (0, plan.layers) or at in [span.layers.start for span in cut.spans]
    for layer in range(plan.layers):
        old = next(span for span in plan.spans if layer in span.layers)
        new = next(span for span in cut.spans if layer in span.layers)
        assert new.rows is old.rows
        assert new.frozen is old.frozen
        # What is saved is saved once, where it was.
        kept_old = old.save if old.layers.start == layer else None
        kept_new = new.save if new.layers.start == layer else None
        assert kept_new is kept_old
    starts = {span.layers.start for span in plan.spans}
    assert {span.layers.start for span in cut.spans} == starts | ({at} - {plan.layers})


@pytest.mark.parametrize("at", [-1, 5, 100])
def test_cut_outside_the_layers_is_refused(at: int) -> None:
    with pytest.raises(PlanError, match=f"cannot cut a plan of 4 layers at layer {at}:"):
        Plan((Span(range(4), mask(0)),), predict=mask()).cut(at)


def test_map_applies_to_every_span_and_checks_the_result() -> None:
    plan = Plan((Span(range(2), mask(0)), Span(range(2, 4), mask(1))), predict=mask())
    widened = plan.over(plan.spans.map(lambda span: Span(span.layers, span.rows | mask(5))))
    assert [span.rows.tolist() for span in widened.spans] == [mask(0, 5).tolist(), mask(1, 5).tolist()]
    with pytest.raises(PlanError):
        plan.over(plan.spans.map(lambda span: Span(range(span.layers.start, span.layers.stop + 1), span.rows)))


def test_a_view_names_the_noisy_positions_of_its_block() -> None:
    noisy = mask(2, 3, 5)
    settled = np.where(noisy, NEVER, 0).astype(np.int32)
    view = View(
        layers=2,
        step=0,
        block_step=0,
        block=range(2, 4),
        prompt=2,
        noisy=noisy,
        settled=settled,
        prefix=PrefixHit(1, 1),
    )
    assert view.length == LENGTH
    assert view.candidates.tolist() == mask(2, 3).tolist()
    assert view.everything.all()
    view.everything[:] = False
    view.candidates[:] = True
    assert view.everything.all()
    assert noisy.tolist() == mask(2, 3, 5).tolist()


def test_canvases_of_one_length_have_the_same_spans() -> None:
    noisy = mask(2, 3)
    first, second, longer = (
        View(3, 0, 0, range(2, 4), 2, flags, flags.astype(np.int32), None)
        for flags in (noisy, ~noisy, np.append(noisy, False))
    )
    spans = first.over(2, 4)
    assert spans is second.over(2, 4)
    assert spans[0].rows.tolist() == mask(2, 3).tolist()
    assert first.over(2, 5)[0].rows.tolist() == mask(2, 3, 4).tolist()
    assert longer.over(2, 4)[0].rows.tolist() == [*mask(2, 3).tolist(), False]
    assert replace(second, layers=2, memo=SpanMemo()).over(2, 4).layers == 2
    with pytest.raises(ValueError, match="read-only"):
        spans[0].rows[0] = True


@given(plans(), st.data())
def test_rows_cross_from_one_span_to_the_next(plan: Plan, data: st.DataObject) -> None:
    before, after = data.draw(st.sampled_from(plan.spans)), data.draw(st.sampled_from(plan.spans))
    old, new = ([row for row in range(LENGTH) if span.rows[row]] for span in (before, after))
    crossed = crossing(before, after)
    assert [old[number] for number in crossed.source] == [row for row in old if row in new]
    assert [new[number] for number in crossed.target] == [row for row in new if row in old]
    assert [new[number] for number in crossed.joining] == [row for row in new if row not in old]
    assert crossed.joining_positions.tolist() == [row for row in new if row not in old]


@given(plans())
def test_written_rows_are_numbered_among_the_computed_ones(plan: Plan) -> None:
    for span in plan.spans:
        computed = [row for row in range(LENGTH) if span.computed[row]]
        frozen = mask() if span.frozen is None else span.frozen
        assert [computed[number] for number in span.written_rows] == [row for row in computed if not frozen[row]]


def test_spans_stay_the_same_object() -> None:
    spans = layered(mask(1)).spans
    assert Spans(spans) is spans


def layered(rows: Mask, layers: int = 3, hook: Revive | None = None) -> Plan:
    spans = tuple(Span(range(i, i + 1), rows, save=rows if i else None) for i in range(layers))
    return Plan(spans, predict=mask(4), hook=hook)


@pytest.mark.parametrize("at", [1, 2])
def test_refreshed_plans_are_whole_from_a_layer_on(at: int) -> None:
    plan = layered(mask(1, 4, 5), hook=Revive(mask(4, 5), at))
    refreshed = plan.refreshed(at)
    assert refreshed.spans[:at] == plan.spans[:at]
    assert all(span.rows.all() and span.save is not None and span.save.all() for span in refreshed.spans[at:])
    assert (refreshed.predict, refreshed.hook) == (plan.predict, plan.hook)
    assert refreshed.cost == at * 3 + (3 - at) * LENGTH
    assert plan.cost == 9
    refreshed.check(LENGTH)


def test_a_choice_that_was_made_takes_the_place_of_the_pick() -> None:
    pick = TopRho(mask(2, 3, 4, 5), 2)
    plan = Plan(
        (Span(range(1), mask(0, 2, 3, 4, 5)), Span(range(1, 4), mask(0, 2, 3, 4, 5), pick=pick, held=mask(0))), mask(4)
    )
    chosen = plan.with_choice(2, mask(3, 5))
    assert [(span.layers, span.pick) for span in chosen.spans] == [
        (range(1), None),
        (range(1, 2), pick),
        (range(2, 3), None),
        (range(3, 4), pick),
    ]
    assert chosen.spans[2].computed.tolist() == mask(3, 5).tolist()
    assert chosen.spans[2].held is not None
    assert chosen.spans[2].held.tolist() == mask(0, 2, 4).tolist()
    assert chosen.cost == plan.cost
    assert all(span.rows.tolist() == mask(0, 2, 3, 4, 5).tolist() for span in chosen.spans)
    for unchanged in (plan.with_choice(0, mask(2)), chosen.with_choice(2, mask(2))):
        assert unchanged.spans[-1].pick is pick
        assert unchanged.cost == plan.cost


def test_masks_of_a_hook_are_those_of_the_canvas() -> None:
    layered(mask(4), hook=Revive(mask(4), None)).check(LENGTH)
    with pytest.raises(PlanError, match="for a canvas of 6 positions"):
        layered(mask(4), hook=Revive(mask(4)[1:], None)).check(LENGTH)


def test_tokens_are_the_state_that_enters_the_first_layer() -> None:
    with pytest.raises(PlanError, match="tokens enter the first layer"):
        Plan((Span(range(2), mask(4), save=mask(4)),), predict=mask(4)).check(LENGTH)


def test_of_a_plan_that_is_cut_nothing_but_the_lead_is_left() -> None:
    """By hand, on six positions of which four are left."""
    pick = TopRho(mask(2, 3, 4, 5), 3)
    spans = Spans(
        [
            Span(range(1), mask(0, 3, 5)),
            Span(range(1, 2), mask(0, 1, 2, 3, 4, 5), mask(0, 5), mask(1, 4), pick, mask(1)),
        ]
    )
    sees, memo = np.full(6, 4), SpanMemo()
    hook = Revive(mask(3, 4), 1)
    cut = Plan(spans, mask(3, 5), mask(5), hook=hook).below(sees, memo)
    first, second = cut.spans
    assert first.rows.tolist() == mask(0, 3).tolist()
    assert second.rows.tolist() == mask(0, 1, 2, 3).tolist()
    assert second.frozen is not None
    assert second.save is not None
    assert second.pick is not None
    assert second.held is not None
    assert [each.tolist() for each in (second.frozen, second.save, second.held)] == [
        mask(0).tolist(),
        mask(1).tolist(),
        mask(1).tolist(),
    ]
    assert (second.pick.candidates.tolist(), second.pick.count) == (mask(2, 3).tolist(), 2)
    assert (cut.predict.tolist(), cut.sees is sees) == (mask(3).tolist(), True)
    assert cut.transfer is not None
    assert not cut.transfer.any()
    assert isinstance(cut.hook, Revive)
    assert cut.hook.rows.tolist() == mask(3).tolist()
    assert Plan(spans, mask(3)).below(sees, memo).spans is cut.spans, "so that nothing is packed anew"
    assert cut.refreshed(1).spans[1].rows.tolist() == mask(0, 1, 2, 3).tolist(), "a refresh leaves the tail out too"
