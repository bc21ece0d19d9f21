from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from remask.errors import ConfigError, UnknownNameError
from remask.plan.ledger import Ledger
from remask.plan.plan import NEVER, StepFacts, View
from remask.policies import BiCache, CachePolicy, parse
from remask.policies.base import RequestFacts
from remask.policies.depth_lookup import DepthLookup
from remask.policies.dkv import SHIFTS, DkvDecode, DkvGreedy, DkvPd, DkvPrefill, Shift
from tests.policies.views import Walk, positions, rows_of

LLADA = RequestFacts(layers=3, shift=0, ordered=False, canvas=12, response=8)
DREAM = RequestFacts(layers=3, shift=1, ordered=False, canvas=12, response=8)
INTERVALS = st.none() | st.integers(1, 6)


def no_table() -> DepthLookup:
    raise AssertionError("the depth table was asked for")


def walks(shift: int = 0, ordered: bool = False) -> st.SearchStrategy[Walk]:
    """Requests of any shape; one block on a model with shift, as its own sampler has it."""
    return st.builds(
        Walk,
        prompt=st.integers(1, 5),
        block_length=st.integers(1, 6),
        blocks=st.just(1) if shift else st.integers(1, 3),
        per_step=st.integers(1, 3),
        shift=st.just(shift),
        ordered=st.just(ordered),
        seed=st.integers(0, 99),
        idle=st.sampled_from([(), (0,), (1, 2), (2, 4)]),
    )


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
        assert plan.commit is None


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


@given(walks(shift=1), INTERVALS, st.booleans())
def test_shifted_right_is_unshifted_one_row_to_the_right(walk: Walk, interval: int | None, prefill: bool) -> None:
    """Section 7: a token that "un" caches in the row that predicted it, "right" caches in the row where it stands."""
    everything = set(range(walk.length))
    for view in walk.views():
        known = walk.known[view.step - 2] if view.step > 1 else set(range(walk.prompt))
        refresh = view.step == 0 or is_refresh(view.step, interval)
        cached = set() if refresh else {(row + 1) % walk.length for row in cacheable(known, walk.length, "un")}
        if prefill and view.step:
            cached |= set(range(walk.prompt - 1))
        wanted = {position - 1 for position in positions(view.candidates)}
        (span,) = (DkvPd(interval, "right") if prefill else DkvDecode(interval, "right")).plan(view).spans
        assert positions(span.rows) == everything - cached | wanted
        frozen = set() if span.frozen is None else positions(span.frozen)
        assert frozen & positions(span.rows) == wanted & cached


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


@given(walks(), INTERVALS)
def test_pd_on_llada_is_both(walk: Walk, interval: int | None) -> None:
    for view in walk.views():
        decode, prefill = rows_of(DkvDecode(interval).plan(view)), rows_of(DkvPrefill().plan(view))
        assert rows_of(DkvPd(interval).plan(view)) == decode & prefill


@given(st.sampled_from([0, 1]).flatmap(walks))
def test_prefill_keeps_the_prompt_but_its_last_row(walk: Walk) -> None:
    for view in walk.views():
        rows = rows_of(DkvPrefill().plan(view))
        assert rows == set(range(walk.prompt - 1 if view.step else 0, walk.length))


def naive_greedy(walk: Walk, step: int, block_step: int, now: list[int], window: int) -> set[int]:
    """Section 5.2: A_i, from what each step transferred."""
    last = walk.moved[step - 1]
    noisy_before = set(range(walk.length)) - (walk.known[step - 2] if step > 1 else set(range(walk.prompt)))
    active = set(last) | set(now)
    for centre in now:
        left, right, added = centre - 1, centre + 1, 0
        while added < window and (left >= 0 or right < walk.length):
            if left >= 0 and left in noisy_before and left not in active:
                active.add(left)
                added += 1
            if added < window and right < walk.length and right in noisy_before and right not in active:
                active.add(right)
                added += 1
            left, right = left - 1, right + 1
    return active


@given(walks(ordered=True), INTERVALS, st.integers(0, 5))
def test_greedy_computes_this_steps_and_the_lasts_rows_and_a_window(
    walk: Walk, interval: int | None, window: int
) -> None:
    for view in walk.views():
        assert view.decoding.order is not None
        plan = DkvGreedy(interval, window).plan(view)
        now = view.decoding.order.tolist()
        assert positions(plan.predict) == set(now)
        if is_refresh(view.block_step, interval):
            assert rows_of(plan) == set(range(walk.length))
        else:
            assert rows_of(plan) == naive_greedy(walk, view.step, view.block_step, now, window)


POLICIES: list[CachePolicy] = [DkvDecode(), DkvDecode(None), DkvPrefill(), DkvPd(3), DkvPd(None)]


