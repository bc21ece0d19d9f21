"""Stored parts that stand anywhere in a prompt. `test_against_oracles` compares what they compute with an oracle."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from remask.answers.answer import trace_of
from remask.engine.canvas_state import Move
from remask.engine.engine import Engine
from remask.engine.request import Request, request_of
from remask.errors import ConfigError, UnknownNameError
from remask.families import preset
from remask.model.config import ModelConfig
from remask.model.transformer import Transformer
from remask.plan.plan import NEVER, Plan, PrefixHit, View
from remask.plan.spans import Span
from remask.policies import ACache, BiCache, CachePolicy, Dense, DllmCache, Reuse
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.dkv import DkvDecode
from remask.readers.logprobs import Logprobs
from remask.request.parts import MAX_SEGMENTS, Segment, stored_parts
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.request.trace import Trace
from tests.engine.support import (
    LAYERS,
    CheckedTransformer,
    Work,
    alone,
    lively_weights,
    make_engine,
    outcome,
    poisoned_engine,
    prompt_of,
    request,
    run,
    small_config,
    work_of,
)

FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])
FIRST, SECOND, THIRD = prompt_of(7, 1), prompt_of(5, 2), prompt_of(6, 3)


def asks(
    name: str, pieces: Sequence[list[int] | int], policy: CachePolicy | None = None, salt: str = "", **more: Any
) -> Work:
    """A request whose prompt is made of documents and of so many other tokens; the documents are its parts."""
    prompt: list[int] = []
    segments = []
    for piece in pieces:
        if isinstance(piece, int):
            prompt += prompt_of(piece, sum(map(ord, name)))
        else:
            segments.append(Segment(len(prompt), len(piece)))
            prompt += piece
    asked = replace(request(name, prompt, **more), segments=segments, cache_salt=salt)
    return Work(asked, policy or BiCache(depth=2, refresh_interval=3))


def prefixed(item: Work) -> Work:
    """The same request that names its one part as a prefix."""
    (part,) = item.request.segments
    assert part.positions.start == 0
    return replace(item, request=replace(item.request, segments=(), prefix_length=len(part.positions)))


@pytest.mark.few(3)
@FAMILIES
@pytest.mark.parametrize(
    "policy",
    [
        Reuse(),
        BiCache(depth=2, refresh_interval=2),
        BiCache(depth=LAYERS - 1, boundary_state="recomputed", refresh_interval=1),
        BiCache(BlockDual(), depth=1, refresh_interval=3),
        BiCache(DllmCache(2, 2, 0.5), depth=2),
    ],
    ids=str,
)
def test_one_part_at_the_front_is_a_prefix_bit_for_bit(family: str, policy: CachePolicy) -> None:
    item = asks("r", [FIRST, 4], policy)
    item = replace(item, request=item.request.with_readers(Logprobs(3)))
    engine, other = make_engine(family), make_engine(family)
    results = [run(engine, [item])["r"], run(other, [prefixed(item)])["r"]]
    assert outcome(results[0]) == outcome(results[1])
    assert results[0].trace[0].logprobs, "the log-probabilities are compared to their last bit"
    for side, prefix_side in zip((*engine.pool.k, *engine.pool.v), (*other.pool.k, *other.pool.v), strict=True):
        assert side.isnan().equal(prefix_side.isnan())
        assert side.nan_to_num().equal(prefix_side.nan_to_num())
    # They read the same entry, whoever stored it.
    again = run(engine, [prefixed(item)])["r"]
    assert again.usage.cached_tokens == len(FIRST)
    assert outcome(again)[:4] == outcome(results[0])[:4]
    assert engine.stats.prefix_passes == 1


@FAMILIES
def test_parts_are_read_wherever_they_stand(family: str) -> None:
    engine = make_engine(family)
    orders: list[list[list[int] | int]] = [
        [FIRST, 2, SECOND, THIRD, 3],
        [1, THIRD, FIRST, 2, SECOND, 1],
        [SECOND, THIRD, FIRST],
    ]
    for number, pieces in enumerate(orders):
        item = asks(str(number), pieces)
        result = run(engine, [item])[str(number)]
        # On Dream a part that ends the prompt is read without its last token, so that is another part.
        clipped = family == "dream" and number == 2
        assert result.usage.prefix_tokens == 18 - clipped
        assert result.usage.cached_tokens == (0 if number == 0 else 11 if clipped else 18)
        assert outcome(result) == outcome(alone(item, family))
    assert engine.stats.prefix_passes == 3 + (family == "dream")


def test_what_is_copied_is_what_is_stored_turned_and_nothing_writes_there() -> None:
    engine = make_engine("llada")
    item = asks("r", [3, FIRST, 2, SECOND, 4], BiCache(depth=2, refresh_interval=1))
    engine.add(item.asked)
    engine.step()  # the passes over the parts
    for _ in range(3):
        engine.step()
        (running,) = engine._lifecycle.unfinished()
        (branch,) = running.canvases
        assert branch.prefix == PrefixHit(12, 2, 3, (range(3, 10), range(12, 17)))
        assert not running.claim.moves
        for part, lease in zip(branch.prefix.parts, running.claim.leases, strict=True):
            stored, own = (torch.from_numpy(s) for s in (lease.entry.extent.slots(), branch.slots(0)[part]))
            for layer in range(LAYERS):
                lent = layer < branch.prefix.layers
                turned = engine.model.turned(engine.pool.k[layer][stored], part.start)
                assert engine.pool.k[layer][own].equal(turned) == lent
                assert engine.pool.v[layer][own].equal(engine.pool.v[layer][stored]) == lent
    engine.cancel("r")
    run(engine, [])


@pytest.mark.parametrize("name", ["llada-tiny", "gidd-tiny"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_turned_keys_are_keys_at_the_other_positions(name: str, dtype: torch.dtype) -> None:
    config = replace(small_config("llada"), rotary_dim=4) if name == "gidd-tiny" else small_config("llada")
    model = Transformer(config, lively_weights(config, dtype))
    generator = torch.Generator().manual_seed(3)
    rows = torch.randn(9, config.hidden, generator=generator, dtype=torch.float64).to(dtype)
    here, there = (torch.arange(9) + start for start in (0, 37))

    def keys(positions: torch.Tensor) -> torch.Tensor:
        w, heads = model.weights.layers[0], range(config.heads, config.heads + config.kv_heads)
        return model._project(model.norm(rows, w.attn_norm), 0, heads, *model.turned_by(0, positions))[0]

    tolerance = {torch.float64: 1e-5, torch.float32: 1e-5, torch.bfloat16: 0.03}[dtype]
    expected = keys(there)
    assert (expected - keys(here)).abs().max() > 0.1 * expected.abs().max(), "the angles make a difference"
    assert (model.turned(keys(here), 37) - expected).abs().max() < tolerance * expected.abs().max()
    assert model.turned(keys(here), 0).equal(keys(here))


def test_batch_invariance_holds_of_parts_to_the_last_bit() -> None:
    config = small_config("llada")
    model = CheckedTransformer(config, lively_weights(config, torch.float32))

    def engine() -> Engine:
        return poisoned_engine(model, batch_invariant=True, max_num_seqs=8)

    pieces: list[list[list[int] | int]] = [[2, FIRST, SECOND, 3], [FIRST, 1, SECOND], [THIRD, SECOND, 5]]
    work = [asks(str(number), each) for number, each in enumerate(pieces)]
    work += [asks(f"a{number}", each, ACache(ratio=0.4)) for number, each in enumerate(pieces)]
    work = [replace(item, request=item.request.with_readers(Logprobs(2))) for item in work]
    together = run(engine(), work)
    for item in work:
        assert outcome(together[item.request.id]) == outcome(run(engine(), [item])[item.request.id])


@pytest.mark.parametrize("source", [[4, 5, 6], [4, 7, 5]])
@pytest.mark.parametrize("target", [[20, 21, 22], [30, 12, 25]])
def test_parts_are_copied_between_runs_and_scattered_slots(source: list[int], target: list[int]) -> None:
    """Where memory is in pieces, a stored part may be a run and the canvas' slots none, or the other way round."""
    engine = make_engine(page_size=1)
    pool, layers = engine.pool, engine.model.config.layers
    for tensor in (*pool.k, *pool.v):
        tensor.copy_(torch.randn(tensor.shape))
    kept = [(k.clone(), v.clone()) for k, v in zip(pool.k, pool.v, strict=True)]
    engine.runner.move([Move(np.array(source), np.array(target), layers - 1, 3)])
    for layer, (k, v) in enumerate(kept):
        if layer < layers - 1:
            k[target], v[target] = engine.model.turned(k[source], 3), v[source]
        assert torch.equal(pool.k[layer], k)
        assert torch.equal(pool.v[layer], v)


