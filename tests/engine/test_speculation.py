"""Speculation: the tokens, and the steps, of the static rule, in fewer passes.

An oracle computes every draft densely, in a pass of its own. It says which passes there are and how many drafts they
have; the engine's are compared with that. Where caches reuse prefixes, and in mixtures, requests with drafts are
compared with the same requests without.
"""

import random
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from remask.checkpoint.loaded import dummy_weights
from remask.engine.drafting import ROWS, Drafting, Pace, PassSeconds, pass_seconds
from remask.engine.engine import Engine
from remask.engine.request import Owner, Request
from remask.errors import ConfigError
from remask.families import preset
from remask.model.stage import StepBatch
from remask.model.transformer import Transformer
from remask.plan.plan import Plan
from remask.plan.spans import Span
from remask.readers.drafts import Drafts
from remask.readers.logprobs import Logprobs
from remask.request.parts import Segment
from remask.request.result import Result
from tests.engine import test_against_oracles as static
from tests.engine.support import (
    CPU,
    FAMILIES,
    LAYERS,
    VOCAB,
    Work,
    alone,
    lively_weights,
    make_engine,
    poisoned_engine,
    policy_of,
    prompt_of,
    request,
    run,
    small_config,
    written,
)
from tests.goldens import moe
from tests.oracles import speculate as oracle
from tests.parallel.threads import ThreadRanks, together
from tests.sampling_fields import flat_params

Line = dict[str, Any]
MODELS = ("llada", "llada_gqa", "dream", moe.MASKED)
TRIES = 60


def lines(rng: random.Random, model: str, cache: str) -> tuple[Line, Callable[[int], oracle.Take]]:
    """A request without sharing, and its rule for a block of so many masks."""
    block, count = rng.randint(4, 8), rng.randint(1, 2)
    prompt = [rng.randrange(static.VOCAB - 1) for _ in range(rng.randint(1, 9))]
    sampling: Line = {"max_tokens": block * count, "block_length": block, "speculate": rng.randint(1, 6)}
    line = {"cache": cache, "cache_config": {}, "prompt_token_ids": prompt, "sampling": sampling}
    kind = rng.choice(["counted", "counted", "above", "by_factor"])
    value = rng.choice([0.2, 0.5]) if kind == "above" else rng.choice([0.8, 1.2])
    if kind == "above":
        sampling |= {"remasking": "low_confidence", "threshold": value}
        return line, lambda _: oracle.above(value)
    if kind == "by_factor":
        sampling |= {"remasking": "low_confidence", "factor": value}
        return line, lambda _: oracle.by_factor(value)
    steps = rng.randint(2, block)
    sampling |= {"steps": steps * count}
    if "dream" in model and cache != "none":
        return line, lambda _: oracle.timed(steps)
    sampling |= {"remasking": "low_confidence"}
    return line, lambda masks: oracle.counted(masks, steps)


def decoded(model: str, line: Line, rule: Callable[[int], oracle.Take]) -> oracle.Speculated | None:
    """What the oracle makes of it; None where a rounding would decide that."""
    sampling = line["sampling"]
    found = []
    for dtype in (torch.float64, torch.float32):
        shape = sampling["max_tokens"], sampling["block_length"], rule, line["cache"], sampling["speculate"]
        found.append(oracle.speculate(static.dense(model, dtype), line["prompt_token_ids"], *shape))
    exact, rough = found
    same = (exact.transfers, exact.drafts, exact.accepted) == (rough.transfers, rough.drafts, rough.accepted)
    return exact if same and exact.narrowest > 1e-5 else None


