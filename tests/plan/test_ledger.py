import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remask.errors import PlanError
from remask.plan.canvas import LEASED, UNWRITTEN, Ledger
from remask.plan.plan import Plan, PrefixHit
from remask.plan.spans import Mask, Span, TopRho
from tests.engine.own_policies import Revive


def rows(length: int, *positions: int) -> Mask:
    out = np.zeros(length, dtype=np.bool_)
    out[list(positions)] = True
    return out


def one(layers: int, live: Mask, frozen: Mask | None = None) -> Plan:
    return Plan((Span(range(layers), live, frozen),), predict=np.zeros_like(live))


def test_it_knows_when_each_row_was_written() -> None:
    ledger = Ledger(2, 3, None)
    ledger.enter(one(2, rows(3, 0, 1, 2)))
    ledger.enter(one(2, rows(3, 2)))
    ledger.enter(Plan((Span(range(1), rows(3, 1, 2)), Span(range(1, 2), rows(3, 1))), predict=rows(3)))
    assert ledger.step == 2
    assert ledger.written.tolist() == [[0, 2, 2], [0, 2, 1]]


def test_the_first_pass_must_write_all_that_it_attends_to() -> None:
    with pytest.raises(PlanError, match="layer 0 attends to position 1, whose K/V were never written"):
        Ledger(2, 3, None).enter(one(2, rows(3, 0, 2)))


def test_leased_rows_may_be_read_and_left_out() -> None:
    ledger = Ledger(2, 3, PrefixHit(2, 2))
    ledger.enter(one(2, rows(3, 2)))
    assert ledger.written.tolist() == [[LEASED, LEASED, 0]] * 2


def test_leased_rows_are_read_only() -> None:
    ledger = Ledger(2, 3, PrefixHit(2, 1))
    with pytest.raises(PlanError, match="leased rows are read-only"):
        ledger.enter(one(2, rows(3, 0, 1, 2)))
    assert ledger.step == -1
    assert (ledger.written[1] == UNWRITTEN).all()


def test_frozen_leased_rows_may_be_computed() -> None:
    ledger = Ledger(2, 3, PrefixHit(2, 1))
    plan = Plan(
        (Span(range(1), rows(3, 0, 1, 2), frozen=rows(3, 0, 1)), Span(range(1, 2), rows(3, 0, 1, 2))), predict=rows(3)
    )
    ledger.enter(plan)
    assert ledger.written.tolist() == [[LEASED, LEASED, 0], [0, 0, 0]]


def test_frozen_rows_that_were_never_written_are_not_there_to_be_read() -> None:
    with pytest.raises(PlanError, match="never written"):
        Ledger(1, 2, None).enter(one(1, rows(2, 0, 1), frozen=rows(2, 0)))


def test_rows_join_at_the_boundary_only() -> None:
    def join(at: int, position: int) -> Plan:
        lower, upper = rows(4, 2, 3), rows(4, 2, 3, position)
        return Plan((Span(range(at), lower), Span(range(at, 4), upper)), predict=rows(4))

    ledger = Ledger(4, 4, PrefixHit(2, 2))
    ledger.written[2:, :2] = 0  # as after a refresh
    with pytest.raises(PlanError, match="position 1 joins at layer 1, where no boundary state is stored"):
        ledger.enter(join(1, 1))
    ledger.enter(join(2, 1))
    plain = Ledger(4, 4, None)
    plain.enter(one(4, rows(4, 0, 1, 2, 3)))
    with pytest.raises(PlanError, match="position 0 joins at layer 2"):
        plain.enter(join(2, 0))


def test_rows_behind_the_prefix_have_no_boundary_state() -> None:
    ledger = Ledger(2, 4, PrefixHit(2, 1))
    ledger.written[:, 2:] = 0
    plan = Plan((Span(range(1), rows(4, 3)), Span(range(1, 2), rows(4, 0, 1, 2, 3))), predict=rows(4))
    with pytest.raises(PlanError, match="position 2 joins"):
        ledger.enter(plan)


@pytest.mark.parametrize(("layers", "length"), [(3, 4), (1, 4), (2, 5), (2, 3)])
def test_plans_of_another_shape_are_refused(layers: int, length: int) -> None:
    plan = one(layers, np.ones(length, dtype=np.bool_))
    with pytest.raises(PlanError):
        (Ledger(2, 4, None).enter if length == 4 else lambda plan: plan.check(4))(plan)


