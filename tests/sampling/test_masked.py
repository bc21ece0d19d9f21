from typing import Any, Literal, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from remask.errors import ConfigError
from remask.request.sampling_params import SamplingDefaults
from remask.sampling.blocks import TimeSchedule
from remask.sampling.decoder import Predictions
from remask.sampling.masked import MaskedDecoder, MaskedDecoding
from tests.sampling_fields import flat_params

FAMILIES = {"llada": SamplingDefaults(), "dream": SamplingDefaults("entropy", time_schedule=True)}
PROMPT = 3
MASK_ID = 99

Idle: TypeAlias = Literal["skipped", "within_block", "all"]
IDLE: tuple[Idle, ...] = ("skipped", "within_block", "all")


class Bench:
    """A decoder on a canvas of its own, fed with confidences."""

    def __init__(
        self,
        family: str = "llada",
        idle: Idle = "all",
        seed: int = 1,
        **values: Any,
    ) -> None:
        self.params = flat_params(**values)
        decoding = MaskedDecoding.of([1] * PROMPT, self.params, FAMILIES[family], MASK_ID, seed, blockwise=False)
        self.canvas = decoding.canvas()
        self.decoder = decoding.decoder(self.canvas, idle)

    def candidates(self) -> list[int]:
        return [p for p in self.decoder.block if self.canvas.noisy[p]]

    def step(self, confidence: Any = None) -> list[int]:
        """One step under confidences by position; returns what was transferred."""
        positions = np.array(self.candidates(), dtype=np.int64)
        values = np.linspace(0.9, 0.1, len(self.canvas)) if confidence is None else np.asarray(confidence)
        chosen = self.decoder.choose(Predictions(positions, positions, values[positions].astype(np.float32)))
        assert set(chosen.tolist()) <= set(positions.tolist())
        assert sorted(set(chosen.tolist())) == chosen.tolist()
        self.canvas.settle(self.decoder.outcome(chosen).final, self.decoder.step)
        self.decoder.advance()
        return [int(p) for p in chosen]

    def commit(self, positions: list[int]) -> None:
        """One step whose transfers the plan chooses, not the rule."""
        self.canvas.settle(np.array(positions), self.decoder.step)
        self.decoder.advance()

    def run(self, confidence: Any = None, limit: int = 500) -> list[list[int]]:
        steps = []
        while not self.decoder.finished:
            steps.append(self.step(confidence))
            assert len(steps) < limit, "decoding does not end"
        return steps


@pytest.mark.parametrize(("idle", "passes", "steps"), [("all", 8, 8), ("within_block", 4, 4), ("skipped", 4, 8)])
def test_steps_after_a_blocks_last_transfer(idle: Idle, passes: int, steps: int) -> None:
    """Run, left out of the schedule, or counted without a pass."""
    bench = Bench(max_tokens=4, block_length=2, steps=8, idle=idle)
    assert len(bench.run()) == passes
    assert bench.decoder.step == steps
    assert not bench.canvas.noisy.any()


@pytest.mark.parametrize(("idle", "counts"), [("all", [0, 1]), ("within_block", [0, 1]), ("skipped", [1])])
def test_idle_steps_before_a_transfer_are_run_within_a_block(idle: Idle, counts: list[int]) -> None:
    """Of one mask Dream's schedule takes nothing until its last step, where everything goes."""
    bench = Bench("dream", idle, max_tokens=1, steps=2)
    assert [len(chosen) for chosen in bench.run()] == counts
    assert bench.decoder.step == 2


@pytest.mark.parametrize("idle", IDLE)
def test_a_block_that_commits_less_than_its_share_takes_more_steps(idle: Idle) -> None:
    """A plan may commit fewer positions than the schedule has; nothing may stay noisy for that."""
    bench = Bench(max_tokens=4, steps=2, idle=idle)
    bench.commit([3])
    bench.commit([4])
    assert (bench.decoder.block_step, bench.decoder.finished) == (2, False)
    assert bench.run() == [[5, 6]]
    assert bench.decoder.step == 3


@pytest.mark.parametrize(("idle", "finished"), [("all", False), ("within_block", True)])
def test_a_block_that_is_committed_early_ends_as_the_mode_says(idle: Idle, finished: bool) -> None:
    bench = Bench(max_tokens=4, steps=4, idle=idle)
    bench.commit([3, 4, 5, 6])
    assert (bench.decoder.step, bench.decoder.finished) == (1, finished)
    assert bench.run() == ([] if finished else [[], [], []])


