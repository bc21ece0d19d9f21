"""Log-probabilities of settled tokens, against dense models that know nothing of this package; and forced tokens."""

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.answers.answer import trace_of
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.policies.block import BlockDual
from remask.policies.dense import Dense
from remask.readers.forced import ForcedRows, ForcedTokens
from remask.readers.logprobs import Logprobs, PredictedLogprobs, Ranking
from remask.request.result import Result, Transfer
from remask.request.sampling_params import SamplingParams
from remask.request.trace import TokenLogprob, step_map, token_logprobs
from remask.sampling.device_reads import MIN_LOGPROB
from remask.sampling.rows import RowGroup
from remask.sampling.score import score
from tests.engine import kinds, support
from tests.engine.support import Work, make_engine, poisoned_engine, request, run
from tests.engine.test_against_oracles import dense, model_of
from tests.engine.test_block_causal_against_oracles import draw_line, work_of
from tests.oracles.decode import load
from tests.oracles.dense import DenseModel
from tests.oracles.sdar import SdarModel
from tests.sampling_fields import flat_params

RULES: tuple[dict[str, Any], ...] = (
    {},
    {"remasking": "entropy", "temperature": 0.7},
    {"remasking": "topk_margin", "top_k": 3, "temperature": 1.5},
    {"remasking": "random", "temperature": 1.0},
    {"remasking": "maskgit_plus", "top_p": 0.5, "temperature": 0.8},
    {"threshold": 0.3},
    {"cfg_scale": 1.5},
    {"cfg_scale": 0.5, "temperature": 1.0},
)


def masked_logprobs(oracle: DenseModel, canvas: Sequence[int], prompt: int, scale: float) -> Tensor:
    """Log-probabilities at every position of a canvas, float64 [T, V]."""
    tokens = torch.tensor(canvas)
    logits = oracle.predictions(oracle.forward(tokens).logits)
    if scale:
        blind = tokens.clone()
        blind[:prompt] = oracle.mask_id
        without = oracle.predictions(oracle.forward(blind).logits)
        logits = without + (scale + 1) * (logits - without)
    return logits.log_softmax(-1)


def check(trace: Sequence[Transfer], expected: list[Tensor], mask_id: int, top: int) -> None:
    """Each transfer's log-probabilities are those of the oracle in its step."""
    for event, truth in zip(trace, expected, strict=True):
        at = list(event.positions)
        assert event.logprobs == pytest.approx(truth[at, list(event.token_ids)].tolist(), abs=1e-4)
        others = truth[at].clone()
        others[:, mask_id] = -torch.inf
        best = others.topk(top, -1).values if top else torch.empty(len(at), 0)
        assert len(event.top_logprobs) == (len(at) if top else 0)
        for place, (pairs, row) in enumerate(zip(event.top_logprobs, best, strict=False)):
            assert [value for _, value in pairs] == pytest.approx(row.tolist(), abs=1e-4)
            assert mask_id not in [token for token, _ in pairs]
            assert [value for _, value in pairs] == pytest.approx(
                [float(truth[at[place], token]) for token, _ in pairs], abs=1e-4
            )


@pytest.mark.few(7)
@pytest.mark.parametrize("name", ["llada", "dream"])
@pytest.mark.parametrize("rule", RULES)
def test_masked_models_in_a_mixed_batch(name: str, rule: dict[str, Any]) -> None:
    """Requests that ask for 0, 3 or 20 tokens, or for nothing, in one batch."""
    oracle, model = dense(name), model_of(name)
    rng = random.Random(f"{name} {rule}")
    tops = (0, 3, 20, None)
    work = []
    for number, top in enumerate(tops):
        tokens = [rng.randrange(200) for _ in range(rng.randint(3, 9))]
        params = flat_params(max_tokens=8, block_length=4, ignore_eos=True, seed=number, **rule)
        asked = Request(str(number), tokens, params, readers=() if top is None else (Logprobs(top),))
        work.append(Work(asked, Dense(), joins=number))
    results = run(poisoned_engine(model), work)
    for item, top in zip(work, tops, strict=True):
        asked, result = item.request, results[item.request.id]
        prompt = asked.prompt_token_ids
        if top is None:
            assert all(not event.logprobs and not event.top_logprobs for event in result.trace)
            continue
        canvas, expected = [*prompt, *[oracle.mask_id] * 8], []
        for event in result.trace:
            expected.append(masked_logprobs(oracle, canvas, len(prompt), rule.get("cfg_scale", 0.0)))
            for position, token in zip(event.positions, event.token_ids, strict=True):
                canvas[position] = token
        check(result.trace, expected, oracle.mask_id, top)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", ["sdar", "sdar, any block"])