def refused(written: list[list[int]], prefix: PrefixHit | None, plan: Plan) -> bool:
    """The rules of `Ledger.enter`, one row and one layer at a time."""
    length = len(written[0])
    state = [list(row) for row in written]
    live = set(range(length))
    for span in plan.spans:
        here = {p for p in range(length) if span.rows[p]}
        for p in here - live:
            if prefix is None or span.layers.start != prefix.boundary or not prefix.rows(length)[p]:
                return True
        for layer in span.layers:
            for p in here:
                if span.frozen is not None and span.frozen[p]:
                    continue
                if state[layer][p] == LEASED and prefix is not None and not prefix.copied:
                    return True
                state[layer][p] = 99
            if UNWRITTEN in state[layer]:
                return True
        live = here
    return False


@st.composite
def histories(draw: st.DrawFn) -> tuple[int, int, PrefixHit | None, list[Plan]]:
    layers, length = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    prefix = None
    if draw(st.booleans()):
        prefix = PrefixHit(draw(st.integers(1, length)), draw(st.integers(1, layers)), 0, draw(st.booleans()))
    # Mostly live rows, or nearly every plan would be refused at once.
    bits = st.lists(st.sampled_from([True, True, False]), min_size=length, max_size=length)
    masks = bits.map(lambda values: np.array(values, dtype=np.bool_))
    history = []
    for _ in range(draw(st.integers(1, 5))):
        cut = draw(st.integers(0, layers))
        parts = [part for part in (range(cut), range(cut, layers)) if len(part)]
        spans = tuple(Span(part, draw(masks), frozen=draw(st.none() | masks)) for part in parts)
        history.append(Plan(spans, predict=np.zeros(length, dtype=np.bool_)))
    full = Plan((Span(range(layers), np.ones(length, dtype=np.bool_)),), predict=np.zeros(length, dtype=np.bool_))
    return layers, length, prefix, [full, *history] if prefix is None and draw(st.booleans()) else history


@settings(max_examples=200)
@given(histories())
def test_it_refuses_what_the_rules_refuse_and_then_records_nothing(
    history: tuple[int, int, PrefixHit | None, list[Plan]],
) -> None:
    layers, length, prefix, plans = history
    ledger = Ledger(layers, length, prefix)
    for plan in plans:
        before, step = ledger.written.copy(), ledger.step
        if refused(before.tolist(), prefix, plan):
            with pytest.raises(PlanError):
                ledger.enter(plan)
            assert np.array_equal(ledger.written, before)
            assert ledger.step == step
            continue
        ledger.enter(plan)
        assert ledger.step == step + 1
        for span in plan.spans:
            wrote = span.rows if span.frozen is None else span.rows & ~span.frozen
            for layer in span.layers:
                expected = np.where(wrote, ledger.step, before[layer])
                assert ledger.written[layer].tolist() == expected.tolist()


def limited(live: Mask, *sees: int) -> Plan:
    return Plan((Span(range(1), live),), predict=np.zeros_like(live), sees=np.array(sees))


def test_what_no_live_row_attends_to_need_not_be_written() -> None:
    ledger = Ledger(1, 6, None)
    ledger.enter(limited(rows(6, 0, 1), 2, 2, 4, 4, 6, 6))
    with pytest.raises(PlanError, match="layer 0 attends to position 2, whose K/V were never written"):
        ledger.enter(limited(rows(6, 3), 2, 2, 4, 4, 6, 6))
    ledger.enter(limited(rows(6, 2, 3), 2, 2, 4, 4, 6, 6))
    assert ledger.written.tolist() == [[0, 0, 1, 1, UNWRITTEN, UNWRITTEN]]
    with pytest.raises(PlanError, match="position 4"):
        ledger.enter(limited(rows(6, 5), 2, 2, 4, 4, 6, 6))
    ledger.enter(limited(rows(6), 2, 2, 4, 4, 6, 6))


def test_limits_are_an_entry_a_position() -> None:
    with pytest.raises(PlanError, match=r"an array of shape \(5,\) for a canvas of 6 positions"):
        limited(rows(6, 0, 1), 2, 2, 4, 4, 6).check(6)