@pytest.mark.parametrize("policy", [*POLICIES, DkvGreedy(), DkvGreedy(None, 0), DkvGreedy(3, 2, "previous")], ids=repr)
@pytest.mark.parametrize("idle", [(), (0, 1), (2, 3)])
def test_plans_read_only_what_was_written_and_change_no_view(policy: CachePolicy, idle: tuple[int, ...]) -> None:
    for shift in (0, 1):
        greedy = isinstance(policy, DkvGreedy)
        if greedy and shift:
            continue
        walk = Walk(shift=shift, blocks=1 if shift else 3, ordered=greedy, idle=idle)
        ledger = Ledger(walk.layers, walk.length, None)
        for view in walk.views():
            before = view.noisy.copy(), view.settled.copy()
            ledger.apply(policy.plan(view))
            assert (before[0] == view.noisy).all()
            assert (before[1] == view.settled).all()


def test_a_row_beyond_the_canvas_is_never_asked_for() -> None:
    """A window larger than the canvas takes what there is."""
    walk = Walk(prompt=1, block_length=3, blocks=1, ordered=True)
    for view in walk.views():
        rows = rows_of(DkvGreedy(None, 1000).plan(view))
        assert rows <= set(range(walk.length))


def test_the_order_is_needed() -> None:
    (view, *_) = Walk().views()
    with pytest.raises(AssertionError):
        DkvGreedy().plan(replace(view, decoding=StepFacts()))


def test_what_they_say_of_themselves() -> None:
    assert DkvDecode() == DkvDecode(refresh_interval=8, shift=None)
    assert DkvPd() == DkvPd(refresh_interval=8, shift=None)
    assert DkvGreedy() == DkvGreedy(refresh_interval=8, window=4)
    for policy in (DkvDecode(), DkvPrefill(), DkvPd(), DkvGreedy()):
        assert policy.traits.schedule.idle_passes == "all"
        assert not policy.traits.schedule.blockwise
        assert not policy.traits.keeps
        assert not policy.traits.schedule.own_clocks
        assert policy.guides(7)
        assert policy.without_prefix is policy
        assert policy.boundary(3, 9, 4) == 0


@pytest.mark.parametrize("kind", [DkvDecode, DkvPd])
@pytest.mark.parametrize("shift", SHIFTS)
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


@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        ("dkv-decode", None, DkvDecode()),
        ("dkv-decode", {"refresh_interval": 3}, DkvDecode(3)),
        ("dkv-decode", {"refresh_interval": None}, DkvDecode(None)),
        ("dkv-decode", {"shift": "un_right"}, DkvDecode(8, "un_right")),
        ("dkv-decode", {"shift": None}, DkvDecode()),
        ("dkv-prefill", {}, DkvPrefill()),
        ("dkv-pd", {"refresh_interval": 2, "shift": "un"}, DkvPd(2, "un")),
        ("dkv-greedy", None, DkvGreedy()),
        ("dkv-greedy", {"refresh_interval": None, "window": 0}, DkvGreedy(None, 0)),
        ("bicache+dkv-pd", {"depth": 1}, BiCache(DkvPd(), 1)),
        # A setting that both take goes to the outer policy.
        ("bicache+dkv-decode", {"depth": 1, "refresh_interval": 2}, BiCache(DkvDecode(), 1, 2)),
        ("bicache+dkv-greedy", {"depth": 1, "window": 2}, BiCache(DkvGreedy(8, 2), 1)),
    ],
)
def test_specs(spec: str, settings: dict[str, Any] | None, expected: CachePolicy) -> None:
    policy = parse(spec, settings, no_table)
    assert policy == expected
    assert type(policy) is type(expected)


@pytest.mark.parametrize("spec", ["dkv-decode", "dkv-pd", "dkv-greedy"])
@pytest.mark.parametrize("interval", [0, -1, 1.5, "8", True, np.nan, []])
def test_bad_intervals(spec: str, interval: Any) -> None:
    with pytest.raises(ConfigError, match=r"refresh_interval must be a whole number from 1 .*, or null, got"):
        parse(spec, {"refresh_interval": interval}, no_table)


@pytest.mark.parametrize("window", [-1, 1.5, "4", True, None, np.inf])
def test_bad_windows(window: Any) -> None:
    with pytest.raises(ConfigError, match=r"window must be a whole number from 0 .*got"):
        parse("dkv-greedy", {"window": window}, no_table)


@pytest.mark.parametrize("shift", ["left", "", "UN", True, 1, ["un"]])
def test_unknown_shifts(shift: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown shift .*Available: right, un, un_right"):
        parse("dkv-decode", {"shift": shift}, no_table)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("dkv-prefill", {"refresh_interval": 2}, "cache policy 'dkv-prefill' takes no settings"),
        ("dkv-decode", {"window": 2}, "Unknown setting of cache policy 'dkv-decode' 'window'"),
        ("dkv-greedy", {"shift": "un"}, "Unknown setting of cache policy 'dkv-greedy' 'shift'"),
        ("dkv-greedy", {"windw": 2}, r"Did you mean 'window'\?"),
        ("dkv-decod", {}, r"Did you mean 'dkv-decode'\?"),
        ("dkv-decode+bicache", {}, "'dkv-decode' cannot wrap another policy"),
        ("dkv-pd+none", {}, "'dkv-pd' cannot wrap another policy"),
        ("dkv-decode+dllm-cache", {}, "'dkv-decode' cannot wrap another policy"),
    ],
)
def test_what_cannot_be(spec: str, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(spec, settings, no_table)