def test_a_part_that_comes_twice_is_stored_once() -> None:
    engine = make_engine("llada")
    item = asks("r", [2, FIRST, 1, FIRST, FIRST, 3])
    result = run(engine, [item])["r"]
    assert engine.stats.prefix_passes == 1
    assert [len(entry) for entry in engine.store.entries] == [len(FIRST)]
    assert (result.usage.prefix_tokens, result.usage.cached_tokens) == (21, 14)
    whole = 8 + 6 + 21
    full, between = LAYERS * whole - 2 * 21, LAYERS * (whole - 21)
    assert result.usage.row_layers == 3 * full + 5 * between, "refreshes at steps 0, 3 and 6"


def test_parts_that_the_store_cannot_hold_together_are_computed() -> None:
    engine = make_engine("llada", store_budget_tokens=13)
    item = asks("r", [FIRST, 1, THIRD, SECOND, FIRST, 2])
    result = run(engine, [item])["r"]
    assert result.usage.prefix_tokens == 2 * len(FIRST) + len(SECOND)
    assert result.usage.prefix_note == "1 of 4 parts are not read: the store's budget is 13 tokens"
    assert engine.store.stats.unread["budget"] == 1
    nothing = run(engine, [asks("n", [3, prompt_of(20), 2])])["n"]
    assert (nothing.usage.prefix_tokens, nothing.usage.prefix_depth) == (0, 0)
    assert nothing.usage.prefix_note == "1 of 1 parts are not read: the store's budget is 13 tokens"
    off = run(make_engine("llada", prefix_sharing="off"), [item])["r"]
    assert (off.usage.prefix_tokens, off.usage.prefix_note) == (0, "prefix_sharing is off")


