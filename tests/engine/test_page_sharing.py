"""Exact sharing of committed pages between requests: the same tokens, less work, memory held once, nothing leaked."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from remask.engine.engine import Engine
from remask.engine.placement import PageSharing
from remask.plan.canvas import Canvas
from remask.plan.plan import Plan, View
from remask.plan.spans import Span
from remask.policies import CachePolicy
from remask.policies.base import Traits
from remask.policies.exact import Exact
from remask.request.result import Result, Usage
from tests.engine import kinds
from tests.engine.support import Work, poisoned_engine, run, running_canvases
from tests.engine.test_block_causal_against_oracles import Line, oracle, work_of
from tests.oracles.block_causal import BlockDecode
from tests.oracles.page_chain import Pool

MODEL = "sdar"
BLOCK = kinds.SDAR["block_size"]


def engine_of(model: str = MODEL, **limits: Any) -> Engine:
    page = 2 * kinds.checkpoint(model).block
    defaults = {"page_size": page, "max_model_len": 96, "store_budget_tokens": 400, "max_num_seqs": 8}
    return poisoned_engine(kinds.checkpoint(model).model, **{**defaults, **limits})


def line_of(prompt: Sequence[int], chunk: int = 512, **sampling: Any) -> Line:
    given = {"max_tokens": 8, "steps_per_block": 2, **sampling}
    return {"cache": "exact", "cache_config": {"prefill_chunk": chunk}, "prompt_token_ids": prompt, "sampling": given}


def ask(engine: Engine, name: str, line: Line) -> Result:
    """One request, run to its end before another comes."""
    return run(engine, [work_of(line, name)])[name]


def decoded(prompt: Sequence[int], **sampling: Any) -> BlockDecode:
    expected = oracle(MODEL, line_of(prompt, **sampling))
    assert expected is not None, "a decode that turns on a rounding; take another prompt"
    return expected


class Conversations:
    """Prompts with common left parts: a system prompt, examples, a question, and second turns over answers."""

    def __init__(self, rng: random.Random, model: str) -> None:
        self.rng, self.model = rng, model
        self.known: list[list[int]] = [kinds.tokens(rng, 40) for _ in range(2)]

    def line(self) -> Line:
        base = self.rng.choice(self.known)
        kept = base[: self.rng.randint(1, len(base))]
        prompt = (kept + kinds.tokens(self.rng, self.rng.randint(0, 10)))[:60]
        sampling: Line = {"max_tokens": self.rng.randint(1, 12), "steps_per_block": self.rng.choice([1, 2, 4])}
        if kinds.checkpoint(self.model).model.config.block_length is None:
            sampling["block_length"] = self.rng.choice([2, 4, 4, 4])
        if self.rng.random() < 0.3:
            sampling["stop_token_ids"] = self.rng.sample(range(kinds.MASK), 12)
        if self.rng.random() < 0.3:
            sampling |= {"temperature": 0.8, "seed": self.rng.randrange(99)}
        return line_of(prompt, self.rng.choice([1, 6, 12, 512]), **sampling)

    def learn(self, line: Line, result: Result) -> None:
        """An answer becomes part of what later prompts begin with."""
        self.known.append([*line["prompt_token_ids"], *result.token_ids])


def cancelling(engine: Engine, rng: random.Random, names: Sequence[str], gone: set[str]) -> Callable[[int], None]:
    """Cancels some request before some steps, and checks every page's owners before each."""

    def each_step(step: int) -> None:
        engine.check_integrity()
        if rng.random() < 0.12:
            name = rng.choice(names)
            if engine.cancel(name):
                gone.add(name)

    return each_step


def stub(tokens: Sequence[int], root: bytes) -> int:
    return (sum(tokens) + sum(root)) % 3