@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("rule", [{"threshold": 0.0}, {"factor": 4.0}])
def test_a_dynamic_rule_ends_a_block_with_its_last_transfer(idle: Idle, rule: dict[str, Any]) -> None:
    bench = Bench(idle=idle, max_tokens=4, block_length=2, steps=40, **rule)
    assert bench.run() == [[3, 4], [5, 6]]
    assert bench.decoder.step == 2


@pytest.mark.parametrize("family", ["llada", "dream"])
def test_the_modes_change_no_transfer(family: str) -> None:
    runs = [
        [chosen for chosen in Bench(family, idle, max_tokens=12, block_length=6, steps=24).run() if chosen]
        for idle in IDLE
    ]
    assert runs[0] == runs[1] == runs[2]


@given(st.integers(1, 12), st.integers(1, 24), st.sampled_from(IDLE))
def test_dreams_schedule_follows_what_is_left(tokens: int, steps: int, idle: Idle) -> None:
    schedule, left, expected = TimeSchedule(steps, 1e-3), tokens, []
    for step in range(steps):
        expected.append(schedule.count(step, left))
        left -= expected[-1]
    bench = Bench("dream", idle, max_tokens=tokens, steps=steps)
    counts = [len(chosen) for chosen in bench.run()]
    last = max(step for step in range(steps) if expected[step]) + 1
    by_mode = {
        "all": expected,
        "within_block": expected[:last],
        "skipped": [count for count in expected if count],
    }
    assert counts == by_mode[idle]
    assert bench.decoder.step == (last if idle == "within_block" else steps)


@pytest.mark.parametrize(
    "order",
    [
        [[3, 4], [5, 5]],
        [[3, 4], [5]],
        [[0, 1], [2, 3]],
        [[4, 3], [3, 4]],
        [[3, 4], [5, 6, 7]],
        [["3", "4"], ["5", "6"]],
    ],
    ids=repr,
)
def test_a_bad_order_is_refused(order: Any) -> None:
    with pytest.raises(ConfigError, match="order"):
        Bench(max_tokens=4, block_length=2, remasking="order", order=order)


@pytest.mark.parametrize("idle", IDLE)
@pytest.mark.parametrize("remasking", ["random", "order"])
def test_ordered_rules_know_a_steps_positions_before_its_pass(remasking: str, idle: Idle) -> None:
    order = [[5, 3, 4], [8, 7, 6]] if remasking == "order" else None
    bench = Bench(idle=idle, max_tokens=6, block_length=3, steps=8, remasking=remasking, order=order)
    told = []
    while not bench.decoder.finished:
        known = bench.decoder.context.order
        assert known is not None
        told.append(known.tolist())
        assert bench.step(np.random.default_rng(bench.decoder.step).random(9)) == sorted(known.tolist())
    flat = [position for positions in told for position in positions]
    if order is not None:
        assert flat == [5, 3, 4, 8, 7, 6]
    assert sorted(flat[:3]) == [3, 4, 5]
    assert sorted(flat[3:]) == [6, 7, 8]
    assert len(told) == {"all": 8, "within_block": 6, "skipped": 6}[idle]


def test_the_random_order_is_drawn_from_the_seed_for_all_blocks_at_once() -> None:
    """Blocks are drawn one after the other, so neither confidences nor steps shift the draws."""
    rng = np.random.default_rng(5)
    drawn = [start + rng.permutation(4) for start in (3, 7)]
    slow, fast = (Bench(seed=5, max_tokens=8, block_length=4, steps=s, remasking="random") for s in (8, 4))
    assert slow.run() == [[int(p)] for block in drawn for p in block]
    assert fast.run() == [sorted(block[i : i + 2].tolist()) for block in drawn for i in (0, 2)]


def test_an_ordered_rule_passes_over_what_a_plan_committed() -> None:
    bench = Bench(max_tokens=4, steps=4, remasking="order", order=[[5, 3, 4, 6]])
    bench.commit([3])
    assert bench.run() == [[5], [4], [6]]


def test_origin_transfers_each_with_its_share_and_ends() -> None:
    totals = np.zeros(4)
    for seed in range(300):
        steps = Bench(seed=seed, max_tokens=8, steps=4, remasking="origin").run()
        assert len(steps) == 4
        assert sorted(p for chosen in steps for p in chosen) == list(range(3, 11))
        totals += [len(chosen) for chosen in steps]
    assert np.allclose(totals / 300, 2.0, atol=0.35)  # times fall by a quarter a step