def test_many_small_parts_leave_room_for_the_canvas() -> None:
    """Each part takes a page at least, so pages may run out before the budget does."""
    engine = make_engine("llada", page_size=16, max_num_seqs=2, store_budget_tokens=40)
    item = asks("r", [[token] for token in range(30)])
    result = run(engine, [item])["r"]
    pages = engine.allocator.references.shape[1]
    assert result.usage.prefix_tokens == pages - engine.allocator.pages_for(38)
    assert result.usage.prefix_note is not None


def test_what_a_request_reads_is_not_evicted_for_what_it_brings() -> None:
    engine = make_engine("llada", store_budget_tokens=20, eviction="fifo")
    run(engine, [asks("a", [FIRST, 1]), asks("b", [1, SECOND, 1])])
    result = run(engine, [asks("c", [1, FIRST, THIRD, 1])])["c"]
    assert result.usage.cached_tokens == len(FIRST)
    assert {entry.tokens for entry in engine.store.entries} == {tuple(FIRST), tuple(SECOND), tuple(THIRD)}
    big = prompt_of(9, 9)
    result = run(engine, [asks("d", [1, big, FIRST, 1])])["d"]
    assert result.usage.cached_tokens == len(FIRST), "the oldest entry, which it reads itself, stays"
    assert {entry.tokens for entry in engine.store.entries} == {tuple(FIRST), tuple(big)}