@pytest.mark.few(29)
@pytest.mark.parametrize("colliding", [False, True])
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("model", kinds.BLOCKS)
def test_sharing_changes_no_token(model: str, seed: int, colliding: bool) -> None:
    """Random mixes of overlapping prompts, cancelled requests and evictions, three waves in one store."""
    rng = random.Random(f"{model} {seed} {colliding}")
    block = 4 if model == "sdar, any block" else kinds.checkpoint(model).block
    limits = {
        "page_size": block * rng.choice([1, 2, 3]),
        "max_num_seqs": rng.choice([1, 3, 8]),
        "max_row_layers": rng.choice([None, 30, 100]),
    }
    engine = engine_of(model, **limits, store_budget_tokens=rng.choice([14, 30, 60, 400]))
    if colliding:
        engine.memory.chain.hash = stub
    talk, hits = Conversations(rng, model), 0
    for wave in range(3):
        lines = {f"{wave}.{number}": talk.line() for number in range(8)}
        work = [work_of(line, name, rng.randrange(10)) for name, line in lines.items()]
        gone: set[str] = set()
        shared = run(engine, work, each_step=cancelling(engine, rng, list(lines), gone))
        off = run(engine_of(model, **limits, store_budget_tokens=0), work)
        for name, line in lines.items():
            assert off[name].usage.cached_tokens == 0
            if name in gone:
                assert (shared[name].finish_reason, shared[name].token_ids) == ("cancelled", ())
                continue
            assert (shared[name].token_ids, shared[name].trace) == (off[name].token_ids, off[name].trace)
            hits += shared[name].usage.cached_tokens
            talk.learn(line, shared[name])
    assert hits > 0 or colliding or engine.memory.chain.stats.evictions > 0
    held = engine.allocator.used
    assert held == len(engine.memory.chain.pages) * engine.model.config.layers
    engine.memory.chain.drop()
    assert engine.allocator.used == 0


