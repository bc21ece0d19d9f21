"""Layer hooks from elsewhere: what they find reaches their policy, and what they raise ends their own request alone."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self

import numpy as np
import pytest
from torch import Tensor

from remask.machine.transfers import fetch
from remask.model.stage import Stage
from remask.plan import HookCost, LayerHook, Mask, Plan, Span, Spans, View, Widths
from remask.policies import BiCache, CachePolicy, Dense
from remask.policies.block import BlockDual
from remask.policies.on_device import Changed, DeviceHook
from tests.engine.own_policies import Reviving
from tests.engine.support import LAYERS, Work, make_engine, request, run


@dataclass(frozen=True, slots=True)
class Norms(LayerHook):
    """Tells how long the hidden states of the rows are before each layer but the first; `raises` in that layer."""

    rows: Mask
    raises: int | None = None

    on_device = "tests.engine.test_hooks:MeasureNorms"

    @property
    def masks(self) -> tuple[Mask, ...]:
        return (self.rows,)

    def check(self, spans: Spans) -> None:
        assert len(spans) == spans.layers

    def below(self, lead: Mask) -> Self:
        return type(self)(self.rows & lead, self.raises)

    def cost(self, widths: Widths, spans: Spans) -> HookCost:  # noqa: ARG002
        return HookCost()


class MeasureNorms(DeviceHook):
    def __init__(self, *what: Any) -> None:
        super().__init__(*what)
        self.found: dict[int, list[float]] = {each.number: [] for each in self.canvases}
        self.ended = list[int]()

    def before(self, stage: Stage, h: Tensor, plans: Sequence[Plan]) -> Changed:
        starts = np.cumsum([0, *(len(plan.spans[0].positions) for plan in plans)])
        for each in self.canvases if stage.layers.start else ():
            hook = each.plan.hook
            assert isinstance(hook, Norms)
            if stage.layers.start == hook.raises:
                raise ZeroDivisionError("the hook's own")
            own = h[starts[each.number] : starts[each.number + 1]]
            self.found[each.number].append(float(fetch(own.float().norm(dim=-1).mean())))
        return {}

    def after(self, layer: int, plans: Sequence[Plan]) -> Changed:  # noqa: ARG002
        self.ended.append(layer)
        return {}

    def after_pass(self) -> None:
        assert self.ended == list(range(LAYERS))
        for each in self.canvases:
            each.branch.hook_output = [*(each.branch.hook_output or []), self.found[each.number]]


@dataclass(frozen=True)
class Measured(CachePolicy):
    """Computes everything, measures it, and keeps what it is told."""

    seen: list[Any]
    raises: int | None = None

    def plan(self, view: View) -> Plan:
        self.seen[:] = [view.hook_output]
        spans = [Span(range(i, i + 1), view.everything) for i in range(view.layers)]
        return Plan(spans, view.candidates, hook=Norms(view.everything, self.raises))


def test_what_a_hook_finds_reaches_its_policy_in_any_batch() -> None:
    others = [
        Work(request(f"o{n}", 5 + n), policy)
        for n, policy in enumerate((Dense(), BlockDual(), BiCache(Dense(), 2), Reviving()))
    ]
    found = []
    for beside in ([], others):
        seen: list[list[Any]] = [[], []]
        own = [Work(request(f"m{n}", 3 + n), Measured(seen[n])) for n in range(2)]
        results = run(make_engine(), [*own, *beside])
        plain = run(make_engine(), [Work(each.request, Dense()) for each in own])
        for each in own:
            assert results[each.request.id].token_ids == plain[each.request.id].token_ids
        found.append(seen)
    for alone, together in zip(*found, strict=True):
        assert len(alone[0]) == 7, "before the last of 8 steps"
        assert {len(norms) for norms in alone[0]} == {LAYERS - 1}
        assert np.array(together[0]) == pytest.approx(np.array(alone[0]), rel=1e-5)


@pytest.mark.parametrize("layer", range(1, LAYERS))
def test_what_a_hook_raises_ends_its_own_request_alone(layer: int) -> None:
    good = [
        Work(request("a"), Dense()),
        Work(request("b", 4), Reviving(at=1)),
        Work(request("c"), Measured([])),
    ]
    engine = make_engine()
    results = run(engine, [*good, Work(request("bad"), Measured([], raises=layer))])
    assert "the hook's own" in str(results["bad"].error)
    alone = {each.request.id: run(make_engine(), [each])[each.request.id] for each in good}
    assert {name: result.token_ids for name, result in results.items() if name != "bad"} == {
        name: result.token_ids for name, result in alone.items()
    }
    engine.check_integrity()


def test_hooks_of_two_kinds_act_in_one_pass() -> None:
    """One that lets plans grow, beside one that changes none."""
    policies = Reviving(every=3), Measured([])
    work = [Work(request(str(n), 3 + n), policies[n % 2], joins=n) for n in range(6)]
    together = run(make_engine(), work)
    for item in work:
        name = item.request.id
        assert together[name].token_ids == run(make_engine(), [item])[name].token_ids
