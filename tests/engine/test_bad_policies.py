"""A policy that plans nonsense ends its own request with "error", and nobody else's."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest

from remask.plan.plan import Plan, View
from remask.plan.spans import Span
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from tests.engine.support import LAYERS, Work, alone, make_engine, outcome, prompt_of, request, run

Planner = Callable[[View], Plan]


@dataclass(frozen=True)
class Bad(CachePolicy):
    """Plans as `Reuse` does, until step 2: from then on as told. `layers` is how many read the prefix."""

    planner: Planner
    layers: int = LAYERS

    def boundary(self, prefix_length: int, canvas_length: int, layers: int) -> int:  # noqa: ARG002
        return self.layers

    def plan(self, view: View) -> Plan:
        if view.step >= 2:
            return self.planner(view)
        return BiCache(depth=self.layers, refresh_interval=1).plan(view)


def whole(view: View) -> Plan:
    return Reuse().plan(view)


def predicting_rows_are_dead(view: View) -> Plan:
    rows = view.everything
    rows[: view.prompt] = False
    rows[view.block.start :] = False
    return Plan((Span(range(view.layers), rows),), view.candidates)


def predicting_what_is_settled(view: View) -> Plan:
    predict = view.candidates
    predict[view.prompt - 1] = True
    return replace(whole(view), predict=predict)


def predicting_nothing_while_saving(view: View) -> Plan:
    first, second = whole(view).cut(1).spans
    return whole(view).over((first, replace(second, save=second.rows)))


def joining_in_mid_air(view: View) -> Plan:
    plan = whole(view).cut(1)
    first, second = plan.spans
    return plan.over((first, replace(second, rows=view.everything)))


def joining_one_by_one(view: View) -> Plan:
    """Rows 0 and 2 of the prefix rejoin at the boundary, row 1 stays out."""
    assert view.prefix is not None
    plan = whole(view).cut(view.prefix.boundary)
    first, second = plan.spans
    rows = second.rows.copy()
    rows[[0, 2]] = True
    return plan.over((first, replace(second, rows=rows)))


def raising(view: View) -> Plan:
    raise RuntimeError("this policy has a defect")


def spanning(*layers: tuple[int, int], more: int = 0) -> Planner:
    """Spans of these layers, the last of which are counted from the end, over the rows of a canvas of `more` tokens."""

    def planner(view: View) -> Plan:
        rows = np.ones(view.length + more, dtype=np.bool_)
        return Plan([Span(range(start, view.layers + stop), rows) for start, stop in layers], view.candidates)

    return planner


def frozen_of_another_shape(view: View) -> Plan:
    (span,) = whole(view).spans
    return whole(view).over([replace(span, frozen=np.zeros(view.length + 1, dtype=np.bool_))])


NONSENSE: dict[str, Planner] = {
    "leased rows written": Dense().plan,
    "too few layers": spanning((0, -1)),
    "too many layers": spanning((0, 1)),
    "no spans": spanning(),
    "a gap": spanning((0, 1 - LAYERS), (2, 0)),
    "rows of another canvas": spanning((0, 0), more=1),
    "predicting rows are dead": predicting_rows_are_dead,
    "predicting another canvas": lambda view: replace(whole(view), predict=np.ones(view.length + 3, dtype=np.bool_)),
    "predicting what is settled": predicting_what_is_settled,
    "predicting nothing while saving": predicting_nothing_while_saving,
    "joining in mid-air": joining_in_mid_air,
    "raising": raising,
    "frozen of another shape": frozen_of_another_shape,
    "transferring on another canvas": lambda view: replace(whole(view), transfer=np.ones(2, dtype=np.bool_)),
}


@pytest.mark.few(5)
@pytest.mark.parametrize("planner", NONSENSE.values(), ids=NONSENSE)
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_nonsense_ends_its_own_request_only(planner: Planner, family: str) -> None:
    prompt = prompt_of(8)
    good = [Work(request("reuse", prompt, 6), Reuse()), Work(request("bicache", prompt, 6), BiCache(depth=2))]
    bad = Work(request("bad", prompt, 6), Bad(planner))
    results = run(make_engine(family), [good[0], bad, good[1]], limit=100)
    assert results["bad"].finish_reason == "error"
    assert results["bad"].error
    assert results["bad"].token_ids == ()
    for item in good:
        assert outcome(results[item.request.id]) == outcome(alone(item, family))


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_rows_that_join_one_by_one_hurt_nobody_else(family: str) -> None:
    prompt = prompt_of(8)
    good = Work(request("good", prompt, 6), Reuse())
    bad = Work(request("bad", prompt, 6), Bad(joining_one_by_one, layers=2))
    results = run(make_engine(family), [good, bad], limit=100)
    assert outcome(results["good"]) == outcome(alone(good, family))
    assert results["bad"].finish_reason in ("error", "length")


def test_a_plan_may_restrict_what_is_committed() -> None:
    def leftmost_only(view: View) -> Plan:
        commit = np.zeros(view.length, dtype=np.bool_)
        commit[np.flatnonzero(view.candidates)[:1]] = True
        return replace(whole(view), transfer=commit)

    result = alone(Work(request("r", 8, 6), Bad(leftmost_only)))
    assert result.finish_reason == "length"
    late = [item.positions for item in result.trace if item.step >= 2]
    assert late == sorted(late)
    assert len(result.token_ids) == 8


def test_a_pass_that_only_fills_caches_transfers_nothing() -> None:
    def fill_on_2(view: View) -> Plan:
        fills = view.step == 2 and view.pass_index == 0
        return replace(whole(view), transfer=view.everything & False if fills else None)

    result = alone(Work(request("r", 8, 6, threshold=0.0, block_length=2), Bad(fill_on_2)))
    assert [item.step for item in result.trace] == [0, 1, 2, 3]
    assert result.usage.forwards == 5


def test_a_second_fill_pass_in_one_step_is_a_defect() -> None:
    result = alone(Work(request("r", 8, 6), Bad(lambda view: replace(whole(view), transfer=view.everything & False))))
    assert result.finish_reason == "error"
    assert result.error is not None
    assert "fill" in result.error


def test_predicting_nothing_is_a_pass_without_logits() -> None:
    def blind_on_2(view: View) -> Plan:
        return replace(whole(view), predict=view.candidates & (view.step != 2))

    result = alone(Work(request("r", 8, 6, threshold=0.0, block_length=2), Bad(blind_on_2)))
    assert [item.step for item in result.trace] == [0, 1, 3, 4]