def test_confidence_threshold_shares_masks_evenly() -> None:
    with pytest.raises(ConfigError, match="a block of 7 masks has 3 steps: leave steps out"):
        Bench("dream", max_tokens=7, steps=3, remasking="confidence_threshold", threshold=0.5)


def test_no_candidates_means_no_choice() -> None:
    bench = Bench(max_tokens=2)
    nothing = np.array([], dtype=np.int64)
    assert bench.decoder.choose(Predictions(nothing, nothing, nothing.astype(np.float32))).tolist() == []


RULES: list[dict[str, Any]] = [
    {"remasking": "low_confidence"},
    {"remasking": "random"},
    {"remasking": "entropy", "eps": 0.01},
    {"remasking": "topk_margin", "eps": 0.5},
    {"remasking": "origin"},
    {"threshold": 0.6},
    {"factor": 0.8},
]


@given(
    st.sampled_from(RULES),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 6),
    st.sampled_from(IDLE),
    st.sampled_from(["llada", "dream"]),
    st.integers(0, 2**40),
)
def test_every_rule_ends_with_every_position_transferred_once(
    rule: dict[str, Any], block: int, blocks: int, per_block: int, idle: Idle, family: str, seed: int
) -> None:
    values: dict[str, Any] = {"max_tokens": block * blocks, "block_length": block, "steps": per_block * blocks, **rule}
    bench = Bench(family, idle, seed, **values)
    flat = [p for chosen in bench.run(np.random.default_rng(seed).random(40)) for p in chosen]
    assert sorted(flat) == list(range(PROMPT, PROMPT + block * blocks))
    assert [(p - PROMPT) // block for p in flat] == sorted((p - PROMPT) // block for p in flat)


class OneByOne(MaskedDecoder):
    def _skip_idle(self) -> None:
        counted = self._rule.counts == "schedule" and not self._uses_threshold
        while self.idle == "skipped" and not self.finished and counted and self._scheduled_count() == 0:
            self._advance_steps()


@settings(deadline=None)
@given(st.data())
def test_idle_steps_are_skipped_to_where_a_loop_over_them_ends(data: st.DataObject) -> None:
    """Every rule and both schedules, also where a plan commits more or less than the schedule says."""
    family = data.draw(st.sampled_from(["llada", "dream"]))
    length, blocks = data.draw(st.integers(1, 12)), data.draw(st.integers(1, 3))
    values: dict[str, Any] = {"max_tokens": length * blocks, "block_length": length}
    values["steps"] = blocks * data.draw(st.integers(1, 400))
    values |= data.draw(st.sampled_from([{}, {"remasking": "random"}, {"remasking": "entropy", "eps": 0.3}]))
    params = flat_params(**values)
    decoding = MaskedDecoding.of([1] * PROMPT, params, FAMILIES[family], MASK_ID, 1, blockwise=False)
    canvases = [decoding.canvas(), decoding.canvas()]
    decoders = [
        decoding.decoder(canvases[0], "skipped"),
        OneByOne(decoding, canvases[1], "skipped"),
    ]
    while not decoders[1].finished:
        assert [(each.step, each.block_step, each.block_index) for each in decoders[:1]] == [
            (each.step, each.block_step, each.block_index) for each in decoders[1:]
        ]
        noisy = np.flatnonzero(canvases[1].noisy)
        inside = noisy[np.isin(noisy, decoders[1].block)]
        if data.draw(st.booleans()) and len(inside):
            chosen = inside[: data.draw(st.integers(0, len(inside)))]
        else:
            chosen = decoders[1].choose(
                Predictions(inside, inside, np.linspace(0.9, 0.1, len(inside), dtype=np.float32))
            )
        for canvas, decoder in zip(canvases, decoders, strict=True):
            canvas.settle(chosen, decoder.step)
            decoder.advance()
    assert decoders[0].finished
    assert decoders[0].step == decoders[1].step
    assert np.array_equal(canvases[0].settled, canvases[1].settled)


@pytest.mark.parametrize("values", [{}, {"remasking": "entropy", "eps": 1e-3}, {"remasking": "random"}])
def test_a_thousand_million_idle_steps_are_skipped_at_once(values: dict[str, Any]) -> None:
    bench = Bench(idle="skipped", max_tokens=8, steps=2**30, **values)
    transfers = bench.run(limit=9)
    assert sum(map(len, transfers)) == 8
    assert bench.decoder.step == 2**30
