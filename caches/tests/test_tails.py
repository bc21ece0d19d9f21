"""Steps that leave out the tail of a canvas, under every cache policy."""

from dataclasses import replace
from typing import Any

import pytest

from remask.engine.running import RunningRequest
from remask.plan.canvas import OPEN, Hole, Template
from tests.engine.support import Work, alone, make_engine, outcome, policy_of, request, run

SETTINGS: dict[str, dict[str, Any]] = {
    "none": {},
    "reuse": {},
    "block-prefix": {},
    "block-dual": {},
    "dkv-decode": {"refresh_interval": 3},
    "dkv-prefill": {},
    "dllm-cache": {"response_interval": 3, "ratio": 0.5},
    "elastic-cache": {"window": 6, "threshold": 0.97},
    "bicache": {"depth": 2, "refresh_interval": 2},
    "bicache+dllm-cache": {"depth": 2, "refresh_interval": 2, "ratio": 0.5, "response_interval": 2},
}


def works(min_confidence: float) -> list[Work]:
    """One request under each policy; its spans are filled one position a step."""
    knobs = {"min_confidence": min_confidence, "window": 1, "threshold": 1.0, "cut_tail": True}
    sampling: dict[str, Any] = {"max_tokens": 16, "remasking": "slowfast", "config": knobs}
    return [Work(request(name, 13, 6, **sampling), policy_of(name, **settings)) for name, settings in SETTINGS.items()]


@pytest.mark.few(2)
@pytest.mark.parametrize(("family", "least"), [("llada", 0.17), ("dream", 0.13)])
def test_every_policy_leaves_out_the_tail(family: str, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that it would compute there, predictions and what is watched; a batch of many equals many of one."""
    seen: dict[str, list[tuple[int, int]]] = {name: [] for name in SETTINGS}
    plans = RunningRequest.plan

    def noting(running: RunningRequest) -> Any:
        turn = plans(running)
        tail = None if (cut := running.decoder.context.cut) is None else int(cut[0])
        for _, planned in turn.items:
            if tail is not None:
                last = max(span.last for span in planned.spans)
                seen[running.request.id].append((last, tail))
                assert max(planned.predicted) < tail
                assert planned.sees is running.decoder.context.cut
        return turn

    monkeypatch.setattr(RunningRequest, "plan", noting)
    work = works(least)
    together = run(make_engine(family), work)
    for name, steps in seen.items():
        assert any(tail < 13 + 16 for _, tail in steps), name
        assert all(last < tail for last, tail in steps)
    for item in work:
        assert outcome(together[item.request.id]) == outcome(alone(item, family))


def test_what_is_fixed_is_never_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed tokens behind a hole stay in sight: the steps that would leave out the tail compute it."""
    left_out, plans = list[bool](), RunningRequest.plan

    def noting(running: RunningRequest) -> Any:
        items = plans(running)
        left_out.append(running.decoder.context.cut is not None)
        return items

    monkeypatch.setattr(RunningRequest, "plan", noting)
    item = works(0.17)[0]
    for fixed in (0, 4):
        left_out.clear()
        template = Template((OPEN,) * (16 - fixed) + (7,) * fixed, (Hole(0, 16 - fixed),))
        alone(replace(item, request=replace(item.request, template=template if fixed else None)))
        assert any(left_out) == (fixed == 0)
