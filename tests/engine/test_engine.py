"""The engine from outside: requests in, results out, and memory conserved throughout."""

import gc
import math
import random
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch

from remask.engine import runner
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError, IntegrityError, UnknownNameError
from remask.model.transformer import Transformer
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.block import BlockDual
from remask.policies.dkv import DkvGreedy, DkvPd
from remask.request.result import Result
from remask.request.sampling_params import SamplingParams
from remask.sampling.score import score
from tests.engine.support import (
    EOS,
    LAYERS,
    MASK_ID,
    MODELS,
    VOCAB,
    Work,
    alone,
    events_of,
    lively_weights,
    make_engine,
    outcome,
    prompt_of,
    random_work,
    request,
    run,
    running_canvases,
)

FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])


def limits(rng: random.Random) -> dict[str, Any]:
    return {
        "max_num_seqs": rng.randint(1, 6),
        "max_row_layers": rng.choice([None, 1, 60, 150, 400]),
        "max_refreshes": rng.choice([None, 1, 2]),
        "page_size": rng.choice([1, 4, 7, 16]),
        "store_budget_tokens": rng.choice([8, 16, 25, 64]),
        "eviction": rng.choice(["fifo", "lru"]),
    }


@pytest.mark.few(13)
@FAMILIES
@pytest.mark.parametrize("seed", range(14))
def test_many_together_are_many_alone(family: str, seed: int) -> None:
    rng = random.Random(f"{family} {seed}")
    work = [random_work(rng, family, f"r{i}") for i in range(rng.randint(4, 9))]
    chosen = limits(rng)
    together = run(make_engine(family, **chosen), work)
    assert set(together) == {item.request.id for item in work}
    store = {"store_budget_tokens": chosen["store_budget_tokens"]}
    for item in work:
        single = alone(item, family, **store)
        assert outcome(together[item.request.id]) == outcome(single), item
        assert together[item.request.id].finish_reason in ("stop", "length")


def test_cancelling_in_every_phase() -> None:
    engine = make_engine(max_num_seqs=1)
    shared = request("running", prefix=6)
    engine.add(shared.with_policy(Reuse()))
    engine.add(replace(shared, id="waiting").with_policy(Reuse()))
    engine.step()  # the prefix-only pass
    assert (running_canvases(engine), engine.waiting) == (1, 1)
    assert engine.cancel("waiting")
    assert not engine.cancel("waiting")
    engine.step()
    assert engine.cancel("running")
    assert not engine.cancel("nobody")
    assert engine.busy
    assert [event.result.finish_reason for event in engine.step() if event.result] == ["cancelled"]
    assert not engine.busy


def test_cancelling_while_the_prefix_pass_is_due() -> None:
    engine = make_engine(max_row_layers=1)
    first = request("first", prefix=6)
    engine.add(request("busy"))
    engine.step()
    engine.add(first.with_policy(Reuse()))
    engine.add(replace(first, id="second").with_policy(Reuse()))
    engine._admission.admit(engine.clock())
    assert engine.store.entries[0].leases == 2
    assert not engine.store.entries[0].ready
    assert engine.cancel("first")
    results = run(engine, [])
    assert engine.stats.prefix_passes == 1
    assert outcome(results["second"]) == outcome(alone(Work(replace(first, id="second"), Reuse())))