def test_leased_pages_are_attended_to_in_front_of_own_rows() -> None:
    ledger = Ledger(1, 6, PrefixHit(2, 1))
    ledger.enter(limited(rows(6, 2, 3), 2, 2, 4, 4, 6, 6))
    assert ledger.written.tolist() == [[LEASED, LEASED, 0, 0, UNWRITTEN, UNWRITTEN]]


def layered(live: Mask, hook: Revive | None = None, keep: bool = True) -> Plan:
    spans = tuple(Span(range(i, i + 1), live, save=live if i and keep else None) for i in range(3))
    return Plan(spans, predict=np.zeros_like(live), hook=hook)


def test_rows_restart_where_their_states_are_kept() -> None:
    everything, few = rows(4, 0, 1, 2, 3), rows(4, 1, 3)
    ledger = Ledger(3, 4, None)
    ledger.enter(layered(everything))
    assert ledger.saved.tolist() == [[False] * 4, [True] * 4, [True] * 4]
    ledger.enter(layered(few).refreshed(2))
    assert ledger.written.tolist() == [[0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 1, 1]]
    forgetful = Ledger(3, 4, None)
    forgetful.enter(layered(everything, keep=False))
    with pytest.raises(PlanError, match="position 0 joins at layer 2, where no boundary state is stored or kept"):
        forgetful.enter(layered(few).refreshed(2))


def test_what_may_become_live_must_be_fit_to_restart() -> None:
    hook = Revive(rows(4, 3), 1)
    ledger = Ledger(3, 4, None)
    with pytest.raises(PlanError, match="may make all rows live, but of position 0 no input to layer 1 is kept"):
        ledger.enter(layered(rows(4, 0, 1, 2, 3), hook, keep=False))
    assert ledger.step == -1
    ledger.enter(layered(rows(4, 0, 1, 2, 3), hook))
    ledger.enter(layered(rows(4, 3), hook, keep=False))  # older states will do


def test_a_plan_that_changed_while_it_ran_takes_the_place_of_the_first() -> None:
    ledger = Ledger(3, 4, None)
    ledger.enter(layered(rows(4, 0, 1, 2, 3)))
    begun = layered(rows(4, 1, 3), Revive(rows(4, 3), 1))
    ledger.enter(begun)
    ledger.revise(begun.refreshed(1))
    assert ledger.step == 1
    assert ledger.written.tolist() == [[0, 1, 0, 1], [1, 1, 1, 1], [1, 1, 1, 1]]
    ledger.revise(begun)
    assert ledger.written.tolist() == [[0, 1, 0, 1]] * 3


@pytest.mark.parametrize("times", [1, 2])
def test_a_bad_revision_records_nothing(times: int) -> None:
    """Also where the last plan repeats the spans of the one before, which is entered without being looked at."""
    ledger = Ledger(3, 4, None)
    ledger.enter(layered(rows(4, 0, 1, 2, 3), keep=False))
    begun = Plan((Span(range(1), rows(4, 1)), Span(range(1, 3), rows(4, 1), pick=TopRho(rows(4, 1), 1))), rows(4))
    for _ in range(times):
        ledger.enter(begun)
    written, kept = ledger.written.copy(), ledger.saved.copy()
    with pytest.raises(PlanError, match="joins at layer 2"):
        ledger.revise(layered(rows(4, 1)).refreshed(2))
    assert ledger.step == times
    assert np.array_equal(ledger.written, written)
    assert np.array_equal(ledger.saved, kept)
    ledger.revise(begun.with_choice(1, rows(4, 1)))
    assert ledger.step == times
    assert ledger.written[:, 1].tolist() == [times, times, 0]


def test_a_plan_that_cannot_change_is_not_revised() -> None:
    ledger = Ledger(1, 2, None)
    with pytest.raises(PlanError, match="none can take its place"):
        ledger.revise(one(1, rows(2, 0, 1)))
    ledger.enter(one(1, rows(2, 0, 1)))
    with pytest.raises(PlanError, match="neither picks rows nor has a hook"):
        ledger.revise(one(1, rows(2, 0, 1)))
    assert ledger.step == 0
