from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.plan.plan import NEVER, StepFacts, View
from remask.policies import BiCache
from remask.policies.base import RequestFacts
from remask.policies.dkv import DkvDecode, DkvGreedy, DkvPd, Shift
from tests.policies.views import Walk, positions, rows_of, walks

LLADA = RequestFacts(layers=3, shift=0, ordered=False, canvas=12, response=8)
DREAM = RequestFacts(layers=3, shift=1, ordered=False, canvas=12, response=8)
INTERVALS = st.none() | st.integers(1, 6)


def is_refresh(step: int, interval: int | None) -> bool:
    return step == 0 if interval is None else step % interval == 0


@given(walks(), INTERVALS)
def test_decode_leaves_out_what_was_known_two_steps_ago(walk: Walk, interval: int | None) -> None:
    """Section 5.1: D_(i-2) is cached; every block begins with two full passes."""
    everything = set(range(walk.length))
    for view in walk.views():
        i = view.block_step
        full = i < 2 or is_refresh(i, interval)
        expected = everything if full else everything - walk.known[view.step - 2]
        plan = DkvDecode(interval).plan(view)
        assert rows_of(plan) == expected
        assert positions(plan.predict) == positions(view.candidates)
        assert plan.transfer is None


def cacheable(known: set[int], length: int, shift: str) -> set[int]:
    """Section 7: C after a step, given the positions known then."""
    if shift == "un":
        return {p for p in range(length) if (p + 1) % length in known}
    both = {p for p in range(length - 1) if p in known and p + 1 in known}
    return both | ({length - 1} if length - 2 in both else set())


@given(walks(shift=1), INTERVALS, st.sampled_from([None, "un", "un_right"]), st.booleans())
def test_on_dream_rows_follow_the_positions_that_they_predict(
    walk: Walk, interval: int | None, shift: Shift | None, prefill: bool
) -> None:
    """Sections 7.1 and 7.3."""
    everything, prompt = set(range(walk.length)), set(range(walk.prompt - 1))
    history = [prompt]  # C_0
    for view in walk.views():
        if view.step:
            history.append(cacheable(walk.known[view.step - 1], walk.length, shift or "un"))
        refresh = is_refresh(view.step, interval) if view.step else True
        expected = everything if refresh else everything - history[view.step - 1]
        if prefill and view.step:
            expected -= prompt
        policy = DkvPd(interval, shift) if prefill else DkvDecode(interval, shift)
        assert rows_of(policy.plan(view)) == expected


def test_shifted_right_by_hand() -> None:
    """Prompt 0 1 2, response 3 to 6; row p predicts position p + 1, and is cached a step after token p is known."""
    settled = np.array([-1, -1, -1, NEVER, 0, 1, NEVER], dtype=np.int32)
    noisy = settled == NEVER
    view = View(2, 2, 2, range(3, 7), 3, noisy, settled, None, shift=1)
    (span,) = DkvDecode(None, "right").plan(view).spans
    # Rows 0 to 2 hold prompt tokens, and row 4 one that the first step wrote: they are cached. Tokens 3 and 6 are
    # noisy, and the last step wrote token 5. Position 3 is wanted of row 2, which is cached, and position 6 of row 5.
    assert positions(span.rows) == {2, 3, 5, 6}
    assert span.frozen is not None
    assert positions(span.frozen) == {2}
    (unshifted,) = DkvDecode(None, "un").plan(view).spans
    assert positions(unshifted.rows) == {2, 4, 5}
    assert unshifted.frozen is None


def test_a_window_around_the_last_step_by_hand() -> None:
    """The last step wrote position 3, this one writes 7; the window of two stands around 7, or around 3."""
    settled = np.array([-1, NEVER, NEVER, 1, NEVER, NEVER, 0, NEVER, NEVER, NEVER], dtype=np.int32)
    view = View(2, 2, 2, range(1, 10), 1, settled == NEVER, settled, None)
    view = replace(view, decoding=StepFacts(order=np.array([7])))
    assert rows_of(DkvGreedy(None, 2).plan(view)) == {3, 7, 8, 5}
    assert rows_of(DkvGreedy(None, 2, "previous").plan(view)) == {3, 7, 2, 4}


def test_a_window_that_is_an_interval_by_hand() -> None:
    """Prompt 0, last step 3, this step 7, w = 3: [7 - 2, 7 + 1], or [3 - 2, 3 + 1], noisy or not; cut at the ends."""
    settled = np.array([-1, NEVER, NEVER, 1, NEVER, NEVER, 0, NEVER, NEVER, NEVER], dtype=np.int32)
    view = View(2, 2, 2, range(1, 10), 1, settled == NEVER, settled, None)
    view = replace(view, decoding=StepFacts(order=np.array([7])))
    assert rows_of(DkvGreedy(None, 3, "current", "interval").plan(view)) == {3, 5, 6, 7, 8}
    assert rows_of(DkvGreedy(None, 3, "previous", "interval").plan(view)) == {1, 2, 3, 4, 7}
    assert rows_of(DkvGreedy(None, 8, "previous", "interval").plan(view)) == {0, 1, 2, 3, 4, 5, 6, 7}
    assert rows_of(DkvGreedy(None, 0, "previous", "interval").plan(view)) == {3, 7}


@pytest.mark.parametrize("kind", [DkvDecode, DkvPd])
@pytest.mark.parametrize("shift", get_args(Shift))
def test_a_shift_is_for_dream(kind: type[DkvDecode], shift: Shift) -> None:
    kind(8, shift).check(DREAM)
    kind(8).check(DREAM)
    kind(8).check(LLADA)
    for policy in (kind(8, shift), BiCache(kind(8, shift), 1)):
        with pytest.raises(ConfigError, match=rf"shift='{shift}' is for models .*\(Dream\)"):
            policy.check(LLADA)


def test_greedy_needs_an_order_and_rows_that_predict_their_own_position() -> None:
    DkvGreedy().check(RequestFacts(3, 0, ordered=True, canvas=12, response=8))
    for policy in (DkvGreedy(), BiCache(DkvGreedy(), 1)):
        with pytest.raises(ConfigError, match=r"dkv-greedy .* use remasking 'random' or 'order'"):
            policy.check(LLADA)
        with pytest.raises(ConfigError, match=r"dkv-greedy .*\(LLaDA\), not Dream"):
            policy.check(RequestFacts(3, 1, ordered=True, canvas=12, response=8))


@pytest.mark.parametrize(("window", "response"), [(0, 1), (1, 1), (4, 4), (5, 4), (100, 99)])
def test_a_window_must_fit_the_response(window: int, response: int) -> None:
    fits = RequestFacts(3, 0, ordered=True, canvas=response + 7, response=response)
    for policy in (DkvGreedy(8, window), BiCache(DkvGreedy(8, window), 1)):
        if window <= response:
            policy.check(fits)
            continue
        with pytest.raises(ConfigError, match=f"window={window} exceeds the response's {response} positions; use a "):
            policy.check(fits)