@pytest.mark.parametrize("interval", [1, 3, None])
@pytest.mark.parametrize("state", ["stored", "recomputed"])
def test_usage_counts_what_was_computed(interval: int | None, state: Literal["stored", "recomputed"]) -> None:
    depth, prefix, prompt, steps = 3, 6, 8, 8
    policy = BiCache(depth=depth, refresh_interval=interval, boundary_state=state)
    engine = make_engine()
    usage = run(engine, [Work(request("r", prompt, prefix), policy)])["r"].usage
    suffix = prompt + 8 - prefix
    refreshes = 1 if interval is None else -(-steps // interval)
    deep = prefix * (LAYERS - depth) if state == "stored" else prefix * LAYERS
    assert usage.row_layers == steps * suffix * LAYERS + refreshes * deep
    assert (usage.steps, usage.forwards, usage.prefix_depth, usage.cached_tokens) == (steps, steps, depth, 0)
    assert (usage.prompt_tokens, usage.completion_tokens, usage.prefix_note) == (prompt, 8, None)
    assert engine.stats.prefix_passes == 1
    assert engine.stats.prefix_row_layers == prefix * LAYERS
    assert engine.stats.row_layers == usage.row_layers + prefix * LAYERS
    assert run(engine, [Work(request("again", prompt, prefix), policy)])["again"].usage.cached_tokens == prefix
    assert engine.stats.prefix_passes == 1


def test_a_guided_request_counts_both_canvases_as_one_forward() -> None:
    usage = alone(Work(request("r", 8, cfg_scale=1.0), Dense())).usage
    assert usage.forwards == 8
    assert usage.row_layers == 8 * 2 * 16 * LAYERS


def test_dense_skips_passes_that_transfer_nothing_and_counts_their_steps() -> None:
    results = [alone(Work(request("r", 8, 6, steps=24), policy)) for policy in (Dense(), Reuse())]
    assert [(r.usage.steps, r.usage.forwards) for r in results] == [(24, 8), (24, 24)]


@FAMILIES
@pytest.mark.parametrize("policy", [Reuse(), BiCache(depth=2)])
def test_concurrent_misses_of_one_prefix_cause_one_pass(family: str, policy: CachePolicy) -> None:
    engine = make_engine(family, max_num_seqs=6)
    prompt = prompt_of(10)
    work = [Work(request(f"r{i}", [*prompt, i], 10), policy, joins=i // 3) for i in range(6)]
    results = run(engine, work)
    assert engine.stats.prefix_passes == 1
    assert [results[f"r{i}"].usage.cached_tokens for i in range(6)] == [0, 10, 10, 10, 10, 10]
    assert (engine.store.stats.hits, engine.store.stats.misses) == (5, 1)


def test_a_prefix_is_shared_in_place() -> None:
    engine = make_engine(max_num_seqs=4, page_size=4)
    for i in range(4):
        engine.add(request(f"r{i}", [*prompt_of(16), i], 16).with_policy(Reuse()))
    engine.step()
    own = engine.allocator.pages_for(1 + 8)
    assert engine.allocator.used == LAYERS * (4 + 4 * own)
    run(engine, [])


@FAMILIES
def test_a_prefix_larger_than_the_budget_runs_uncached_and_says_so(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    engine = make_engine(family, store_budget_tokens=10)
    work = [Work(request("big", 14, 12), BiCache(depth=2)), Work(request("small", 12, 6), Reuse())]
    results = run(engine, work)
    usage = results["big"].usage
    assert usage.prefix_note == "prefix of 12 tokens exceeds the store's budget of 10"
    assert (usage.cached_tokens, usage.prefix_depth) == (0, 0)
    assert "big" in caplog.text
    assert engine.store.stats.unread_reasons["budget"] == 1
    assert results["small"].usage.prefix_note is None
    plain = alone(Work(request("big", 14), Dense()), family)
    assert (results["big"].token_ids, results["big"].trace) == (plain.token_ids, plain.trace)
    assert results["big"].usage.row_layers == plain.usage.row_layers


def test_a_refused_prefix_is_counted_once_however_long_it_waits() -> None:
    engine = make_engine(store_budget_tokens=4, max_num_seqs=1)
    extent = engine.allocator.allocate(engine.pool.page_count * engine.pool.page_size, range(LAYERS))
    assert extent is not None
    engine.add(request("big", 14, 12).with_policy(Reuse()))
    for _ in range(5):
        engine.step()  # no pages: it has to wait
    engine.allocator.release(extent)
    run(engine, [])
    assert engine.store.stats.unread_reasons["budget"] == 1


@pytest.mark.few(13)
@pytest.mark.parametrize("eviction", ["fifo", "lru"])
@pytest.mark.parametrize("budget", [5, 7, 13, 20])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_many_prefixes_in_a_tiny_store_never_get_stuck(eviction: str, budget: int, page_size: int) -> None:
    rng = random.Random(f"{eviction} {budget} {page_size}")
    work = []
    for i in range(16):
        prefix = rng.randint(1, 6)
        sampling: dict[str, Any] = {"max_tokens": 4, "cfg_scale": rng.choice([0.0, 0.0, 1.0])}
        prompt = prompt_of(prefix, seed=rng.randrange(4)) + [1] * rng.randint(1, 3)
        policies: list[CachePolicy] = [Reuse(), BiCache(depth=rng.randint(1, 3))]
        policy = rng.choice(policies)
        work.append(Work(request(f"r{i}", prompt, prefix, **sampling), policy, joins=i // 2))
    engine = make_engine(
        store_budget_tokens=budget, page_size=page_size, eviction=eviction, max_num_seqs=3, max_model_len=16
    )
    assert len(run(engine, work)) == 16
    assert engine.store.token_count < budget


def test_small_entries_that_fill_all_pages_make_way_for_canvases() -> None:
    """Prefixes much shorter than a page hold more pages than their tokens say; nobody reads them any more."""
    engine = make_engine(max_num_seqs=1, max_model_len=32, page_size=16, store_budget_tokens=100)
    for i in range(40):
        run(engine, [Work(request(f"r{i}", [i, 1], 1, max_tokens=1), Reuse())])
    results = run(engine, [Work(request("long", 20, max_tokens=8), Dense())], limit=50)
    assert results["long"].finish_reason == "length"


def test_leased_entries_make_newcomers_wait() -> None:
    engine = make_engine(store_budget_tokens=8, max_num_seqs=4)
    engine.add(request("first", [1] * 6, 6, max_tokens=4).with_policy(Reuse()))
    engine.add(request("second", [2] * 6, 6, max_tokens=4).with_policy(Reuse()))
    engine.step()
    assert (running_canvases(engine), engine.waiting) == (1, 1)
    results = run(engine, [])
    assert engine.store.stats.evictions == 1
    assert len(results) == 2


def test_max_num_seqs_limits_canvases_and_order_is_kept() -> None:
    engine = make_engine(max_num_seqs=3)
    for i in range(5):
        engine.add(request(f"r{i}", cfg_scale=1.0 if i == 1 else 0.0))
    engine.step()
    assert (running_canvases(engine), engine.waiting) == (3, 3)
    run(engine, [])


def test_a_guided_request_runs_alone_where_it_is_too_many() -> None:
    engine = make_engine(max_num_seqs=1)
    seen = []
    work = [Work(request(f"r{i}", 40, cfg_scale=1.0, max_tokens=24), Dense()) for i in range(2)]
    run(engine, work, each_step=lambda _: seen.append(running_canvases(engine)))
    assert max(seen) == 2


def settled(result: Result, prompt: int) -> list[int]:
    tokens = {p: t for item in result.trace for p, t in zip(item.positions, item.token_ids, strict=True)}
    return [tokens[p] for p in sorted(tokens) if p >= prompt]


@pytest.mark.thorough
@FAMILIES
@pytest.mark.parametrize("kind", ["eos", "stop_token_ids", "both"])
def test_the_first_honoured_stop_ends_the_response(family: str, kind: str) -> None:
    stops = {"eos": {EOS}, "stop_token_ids": {7, 20}, "both": {EOS, 7, 20}}[kind]
    stopped = 0
    for seed in range(25):
        sampling: dict[str, Any] = {"temperature": 2.0, "seed": seed, "max_tokens": 16, "block_length": 4}
        free = alone(Work(request("r", 6, **sampling), Dense()), family)
        ids = [] if kind == "eos" else [7, 20]
        got = alone(
            Work(request("r", 6, ignore_eos=kind == "stop_token_ids", stop_token_ids=ids, **sampling), Dense()), family
        )
        assert settled(free, 6) == list(free.token_ids)
        end = next((i + 1 for i, token in enumerate(free.token_ids) if token in stops), None)
        if end is None:
            assert outcome(got) == outcome(free)
            continue
        stopped += 1
        assert got.token_ids == free.token_ids[:end]
        assert got.finish_reason == "stop"
        assert got.usage.completion_tokens == end
        assert got.usage.forwards <= free.usage.forwards
        assert got.trace == free.trace[: len(got.trace)]
    assert stopped >= 3


def letters(tokens: Sequence[int]) -> str:
    return "".join(f"<{token}>" for token in tokens)


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(6))
def test_stop_texts(seed: int) -> None:
    sampling: dict[str, Any] = {"temperature": 2.0, "seed": seed, "max_tokens": 12, "block_length": 4}
    free = alone(Work(request("r", 6, **sampling), Dense()))
    for at in range(12):
        pair = free.token_ids[at : at + 2]
        text = letters(pair)[1:-1]
        engine = make_engine(decode=letters)
        got = run(engine, [Work(request("r", 6, stop=["never", text], **sampling), Dense())])["r"]
        end = next(i for i in range(1, 13) if text in letters(free.token_ids[:i]))
        assert got.token_ids == free.token_ids[:end]
        assert got.finish_reason == "stop"


def test_a_stop_token_before_a_stop_text_wins() -> None:
    free = alone(Work(request("r", 6), Dense()))
    first, last = free.token_ids[0], free.token_ids[-1]
    engine = make_engine(decode=letters)
    got = run(engine, [Work(request("r", 6, stop=f"<{last}>", stop_token_ids=[first]), Dense())])["r"]
    assert got.token_ids == (first,)


def test_stop_texts_need_a_tokenizer() -> None:
    with pytest.raises(ConfigError, match="stop texts need a tokenizer"):
        make_engine().add(request(stop="x"))


@FAMILIES
@pytest.mark.parametrize("policy", [Dense(), Reuse(), BiCache(depth=2)])
@pytest.mark.parametrize("cfg_scale", [0.0, 1.0])
def test_a_typed_mask_token_is_text(family: str, policy: CachePolicy, cfg_scale: float) -> None:
    prompt = [MASK_ID, 3, MASK_ID, 9, MASK_ID]
    result = alone(Work(request("r", prompt, 3, cfg_scale=cfg_scale), policy), family)
    assert len(result.token_ids) == 8
    assert MASK_ID not in result.token_ids
    positions = sorted(p for item in result.trace for p in item.positions)
    assert positions == list(range(5, 13))


def test_the_canvas_of_the_request_is_never_the_callers() -> None:
    prompt = prompt_of(6)
    before = list(prompt)
    alone(Work(Request("r", prompt, SamplingParams(max_tokens=4), 4), BiCache(depth=2)))
    assert prompt == before


def test_without_a_seed_requests_differ() -> None:
    work = [Work(request(f"r{i}", 6, temperature=5.0), Dense()) for i in range(4)]
    assert len({result.token_ids for result in run(make_engine(), work).values()}) > 1


def test_times_and_traces_are_told() -> None:
    events = events_of(make_engine(), request("r"))
    result = events[-1].result
    assert result is not None
    assert [event.transfer for event in events if event.transfer is not None] == list(result.trace)
    assert result.first_settled_s is not None
    assert 0 < result.first_settled_s <= result.elapsed_s


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [1, VOCAB]}, f"prompt_token_ids holds {VOCAB}; token ids are whole numbers from 0 to {VOCAB - 1}"),
        ({"prompt": [1, -1]}, "holds -1"),
        ({"prompt": [1, True]}, "holds True"),
        ({"prompt": [1, math.nan]}, "holds nan"),
        ({"prompt": 60}, "prompt of 60 tokens and max_tokens=8 make a canvas of 68, but max_model_len is 64"),
        ({"prompt": 8, "prefix": 9}, "prefix_length must be from 0 to the prompt's 8 tokens, got 9"),
        ({"prompt": 8, "prefix": -1}, "prefix_length"),
        ({"prompt": 8, "prefix": 2.0}, "prefix_length"),
        ({"remasking": "order", "order": [[0, 1, 2, 3, 4, 5, 6, 7]]}, "order: list 0 must hold each canvas position"),
        ({"remasking": "random", "threshold": 0.5}, "threshold compares probabilities"),
        ({"remasking": "confidence_threshold", "threshold": 0.5, "steps": 3}, "a block of 8 masks has 3 steps"),
    ],
    ids=repr,
)
def test_requests_that_cannot_run_are_refused_and_not_queued(bad: dict[str, Any], message: str) -> None:
    engine = make_engine()
    engine.add(request("good"))
    for call in (engine.check, engine.add):
        with pytest.raises(ConfigError, match=message):
            call(request("bad", **bad))
    assert engine.waiting == 1
    assert set(run(engine, [])) == {"good"}


def test_ids_must_differ_while_in_use() -> None:
    engine = make_engine(max_num_seqs=1)
    engine.add(request("a"))
    engine.add(request("b"))
    for name in ("a", "b"):
        with pytest.raises(ConfigError, match=f"id '{name}' is in use"):
            engine.add(request(name))
    engine.step()
    with pytest.raises(ConfigError, match="id 'a' is in use"):
        engine.add(request("a"))
    run(engine, [])
    engine.add(request("a"))
    run(engine, [])


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 1e-300])
def test_a_temperature_that_float32_cannot_divide_by_is_greedy(temperature: float) -> None:
    plain, tiny = (alone(Work(request("r", temperature=value, seed=1), Dense())) for value in (0.0, temperature))
    assert outcome(plain) == outcome(tiny)


