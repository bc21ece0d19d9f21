"""Plans of `exact`, `uniform-cache`, `block-prefix` and `none` on block-causal and uniform models."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from remask.plan.canvas import Ledger
from remask.plan.plan import NEVER, PrefixHit, View
from remask.policies import CachePolicy, parse, policy_names
from remask.policies.block import BlockPrefix
from remask.policies.dense import Dense
from remask.policies.exact import Exact
from remask.policies.registry import names_for
from remask.policies.uniform_cache import UniformCache
from tests.policies.views import no_table, positions, rows_of

LAYERS = 2


def block_causal(prompt: int, length: int, block: int, hit: int = 0) -> Iterator[View]:
    """The views of a request that takes two steps a block; a view's passes are the caller's."""
    noisy = np.arange(length) >= prompt
    sees = (np.arange(length) // block + 1) * block
    step = 0
    for start in range(prompt // block * block, length, block):
        for block_step in range(2):
            yield View(
                layers=LAYERS,
                step=step,
                block_step=block_step,
                block=range(start, start + block),
                prompt=prompt,
                noisy=noisy.copy(),
                settled=np.where(noisy, NEVER, -1).astype(np.int32),
                prefix=PrefixHit(hit, LAYERS) if hit else None,
                sees=sees,
            )
            left = np.flatnonzero(noisy[start : start + block]) + start
            noisy[left[: len(left) if block_step else len(left) - 1]] = False
            step += 1


def passes(policy: CachePolicy, view: View, limit: int = 50) -> list[tuple[set[int], set[int]]]:
    """Rows and predicted positions of each pass of a step, fill passes first."""
    found = []
    for index in range(limit):
        plan = policy.plan(replace(view, pass_index=index))
        found.append((rows_of(plan), positions(plan.predict)))
        if not plan.fills:
            return found
    raise AssertionError("a step that never ends")


def spans(found: list[tuple[set[int], set[int]]]) -> list[tuple[int, int]]:
    """The rows of each pass, which are one run, as (first, end)."""
    for rows, _ in found:
        assert rows == set(range(min(rows), max(rows) + 1))
    return [(min(rows), max(rows) + 1) for rows, _ in found]


def test_exact_computes_the_block_and_once_what_is_to_be_committed() -> None:
    seen = [spans(passes(Exact(), view)) for view in block_causal(prompt=10, length=20, block=4)]
    assert seen == [[(0, 12)], [(8, 12)], [(8, 16)], [(12, 16)], [(12, 20)], [(16, 20)]]


@pytest.mark.parametrize(
    ("chunk", "first"),
    [
        (4, [(0, 4), (4, 8), (8, 12), (12, 16), (16, 24)]),
        (1, [(0, 4), (4, 8), (8, 12), (12, 16), (16, 24)]),
        (9, [(0, 8), (8, 16), (16, 24)]),
        (12, [(0, 12), (12, 24)]),
        (20, [(0, 24)]),
        (512, [(0, 24)]),
    ],
)
def test_a_long_prompt_is_computed_in_chunks_of_whole_blocks(chunk: int, first: list[tuple[int, int]]) -> None:
    view = next(block_causal(prompt=21, length=28, block=4))
    found = passes(Exact(chunk), view)
    assert spans(found) == first
    assert [predicted for _, predicted in found] == [set()] * (len(first) - 1) + [{21, 22, 23}]


@pytest.mark.parametrize(("hit", "first"), [(8, [(8, 16), (16, 24)]), (16, [(16, 24)]), (20, [(20, 24)])])
def test_what_the_store_lends_is_not_computed(hit: int, first: list[tuple[int, int]]) -> None:
    assert spans(passes(Exact(8), next(block_causal(prompt=20, length=24, block=4, hit=hit)))) == first


def test_a_prompt_of_less_than_a_block_has_no_prefill() -> None:
    assert spans(passes(Exact(), next(block_causal(prompt=3, length=12, block=4)))) == [(0, 4)]


def test_the_closing_pass_is_the_last_blocks() -> None:
    *_, last = block_causal(prompt=10, length=20, block=4)
    plan = Exact().closing(last)
    assert plan is not None
    assert (rows_of(plan), plan.fills, positions(plan.predict)) == (set(range(16, 20)), True, set())
    assert Dense().closing(last) is None


def test_none_computes_all_that_the_block_sees() -> None:
    for view in block_causal(prompt=10, length=20, block=4):
        assert passes(Dense(), view) == [(set(range(view.block.stop)), positions(view.candidates))]


@pytest.mark.parametrize("policy", [Dense(), Exact(), Exact(4)], ids=repr)
def test_every_plan_reads_what_was_written(policy: CachePolicy) -> None:
    ledger = Ledger(LAYERS, 24, None)
    for view in block_causal(prompt=13, length=24, block=4):
        for index in range(20):
            plan = policy.plan(replace(view, pass_index=index))
            ledger.enter(replace(plan, sees=view.sees))
            if not plan.fills:
                break


def uniform(prompt: int, response: int, length: int, block: int, steps: int) -> Iterator[View]:
    """The views of a request on a uniform model, whose blocks settle with their last steps."""
    noisy, step = np.arange(length) >= prompt, 0
    for start in range(prompt, prompt + response, block):
        stop = min(start + block, length)
        for block_step in range(steps):
            yield View(
                layers=LAYERS,
                step=step,
                block_step=block_step,
                block=range(start, stop),
                prompt=prompt,
                noisy=noisy.copy(),
                settled=np.where(noisy, NEVER, -1).astype(np.int32),
                prefix=None,
                sees=np.where(noisy, length, int(noisy.argmax())),
                response=prompt + response,
            )
            step += 1
        noisy[start:stop] = False


@pytest.mark.parametrize(
    ("interval", "ahead"), [(0, []), (1, [2, 3, 4, 5]), (2, [2, 4]), (3, [3]), (4, [4]), (5, [5]), (6, [])]
)
def test_uniform_cache_renews_the_next_block_of_the_response(interval: int, ahead: list[int]) -> None:
    seen = [spans(passes(UniformCache(interval), view)) for view in uniform(3, 6, 20, block=4, steps=5)]
    first = [[(0, 20)]] + [[(3, 11 if step in ahead else 7)] for step in (2, 3, 4, 5)]
    assert seen == first + [[(0, 20)]] + [[(7, 11)]] * 4, "the response has no block after its second"


def test_a_next_block_may_reach_beyond_the_response_and_the_canvas() -> None:
    seen = [spans(passes(UniformCache(1), view)) for view in uniform(3, 7, 11, block=5, steps=2)]
    assert seen == [[(0, 11)], [(3, 11)], [(0, 11)], [(8, 11)]]


def test_block_prefix_computes_all_that_is_noise() -> None:
    seen = [spans(passes(BlockPrefix(), view)) for view in uniform(3, 8, 16, block=4, steps=3)]
    assert seen == [[(0, 16)], [(3, 16)], [(3, 16)], [(0, 16)], [(7, 16)], [(7, 16)]]


@pytest.mark.parametrize(
    "policy", [Dense(), BlockPrefix(), UniformCache(0), UniformCache(2), UniformCache(2, drift=0.1)], ids=repr
)
def test_every_uniform_plan_predicts_its_block_and_reads_what_was_written(policy: CachePolicy) -> None:
    ledger = Ledger(LAYERS, 18, None)
    for view in uniform(3, 10, 18, block=4, steps=4):
        plan = policy.plan(view)
        assert positions(plan.predict) == set(view.block)
        ledger.enter(replace(plan, sees=view.sees))


def test_names_and_settings() -> None:
    assert parse("exact", None, no_table) == Exact(512)
    assert parse("exact", {"prefill_chunk": 7}, no_table) == Exact(7)
    assert parse("uniform-cache", None, no_table) == UniformCache(4)
    assert parse("uniform-cache", {"refresh_next": 0}, no_table) == UniformCache(0)
    assert names_for("uniform") == ("none", "block-prefix", "uniform-cache")
    assert names_for("block_causal") == ("none", "exact")
    assert set(policy_names()) - set(names_for("masked")) == {"uniform-cache", "exact"}