def test_tenants_do_not_share_parts() -> None:
    engine = make_engine("llada")
    results = [run(engine, [asks("r", [2, FIRST, 1], salt=salt)])["r"] for salt in ("", "a", "a")]
    assert [result.usage.cached_tokens for result in results] == [0, 0, len(FIRST)]


@pytest.mark.parametrize("front", [0, 2], ids=["at the front", "behind tokens"])
@pytest.mark.parametrize("family", ["llada", "dream", "llada-moe"])
def test_without_anchors_acache_is_reuse(family: str, front: int) -> None:
    """Its parts are copied, the one at the front too; in memory that holds NaN before."""
    pieces: list[list[int] | int] = [FIRST, 1, SECOND, 3] if not front else [front, FIRST, 1, SECOND, 3]
    plain, reused = (
        run(make_engine(family), [asks("r", pieces, policy)])["r"] for policy in (ACache(ratio=0.0), Reuse())
    )
    assert outcome(plain)[:3] == outcome(reused)[:3]
    assert work_of(plain.usage) == work_of(reused.usage)


def test_a_prefix_has_anchors_too_and_other_requests_read_it_as_it_was() -> None:
    engine = make_engine("llada")
    part, prefix = asks("part", [FIRST, SECOND, 3], ACache()), request("prefix", FIRST + SECOND + prompt_of(3), 12)
    before = run(engine, [asks("r", [FIRST, SECOND, 4], Reuse())])["r"]
    run(engine, [part, Work(prefix, ACache(ratio=0.5))])
    after = run(engine, [asks("r", [FIRST, SECOND, 4], Reuse())])["r"]
    assert outcome(before)[:3] == outcome(after)[:3]
    assert after.usage.cached_tokens == 12


def test_inputs_are_kept_for_one_pass_only() -> None:
    engine = make_engine("llada")
    engine.add(asks("r", [1, FIRST, 3], ACache()).asked)
    engine.step()  # the pass over the part
    states = engine.memory.extra_bytes
    assert states == (LAYERS - 1) * 19 * 32 * 8
    engine.step()
    assert engine.memory.extra_bytes == 0
    (running,) = engine._lifecycle.unfinished()
    (branch,) = running.canvases
    assert branch.hook_output is not None
    assert branch.hook_output[1:8].sum() == pytest.approx(8 * 4 * LAYERS), "8 masks, 4 heads, all layers"
    assert not branch.hook_output[[0, *range(8, 19)]].any()
    run(engine, [])


def test_a_request_whose_parts_cannot_be_copied_ends_alone() -> None:
    engine = make_engine("llada")
    move = engine.runner.move
    failing = asks("bad", [1, FIRST, 2])

    def broken(moves: Any) -> None:
        if len(moves) == 1:
            raise ValueError("no such slots")
        move(moves)

    vars(engine.runner)["move"] = broken
    good = asks("good", [1, FIRST, SECOND, 2])
    results = run(engine, [failing, good])
    assert results["bad"].error == "its stored parts could not be copied: no such slots"
    assert outcome(results["good"]) == outcome(alone(good))


def test_a_request_that_leaves_while_its_parts_are_computed_leaks_nothing() -> None:
    engine = make_engine("llada", max_row_layers=20)
    engine.add(asks("r", [1, FIRST, SECOND, 2]).asked)
    engine.step()
    assert not any(entry.ready for entry in engine.store.entries)
    engine.cancel("r")
    result = run(engine, [asks("again", [SECOND, FIRST, 2])])["again"]
    assert result.usage.cached_tokens == 12