@pytest.mark.parametrize(
    ("family", "policy", "sampling", "message"),
    [
        ("llada", BiCache(DkvPd(8, "un_right"), 1), {}, "shift='un_right' is for models"),
        ("llada", DkvGreedy(), {}, "dkv-greedy plans by an order"),
        ("dream", BiCache(BlockDual("separate"), 1), {}, "fill_pass='separate'"),
    ],
)
def test_policies_that_do_not_suit_are_refused_with_the_request(
    family: str, policy: CachePolicy, sampling: dict[str, Any], message: str
) -> None:
    engine = make_engine(family)
    for call in (engine.check, engine.add):
        with pytest.raises(ConfigError, match=message):
            call(request("r", **sampling).with_policy(policy))
    assert not engine.busy


def test_a_full_canvas_fits() -> None:
    for policy in (Dense(), Reuse(), BiCache(depth=1)):
        engine = make_engine(max_num_seqs=2, page_size=16)
        work = [Work(request(f"r{i}", prompt_of(56, i), 55, cfg_scale=float(i)), policy) for i in range(2)]
        assert len(run(engine, work)) == 2


@pytest.mark.parametrize("rows", [1, 5, 9, 16])
def test_logits_are_read_a_few_requests_at_a_time(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    work = [
        Work(request(f"r{i}", 5, temperature=0.5 * (i % 2), seed=i, cfg_scale=float(i == 2)), Dense()) for i in range(5)
    ]
    expected = {name: outcome(result) for name, result in run(make_engine(max_num_seqs=8), work).items()}
    sizes = []

    def counted(logits: torch.Tensor, *rest: Any) -> torch.Tensor:
        sizes.append(len(logits))
        return score(logits, *rest)

    monkeypatch.setattr(runner, "score", counted)
    monkeypatch.setattr(runner, "logit_rows", lambda _: rows)
    assert {name: outcome(result) for name, result in run(make_engine(max_num_seqs=8), work).items()} == expected
    assert max(sizes) <= max(rows, 2)  # a guided position has two rows


def test_an_idle_engine_does_nothing() -> None:
    engine = make_engine()
    assert engine.step() == []
    assert not engine.busy
    assert engine.stats.steps == 0


def test_a_leaked_page_one_freed_too_early_and_a_lost_lease_are_found() -> None:
    engine = make_engine()
    engine.add(request("r", 8, 4).with_policy(BiCache(depth=2)))
    engine.step()
    assert engine.allocator.allocate(1, range(1, 2)) is not None
    with pytest.raises(IntegrityError, match=r"1 page counts are off, the first at \(layer, page\) \[1, "):
        run(engine, [])
    for what, message in (("page", "page counts are off"), ("lease", "1 leases that nobody holds")):
        engine = make_engine()
        run(engine, [Work(request("r", 8, 4), Reuse())])
        (entry,) = engine.store.entries
        if what == "page":
            engine.allocator.references[2, entry.extent.pages[0]] = 0
        else:
            entry.leases += 1
        with pytest.raises(IntegrityError, match=message):
            engine.step()


def test_the_fingerprint_and_dtype_are_part_of_a_prefixs_identity() -> None:
    engines = [Engine(MODELS["llada"], EngineConfig(), name) for name in ("a", "b")]
    assert engines[0].store.salt != engines[1].store.salt
    assert b"float64" in engines[0].store.salt


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("max_num_seqs", [0, -1, 1.0, True, None, "2"]),
        ("max_model_len", [0, 1.5, True, "9"]),
        ("max_row_layers", [0, -5, 2.0, False]),
        ("page_size", [0, 1.0, "16", True]),
        ("store_budget_tokens", [-1, 1.0, None, math.nan]),
    ],
)
def test_bad_limits_are_named(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ConfigError, match=f"{name} must be a whole number"):
            EngineConfig(**{name: value})
    with pytest.raises(UnknownNameError, match="Unknown eviction 'lfu'"):
        EngineConfig(eviction="lfu")  # type: ignore[arg-type]