def test_block_causal_models(name: str, seed: int) -> None:
    checkpoint, rng = kinds.checkpoint(name), random.Random(f"{name} {seed}")
    oracle = load(checkpoint.folder)
    assert isinstance(oracle, SdarModel)
    line = draw_line(rng, name)
    item = work_of(line, "r", 0)
    item = replace(item, request=item.request.with_readers(Logprobs(4)))
    result = run(poisoned_engine(checkpoint.model, page_size=checkpoint.block * 4, max_model_len=96), [item])["r"]
    block = line["sampling"].get("block_length") or checkpoint.block
    prompt = line["prompt_token_ids"]
    length = -(-(len(prompt) + line["sampling"]["max_tokens"]) // block) * block
    canvas, expected = [*prompt, *[kinds.MASK] * (length - len(prompt))], []
    for event in result.trace:
        expected.append(oracle.forward(torch.tensor(canvas), block).logits.log_softmax(-1))
        for position, token in zip(event.positions, event.token_ids, strict=True):
            canvas[position] = token
    check(result.trace, expected, kinds.MASK, 4)


def test_a_cached_pass_reports_what_it_read_itself() -> None:
    """Under an approximate cache they are the cached pass's: those of `none` differ."""
    asked = request(block_length=4, steps=8).with_readers(Logprobs(0))
    exact, cached = (run(make_engine(), [Work(asked, policy)])["r"].trace for policy in (Dense(), BlockDual()))
    assert exact[0].logprobs == pytest.approx(cached[0].logprobs)
    assert exact != cached


def plain(trace: Sequence[Transfer]) -> list[tuple[Any, ...]]:
    return [(each.step, each.positions, each.token_ids, each.edits) for each in trace]


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("seed", range(5))
def test_asking_changes_nothing_and_forced_tokens_are_the_run(family: str, seed: int) -> None:
    """Random requests under random policies and samplers: same tokens, steps, work; then forced to write the same."""
    rng = random.Random(f"{family} {seed}")
    for number in range(2):
        item = support.random_work(rng, family, str(number))
        silent = run(make_engine(family), [replace(item, joins=0)])[str(number)]
        asked = item.request.with_readers(Logprobs(rng.choice([0, 5])))
        told = run(make_engine(family), [Work(asked, item.policy)])[str(number)]
        assert plain(told.trace) == plain(silent.trace)
        assert support.work_of(told.usage) == support.work_of(silent.usage)
        again = asked.with_readers(ForcedTokens(told.trace))
        forced = run(make_engine(family), [Work(again, item.policy)])[str(number)]
        assert support.outcome(forced) == support.outcome(told), (item.policy, asked.params)


@pytest.mark.few(2)
@pytest.mark.parametrize("name", [*kinds.BLOCK_CAUSAL[:2], "llada2", *kinds.UNIFORM[:2]])
def test_forced_tokens_on_other_kinds_of_models(name: str) -> None:
    checkpoint, rng = kinds.checkpoint(name), random.Random(name)
    uniform = name in kinds.UNIFORM
    rules: tuple[dict[str, Any], ...] = ({"temperature": 1.0}, {}, {"stop_token_ids": list(range(12))})
    if uniform:
        rules += ({"sampler": "ancestral", "temperature": 1.0, "steps_per_block": 3}, {"tokens_per_step": 2})
    else:
        rules += ({"remasking": "joint_threshold", "threshold": 0.05, "edit_threshold": 0.05, "penalty_lambda": 0.5},)
    for number, rule in enumerate(rules):
        sizes = {"block_length": 4, "canvas_length": 32} if uniform else {}
        params = flat_params(**{"max_tokens": 10, "ignore_eos": True, "seed": number, **sizes, **rule})
        asked = Request("r", kinds.tokens(rng, 7), params, readers=() if uniform else (Logprobs(2),))

        def engine() -> Engine:
            return poisoned_engine(checkpoint.model, page_size=checkpoint.block * 4)

        told = run(engine(), [Work(asked, asked.policy)])["r"]
        again = run(engine(), [Work(asked.with_readers(ForcedTokens(told.trace)), asked.policy)])["r"]
        assert support.outcome(again) == support.outcome(told), rule


def test_tokens_are_forced_that_the_model_would_not_take() -> None:
    """What is written is given, and its log-probability is this model's for that token: the oracle's."""
    oracle = dense("llada")
    prompt, params = [4, 8, 15, 16], SamplingParams(max_tokens=4, ignore_eos=True)
    forced = (Transfer(0, (6,), (23,)), Transfer(1, (4,), (42,)), Transfer(2, (5,), (1,)), Transfer(3, (7,), (0,)))
    asked = Request("r", prompt, params, readers=(Logprobs(1), ForcedTokens(forced)))
    result = run(poisoned_engine(model_of("llada")), [Work(asked, asked.policy)])["r"]
    assert result.token_ids == (42, 1, 23, 0)
    canvas, expected = [*prompt, *[oracle.mask_id] * 4], []
    for event in forced:
        expected.append(masked_logprobs(oracle, canvas, 4, 0.0))
        canvas[event.positions[0]] = event.token_ids[0]
    check(result.trace, expected, oracle.mask_id, 1)


@pytest.mark.parametrize(
    ("forced", "error"),
    [
        ((), "they end before the response is complete"),
        ((Transfer(0, (8,), (1,)),), "they end before"),
        ((Transfer(0, (12,), (1,)),), "step 0 is to write position 12, and denoises 8 to 11"),
        ((Transfer(0, (7,), (1,)),), "step 0 is to write position 7"),
    ],
)
def test_what_cannot_be_written_ends_its_own_request(forced: tuple[Transfer, ...], error: str) -> None:
    asked = request("bad", block_length=4, steps=8).with_readers(ForcedTokens(forced))
    results = run(make_engine(), [Work(asked, BlockDual()), Work(request("good"), Dense())])
    assert results["bad"].finish_reason == "error"
    assert f"forced tokens: {error}" in (results["bad"].error or "")
    assert results["good"].finish_reason == "length"


def test_a_correction_is_not_forced_and_uniform_tokens_have_no_one_log_probability() -> None:
    engine = poisoned_engine(kinds.checkpoint("gidd").model)
    params = flat_params(max_tokens=4, canvas_length=16, correction_steps=2)
    with pytest.raises(ConfigError, match="what correction_steps writes depends"):
        engine.check(Request("r", [1], params, readers=(ForcedTokens(()),)))
    with pytest.raises(ConfigError, match="top_logprobs: a uniform model"):
        engine.check(
            Request(
                "r",
                [1],
                replace(params, uniform=replace(params.uniform, correction_steps=None)),
                readers=(Logprobs(0),),
            )
        )
    for bad in (-1, 21, True, "3"):
        with pytest.raises(ConfigError, match="top_logprobs must be a whole number from 0 to 20"):
            make_engine().check(request().with_readers(Logprobs(bad)))  # type: ignore[arg-type]


def group(rows: int, **more: Any) -> RowGroup:
    return replace(RowGroup(slice(0, rows), None, "logits", 0.0, None, None, 0), **more)


@pytest.mark.parametrize("mask_id", [0, 4, 8])
@pytest.mark.parametrize("top", [0, 1, 7, 8, 20])
def test_the_mask_token_is_counted_and_never_listed(mask_id: int, top: int) -> None:
    logits = torch.randn(5, 9, generator=torch.Generator().manual_seed(top)) * 3
    truth = logits.double().log_softmax(-1)
    more = Ranking(top, 9).width
    read = score(logits.clone(), [group(5, reads=(Ranking(top, 9),))], mask_id, width=more)
    assert read.shape == (2 + more, 5)
    held = PredictedLogprobs(6, top, 9)
    held.store(np.arange(1, 6), read[2:].numpy())
    values, tops = held.of(np.arange(1, 6))
    assert values == pytest.approx(truth[range(5), read[0].long()].tolist(), abs=1e-5)
    others = [[(float(truth[row, t]), t) for t in range(9) if t != mask_id] for row in range(5)]
    for row, listed in zip(others, tops, strict=False):
        best = sorted(row, reverse=True)[:top]
        assert [token for token, _ in listed] == [token for _, token in best]
        assert [value for _, value in listed] == pytest.approx([value for value, _ in best], abs=1e-5)
    assert len(tops) == (5 if top else 0)


def test_groups_that_ask_for_less_are_filled_up() -> None:
    logits = torch.randn(6, 9, generator=torch.Generator().manual_seed(0))
    asked = (Ranking(2, 9),), (), (Ranking(0, 9),)
    groups = [replace(group(2, reads=reads), rows=slice(2 * at, 2 * at + 2)) for at, reads in enumerate(asked)]
    read = score(logits.clone(), groups, 8, width=Ranking(2, 9).width)
    assert read.shape == (7, 6)
    assert not read[2:, 2:4].any()
    assert not read[3:, 4:].any()
    alone = score(logits[4:].clone(), [group(2, reads=(Ranking(0, 9),))], 8, width=1)
    torch.testing.assert_close(read[:3, 4:], alone)


def test_an_impossible_token_has_the_smallest_number() -> None:
    logits = torch.zeros(1, 4)
    logits[0, 1] = -torch.inf
    asked = group(1, reads=(ForcedRows(np.array([1])), Ranking(0, 4)))
    read = score(logits, [asked], 3, width=1)
    held = PredictedLogprobs(1, 0, 4)
    held.store(np.array([0]), read[2:].numpy())
    assert held.of(np.array([0])) == ((MIN_LOGPROB,), ())


def test_step_maps_and_tokens_of_a_rule_that_edits() -> None:
    trace = (
        Transfer(0, (2, 3), (7, 8), (), (-1.0, -2.0), (((7, -1.0),), ((8, -2.0),))),
        Transfer(2, (3, 4), (9, 5), (3,), (-0.5, -3.0), (((9, -0.5),), ((5, -3.0),))),
    )
    assert step_map(trace, 2, 3) == [1, 1, 3], "the step that first wrote it, from 1"
    assert step_map(trace, 2, 1) == [1], "truncated as the tokens are"
    last = token_logprobs(trace, 2, 3)
    assert last[1] == TokenLogprob(9, -0.5, 2, ((9, -0.5),))
    assert [each.token_id for each in last] == [7, 9, 5]


def ran(asked: Request) -> Result:
    return run(make_engine(), [Work(asked, asked.policy)])["r"]


def test_draws_differ_and_a_trace_has_one_text() -> None:
    asked = request(temperature=1.5, seed=3).with_readers(Logprobs(0))
    texts = [str(trace_of(asked, told.trace, told.usage, "m").content) for told in (ran(asked), ran(asked))]
    assert texts[0] == texts[1]
    others = {ran(replace(asked, params=replace(asked.params, seed=seed))).token_ids for seed in range(8)}
    assert len(others) >= 7


def test_forced_tokens_may_come_in_any_order() -> None:
    """Each token has the log-probability of its own position."""
    asked = request("r", max_tokens=4, block_length=4)
    told = []
    for order in ((0, 1, 2, 3), (3, 0, 2, 1)):
        transfer = Transfer(0, tuple(8 + place for place in order), tuple(1 + place for place in order))
        again = asked.with_readers(ForcedTokens([transfer]), Logprobs(0))
        (written,) = run(make_engine(), [Work(again, Dense())])["r"].trace
        told.append(dict(zip(written.positions, zip(written.token_ids, written.logprobs, strict=True), strict=True)))
    assert told[0] == told[1]


@pytest.mark.parametrize(
    ("transfers", "message"),
    [
        ([Transfer(0, (8,), (64,))], "step 0 is to write the token 64; token ids are whole numbers from 0 to 63"),
        ([Transfer(0, (8,), (-1,))], "step 0 is to write the token -1"),
        ([Transfer(1, (8,), (1,)), Transfer(1, (9,), (1,))], "two transfers are of step 1"),
    ],
)
def test_forced_tokens_that_cannot_be_written_are_refused(transfers: list[Transfer], message: str) -> None:
    asked = request("r", max_tokens=4).with_readers(ForcedTokens(transfers))
    with pytest.raises(ConfigError, match=f"forced tokens: {message}"):
        make_engine().check(asked)
