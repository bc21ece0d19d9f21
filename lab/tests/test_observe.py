"""Observers of an engine: any number at a time, and nothing is left of one that was detached."""

from collections.abc import Sequence

import pytest
from torch import Tensor

from remask.engine.observer import EngineObserver
from remask.model.attention import Attention, Sink
from remask.model.work_list import WorkList
from remask.policies import Dense
from remask_lab.observe import (
    CacheMeter,
    CostMeter,
    ObservedPass,
    observe_cache,
    observe_costs,
    observe_passes,
    replace_attention,
)
from tests.engine.support import Work, alone, make_engine, outcome, request, run


class Counted:
    """Counts the calls of an attention."""

    def __init__(self, inner: Attention) -> None:
        self.inner, self.calls = inner, 0

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        """As ever."""
        self.calls += 1
        return self.inner(q, k, v, work, sink)


def test_several_observers_see_the_same_passes() -> None:
    engine, item, seen = make_engine(overlap=False), Work(request(), Dense()), list[int]()
    cache, costs = CacheMeter(), CostMeter(engine.model.config.widths(8))

    def note(passes: Sequence[ObservedPass]) -> None:
        seen.extend(each.step for each in passes)

    attached = [observe_passes(engine, note), observe_passes(engine, note)]
    attached += [observe_cache(engine, cache), observe_costs(engine, costs)]
    expected = outcome(alone(item))
    assert outcome(run(engine, [item])["r"]) == expected
    assert seen == [step for step in range(8) for _ in range(2)]
    assert (cache.passes, costs.passes) == (8, 8)
    for each in attached:
        engine.detach(each)
    assert outcome(run(engine, [item])["r"]) == expected
    assert (len(seen), cache.passes, costs.passes) == (16, 8, 8)


def test_what_runs_passes_is_the_engines_own_again_when_nobody_replaces_it() -> None:
    """The attention of a later observer stands in the place of an earlier one's, until it leaves."""
    engine, item = make_engine(graphs=False), Work(request(), Dense())
    own, (first, second) = engine.runner, (Counted(engine.model.attention) for _ in range(2))
    below, above = replace_attention(engine, first), replace_attention(engine, second)
    expected = outcome(alone(item))
    assert outcome(run(engine, [item])["r"]) == expected
    assert (first.calls, second.calls > 0) == (0, True)
    calls = second.calls
    engine.detach(above)
    assert outcome(run(engine, [item])["r"]) == expected
    assert (first.calls, second.calls) == (calls, calls)
    engine.detach(below)
    assert engine.runner is own
    assert outcome(run(engine, [item])["r"]) == expected
    assert first.calls == calls


def test_only_observers_that_wait_keep_passes_from_being_queued() -> None:
    item = Work(request(), Dense())
    engine = make_engine(overlap=True)
    engine.attach(EngineObserver())
    run(engine, [item])
    assert engine.stats.queued_passes > 0
    waiting = make_engine(overlap=True)
    observer = observe_cache(waiting, CacheMeter())
    run(waiting, [item])
    assert waiting.stats.queued_passes == 0
    waiting.detach(observer)
    run(waiting, [item])
    assert waiting.stats.queued_passes > 0


def test_an_observer_that_is_not_attached_cannot_be_detached() -> None:
    with pytest.raises(ValueError, match="not in list"):
        make_engine().detach(EngineObserver())