def drawn(rng: random.Random, model: str, cache: str, *, accepts: bool) -> tuple[Line, oracle.Speculated]:
    """A line, and what it decodes to; with `accepts` some draft comes true."""
    for _ in range(TRIES):
        line, rule = lines(rng, model, cache)
        found = decoded(model, line, rule)
        if found is not None and (found.accepted or not accepts):
            return line, found
    raise AssertionError("every decode turns on a rounding")


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", MODELS)
def test_passes_and_drafts_are_those_of_the_oracle(model: str, seed: int) -> None:
    """Several requests under each cache in one batch. Memory is there for all drafts."""
    rng = random.Random(f"speculation {model} {seed}")
    caches = ("none", "block-prefix", "block-dual")
    found = {f"{cache} {n}": drawn(rng, model, cache, accepts=n == 0) for cache in caches for n in range(3)}
    engine = poisoned_engine(static.model_of(model), max_num_seqs=9, max_model_len=128, page_size=rng.choice([1, 4]))
    results = run(engine, [static.work_of(line, name, rng.randrange(8)) for name, (line, _) in found.items()])
    layers = static.LAYERS[model]
    for name, (line, expected) in found.items():
        result, usage = results[name], results[name].usage
        trace = [(list(each.positions), list(each.token_ids)) for each in result.trace]
        assert trace == expected.transfers, line
        assert usage.accepted == expected.accepted
        assert usage.forwards == len(expected.drafts) == usage.steps - expected.accepted
        assert usage.row_layers == layers * sum(expected.rows)


CACHES: tuple[tuple[str, Line], ...] = (
    ("none", {}),
    ("reuse", {}),
    ("block-prefix", {}),
    ("block-dual", {}),
    ("block-dual", {"fill_pass": "separate"}),
    ("bicache", {"depth": 2, "refresh_interval": 4}),
    ("bicache", {"depth": 2, "refresh_interval": None, "boundary": "recomputed"}),
    ("bicache", {"depth": 0, "refresh_interval": 5, "within_request": True}),
    ("bicache+block-prefix", {"depth": 1, "refresh_interval": 6}),
    ("bicache+block-dual", {"depth": 1, "refresh_interval": 3}),
    ("bicache+block-dual", {"depth": 4, "refresh_interval": None, "fill_pass": "separate"}),
)
SAMPLING: tuple[Line, ...] = (
    {},
    {"steps_per_block": 5},
    {"threshold": 0.15},
    {"factor": 0.9},
    {"remasking": "topk_margin"},
    {"remasking": "random"},
    {"remasking": "origin"},
    {"stop_token_ids": list(range(1, 30))},
)


def asked(rng: random.Random, family: str, name: str, number: int) -> Work:
    """A request under one of the caches, with a shared prefix, parts, or neither."""
    cache, config = CACHES[number % len(CACHES)]
    if family == "dream" and config.get("fill_pass") == "separate":
        config = {key: value for key, value in config.items() if key != "fill_pass"}
    shared = prompt_of(8, seed=rng.randrange(2))
    prompt = [*shared, *(rng.randrange(VOCAB) for _ in range(rng.randint(1, 4)))]
    block = rng.choice([4, 6, 12])
    sampling: Line = {"max_tokens": 12, "block_length": block, "ignore_eos": True, "seed": rng.randrange(99)}
    if block < 12 and rng.random() < 0.4:
        sampling["growing_canvas"] = True
    params = flat_params(**sampling, **rng.choice(SAMPLING), speculate=rng.randint(2, 6))
    asked = Request(name, prompt, params, rng.choice([0, 8, 8]))
    if rng.random() < 0.3:
        asked = replace(asked, prefix_length=0, segments=[Segment(1, 4)])
    if rng.random() < 0.3:
        asked = asked.with_readers(Logprobs(2))
    return Work(asked, policy_of(cache, **config), rng.randrange(10))


def without(item: Work) -> Work:
    params = replace(item.request.params, speculate=None)
    return replace(item, request=replace(item.request, params=params))


