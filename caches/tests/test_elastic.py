from dataclasses import replace
from typing import Literal

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.plan.plan import Plan, View
from remask.policies import BiCache, parse
from remask.policies.base import RequestFacts
from remask_caches.elastic import ElasticCache, Watch
from tests.policies.views import Walk, no_table, positions, walks

LLADA = RequestFacts(layers=3, shift=0, ordered=False, canvas=12, response=8)


def rows_of(plan: Plan) -> set[int]:
    """The rows of a plan that has the same in all layers, and keeps what enters each but the first."""
    assert [span.layers for span in plan.spans] == [range(i, i + 1) for i in range(plan.layers)]
    for span in plan.spans:
        assert (span.frozen, span.pick, span.held) == (None, None, None)
        assert span.rows.tolist() == plan.spans[0].rows.tolist()
        assert span.save is None if span.layers.start == 0 else span.save is not None
        assert span.save is None or span.save.tolist() == span.rows.tolist()
    return positions(plan.spans[0].rows)


def tracking(view: View, tracked: list[int]) -> View:
    return replace(view, hook_output=np.array(tracked, dtype=np.int64))


@given(
    st.sampled_from([0, 1]).flatmap(lambda shift: walks(shift, layers=st.integers(1, 4))),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 3),
    st.data(),
)
def test_a_window_what_it_needs_what_was_decoded_and_what_is_tracked(
    walk: Walk, window: int, block_caching: bool, track_num: int, data: st.DataObject
) -> None:
    queries: Literal["window", "masks"] = "window" if block_caching or data.draw(st.booleans()) else "masks"
    policy = ElasticCache(window, 0.75, track_num, block_caching, queries=queries)
    for view in walk.views():
        settled = [p for p in range(walk.length) if not view.noisy[p]]
        tracked = data.draw(st.lists(st.sampled_from(settled), min_size=1, max_size=track_num * walk.layers))
        stops = [p for p in settled if p >= walk.prompt and view.noisy[walk.prompt : p].any()]
        stop = data.draw(st.sampled_from([None, *stops]))
        plan = policy.plan(replace(tracking(view, sorted({*tracked})), stop=stop))
        masked = [p for p in range(walk.length) if view.noisy[p] and (stop is None or p < stop)]
        first = masked[:window]
        settled = [p for p in range(walk.length) if p not in masked]
        if view.step == 0:
            assert rows_of(plan) == set(range(walk.length))
        else:
            computed = first if block_caching else masked
            decoded = walk.moved[view.step - 1]
            assert rows_of(plan) == {*computed, *(p - walk.shift for p in computed), *decoded, *tracked}
        assert positions(plan.predict) == set(first) & set(view.block)
        assert plan.transfer is None
        assert isinstance(plan.hook, Watch)
        assert plan.hook.threshold == 0.75
        assert positions(plan.hook.window) == set(first if queries == "window" else masked)
        assert positions(plan.hook.among) == set(settled), "masks that a stop cuts off are among them"
        assert positions(plan.hook.tracked) == (set(tracked) if view.step else set())
        assert (plan.hook.track_num, plan.hook.similarity) == (track_num, "heads")
        plan.check(walk.length)


def test_defaults_are_the_papers() -> None:
    assert parse("elastic-cache", None, no_table) == ElasticCache(
        window=16, threshold=0.9, track_num=1, block_caching=True, similarity="heads", queries="window"
    )


def test_all_masks_may_ask_only_where_they_are_computed() -> None:
    with pytest.raises(ConfigError, match=r"queries='masks' .* use block_caching=false, or queries='window'"):
        ElasticCache(queries="masks")


def test_a_window_beyond_the_response_is_refused() -> None:
    ElasticCache(window=8).check(LLADA)
    with pytest.raises(ConfigError, match="window=9 exceeds the response's 8 positions; use a window from 1 to 8"):
        ElasticCache(window=9).check(LLADA)


def test_an_order_drawn_beforehand_must_keep_to_the_window() -> None:
    ordered = replace(LLADA, ordered=True)
    ElasticCache(window=8).check(ordered)
    with pytest.raises(ConfigError, match=r"within a window of 4 positions.*use window=8, or a remasking other than"):
        ElasticCache(window=4).check(ordered)


def test_it_keeps_states_of_its_own_so_bicache_cannot_stand_before_it() -> None:
    with pytest.raises(ConfigError, match="bicache cannot wrap ElasticCache"):
        BiCache(inner=ElasticCache())
    with pytest.raises(ConfigError, match="bicache cannot wrap ElasticCache"):
        parse("bicache+elastic-cache", {"depth": 1}, no_table)