@pytest.mark.parametrize(("cache", "depth"), [("reuse", LAYERS), ("bicache", 2)])
def test_a_replay_reads_the_same_parts(cache: str, depth: int) -> None:
    policy: CachePolicy = Reuse() if cache == "reuse" else BiCache(depth=depth)
    engine = make_engine("llada")
    prompt = [*prompt_of(2), *FIRST, *prompt_of(3, 4)]
    terms = Terms(segments=[{"start": 2, "length": 7}], return_trace=True)  # type: ignore[list-item]
    params = SamplingParams(max_tokens=8, ignore_eos=True, temperature=1.0)
    asked = request_of("r", prompt, params, policy, terms, small_config("llada"), shared=5)
    assert (asked.prefix_length, asked.find_prefix) == (0, False)
    first = run(engine, [Work(asked, policy)])["r"]
    trace = Trace.from_mapping(trace_of(asked, first.trace, first.usage, "model").content)
    assert trace.segments == (Segment(2, 7),)
    again = Terms(replay=trace, top_logprobs=0)
    replayed = request_of("s", prompt, asked.params, policy, again, small_config("llada"), shared=5)
    assert replayed.segments == (Segment(2, 7),)
    second = run(make_engine("llada"), [Work(replayed, policy)])["s"]
    assert outcome(second) == outcome(first)
    # A request that says something else is asked that.
    assert Terms(replay=trace, prefix_length=3).parts == ()
    assert Terms(replay=trace, segments=()).parts == ()


