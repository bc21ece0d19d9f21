"""Passes that watch attention: what is tracked, what is refreshed, from which layer on, and at what price."""

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from caches.tests.oracles import DREAM, LLADA
from remask.engine.member import Turn
from remask.engine.running import RunningRequest
from remask.families import preset
from remask.machine.transfers import fetch
from remask.model.pool import Pool
from remask.model.row_attention import attention_rows
from remask.model.stage import Rows, StepBatch
from remask.model.transformer import Transformer
from remask.model.work_list import WorkList
from remask.plan.plan import Plan, View
from remask.plan.spans import Span
from remask.policies import BiCache, CachePolicy, Dense, DkvDecode
from remask_caches.elastic import ElasticCache, Watch
from remask_caches.elastic_on_device import Tracker, drift
from tests.engine.support import (
    CPU,
    LAYERS,
    MODELS,
    Work,
    alone,
    lively_weights,
    make_engine,
    outcome,
    poisoned_engine,
    prompt_of,
    request,
    run,
)
from tests.engine.test_against_oracles import compare, draw_line, drawn, model_of, oracle, work_of

FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])


def whole_response(model: str) -> dict[str, Any]:
    """One block of twelve positions, one of which is decoded in most steps."""
    return {"max_tokens": 12, "remasking": "maskgit_plus" if model.startswith("dream") else "low_confidence"}


Log = dict[str, list[list[int]]]  # rows of each pass, layer by layer, of all canvases together


@contextmanager
def passes_of() -> Iterator[Log]:
    """The rows that every pass of every request computes."""
    log: Log = {}
    write = RunningRequest.write

    def noting(running: RunningRequest, turn: Turn, *rest: Any) -> object:
        plans = [plan for _, plan in turn.items]
        rows = [[int(span.rows.sum()) for span in plan.spans for _ in span.layers] for plan in plans]
        log.setdefault(running.request.id, []).append([sum(layer) for layer in zip(*rows, strict=True)])
        return write(running, turn, *rest)

    with patch.object(RunningRequest, "write", noting):
        yield log


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["llada", "llada_gqa", "dream", "dream_dllm"])
def test_it_refreshes_where_the_oracle_does(model: str) -> None:
    """Layer by layer and pass by pass, in one batch."""
    kinds = DREAM if model.startswith("dream") else LLADA
    names = [name for name in kinds if name.startswith("elastic-cache")]
    rng = random.Random(model)
    drawings = {f"{name} {i}": drawn(rng, model, name, kinds[name]) for name in names for i in range(6)}
    with passes_of() as log:
        engine = poisoned_engine(model_of(model), max_num_seqs=10)
        results = run(engine, [work_of(line, name, rng.randrange(6)) for name, (line, _) in drawings.items()])
    fired = set()
    for name, (line, expected) in drawings.items():
        compare(line, expected, results[name], model_of(model).config.shift)
        assert log[name] == expected.rows
        for rows in expected.rows:
            fired |= {layer for layer in range(1, len(rows)) if rows[layer] > rows[layer - 1]}
    assert len(fired) >= 3, "the draw is too tame to prove anything"


@FAMILIES
@pytest.mark.parametrize("sampling", [{}, {"block_length": 2}, {"threshold": 0.3}, {"cfg_scale": 1.0}])
def test_threshold_1_refreshes_all_but_the_first_layer_in_every_step(family: str, sampling: dict[str, Any]) -> None:
    with passes_of() as log:
        result = alone(Work(request("r", 6, **sampling), ElasticCache(window=8, threshold=1.0)), family)
    # Dream's schedule begins with steps that transfer nothing, after which nothing has changed.
    changed = {each.step + 1 for each in result.trace}
    whole = 14 * (2 if "cfg_scale" in sampling else 1)
    first, *rest = log["r"]
    assert first == [whole] * LAYERS
    rest = [rows for step, rows in enumerate(rest, 1) if step in changed]
    assert rest
    assert all(rows[0] < whole and rows[1:] == [whole] * (LAYERS - 1) for rows in rest)


@FAMILIES
@pytest.mark.parametrize("threshold", [0.0, 0.9, 1.0])
def test_where_every_row_is_live_it_is_no_cache(family: str, threshold: float) -> None:
    """In two steps from a prompt of one token, which every layer has to track."""
    asked = request("r", 1, steps=2)
    with passes_of() as log:
        elastic = alone(Work(asked, ElasticCache(window=8, threshold=threshold)), family)
    none = alone(Work(asked, Dense()), family)
    assert outcome(elastic) == outcome(none)
    assert log["r"] == [[9] * LAYERS] * 2