@pytest.mark.few(4)
@pytest.mark.parametrize("page", [4, 8, 12])
@pytest.mark.parametrize("seed", range(3))
def test_hit_counts(seed: int, page: int) -> None:
    """Requests one after the other find exactly the pages that an unlimited pool without hashes finds."""
    rng = random.Random(seed)
    engine, pool = engine_of(page_size=page, store_budget_tokens=4000), Pool(page)
    known = [kinds.tokens(rng, 30)]
    hits = 0
    for number in range(14):
        base = rng.choice(known)
        prompt = (base[: rng.randint(1, len(base))] + kinds.tokens(rng, rng.randint(0, 9)))[:70]
        stops = rng.sample(range(kinds.MASK), 8) if rng.random() < 0.5 else []
        line = line_of(prompt, rng.choice([4, 512]), max_tokens=rng.randint(1, 10), stop_token_ids=stops)
        expected = oracle(MODEL, line)
        if expected is None:
            continue
        result = ask(engine, str(number), line)
        assert list(result.token_ids) == expected.output_ids
        found = pool.hit_tokens(prompt, len(prompt) // BLOCK * BLOCK)
        assert result.usage.cached_tokens == found
        pool.publish(expected.committed)
        known.append([*prompt, *result.token_ids])
        hits += found
    assert hits > 0
    stats = engine.memory.chain.stats
    assert (stats.hits, stats.evictions, stats.rejections) == (hits, 0, 0)
    assert len(engine.memory.chain.pages) == stats.published == len(pool.pages)


def test_a_second_turn_reads_the_first_ones_answer() -> None:
    rng = random.Random(1)
    first = kinds.tokens(rng, 10)
    answer = decoded(first, max_tokens=14)
    engine = engine_of(page_size=4)
    turn = [*first, *ask(engine, "1", line_of(first, max_tokens=14)).token_ids, *kinds.tokens(rng, 5)]
    assert turn[:24] == [*first, *answer.output_ids]
    second = ask(engine, "2", line_of(turn))
    assert second.usage.cached_tokens == 24
    assert list(second.token_ids) == decoded(turn).output_ids


def test_a_common_prompt_is_computed_and_held_once() -> None:
    """All come at once: the others wait for the first one's pages, page by page."""
    rng = random.Random(2)
    system, layers, count = kinds.tokens(rng, 48), kinds.checkpoint(MODEL).model.config.layers, 6
    lines = {str(number): line_of([*system, *kinds.tokens(rng, 3)], 16) for number in range(count)}
    engine = engine_of()
    held = []
    work = [work_of(line, name) for name, line in lines.items()]
    results = run(engine, work, each_step=lambda _: held.append((running_canvases(engine), engine.allocator.used)))
    cached = sorted(result.usage.cached_tokens for result in results.values())
    assert cached == [0] + [48] * (count - 1)
    decodes = {name: oracle(MODEL, line) for name, line in lines.items()}
    passes = 0
    for name, expected in decodes.items():
        assert expected is not None
        assert list(results[name].token_ids) == expected.output_ids
        # Denoising passes, and commit passes of all blocks but the last, which ends no page.
        passes += expected.kinds.count("d") + expected.kinds.count("c") - 1
    assert engine.stats.row_layers == (48 + passes * BLOCK) * layers
    # Six pages of the system prompt, and two of each request for what stands after it.
    assert max(held) == (count, (6 + 2 * count) * layers)


def test_a_prompt_that_is_stored_whole_needs_no_prefill() -> None:
    prompt = kinds.tokens(random.Random(3), 16)
    engine = engine_of()
    ask(engine, "1", line_of(prompt))
    again = ask(engine, "2", line_of(prompt))
    expected = decoded(prompt)
    assert (again.usage.cached_tokens, list(again.token_ids)) == (16, expected.output_ids)
    denoise, commits = expected.kinds.count("d"), expected.kinds.count("c")
    assert again.usage.row_layers == (denoise + commits - 1) * BLOCK * engine.model.config.layers


def test_requests_with_other_blocks_share_nothing() -> None:
    prompt = kinds.tokens(random.Random(4), 32)
    engine = engine_of("sdar, any block", page_size=8)
    for block in (2, 4, 8):
        assert ask(engine, f"{block}", line_of(prompt, block_length=block)).usage.cached_tokens == 0
    for block in (2, 4, 8):
        assert ask(engine, f"again {block}", line_of(prompt, block_length=block)).usage.cached_tokens == 32
    odd = ask(engine, "3", line_of(prompt, block_length=3))
    assert odd.usage.cached_tokens == 0
    assert odd.usage.prefix_note == "pages of 8 tokens hold no whole number of blocks of 3: none is shared"


def test_who_shares_no_page_is_told_why() -> None:
    prompt = kinds.tokens(random.Random(4), 32)
    cases: list[tuple[int, dict[str, Any], dict[str, Any], str | None, str]] = [
        (5, {"page_size": 8}, {}, "short", "the prompt of 5 tokens fills no page of 8"),
        (32, {"page_size": 8, "store_budget_tokens": 4}, {}, "budget", "budget of 4 tokens holds no page of 8"),
        (32, {"page_size": 8}, {"cache_salt": "mine"}, "salt", "nothing of this cache_salt is stored yet"),
        (32, {"page_size": 8}, {}, None, ""),
    ]
    for length, limits, terms, reason, note in cases:
        engine = engine_of("sdar, any block", **limits)
        item = work_of(line_of(prompt[:length], block_length=4), "r")
        usage = run(engine, [replace(item, request=replace(item.request, **terms))])["r"].usage
        assert engine.store.stats.unread_reasons == ({} if reason is None else {reason: 1})
        assert note in (usage.prefix_note or "")
        assert usage.approximation is None


def test_blocks_from_the_end_of_the_prompt_share_the_pages_of_prompts_that_leave_as_many_tokens() -> None:
    """A page is known by the tokens up to the end of the block in which it ends, as its K/V depend on them."""
    model, tokens = "a2d, blocks", kinds.tokens(random.Random(11), 40)
    engine = engine_of(model, page_size=8)

    def usage(common: int, length: int) -> Usage:
        prompt = [*tokens[:common], *kinds.tokens(random.Random(f"{common} {length}"), length - common)]
        result, alone = (run(each, [work_of(line_of(prompt), "r")])["r"] for each in (engine, engine_of(model)))
        assert (result.token_ids, result.trace) == (alone.token_ids, alone.trace)
        return result.usage

    assert usage(40, 42).prefix_note is None, "the first of all"
    assert [usage(common, 26).cached_tokens for common in (18, 17, 10, 9)] == [16, 8, 8, 0]
    other = usage(26, 27)
    assert other.cached_tokens == 0
    assert other.prefix_note == (
        "blocks of 4 are counted from the end of the prompt, whose 27 tokens leave 3; the page stored of its beginning "
        "is of prompts that leave 2"
    )
    assert engine.store.stats.unread_reasons["blocks"] == 1
    assert usage(26, 31).cached_tokens == 16, "and now it is stored in these blocks, too"
    ends: dict[str | None, int] = {None: 0}
    for part in engine.memory_report(detail=True).stored:
        ends[part.id] = part.tokens
        assert part.tokens == ends[part.parent] + 8


def test_what_was_told_does_not_change_with_the_pass_that_completes_a_page() -> None:
    prompt = kinds.tokens(random.Random(5), 8)
    engine = engine_of(page_size=8)
    engine.add(work_of(line_of(prompt, max_tokens=8), "x").request.with_policy(work_of(line_of(prompt), "x").policy))
    told: Result | None = None
    while told is None:
        told = next((event.result for event in engine.step() if event.result is not None), None)
    before = repr(told.usage)
    assert engine.busy, "the last block's commit pass is still to come"
    assert not engine.cancel("x")
    pages = len(engine.memory.chain.pages)
    assert engine.step() == []
    assert (len(engine.memory.chain.pages), repr(told.usage), engine.busy) == (pages + 1, before, False)


def test_a_chain_that_found_no_room_is_not_completed() -> None:
    """The store holds one page, which the next ones follow: there is nothing to run a closing pass for."""
    work = work_of(line_of(kinds.tokens(random.Random(5), 16), max_tokens=8), "x")
    engine = engine_of(page_size=8, store_budget_tokens=8)
    engine.add(work.asked)
    while not any(event.result is not None for event in engine.step()):
        assert engine.busy
    assert not engine.busy
    assert (len(engine.memory.chain.pages), engine.memory.chain.stats.rejections) == (1, 1)


def waiting_pair(chunk: int) -> tuple[Engine, Work, Work]:
    rng = random.Random(6)
    system = kinds.tokens(rng, 40)
    first, second = (work_of(line_of([*system, number], chunk), str(number)) for number in (1, 2))
    return engine_of(), first, second


@pytest.mark.parametrize("after", [1, 2, 3, 4])
def test_pages_that_are_never_finished_are_given_up(after: int) -> None:
    """The request that computes the common prompt is cancelled; the one that awaits its pages computes the rest."""
    engine, first, second = waiting_pair(8)
    for item in (first, second):
        engine.add(item.asked)
    for _ in range(after):
        engine.step()
    assert (running_canvases(engine), engine.waiting) == (1, 1)
    assert engine.cancel("1")
    results = run(engine, [])
    assert list(results["2"].token_ids) == decoded(second.request.prompt_token_ids).output_ids
    assert results["2"].usage.cached_tokens == 8 * after


def test_one_that_awaits_pages_lets_others_pass() -> None:
    engine, first, second = waiting_pair(8)
    other = work_of(line_of([7] * 9), "other")
    for item in (first, second, other):
        engine.add(item.asked)
    engine.step()
    assert (running_canvases(engine), engine.waiting) == (2, 1)
    assert len(run(engine, [])) == 3


def test_a_budget_of_less_than_a_page_shares_nothing() -> None:
    prompt = kinds.tokens(random.Random(8), 32)
    engine = engine_of(store_budget_tokens=7)
    for name in ("1", "2"):
        assert ask(engine, name, line_of(prompt)).usage.cached_tokens == 0
    assert engine.memory.chain.pages == ()


def test_stored_pages_give_way_to_running_requests() -> None:
    """Where the pool is full, idle pages go, and then a request waits until somebody frees his."""
    rng = random.Random(9)
    engine = engine_of()
    for number in range(3):
        ask(engine, str(number), line_of(kinds.tokens(rng, 24)))
    layers = engine.model.config.layers
    free = engine.allocator.references.shape[1] - engine.allocator.used // layers
    taken = engine.allocator.allocate((free - 1) * 8, range(layers))
    assert taken is not None
    stored = len(engine.memory.chain.pages)
    prompt = kinds.tokens(rng, 24)
    for name in ("first", "second"):
        work = work_of(line_of([*prompt, len(name)]), name)
        engine.add(work.asked)
    engine.step()
    assert (running_canvases(engine), engine.waiting) == (1, 1)
    assert len(engine.memory.chain.pages) < stored
    more = engine.allocator.allocate(8 * 8, range(layers))
    assert more is None
    rest = work_of(line_of(kinds.tokens(rng, 80)), "long")
    engine.add(rest.asked)
    engine.step()
    assert running_canvases(engine) == 2, "the second one reads the first one's pages; the long one has no room"
    assert engine.waiting == 1
    engine.allocator.release(taken)
    assert set(run(engine, [])) == {"first", "second", "long"}


class NoClosing(CachePolicy):
    """A policy that shares pages and forgets the pass that completes the last one."""

    @property
    def traits(self) -> Traits:
        return Exact().traits

    def plan(self, view: View) -> Plan:
        return Exact().plan(view)


def test_a_policy_without_a_closing_pass_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    prompt = kinds.tokens(random.Random(5), 8)
    engine = engine_of(page_size=8)
    work = work_of(line_of(prompt), "x")
    result = run(engine, [Work(work.request, NoClosing())])["x"]
    assert list(result.token_ids) == decoded(prompt).output_ids
    assert "has no plan for the last block's commit pass" in caplog.text
    assert len(engine.memory.chain.pages) == 1, "what the prompt fills"


def test_a_second_writer_shares_its_twins_pages_further_on() -> None:
    """Two requests decode the same answer side by side: one page each is stored, and a third request finds all."""
    prompt = kinds.tokens(random.Random(10), 6)  # no whole page, so nobody waits
    engine = engine_of(page_size=4 * 2)
    run(engine, [work_of(line_of(prompt, max_tokens=18), name) for name in ("1", "2")])
    expected = decoded(prompt, max_tokens=18)
    assert engine.memory.chain.stats.published == len(expected.committed) // 8 == 3
    turn = [*expected.committed, 1]
    assert ask(engine, "3", line_of(turn)).usage.cached_tokens == 24


def test_rows_beyond_a_gap_commit_nothing() -> None:
    """Pages are final only where every position before them has been computed after it settled."""
    engine = engine_of(page_size=4)
    canvas = Canvas(range(16), (), 0)
    own = engine.allocator.allocate(16, range(engine.model.config.layers))
    assert own is not None
    keys = engine.memory.chain.identities(range(16))
    sharing = PageSharing(engine.memory.chain, canvas, 4, 0, "", [], own.split(), keys)

    def computes(*positions: int) -> Plan:
        rows = np.isin(np.arange(16), positions)
        return Plan((Span(range(engine.model.config.layers), rows),), np.zeros(16, dtype=np.bool_))

    sharing.record_pass(computes(*range(8, 16)), 16)
    assert (sharing.committed, len(engine.memory.chain.pages)) == (0, 0)
    sharing.record_pass(computes(*range(4)), 16)
    assert (sharing.committed, len(engine.memory.chain.pages)) == (4, 1)
    sharing.record_pass(computes(*range(12, 16)), 16)
    assert (sharing.committed, len(engine.memory.chain.pages)) == (4, 1)
    sharing.record_pass(computes(*range(4, 16)), 16)
    assert (sharing.committed, len(engine.memory.chain.pages)) == (16, 4)
