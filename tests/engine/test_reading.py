"""What a pass says of masks between given tokens, against dense models that know nothing of this package."""

import random
from dataclasses import replace
from typing import Any

import pytest

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.dkv import DkvDecode, DkvPd
from remask.policies.dllm import DllmCache
from remask.readers.base import Reader
from remask.readers.decision import Reading
from remask.readers.forced import ForcedTokens
from remask.readers.logprobs import Logprobs
from remask.request.result import Result
from remask.request.sampling_params import SamplingParams
from tests.engine import kinds
from tests.engine.own_policies import Reviving
from tests.engine.support import Work, poisoned_engine, run
from tests.engine.support import request as generating
from tests.engine.test_against_oracles import dense, model_of
from tests.oracles import reading as oracle
from tests.oracles.dense import DenseModel

MODELS = ("llada", "llada_gqa", "dream")


def draw(rng: random.Random, name: str, prompt: list[int] | None = None, **terms: Any) -> Request:
    """Any answer with masks in it, some of which are read."""
    length = rng.randint(1, 7)
    masks = tuple(sorted(rng.sample(range(length), rng.randint(1, length))))
    slots = {
        place: tuple(rng.sample(range(200), rng.randint(1, 9)))
        for place in rng.sample(masks, rng.randint(1, len(masks)))
    }
    asked = Reading(tuple(rng.randrange(200) for _ in range(length)), masks, slots)
    prompt = prompt or [rng.randrange(200) for _ in range(rng.randint(3, 9))]
    return Request(name, prompt, SamplingParams(max_tokens=length), readers=(asked,), **terms)


def check(request: Request, result: Result, model: DenseModel, depth: int | None = None) -> None:
    asked = request.reader(Reading)
    assert asked is not None
    prefix = 0 if depth is None else request.prefix_length
    truth = oracle.logprobs(model, request.prompt_token_ids, asked.token_ids, asked.masks, prefix, depth or 0)
    assert (result.finish_reason, result.token_ids, result.trace) == ("stop", (), ())
    assert (result.usage.steps, result.usage.completion_tokens) == (1, 0)
    assert result.reads[Reading.name].keys() == asked.slots.keys()
    for place, tokens in asked.slots.items():
        assert result.reads[Reading.name][place] == pytest.approx(truth[place, list(tokens)].tolist(), abs=1e-4)


@pytest.mark.parametrize("name", MODELS)
def test_many_readings_in_a_batch_with_answers_that_are_written(name: str) -> None:
    model, rng = dense(name), random.Random(name)
    policies: list[CachePolicy] = [Dense(), DkvDecode(), DkvPd(), DllmCache()]
    # The first passes of these predict less, where they write.
    policies += [Reviving(), BlockPrefix(), BlockDual(), *([] if model.dream else [BlockDual("separate")])]
    work = [Work(draw(rng, str(n)), policies[n % len(policies)], joins=n // 5) for n in range(24)]
    others = [Work(generating(f"w{n}").with_readers(Logprobs(n)), Dense(), joins=n) for n in range(2)]
    alone = run(poisoned_engine(model_of(name)), [replace(others[0], joins=0)])["w0"]
    results = run(poisoned_engine(model_of(name)), [*work, *others])
    for item in work:
        check(item.request, results[item.request.id], model)
    assert results["w0"].token_ids == alone.token_ids


@pytest.mark.few(3)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("depth", [0, 2, 4])
def test_readings_over_one_shared_prefix(name: str, depth: int) -> None:
    model, rng = dense(name), random.Random(f"{name} {depth}")
    shared = [rng.randrange(200) for _ in range(11)]
    asked = [
        draw(rng, str(n), [*shared, *(rng.randrange(200) for _ in range(rng.randint(1, 4)))], prefix_length=11)
        for n in range(9)
    ]
    policy: CachePolicy = Reuse() if depth == model.layers else BiCache(Dense(), depth)
    engine = poisoned_engine(model_of(name))
    results = run(engine, [Work(each, policy) for each in asked])
    for each in asked:
        check(each, results[each.id], model, depth if depth else None)
    assert engine.stats.prefix_passes == (1 if depth else 0)


def test_many_are_the_bits_of_one_under_batch_invariance() -> None:
    rng = random.Random(7)
    work = [Work(draw(rng, str(n)), Dense()) for n in range(6)]
    together = run(poisoned_engine(model_of("llada"), batch_invariant=True), work)
    for item in work:
        name = item.request.id
        assert run(poisoned_engine(model_of("llada"), batch_invariant=True), [item])[name].reads == together[name].reads


GOOD = Request("r", [1, 2], SamplingParams(max_tokens=3), readers=(Reading((4, 0, 5), (1,), {1: (7, 8)}),))
BAD: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "at least one slot": ({"slots": {}}, {}),
    "at least one token": ({"slots": {1: ()}}, {}),
    "masks must be ascending places below 3": ({"masks": (1, 1)}, {}),
    "below 3, got": ({"masks": (1, 3)}, {}),
    "holds 2, where no mask stands": ({"slots": {2: (7,)}}, {}),
    "holds the token 256": ({"token_ids": (256, 0, 5)}, {}),
    "holds the token -1": ({"slots": {1: (-1,)}}, {}),
    "mask token 255": ({"slots": {1: (255,)}}, {}),
    "no sampling parameters but max_tokens": ({}, {"params": SamplingParams(max_tokens=3, temperature=1.0)}),
    "the length of its answer": ({}, {"params": SamplingParams(max_tokens=4)}),
    "forced tokens": ({}, {}),
}
BESIDE: dict[str, tuple[Reader, ...]] = {"forced tokens": (ForcedTokens(()),)}


@pytest.mark.parametrize("message", BAD)
def test_what_cannot_be_read_is_refused(message: str) -> None:
    changed, request = BAD[message]
    engine, reading = poisoned_engine(model_of("llada")), GOOD.reader(Reading)
    assert reading is not None
    engine.check(GOOD)
    with pytest.raises(ConfigError, match=message):
        engine.check(replace(GOOD, **request).with_readers(replace(reading, **changed), *BESIDE.get(message, ())))


def test_kinds_without_such_a_pass_are_refused() -> None:
    checkpoint = kinds.checkpoint("sdar")
    with pytest.raises(ConfigError, match="block-causal models"):
        poisoned_engine(checkpoint.model, page_size=checkpoint.block * 4, max_model_len=96).check(GOOD)