@FAMILIES
def test_one_layer_has_nothing_to_watch_and_is_no_cache(family: str) -> None:
    """Its K/V depend on the tokens alone, so what is cached is never stale."""
    model = Transformer(config := replace(MODELS[family].config, layers=1), lively_weights(config))
    results = run(poisoned_engine(model), [Work(request("e", 6), ElasticCache(8)), Work(request("n", 6), Dense())])
    assert (results["e"].token_ids, results["e"].trace) == (results["n"].token_ids, results["n"].trace)
    assert results["e"].usage.row_layers < results["n"].usage.row_layers


@FAMILIES
def test_threshold_0_never_refreshes(family: str) -> None:
    with passes_of() as log:
        alone(Work(request("r", 6), ElasticCache(window=3, threshold=0.0)), family)
    first, *rest = log["r"]
    assert first == [14] * LAYERS
    assert rest
    assert all(len(set(rows)) == 1 and rows[0] <= 3 + 1 + 1 + LAYERS for rows in rest)


@FAMILIES
def test_a_step_transfers_within_the_window_whatever_the_schedule_says(family: str) -> None:
    """Two steps for eight positions, three of them within reach: it takes more steps."""
    result = alone(Work(request("r", 6, steps=2), ElasticCache(window=3)), family)
    assert [item.positions for item in result.trace] == [(6, 7, 8), (9, 10, 11), (12, 13)]
    assert (result.usage.steps, result.usage.forwards) == (3, 3)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.0])
def test_a_budget_of_positions_outlasts_the_window(threshold: float) -> None:
    sampling: dict[str, Any] = {"remasking": "confidence_threshold", "threshold": threshold, "steps": 2}
    result = alone(Work(request("r", 6, **sampling), ElasticCache(window=3)), "dream")
    assert sorted(p for item in result.trace for p in item.positions) == list(range(6, 14))


def test_without_a_watch_nothing_is_looked_at() -> None:
    """One forward a step, as the transformer runs it by itself."""
    model, seen = MODELS["llada"], []

    def forward(self: Transformer, batch: StepBatch, pool: Pool) -> Tensor:
        seen.append(batch)
        return Transformer.forward(self, batch, pool)

    with (
        patch.object(type(model), "forward", forward),
        patch.object(type(model), "queries", side_effect=AssertionError("attention was looked at")),
    ):
        run(make_engine(overlap=False), [Work(request("a"), Dense()), Work(request("b"), DkvDecode(3), 2)])
    assert len(seen) == 10


def test_one_host_read_a_layer_however_many_are_watched() -> None:
    reads = []

    def fetched(tensor: Tensor) -> NDArray[Any]:
        reads.append(tuple(tensor.shape))
        return fetch(tensor)

    work = [Work(request(f"r{i}", 6 + i), ElasticCache(window=4, threshold=0.0)) for i in range(3)]
    with patch("remask_caches.elastic_on_device.fetch", fetched):
        run(make_engine(), work)
    # In the first pass nothing is compared; after the last layer of each, what all layers track is read.
    tracked, compared = (3 * LAYERS,), (3,)
    assert reads == [tracked, *([*[compared] * (LAYERS - 1), tracked] * 7)]


@pytest.mark.few(2)
@FAMILIES
def test_pieces_of_a_prefix_pass_run_beside_refreshes(family: str) -> None:
    """A prefix-only pass that is cut by the budget keeps what leaves its piece, also where others are refreshed."""
    watched = [Work(request(f"w{i}", 5), ElasticCache(window=8, threshold=0.99), i) for i in range(2)]
    sharing = [Work(request(f"s{i}", [*prompt_of(12), i], 12), BiCache(depth=2, refresh_interval=2), 2) for i in (1, 2)]
    for budget in (60, 90, 150):
        results = run(make_engine(family, max_row_layers=budget), [*watched, *sharing])
        for item in [*watched, *sharing]:
            expected = alone(item, family)
            got = results[item.request.id]
            assert (got.token_ids, got.trace, got.usage.row_layers) == (
                expected.token_ids,
                expected.trace,
                expected.usage.row_layers,
            )


def test_memory_beside_the_pages_is_counted_and_given_back() -> None:
    engine, plain = make_engine(), make_engine()
    asked = request("r", 6, cfg_scale=1.0)
    for each, policy in ((engine, ElasticCache(window=4)), (plain, Dense())):
        each.add(asked.with_policy(policy))
        each.step()
    config = engine.model.config
    states = (LAYERS - 1) * 14 * config.hidden * 8
    assert engine.memory.bytes_used - plain.memory.bytes_used == 2 * states
    assert engine.stats.peak_memory_bytes - plain.stats.peak_memory_bytes == 2 * states
    (running,) = [item for item in engine._lifecycle.unfinished() if item.request.id == "r"]
    assert engine.cancel("r")
    assert engine.memory.extra_bytes == 0
    assert all(branch.states is None and branch.hook_state is None for branch in running.canvases)
    engine.memory.free(running)
    assert engine.memory.extra_bytes == 0
    run(engine, [])