def at(*parts: tuple[int, int], **more: Any) -> Request:
    return replace(request("r", 12), segments=[Segment(*part) for part in parts], **more)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (at((0, 4), (3, 2)), "segments: start=3 and length=2 overlap the part before, which ends at 4"),
        (at((5, 2), (0, 6)), "segments: start=5 and length=2 overlap the part before, which ends at 6"),
        (at((10, 3)), "segments: start=10 and length=3 end at 13, and the prompt has 12 tokens"),
        (at((12, 1)), "segments: start=12 and length=1 end at 13"),
        (at((0, 4), prefix_length=2), "segments and prefix_length=2 both say what is shared"),
    ],
    ids=str,
)
def test_parts_that_cannot_be_are_refused(asked: Request, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        make_engine("llada").check(asked)


@pytest.mark.parametrize(("name", "why"), [("gidd-tiny", "clean rows"), ("sdar-tiny", "only a prefix is the same")])
def test_other_kinds_of_models_refuse_parts(name: str, why: str) -> None:
    config: ModelConfig = preset(name)
    model = Transformer(config, lively_weights(config, torch.float32))
    with pytest.raises(ConfigError, match=f"^segments: stored parts .* are not defined on .*{why}"):
        poisoned_engine(model).check(at((0, 4)))


@pytest.mark.parametrize(
    ("segments", "message"),
    [
        ([{"start": 0}], "segments: a part needs length"),
        ([{"length": 3}], "segments: a part needs start"),
        ([{"start": 0, "length": 0}], "segments.length must be a whole number from 1"),
        ([{"start": -1, "length": 2}], "segments.start must be a whole number from 0"),
        ([{"start": True, "length": 2}], "segments.start must be a whole number"),
        ([3], r"segments\[0\] must be an object of segment fields"),
        ("all", "segments must be a list of at most 256 parts"),
        ([{"start": 0, "length": 1}] * (MAX_SEGMENTS + 1), "segments holds 257 items"),
    ],
    ids=str,
)
def test_bad_segments_are_refused_by_name(segments: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=f"^{message}"):
        Terms(segments=segments)


def test_segments_stand_in_place_of_a_prefix() -> None:
    with pytest.raises(ConfigError, match=r"^segments and prefix_length both say what is shared"):
        Terms.from_mapping({"segments": [{"start": 0, "length": 2}], "prefix_length": 0})
    with pytest.raises(UnknownNameError, match=r"^Unknown segment field 'segments\[0\].stop'"):
        Terms.from_mapping({"segments": [{"start": 0, "stop": 2}]})
    assert Terms.from_mapping({"segments": [{"start": 4, "length": 2}]}).shared(7) == 0


def test_parts_are_sorted() -> None:
    assert stored_parts([Segment(6, 2), Segment(0, 3), Segment(3, 3)], 8) == (range(3), range(3, 6), range(6, 8))


def test_a_plan_leaves_out_parts_below_the_boundary_and_puts_them_in_above() -> None:
    hit = PrefixHit(4, 1, 2, (range(2, 4), range(6, 8)))
    noisy = np.arange(10) >= 8
    settled = np.where(noisy, NEVER, -1).astype(np.int32)
    view = View(3, 0, 0, range(8, 10), 8, noisy, settled, hit)
    plan: Plan = BiCache(depth=1).plan(view)
    others = ~hit.rows(10)
    spans: list[Span] = list(plan.spans)
    assert [span.layers for span in spans] == [range(1), range(1, 2), range(2, 3)]
    assert [span.rows.tolist() for span in spans] == [others.tolist(), [True] * 10, [True] * 10]
    assert spans[1].frozen is not None
    assert spans[1].frozen.tolist() == hit.rows(10).tolist()
    assert spans[2].frozen is None
    assert (hit.lead, PrefixHit(3, 1).lead) == (0, 3)
    between = BiCache(depth=1).plan(replace(view, step=1))
    assert all(span.rows.tolist() == others.tolist() for span in between.spans)
    assert Reuse().plan(view).spans[0].rows.tolist() == others.tolist()


@FAMILIES
@pytest.mark.parametrize("inner", [Dense(), BlockPrefix(), BlockDual(), DkvDecode()], ids=str)
@pytest.mark.parametrize("prefixes", [True, False], ids=["a prefix", "parts"])
def test_guidance_beside_the_pass_that_tells_the_anchors(family: str, inner: CachePolicy, prefixes: bool) -> None:
    """Only the canvas that reads parts has anchors, so the other one takes no part in the pass that tells them."""
    sampling: dict[str, Any] = {"cfg_scale": 1.0, "block_length": 4, "steps": 4}
    pieces: list[list[int] | int] = [FIRST, 4] if prefixes else [2, FIRST, 1, SECOND, 2]
    told, known = (asks("r", pieces, ACache(inner, ratio), **sampling) for ratio in (0.2, 1.0))
    if prefixes:
        told, known = prefixed(told), prefixed(known)
    result, whole = alone(told, family), alone(known, family)
    assert (result.finish_reason, result.error) == ("length", None)
    assert outcome(run(make_engine(family), [told, Work(request("other"), Dense())])["r"]) == outcome(result)
    stored = result.usage.prefix_tokens
    canvas, anchors = len(told.request.prompt_token_ids) + 8, -(-stored // 5)
    asking, left_out = canvas - stored, stored - anchors
    assert result.usage.forwards == whole.usage.forwards + 1
    begun = 2  # blocks, in each of which one pass computes the anchors; the others compute no stored row in either run
    assert result.usage.row_layers == whole.usage.row_layers + LAYERS * (asking - begun * left_out)


def test_fill_passes_of_both_canvases_are_run_together() -> None:
    """A separate fill pass is run on both; what one of them was asked before it is not counted for the other."""
    sampling: dict[str, Any] = {"cfg_scale": 1.0, "block_length": 4, "steps": 4}
    item = asks("r", [2, FIRST, 1, SECOND, 2], ACache(BlockDual("separate"), 0.2), **sampling)
    engine, passes = make_engine(), list[list[int]]()
    whole = engine.runner.run

    def watched(items: Any) -> Any:
        passes.append([plan.cost // LAYERS for _, plan in items])
        return whole(items)

    engine.runner.run = watched  # type: ignore[method-assign]
    assert run(engine, [item])["r"].finish_reason == "length"
    stored, canvas, anchored = [7, 5], 25, 13 + 3
    cached = [[4, 4], [4, 4]]
    assert passes == [stored, [13, canvas], [anchored], *cached, [anchored, canvas], *cached]
