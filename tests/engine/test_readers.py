"""Readers from elsewhere: they get their numbers in every batch, and what they raise ends their own request alone."""

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from remask.denoising.rules import NEGATIVE_ENTROPY
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.policies import BiCache, Dense
from remask.policies.block import BlockDual
from remask.readers.base import Reader, ReadPass
from remask.readers.drafts import Drafts
from remask.readers.implied import RowMeasureRead
from remask.readers.logprobs import Logprobs
from remask.request.result import Result
from remask.request.sampling_params import SamplingParams
from remask.sampling.rows import DeviceRead
from tests.engine.support import Work, make_engine, poisoned_engine, random_work, run
from tests.engine.test_against_oracles import dense, model_of
from tests.oracles import reading as oracle
from tests.sampling_fields import flat_params

PAGE = Path(__file__).parents[2] / "docs" / "lab" / "hooks-and-readers.md"
TOKEN = 17


def example() -> Callable[[int], Reader]:
    """The reader that docs/lab/hooks-and-readers.md shows."""
    section = PAGE.read_text(encoding="utf-8").split("\n## A reader\n")[1]
    names: dict[str, Any] = {"__name__": "mass"}
    exec(re.findall(r"```python\n(.*?)```", section, re.DOTALL)[0], names)
    mass: Callable[[int], Reader] = names["Mass"]
    return mass


def asked(name: str, prompt: list[int], reader: Reader, **sampling: Any) -> Request:
    params = flat_params(**{"max_tokens": 6, "ignore_eos": True, "seed": 3, **sampling})
    return Request(name, prompt, params, readers=(reader,))


def test_a_foreign_reader_gets_the_models_own_probabilities() -> None:
    model, rng, mass = dense("llada"), random.Random(0), example()(TOKEN)
    prompts = [[rng.randrange(200) for _ in range(rng.randint(3, 9))] for _ in range(4)]
    work = [Work(asked(str(n), prompt, mass), Dense(), joins=n) for n, prompt in enumerate(prompts)]
    results = run(poisoned_engine(model_of("llada")), work)
    for number, prompt in enumerate(prompts):
        result, tokens, masks = results[str(number)], [0] * 6, set(range(6))
        for (positions, found), transfer in zip(result.reads["mass"], result.trace, strict=True):
            assert set(positions) == {len(prompt) + place for place in masks}
            truth = oracle.logprobs(model, prompt, tokens, sorted(masks), 0, 0)
            places = [position - len(prompt) for position in positions]
            assert found == pytest.approx(truth[places, TOKEN].exp().tolist(), abs=1e-5)
            for position, token in zip(transfer.positions, transfer.token_ids, strict=True):
                tokens[position - len(prompt)] = token
                masks.discard(position - len(prompt))
        assert not masks


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("seed", range(3))
def test_it_changes_no_token_and_reads_the_same_beside_anything(seed: int, *, overlap: bool) -> None:
    rng, mass = random.Random(seed), example()(TOKEN)
    plain = [random_work(rng, "llada", str(number)) for number in range(6)]
    work = [Work(each.request.with_readers(mass, Logprobs(2)), each.policy, joins=each.joins) for each in plain]
    together = run(make_engine(overlap=overlap), work)
    without = run(make_engine(overlap=overlap), plain)
    for item in work:
        name = item.request.id
        alone = run(make_engine(), [Work(item.request, item.policy)])[name]
        assert together[name].token_ids == without[name].token_ids == alone.token_ids
        assert numbers(together[name]) == pytest.approx(numbers(alone), abs=1e-5)


def numbers(result: Result) -> list[float]:
    return [number for _, found in result.reads["mass"] for number in found]


HOOKS = ["start", "predicts", "admit", "on_device", "choose", "read", "end_pass"]
HOOKS += ["step_writes", "complete_transfer", "events"]


@pytest.mark.parametrize("hook", HOOKS)
def test_what_a_reader_raises_ends_its_own_request_alone(hook: str) -> None:
    class Broken(Reader):
        name = "broken"

        def on_device(self, read_pass: ReadPass) -> DeviceRead:  # noqa: ARG002
            return RowMeasureRead(NEGATIVE_ENTROPY)

    def defect(*_: Any) -> Any:
        raise ZeroDivisionError("the reader's own")

    setattr(Broken, hook, defect)
    engine = poisoned_engine(model_of("llada"))
    good = [asked(str(number), [1, 2, 3 + number], Drafts()) for number in range(3)]
    bad = asked("bad", [5, 6, 7], Broken())
    results = run(engine, [Work(each, policy) for each, policy in zip([*good, bad], POLICIES, strict=True)])
    assert results["bad"].finish_reason == "error"
    assert "the reader's own" in str(results["bad"].error)
    assert all(results[each.id].error is None and len(results[each.id].token_ids) == 6 for each in good)
    engine.check_integrity()


POLICIES = Dense(), BlockDual(), BiCache(Dense(), 2), Dense()


def test_a_check_refuses_and_names_differ() -> None:
    class Picky(Reader):
        name = "picky"

        def check(self, asked: Any, decoding: Any) -> None:
            raise ConfigError(f"picky: not {len(asked.prompt)} tokens in {decoding.total_steps} steps")

    engine = make_engine()
    with pytest.raises(ConfigError, match="picky: not 2 tokens in 6 steps"):
        engine.check(asked("r", [1, 2], Picky()))
    with pytest.raises(ConfigError, match="two are called 'drafts'"):
        engine.check(Request("r", [1], SamplingParams(max_tokens=4), readers=(Drafts(), Drafts())))