@pytest.mark.thorough
@pytest.mark.parametrize("model", ["llada", "llada_gqa", "dream"])
def test_nothing_is_decoded_after_a_stop_token(model: str) -> None:
    """Any token may be the stop. What stands right of it leaves the window, and refreshes still compute it."""
    rng, saved = random.Random(model), 0
    for threshold in (0.0, 0.9, 0.97):
        for window in (3, 6):
            config = {"window": window, "threshold": threshold}
            line = draw_line(
                rng, "elastic-cache", (lambda _: whole_response(model), lambda *_, config=config: config), LAYERS
            )
            free = oracle(model, line)
            if free is None:
                continue
            early = next(tokens for _, positions, tokens in free.transfers if positions[0] > len(free.output_ids) // 3)
            stopping = line | {"sampling": line["sampling"] | {"stop_token_ids": early}}
            expected = oracle(model, stopping)
            if expected is None:
                continue
            work = work_of(stopping, "r", 0)
            work = replace(work, request=replace(work.request, params=replace(work.request.params, ignore_eos=False)))
            with passes_of() as log:
                result = run(poisoned_engine(model_of(model)), [work])["r"]
            assert log["r"] == expected.rows
            assert [(list(each.positions), list(each.token_ids)) for each in result.trace] == [
                (positions, tokens) for _, positions, tokens in expected.transfers
            ]
            assert result.finish_reason == "stop"
            assert list(result.token_ids) == expected.output_ids[: len(result.token_ids)]
            saved += free.forwards - expected.forwards
    assert saved > 0


@dataclass(frozen=True)
class Watching(CachePolicy):
    """Watches as `ElasticCache` does, until step 2: from then on its plans are spoilt in one way."""

    defect: str
    roomy: bool = True

    @property
    def traits(self):  # type: ignore[no-untyped-def]
        """With room for what it watches, or without."""
        return replace(ElasticCache().traits, keeps=frozenset({"inputs"} if self.roomy else ()))

    def plan(self, view: View) -> Plan:
        """Good, then bad."""
        if not self.roomy and view.step < 2:
            return Dense().plan(view)
        told = np.empty(0, dtype=np.int64) if view.hook_output is None else view.hook_output
        plan = ElasticCache(window=4).plan(replace(view, hook_output=told))
        assert isinstance(plan.hook, Watch)
        if view.step < 2:
            return plan
        nothing = np.zeros(view.length, dtype=np.bool_)
        match self.defect:
            case "no room":
                return plan.over(plan.spans.map(lambda span: replace(span, save=None)))
            case "no window":
                return replace(plan, hook=replace(plan.hook, window=nothing))
            case "nothing to track":
                return replace(plan, hook=replace(plan.hook, among=nothing))
            case "another canvas":
                return replace(plan, hook=replace(plan.hook, window=np.ones(3, dtype=np.bool_)))
            case "one span":
                return plan.over((Span(range(view.layers), plan.spans[0].rows),))
        first, *others = plan.spans
        return plan.over((replace(first, save=first.rows), *others))


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        (Watching("no room", roomy=False), "may make all rows live, on a canvas that keeps no inputs"),
        (Watching("no window"), "watched of no row"),
        (Watching("nothing to track"), "or to no position"),
        (Watching("another canvas"), "for a canvas of 16 positions"),
        (Watching("one span"), "a span for each layer"),
        (Watching("first layer"), "tokens enter the first layer"),
    ],
    ids=lambda value: getattr(value, "defect", ""),
)
def test_a_bad_watch_ends_its_own_request_only(policy: Watching, message: str) -> None:
    good = Work(request("good"), ElasticCache(window=4, threshold=0.95))
    results = run(make_engine(), [good, Work(request("bad"), policy)])
    assert results["bad"].finish_reason == "error"
    assert results["bad"].error is not None
    assert message in results["bad"].error
    assert outcome(results["good"]) == outcome(alone(good))