def test_canvases_longer_than_the_models_positions_are_refused() -> None:
    with pytest.raises(ConfigError, match="max_model_len=129 exceeds the model's 128 positions"):
        make_engine(max_model_len=129)
    assert Engine(MODELS["llada"], EngineConfig(), "x").max_model_len == 128


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_number_formats_run(dtype: torch.dtype) -> None:
    config = MODELS["dream"].config
    engine = Engine(Transformer(config, lively_weights(config, dtype)), EngineConfig(page_size=4), "x")
    work = [Work(request(f"r{i}", 9 + i, 5), BiCache(depth=2, refresh_interval=2)) for i in range(3)]
    assert all(len(result.token_ids) == 8 for result in run(engine, work).values())
    assert engine.pool.k[0].dtype == engine.store.entries[0].states.dtype == dtype
    width = config.kv_heads * config.head_dim * dtype.itemsize
    assert engine.pool.bytes_of(1) == 2 * width
    assert engine.pool.nbytes == 2 * width * LAYERS * (engine.pool.page_count * 4 + 1), "with the slot that no page has"


def test_nothing_of_an_ended_request_is_kept_while_others_run() -> None:
    engine = make_engine(max_num_seqs=2)
    engine.add(request("long", max_tokens=16))
    engine.add(request("short", max_tokens=4))
    engine.step()
    canvases = {each.request.id: weakref.ref(each.canvases[0].canvas) for each in engine._lifecycle.requests()}
    while running_canvases(engine) == 2:
        engine.step()
    engine.step()
    gc.collect()
    assert [name for name, canvas in canvases.items() if canvas() is not None] == ["long"]