def same(drafted: Result, plain: Result) -> None:
    assert (drafted.error, plain.error) == (None, None)
    assert written(drafted) == written(plain)
    assert (drafted.token_ids, drafted.finish_reason) == (plain.token_ids, plain.finish_reason)
    assert drafted.usage.steps == plain.usage.steps
    assert drafted.usage.accepted == plain.usage.forwards - drafted.usage.forwards
    for one, other in zip(drafted.trace, plain.trace, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def poison_what_is_renewed(engine: Engine) -> Callable[[int], None]:
    """Makes K/V NaN that the passes of a block have written, between passes: the next one must write them anew."""

    def poison(_: int) -> None:
        for running in engine._lifecycle.requests():
            drafting, standing = running.claim.drafting, running.planner.standing
            if drafting is None or standing is None or running.decoder.finished:
                continue
            if running.planner.repeated(running.decoder, running.canvases[0].canvas.noisy) is None:
                continue
            for span in standing.plan.spans:
                for layer in span.layers:
                    slots = torch.from_numpy(running.canvases[0].slots(layer)[span.written_index])
                    engine.pool.k[layer][slots] = engine.pool.v[layer][slots] = torch.nan

    return poison


@pytest.mark.few(6)
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_no_token_under_any_cache(family: str, seed: int) -> None:
    """Requests with drafts in one batch with requests without; memory and budgets may be too small for all drafts."""
    rng = random.Random(f"drafts {family} {seed}")
    work = [asked(rng, family, str(number), number) for number in range(2 * len(CACHES))]
    limits: Line = {"max_num_seqs": rng.choice([3, 8]), "page_size": rng.choice([1, 4]), "max_model_len": 64}
    limits |= {"max_row_layers": rng.choice([None, 300]), "max_refreshes": rng.choice([None, 1])}
    plain = run(make_engine(family, **limits), [without(item) for item in work])
    mixed = [item if rng.random() < 0.8 else without(item) for item in work]
    engine = make_engine(family, **limits)
    results = run(engine, mixed, each_step=poison_what_is_renewed(engine))
    accepted = 0
    for item in mixed:
        name = item.request.id
        if item.request.params.speculate is None:
            assert results[name].usage.accepted is None
            assert written(results[name]) == written(plain[name])
        else:
            same(results[name], plain[name])
            accepted += results[name].usage.accepted or 0
    assert accepted > 0


def test_the_bits_are_those_of_a_run_without_drafts() -> None:
    """Where bits depend on no company, log-probabilities are equal to the last bit."""
    rng = random.Random("bits")
    limits: Line = {"batch_invariant": True, "max_num_seqs": 8}
    work = [asked(rng, "llada", str(number), number) for number in range(len(CACHES))]
    work = [replace(item, request=item.request.with_readers(Logprobs(3))) for item in work]
    plain, drafted = (run(make_engine(**limits), each) for each in ([without(item) for item in work], work))
    for name, result in plain.items():
        assert drafted[name].trace == result.trace


def test_overlap_and_graphs_read_first() -> None:
    """Tokens live on the device then, also those of drafts that have K/V for earlier blocks too."""
    rng = random.Random("overlap")
    work = [asked(rng, "llada", str(number), number) for number in range(len(CACHES))]
    blocks = [request(f"blocks {n}", n + 5, max_tokens=12, block_length=4, speculate=4) for n in range(6)]
    work += [Work(each, policy_of("none")) for each in blocks]
    plain = run(make_engine(), [without(item) for item in work])
    results = run(make_engine(overlap=True, graphs=True, max_num_seqs=8), work)
    for name, result in results.items():
        same(result, plain[name])


def test_passes_that_are_run_and_read_in_parts() -> None:
    """A pass that fails as a whole runs in halves, and is read request by request, drafts and all."""
    rng = random.Random("parts of passes")
    work = [asked(rng, "llada", str(number), number) for number in range(len(CACHES))]
    plain = run(make_engine(), [without(item) for item in work])
    engine = make_engine(max_num_seqs=8, overlap=False)
    ran, read = engine.runner.run, engine.runner.launch_scores

    def run_few(items: Any) -> Any:
        if len(items) > 12:
            raise ValueError("too many at once")
        return ran(items)

    def read_one(hidden: Any, turns: Any) -> Any:
        if len(turns) > 1:
            raise ValueError("one by one")
        return read(hidden, turns)

    vars(engine.runner)["run"], vars(engine.runner)["launch_scores"] = run_few, read_one
    results = run(engine, work)
    for name, result in results.items():
        same(result, plain[name])


@pytest.mark.few(2)
@pytest.mark.parametrize("seed", range(4))
def test_cancels_leave_nothing(seed: int) -> None:
    """Whatever ends while drafts are there gives back their pages; what goes on is answered as ever."""
    rng = random.Random(f"cancels {seed}")
    work = [asked(rng, "llada", str(number), number) for number in range(2 * len(CACHES))]
    engine = make_engine(max_num_seqs=6, max_model_len=32, page_size=rng.choice([1, 3]), store_budget_tokens=16)
    cancelled = set(rng.sample([item.request.id for item in work], 6))

    def cancel(step: int) -> None:
        for name in list(cancelled):
            if rng.random() < 0.1:
                engine.cancel(name)

    results = run(engine, work, each_step=cancel)  # which checks pages and leases
    assert engine.allocator.used == sum(len(e.extent.pages) * len(e.extent.layers) for e in engine.store.entries)
    plain = run(make_engine(), [without(item) for item in work])
    for name, result in results.items():
        if result.finish_reason != "cancelled" and result.usage.prefix_note is None:
            assert written(result) == written(plain[name])


def test_a_stop_within_a_pass_ends_the_response_there() -> None:
    """What drafts hold beyond a stop is neither written nor told."""
    policy = policy_of("block-dual")
    sampling: Line = {"max_tokens": 12, "block_length": 12}
    stop = alone(Work(request(**sampling), policy)).trace[6].token_ids[0]
    drafted = Work(request(**sampling, stop_token_ids=[stop], speculate=8), policy)
    same(alone(drafted), alone(without(drafted)))


def test_drafts_read_the_context_in_place() -> None:
    """A pass with three drafts has rows and K/V slots of the block four times, and everything else once."""
    engine = make_engine(max_num_seqs=4)
    policy = policy_of("bicache+block-dual", depth=2, refresh_interval=None)
    engine.add(request("r", prompt=16, prefix=8, max_tokens=8, speculate=4).with_policy(policy))
    wide = 0
    while engine.busy:
        engine.step()
        for running in engine._lifecycle.requests():
            first, *drafts = running.plan().items
            wide = max(wide, len(drafts))
            block = set(range(16, 24))
            for branch, plan in drafts:
                assert plan.spans is first[1].spans
                for layer in range(branch.ledger.layers):
                    own, other = first[0].slots(layer), branch.slots(layer)
                    assert {p for p in range(24) if own[p] != other[p]} == block
                    assert branch.table(layer).common == first[0].table(layer).common
    assert wide == 3


def test_few_pages_mean_fewer_drafts() -> None:
    """A request never waits for the pages of its drafts."""
    engine = make_engine(max_num_seqs=2, max_model_len=32, store_budget_tokens=0, page_size=4)
    work = [Work(request(str(n), prompt=20, max_tokens=12, speculate=6), policy_of("none")) for n in range(2)]
    for item in work:
        engine.add(item.asked)
    engine.step()
    assert engine.running_canvases == 2
    assert None in [running.claim.drafting for running in engine._lifecycle.requests()]
    assert written(run(engine, [])["0"]) == written(alone(without(work[0])))


def test_what_takes_pages_later_takes_those_of_drafts() -> None:
    """Also of a request whose next pass is planned with drafts; it goes on without them."""
    engine = make_engine(max_num_seqs=2, max_model_len=32, store_budget_tokens=0, page_size=4)
    first, late = (Work(request(str(n), 20, max_tokens=12, speculate=6), policy_of("none")) for n in range(2))
    engine.add(first.asked)
    for _ in range(3):
        engine.step()
    (running,) = engine._lifecycle.requests()
    assert running.claim.drafting is not None
    assert running.plan().drafts

    def taken(_: int) -> None:
        assert len(engine._lifecycle.requests()) < 2 or running.claim.drafting is None

    results = run(engine, [late], each_step=taken)
    assert written(results["0"]) == written(alone(without(first))) == written(results["1"])


def test_drafts_of_a_pass_that_is_queued_stay() -> None:
    """Two of three requests run in a step, so drafts may be queued behind the others. A fourth one waits for pages."""
    names = ("plain", "other", "drafts", "late")
    asked = [replace(request(name, speculate=6 if name == "drafts" else None), owner=Owner(name)) for name in names]
    work = [Work(each, policy_of("none")) for each in asked]
    expected, rows = {item.request.id: written(alone(without(item))) for item in work}, list[int]()
    for joins in range(2, 8):
        engine = make_engine(overlap=True, max_num_seqs=2, max_model_len=32, store_budget_tokens=0)
        results = run(engine, [*work[:3], replace(work[3], joins=joins)])
        assert {name: written(result) for name, result in results.items()} == expected
        assert engine.stats.queued_passes > 0
        rows.append(results["drafts"].usage.row_layers)
    assert max(rows) > 8 * 16 * LAYERS, "drafts were computed"


def test_passes_count_after_drafts_were_taken_from_a_step_that_one_of_them_had_run() -> None:
    rng = random.Random(1)
    line, _ = drawn(rng, "llada", "block-dual", accepts=True)
    engine = poisoned_engine(static.model_of("llada"), max_num_seqs=1, max_model_len=128, overlap=False)
    engine.add(static.work_of(line, "r", 0).asked)
    usage = None
    while engine.busy:
        for event in engine.step():
            usage = usage if event.result is None else event.result.usage
        for running in engine._lifecycle.requests():
            if running.claim.drafting is not None and running.record.usage.accepted:
                engine.memory._drafting.remove(running)
                engine.memory._without_drafts(running)
    assert usage is not None
    assert usage.accepted
    assert usage.forwards == engine.stats.steps


@pytest.mark.parametrize(
    ("cache", "sampling", "reason"),
    [
        ("none", {"temperature": 0.7}, "temperature=0.7 draws"),
        ("none", {"cfg_scale": 1.0}, "cfg_scale=1.0 runs two canvases"),
        ("none", {"remasking": "slowfast"}, "keeps a state from step to step"),
        ("dllm-cache", {}, "depends on the passes that have run"),
        ("elastic-cache", {"max_tokens": 16}, "depends on the passes that have run"),
        ("entropy-cache", {}, "depends on the passes that have run"),
        ("acache", {}, "depends on the passes that have run"),
        ("dkv-decode", {}, "depends on the passes that have run"),
        ("bicache+dllm-cache", {}, "depends on the passes that have run"),
    ],
)
def test_what_cannot_be_exact_is_refused(cache: str, sampling: Line, reason: str) -> None:
    asked = request(speculate=4, **sampling).with_policy(policy_of(cache))
    with pytest.raises(ConfigError, match=f"^speculate=4 cannot be exact here: .*{reason}.*leave speculate out"):
        make_engine().check(asked)


@pytest.mark.parametrize("cache", ["none", "block-prefix", "block-dual", "bicache+block-dual"])
def test_drafts_on_a_canvas_that_grows(cache: str) -> None:
    """It gets room for drafts anew with each block, as the defaults of some families grow."""
    config = replace(small_config("llada"), family="illada", sampling=preset("illada-tiny").sampling)
    model = Transformer(config, lively_weights(config))
    policy = policy_of(cache, **({"depth": 2} if "bicache" in cache else {}))
    work = [
        Work(request(str(n), prefix=2, max_tokens=24, block_length=6, speculate=4, seed=n), policy, n) for n in range(6)
    ]
    engine = poisoned_engine(model, max_num_seqs=6)
    found = run(engine, work, each_step=poison_what_is_renewed(engine))
    for name, plain in run(poisoned_engine(model), [without(item) for item in work]).items():
        same(found[name], plain)
        assert len(plain.trace) > 6, "the canvas has grown"
    assert sum(result.usage.accepted or 0 for result in found.values())


def test_growing_canvases_beside_drafts() -> None:
    """A canvas that grows takes the pages of drafts where no others are left."""
    policy = policy_of("none")
    drafting = Work(request("drafts", prompt=20, max_tokens=12, speculate=6), policy)
    growing = Work(request("grows", prompt=4, max_tokens=24, growing_canvas=True, block_length=4), policy)
    engine = make_engine(max_num_seqs=2, max_model_len=32, store_budget_tokens=0, page_size=4)
    results = run(engine, [drafting, growing])
    same(results["drafts"], alone(without(drafting)))
    assert written(results["grows"]) == written(alone(growing))


@pytest.mark.parametrize("bias", [{"logit_bias": {3: 4.0, 7: -9.0, 11: 2.0}}, {"min_p": 0.3}])
def test_biases_act_on_drafts_too(bias: Line) -> None:
    work = [
        Work(request(f"{cache} {n}", n, max_tokens=12, speculate=4, **bias).with_readers(Logprobs(2)), policy_of(cache))
        for cache in ("none", "block-dual")
        for n in range(5, 9)
    ]
    results = run(make_engine(max_num_seqs=8), work)
    for name, plain in run(make_engine(), [without(item) for item in work]).items():
        same(results[name], plain)
    assert sum(result.usage.accepted or 0 for result in results.values())


def test_auto_weighs_steps_against_what_passes_take() -> None:
    """Where more rows take no longer, as many as may be; where they take as much longer, none. Company counts."""
    flat = Pace(lambda: PassSeconds(np.ones(len(ROWS))))
    steep = Pace(lambda: PassSeconds(np.array(ROWS) / 8.0))
    assert flat.states(32, 0.7, 8) == 8
    assert steep.states(32, 0.9, 8) == 1
    reads = np.maximum(1.0, np.array(ROWS) / 256)  # weights, below 256 rows
    bound = Pace(lambda: PassSeconds(reads))
    assert bound.states(32, 0.7, 8) == 8
    bound.running = 4
    assert bound.states(32, 0.7, 8) == 2
    assert bound.states(32, 0.2, 8) == 1, "a fifth more steps is less than what drafts take besides"
    bound.running = 64  # far beyond what was measured
    assert bound.states(32, 0.99, 8) == 1
    costly = Pace(lambda: PassSeconds(reads, canvas=1.0))  # each canvas as much as the weights
    assert costly.states(32, 0.7, 8) == 8, "that is of short blocks only: a canvas of 32 rows is in the rows' seconds"
    assert costly.states(4, 0.7, 8) == 1


def test_auto_goes_by_the_share_that_came_true() -> None:
    chances: list[float] = []

    def states(_: int, chance: float, most: int) -> int:
        chances.append(chance)
        return most

    pace, rows = Pace(lambda: PassSeconds(np.ones(len(ROWS)))), np.ones(4, dtype=np.bool_)
    vars(pace)["states"] = states
    drafting, plan = Drafting([], pace), Plan((Span(range(1), rows),), rows)
    for drafts, accepted in ((0, 0), (2, 2), (2, 1)):
        drafting.note(drafts, accepted)
        drafting._number(plan)
    assert chances == [2 / 3, 4 / 5, 5 / 7], "as if of three, two had come true before"


def test_auto_measures_once_and_changes_no_token() -> None:
    work = Work(request("r", max_tokens=12, block_length=12, speculate="auto"), policy_of("block-dual"))
    engine, calls = make_engine(), []

    def measured() -> Any:
        calls.append(pass_seconds(engine.model))
        return PassSeconds(np.ones(len(ROWS)))

    vars(engine.memory)["pace"] = Pace(measured)
    same(run(engine, [work])["r"], alone(without(work)))
    assert len(calls) == 1
    (found,) = calls
    assert found.rows.shape == (len(ROWS),)
    assert (found.rows > 0).all()
    assert np.isfinite(found.rows).all()
    assert 0 <= found.canvas < np.inf


def test_passes_that_compute_are_not_run_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests wait while passes are timed. The clock is moved by passes: weights take 20, each row 1 beyond, and each
    canvas half of 1 beyond one.
    """
    model, clock, ran = make_engine().model, [0.0], list[int]()

    def forward(self: Transformer, batch: StepBatch, pool: Any) -> None:
        ran.append(len(batch.tokens))
        canvases = len(batch.stages[0].work.units) - 1
        clock[0] += max(20, len(batch.tokens)) + canvases / 2

    monkeypatch.setattr(Transformer, "forward", forward)
    monkeypatch.setattr("remask.engine.drafting.time.perf_counter", lambda: clock[0])
    found = pass_seconds(model)
    assert found.rows.tolist() == [20, 20, 32, 64.5, 129, 258, 516, 1032]
    assert found.canvas == 0.5
    assert sorted(set(ran)) == [8, 16, 32, 64], "two passes of which the longer one takes twice as long are enough"


def test_ranks_time_the_same_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """However their clocks go: a rank that ran more passes than another one would wait for it for ever."""
    config = small_config("llada")

    class Reads(threading.local):
        rank = count = 0

    def clock() -> float:
        reads.count += 1
        return float(reads.count if reads.rank else 2**reads.count)  # to the first rank longer passes take far longer

    def measured(ranks: ThreadRanks) -> NDArray[np.float64]:
        reads.rank = ranks.shard.rank
        model = Transformer(config, dummy_weights(config, torch.float32, CPU, 0, ranks.shard), ranks=ranks)
        return pass_seconds(model).rows

    reads = Reads()
    monkeypatch.setattr("remask.engine.drafting.time.perf_counter", clock)
    one, other = together(2, measured)
    assert one.tolist() == other.tolist()


def test_readers_of_steps_are_refused() -> None:
    with pytest.raises(ConfigError, match="what 'drafts' reads or writes depends on the steps before"):
        make_engine().check(request("r", speculate=2).with_readers(Drafts()))