@pytest.mark.parametrize("family", ["llada", "dream", "sdar"])
def test_queries_are_those_that_attention_is_given(family: str) -> None:
    """With biases, and with norms of queries, of each head and of all together."""
    base = replace(preset(f"{family}-tiny"), layers=1)
    for norm in ("head", "whole") if base.qk_norm else (None,):
        model = Transformer(config := replace(base, qk_norm=norm), lively_weights(config))
        tokens, places = torch.arange(5), torch.tensor([3, 1])
        h = model.embed(tokens)
        given: list[Tensor] = []

        def attention(q: Tensor, *rest: object, given: list[Tensor] = given) -> Tensor:
            given.append(q)
            return q.flatten(1)

        model.attention = attention  # type: ignore[assignment]
        pool = Pool(config, 1, 8, torch.float64, CPU)
        with torch.inference_mode():
            rows = Rows(*model.cos_sin(0, torch.arange(5)), torch.arange(5), None, outputs=False)
            model.attend(model.project(h, 0, rows, pool), 0, WorkList.of(5, 5), pool)
            torch.testing.assert_close(model.queries(h[places], 0, places), given[0][places])


def logs(*heads: list[float]) -> Tensor:
    """Logarithms of the attention of one token, by head."""
    return torch.tensor(heads)[:, None].log()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_attention_rows_are_attention_by_head(kv_heads: int) -> None:
    torch.manual_seed(kv_heads)
    q, k = torch.randn(3, 4, 8, dtype=torch.float64), torch.randn(5, kv_heads, 8, dtype=torch.float64)
    rows = attention_rows(q, k)
    assert rows.dtype == torch.float32
    # Attending to a unit matrix in place of values gives the probabilities.
    eye = torch.eye(5, dtype=torch.float64).expand(4, 5, 5)
    keys = k.repeat_interleave(4 // kv_heads, 1)
    expected = F.scaled_dot_product_attention(q.transpose(0, 1), keys.transpose(0, 1), eye)
    torch.testing.assert_close(rows.exp(), expected.float())


def test_heads_are_compared_at_each_key_however_little_it_weighs() -> None:
    """By hand: two heads, two keys. At the first key (.6, .3) becomes (.3, .6), at the second (.4, .7) too turns."""
    old, new = logs([0.6, 0.4], [0.3, 0.7]), logs([0.3, 0.7], [0.6, 0.4])
    second = 2 * 0.4 * 0.7 / (0.4**2 + 0.7**2)
    assert float(drift(old, new, "heads")) == pytest.approx(1 - (0.8 + second) / 2, abs=1e-6)
    # Half of the keys turn around, and weigh next to nothing.
    tiny = 1e-30
    old, new = logs([1.0, tiny], [1.0, 2 * tiny]), logs([1.0, 2 * tiny], [1.0, tiny])
    assert float(drift(old, new, "heads")) == pytest.approx((1 - 0.8) / 2, abs=1e-6)
    assert float(drift(old, new, "keys")) == 0


def test_keys_are_compared_of_the_mean_over_heads() -> None:
    """By hand: the heads change places, so their mean stays; then (.5, .5) becomes (.8, .2)."""
    old, new = logs([0.6, 0.4], [0.3, 0.7]), logs([0.3, 0.7], [0.6, 0.4])
    assert float(drift(old, new, "keys")) == pytest.approx(0, abs=1e-7)
    old, new = logs([0.6, 0.4], [0.4, 0.6]), logs([0.9, 0.1], [0.7, 0.3])
    assert float(drift(old, new, "keys")) == pytest.approx(1 - 0.5 / (0.5**0.5 * 0.68**0.5), abs=1e-6)


@pytest.mark.parametrize("similarity", ["heads", "keys"])
def test_tokens_count_alike(similarity: str) -> None:
    torch.manual_seed(0)
    old, new = torch.randn(2, 4, 3, 7).log_softmax(-1)
    one_by_one = torch.stack([drift(old[:, [i]], new[:, [i]], similarity) for i in range(3)])  # type: ignore[arg-type]
    torch.testing.assert_close(drift(old, new, similarity), one_by_one.mean())  # type: ignore[arg-type]
    assert float(drift(old, old.clone(), similarity)) == 0  # type: ignore[arg-type]


def test_small_drifts_are_not_rounded_away() -> None:
    old = torch.full((1, 1, 4), 0.25)
    new = old + 1e-5 * torch.tensor([1.0, -1.0, 1.0, -1.0])
    assert float(drift(old.log(), new.log(), "keys")) == pytest.approx(0.5 * (4e-5) ** 2, rel=0.02)


def test_what_a_pass_found_is_forgotten_when_it_is_done() -> None:
    tracker = Tracker()
    assert tracker.tokens.tolist() == []
    tracker = Tracker(drifts={0: 0.5}, reference=(0, torch.zeros(1)))
    tracker.finish(np.array([7, 3, 7, 0]))
    assert (tracker.tokens.tolist(), len(tracker.drifts)) == ([0, 3, 7], 0)
    assert tracker.reference is None
