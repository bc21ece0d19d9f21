"""LLaDA2.2, which deletes and inserts: recorded runs and scripted blocks, random runs against the oracle, refusals."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from remask import LLM, EngineConfig
from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.denoising.indel import EditTokens, IndelBlock, JointThresholdIndel, Levenshtein, Limits, TokenCandidates
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.families import preset
from remask.policies import CachePolicy, Dense
from remask.policies.base import Traits
from remask.policies.exact import Exact
from remask.readers.forced import ForcedTokens
from remask.readers.logprobs import Logprobs
from remask.request.result import Result, Transfer
from remask.request.sampling_params import SamplingParams
from tests.engine.support import CPU, CheckedTransformer, Work, events_of, lively_weights, poisoned_engine, run
from tests.goldens import llada22 as goldens
from tests.oracles import experts, indel
from tests.oracles.experts import Llada2Model
from tests.sampling_fields import flat_params

RULES = {"levenshtein": Levenshtein, "joint_threshold_indel": JointThresholdIndel}
MASK, TOKENS = 127, EditTokens(125, 126)


@cache
def llm(name: str) -> LLM:
    engine = EngineConfig(max_num_seqs=12, page_size=16, max_steps=4000)
    return LLM(str(goldens.folder(name)), dtype="float32", engine=engine)


@cache
def precise(name: str) -> CheckedTransformer:
    loaded = find_model(ModelSettings(str(goldens.folder(name)))).load(torch.float64, CPU)
    return CheckedTransformer(loaded.config, loaded.weights)


def after(trace: Sequence[Transfer], prompt: Sequence[int], length: int, count: int) -> list[list[int]]:
    """The block that each of `count` steps leaves."""
    canvas, steps = [*prompt, *[MASK] * 64], {transfer.step: transfer for transfer in trace}
    start, left = len(prompt) // length * length, list[list[int]]()
    for step in range(count):
        if step in steps:
            start = min((place for place, _ in steps[step].writes), default=start) // length * length
            for place, token in zip(steps[step].positions, steps[step].token_ids, strict=True):
                canvas[place] = token
        left.append(canvas[start : start + length])
    return left


def check(recorded: dict[str, Any], output: Any) -> None:
    assert list(output.token_ids) == recorded["tokens"]
    assert (output.finish_reason, output.usage.steps) == (recorded["ended"], recorded["passes"])
    passes = [(block["start"], each) for block in recorded["blocks"] for each in block["passes"]]
    left = after(output.trace, recorded["prompt"], recorded["block_length"], len(passes))
    writes = {transfer.step: transfer.writes for transfer in output.trace}
    for number, (start, each) in enumerate(passes):
        wrote = sorted((start + place, token) for place, token in (*each["fill"], *each["edit"]))
        assert list(writes.get(number, ())) == wrote
        if wrote:
            assert left[number] == each["after"]


@pytest.mark.thorough
@pytest.mark.parametrize("name", goldens.MODELS)
def test_recorded_runs_in_one_batch(name: str) -> None:
    """Both rules and both lengths of blocks, again where pages are shared, and without a cache."""
    model, runs = llm(name), goldens.runs(name)
    prompts, asked = [each["prompt"] for each in runs], [goldens.sampling(each) for each in runs]
    for cached in (False, True):
        for each, output in zip(runs, model.generate(prompts, asked, trace=True), strict=True):
            check(each, output)
            assert not cached or output.usage.cached_tokens == len(each["prompt"]) // 16 * 16


@pytest.mark.few(8)
@pytest.mark.parametrize("share", range(24))
@pytest.mark.parametrize("name", goldens.MODELS)
def test_recorded_runs_alone(name: str, share: int) -> None:
    for recorded in goldens.runs(name)[share::24]:
        for policy in ("exact", "none"):
            (output,) = llm(name).generate([recorded["prompt"]], goldens.sampling(recorded), cache=policy, trace=True)
            check(recorded, output)


def offered(rows: list[list[list[float]]], count: int) -> TokenCandidates:
    """The most probable tokens of places of which three are known, and the others are equal."""
    tokens, chances = [], []
    for row in rows:
        known = {int(token): chance for token, chance in row}
        rest = (1 - sum(known.values())) / 125
        every = {token: known.get(token, rest) for token in range(128) if token != MASK}
        order = sorted(every, key=lambda token: (-every[token], token))[:count]
        tokens.append(order)
        chances.append([every[token] for token in order])
    return TokenCandidates(np.array(tokens), np.array(chances, dtype=np.float32))


def block_of(rule: str, places: int, **limits: Any) -> IndelBlock:
    usual = {"threshold": 0.5, "edit_threshold": 0.0, "max_post_steps": 16, "steps": 32, "max_steps": 1000}
    return RULES[rule](places, MASK, TOKENS, Limits(**usual | limits))


def test_scripted_blocks() -> None:
    """Pass by pass. Where the authors' code gives up and leaves masks, the last pass here resolves them."""
    for script in goldens.scripted():
        given = sum(token != MASK for token in script["block"])
        block = block_of(
            goldens.RULES[script["rule"]],
            len(script["block"]) - given,
            **{name: script[name] for name in ("threshold", "edit_threshold", "max_post_steps")},
            steps=script.get("steps", 1),
            max_steps=script.get("max_steps_per_block", 1000),
        )
        capped = script["ended"] == "cap"
        for number, recorded in enumerate(script["passes"]):
            assert block.end_reason is None
            rows = script["candidates"][number % len(script["candidates"])][given:]
            done = block.choose(offered(rows, block.candidate_count), lambda sure: int(sure.argmin()))
            if capped and number + 1 == len(script["passes"]):
                assert done.is_last
                assert MASK not in block.tokens
                break
            fills, edits, tried = ([[given + at, to] for at, to in of] for of in (done.fills, done.edits, done.escapes))
            counts = {"original": done.original_count, "new": done.inserted_count, "post": done.post_steps}
            found = {"fill": fills, "edit": edits, **counts, "after": script["block"][:given] + block.tokens.tolist()}
            found |= ({"escape": tried} if tried else {}) | ({"last": True} if done.is_last else {})
            assert found == recorded
        assert block.end_reason == script["ended"]


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(20))
def test_random_runs_against_the_oracle(seed: int) -> None:
    """15 runs of each of 20 seeds: in float64, in one batch, in chunks, with requests that join while others run."""
    rng = random.Random(seed)
    name = rng.choice(goldens.MODELS)
    ours, model = precise(name), experts.load(goldens.folder(name))
    assert isinstance(model, Llada2Model)
    work, expected = [], []
    for number in range(15):
        rule, length = rng.choice(list(RULES)), rng.choice([8, 8, 16])
        prompt = [rng.randrange(125) for _ in range(rng.randint(1, 30))]
        own: dict[str, Any] = {
            "rule": rule,
            "edit_threshold": rng.choice([0.0, 0.2, 0.5, 1.0]),
            "max_post_steps": rng.choice([0, 1, 2, 5]),
        }
        sampling = {"max_tokens": rng.randint(1, 24), "block_length": length, "threshold": rng.choice([0.1, 0.4, 0.7])}
        steps, most = rng.randint(1, 10), rng.choice([1, 4, 12])
        full = sampling | own | {"steps": steps, "max_steps": most}
        if rule == "levenshtein":
            own |= {"max_steps_per_block": most}
            sampling |= {"steps_per_block": steps}
        params = SamplingParams.from_mapping(sampling | {"remasking": own})
        policy: CachePolicy = rng.choice([Exact(prefill_chunk=rng.choice([8, 512])), Dense()])
        work.append(Work(Request(str(number), prompt, params), policy, number % 5))
        expected.append(indel.decode(model, prompt, full, ours.config.stop_ids))
    limits: dict[str, Any] = {"page_size": rng.choice([8, 16]), "batch_invariant": rng.random() < 0.3}
    engine = poisoned_engine(ours, max_num_seqs=5, max_model_len=128, max_steps=9999, **limits)
    results = run(engine, work)
    for number, wanted in enumerate(expected):
        found = results[str(number)]
        assert list(found.token_ids) == wanted.tokens
        assert found.usage.steps == sum(map(len, wanted.blocks))
        writes = {transfer.step: dict(transfer.writes) for transfer in found.trace}
        length, given = work[number].request.params.block_length or 0, len(work[number].request.prompt_token_ids)
        step = 0
        for index, passes in enumerate(wanted.blocks, given // length):
            start = max(given, index * length)
            for each in passes:
                wrote = {start + place: token for place, token in (each.fills | each.edits).items()}
                assert writes.get(step, {}) == wrote
                step += 1


def result(**sampling: Any) -> Result:
    config = replace(preset("llada2.2-tiny"), layers=2)
    engine = poisoned_engine(CheckedTransformer(config, lively_weights(config)), page_size=8)
    return run(engine, [Work(Request("r", [1, 2, 3], flat_params(**sampling)), Exact())])["r"]


def test_only_whole_blocks_are_told_and_only_once() -> None:
    recorded = goldens.runs("wild")[0]
    engine = poisoned_engine(precise("wild"), page_size=8, max_steps=9999)
    params = SamplingParams.from_mapping(goldens.sampling(recorded))
    events = events_of(engine, Request("r", recorded["prompt"], params))
    settled = [len(event.settled) for event in events if event.settled]
    assert settled == [8 - len(recorded["prompt"]) % 8, 8, 8, 24 - 16 - 8 + len(recorded["prompt"]) % 8][: len(settled)]
    assert [token for event in events for token in event.settled] == recorded["tokens"]


@pytest.mark.parametrize("name", goldens.MODELS)
def test_matrices_of_eight_bits(name: str) -> None:
    """Experts too. Routers stay as they are."""
    recorded = goldens.runs(name)[:4]
    model = LLM(str(goldens.folder(name)), quantization="int8", engine=EngineConfig(max_steps=4000))
    outputs = model.generate([each["prompt"] for each in recorded], [goldens.sampling(each) for each in recorded])
    assert model.model.quantized
    for each, output in zip(recorded, outputs, strict=True):
        assert output.finish_reason == "stop" or len(output.token_ids) == each["max_tokens"]
        assert not {125, 126, MASK} & set(output.token_ids)


def test_drawn_tokens_follow_the_seed() -> None:
    asked = {"max_tokens": 13, "temperature": 1.0, "max_steps_per_block": 9}
    one, same, other = (result(seed=seed, **asked) for seed in (3, 3, 4))
    assert one.trace == same.trace != other.trace
    # Top-k of one leaves nothing to draw.
    assert result(seed=3, top_k=1, **asked).trace == result(temperature=0.0, max_tokens=13, max_steps_per_block=9).trace


def test_draws_keep_ties_and_then_the_token_that_crosses() -> None:
    """A token that is drawn counts with its own probability, and a final pass draws one that moves no place."""
    block = block_of("levenshtein", 2, max_post_steps=0, steps=1)
    found = TokenCandidates(
        np.array([[7, 125, 9], [8, 9, 10]]),
        np.array([[0.6, 0.3, 0.1], [0.9, 0.05, 0.02]], dtype=np.float32),
        (np.array([125, 8]), np.array([0.3, 0.9], dtype=np.float32), np.array([9, 8])),
    )
    done = block.choose(found, len)
    assert done.is_last
    assert block.tokens.tolist() == [9, 8]


@dataclass(frozen=True, slots=True)
class Approximate(Dense):
    """A policy that may compute parts of blocks."""

    traits = Traits(kinds=("block_causal",))


def test_caches_of_parts_of_a_block_are_refused_for_the_pool() -> None:
    request = Request("r", [1, 2], SamplingParams(max_tokens=8), policy=Approximate())
    with pytest.raises(ConfigError, match=r"choose experts from one pool for each block of 8, .* use exact or none"):
        llm("calm").engine.check(request)


def test_what_has_no_meaning_where_places_move_is_refused_by_name() -> None:
    model = llm("calm")
    asked: list[tuple[dict[str, Any], str]] = [
        ({"remasking": "low_confidence"}, "'low_confidence': this model deletes and inserts tokens .* levenshtein, "),
        ({"min_tokens": 2}, "min_tokens: this model deletes"),
        ({"block_length": 4}, "block_length=4: .* experts in blocks of 8"),
        ({"remasking": "joint_threshold_indel", "temperature": 1.0}, "temperature=1.0: .*'joint_threshold_indel'"),
        ({"remasking": {"rule": "joint_threshold_indel", "max_steps_per_block": 4}}, "max_steps_per_block=4 is for"),
        ({"remasking": {"max_steps_per_block": 4000}, "max_tokens": 32}, "max_steps_per_block=4000"),
        ({"remasking": {"penalty_lambda": 1.0}}, "penalty_lambda=1.0 is for remasking 'joint_threshold'"),
        ({"presence_penalty": 1.0}, "'levenshtein' may replace every token"),
        ({"blocks": {"early_stop": True}}, "early_stop ends a block"),
    ]
    for sampling, message in asked:
        with pytest.raises(ConfigError, match=message):
            model.generate([[1, 2]], {"max_tokens": 8} | sampling)
    with pytest.raises(ConfigError, match="the prompt holds the token 126"):
        model.generate([[1, 126]], {"max_tokens": 8})
    for reader in (Logprobs(1), ForcedTokens(())):
        with pytest.raises(ConfigError, match="move"):
            model.engine.check(Request("r", [1], SamplingParams(max_tokens=8), readers=(reader,)))
    other = Request("r", [1], SamplingParams.from_mapping({"max_tokens": 8, "remasking": "levenshtein"}))
    engine = poisoned_engine(
        CheckedTransformer(preset("llada2-tiny"), lively_weights(preset("llada2-tiny"))), page_size=8
    )
    with pytest.raises(ConfigError, match="'levenshtein': this model writes no tokens that delete"):
        engine.check(other)
