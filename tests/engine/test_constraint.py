"""Responses under random automata, samplers and cache policies: each one is accepted, whatever the kind of model."""

import random
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from remask.answers.structured import automaton_of
from remask.denoising.rules import MARGIN, NEGATIVE_ENTROPY
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.model.transformer import Transformer
from remask.plan.canvas import OPEN, Hole, Template
from remask.policies.dense import Dense
from remask.policies.exact import Exact
from remask.readers.constraint import BestOfClasses, Constraint
from remask.readers.forced import ForcedTokens
from remask.readers.logprobs import Logprobs
from remask.request.sampling_params import SamplingParams
from remask.sampling.rows import RowGroup
from remask.sampling.score import score
from tests.engine import kinds, support
from tests.engine.support import EOS, MODELS, VOCAB, Work, make_engine, poisoned_engine, run
from tests.sampling_fields import flat_params

LENGTH = 8


@dataclass(frozen=True)
class Form:
    """An automaton as plain tables."""

    table: dict[tuple[int, int], int]
    accepting: set[int]
    padding: tuple[int, ...]

    def check(self, tokens: tuple[int, ...]) -> None:
        """Padding ends an answer; what stands before it is one."""
        state = 0
        while tokens and tokens[-1] in self.padding:
            tokens = tokens[:-1]
        for token in tokens:
            assert (state, token) in self.table
            state = self.table[state, token]
        assert state in self.accepting


def drawn(
    rng: random.Random, vocab: int, mask: int, padding: tuple[int, ...], length: int = LENGTH
) -> tuple[Constraint, Form]:
    """An automaton of a few states over some of the tokens, with an answer of `length` tokens."""
    allowed = [token for token in range(vocab) if token not in (mask, *padding)]
    while True:
        states = rng.randint(2, 6)
        table = {
            (state, token): rng.randrange(states)
            for state in range(states)
            for token in rng.sample(allowed, rng.choice([1, 3, 20]))
        }
        accepting = {rng.randrange(states)}
        edges = np.array([(s, t, q) for (s, t), q in table.items()], dtype=np.int64)
        made = automaton_of(edges, 0, np.array(sorted(accepting)), vocab, padding)
        if made.live_states(length)[made.start]:
            return Constraint(made), Form(table, accepting, padding)


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("seed", range(4))
def test_masked_models_under_every_policy_and_sampler(family: str, seed: int) -> None:
    """In one batch with requests that ask for nothing, whose answers stay as they are alone."""
    rng = random.Random(f"{family} {seed} constraint")
    work: list[Work] = []
    forms: dict[str, Form] = {}
    for number in range(6):
        item = support.random_work(rng, family, str(number))
        params = replace(item.request.params, ignore_eos=False, stop_token_ids=())
        top = rng.choice([None, 0, 3])
        asked = replace(item.request, params=params).with_readers(None if top is None else Logprobs(top))
        if number % 3:
            constraint, form = drawn(rng, VOCAB, support.MASK_ID, (EOS,))
            forms[asked.id], asked = form, asked.with_readers(constraint)
        work.append(replace(item, request=asked))
    results = run(make_engine(family), work)
    for item in work:
        result = results[item.request.id]
        assert result.error is None, item
        if item.request.id in forms:
            forms[item.request.id].check(result.token_ids)
            assert result.finish_reason == "stop", "it is whole"
        else:
            assert result.token_ids == support.alone(item, family).token_ids


@pytest.mark.parametrize("name", ["sdar", "sdar, blocks of 3", "llada2"])
def test_block_causal_models(name: str) -> None:
    checkpoint, rng = kinds.checkpoint(name), random.Random(f"{name} constraint")
    stops = checkpoint.model.config.stop_ids
    rules: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 1.0, "seed": 4},
        {"threshold": 0.3, "remasking": "low_confidence"},
        {"remasking": "entropy_bounded", "temperature": 0.7, "top_k": 3, "seed": 1},
        {"sub_block_length": checkpoint.block, "remasking": "sequential"},
    )
    for rule in rules:
        constraint, form = drawn(rng, checkpoint.model.config.vocab, kinds.MASK, stops)
        prompt = kinds.tokens(rng, rng.randint(1, 9))
        asked = Request("r", prompt, flat_params(max_tokens=LENGTH, **rule), readers=(constraint,))
        engine = poisoned_engine(checkpoint.model, page_size=checkpoint.block * 4)
        result = run(engine, [Work(asked, rng.choice([Dense(), Exact()]))])["r"]
        assert result.error is None
        form.check(result.token_ids)


def test_log_probabilities_are_those_of_the_tokens_that_were_taken() -> None:
    rng = random.Random(5)
    constraint, _ = drawn(rng, VOCAB, support.MASK_ID, (EOS,))
    params = SamplingParams(max_tokens=LENGTH)
    asked = Request("r", [1, 2, 3], params, readers=(constraint, Logprobs(2)))
    told = run(make_engine(), [Work(asked, Dense())])["r"]
    again = run(make_engine(), [Work(replace(asked, readers=(Logprobs(2), ForcedTokens(told.trace))), Dense())])["r"]
    for one, other in zip(again.trace, told.trace, strict=True):
        assert (one.positions, one.token_ids) == (other.positions, other.token_ids)
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("narrow", [{}, {"top_k": 2}, {"top_p": 0.4}])
@pytest.mark.parametrize("measure", [None, NEGATIVE_ENTROPY, MARGIN])
def test_where_every_token_is_allowed_nothing_changes(temperature: float, narrow: dict[str, Any], measure: Any) -> None:
    """The best token of a class of all is the one that the sampler draws, with its confidence."""
    logits = torch.randn(7, 11, generator=torch.Generator().manual_seed(3)) * 2
    edges = np.array([(0, token, 0) for token in range(11)])
    table = Constraint(automaton_of(edges, 0, np.array([0]), 11)).table
    group = RowGroup(slice(0, 7), measure, "filtered", temperature, narrow.get("top_k"), narrow.get("top_p"), 9)
    read = score(logits.clone(), [replace(group, reads=(BestOfClasses(table),))], 4, width=4 * table.count)
    _, tokens, confidences, logprobs = read[2:].reshape(4, table.count, 7)
    assert torch.equal(tokens[1], read[0])
    torch.testing.assert_close(confidences[1], read[1])
    truth = logits.log_softmax(-1).gather(1, read[0].long()[:, None])[:, 0]
    torch.testing.assert_close(logprobs[1], truth)


@pytest.mark.few(3)
@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("seed", range(3))
def test_the_hole_of_a_canvas_has_the_form(family: str, seed: int) -> None:
    """Fixed tokens stand around it, whatever they are, and blocks are cut anywhere."""
    rng = random.Random(f"{family} {seed} hole")
    work, forms = [], {}
    for number in range(5):
        constraint, forms[str(number)] = drawn(rng, VOCAB, support.MASK_ID, (EOS,))
        before, after = (tuple(kinds.tokens(rng, rng.randint(0, 6))) for _ in range(2))
        template = Template(before + (OPEN,) * LENGTH + after, (Hole(len(before), len(before) + LENGTH),), (EOS,))
        drawn_by: Any = rng.choice(
            [{}, {"temperature": 1.0}, {"remasking": "entropy", "eps": 0.01}, {"threshold": 0.2}]
        )
        block = rng.randint(1, len(template))
        params = flat_params(max_tokens=len(template), block_length=block, seed=number, **drawn_by)
        prompt = kinds.tokens(rng, 5)
        asked = Request(str(number), prompt, params, 3, template=template, readers=(Logprobs(1), constraint))
        policy = support.random_policy(rng, family, ordered=False)
        work.append(Work(asked, Dense() if "elastic" in repr(policy).lower() else policy, rng.randrange(4)))
    for name, result in run(make_engine(family), work).items():
        hole = forms[name]
        assert result.error is None
        (item,) = [each.request for each in work if each.request.id == name]
        (place,) = item.response.holes
        hole.check(result.token_ids[place.start : place.stop])
        assert result.finish_reason == "stop"


def test_forms_of_canvases_that_are_refused() -> None:
    edges = np.array([(0, 1, 1), (1, 2, 2)])
    constraint = Constraint(automaton_of(edges, 0, np.array([2]), VOCAB))
    two = Template((OPEN, 1, OPEN), (Hole(0, 1), Hole(2, 3)))
    for template, error in (
        (two, "a form is that of one hole, and the canvas has 2"),
        (Template((OPEN, OPEN, 1), (Hole(0, 2, 2),)), 'asks for 2 at least; send {"mask": {"max": 2}}'),
        (Template((OPEN, 1, 1), (Hole(0, 1),)), "structured_outputs: the hole's max=1 does not suit it"),
    ):
        asked = Request("r", [1], SamplingParams(max_tokens=3), readers=(constraint,), template=template)
        with pytest.raises(ConfigError) as raised:
            make_engine().check(asked)
        assert error in str(raised.value)


BAD: list[tuple[dict[str, Any], str]] = [
    ({"max_tokens": 1}, "structured_outputs: max_tokens=1 does not suit it: no answer of this form has so few tokens"),
    ({"ignore_eos": True}, "ignore_eos: a stop within an answer"),
    ({"stop_token_ids": [3]}, "stop_token_ids: a stop within an answer"),
]


@pytest.mark.parametrize(("fields", "error"), BAD)
def test_what_cannot_be_kept_is_refused(fields: dict[str, Any], error: str) -> None:
    edges = np.array([(0, 1, 1), (1, 2, 2)])
    constraint = Constraint(automaton_of(edges, 0, np.array([2]), VOCAB))
    asked = Request("r", [1], flat_params(**{"max_tokens": 2, **fields}), readers=(constraint,))
    with pytest.raises(ConfigError, match=error):
        make_engine().check(asked)
    with pytest.raises(ConfigError, match="structured_outputs: max_tokens=3 does not suit it: none can be filled up"):
        make_engine().check(replace(asked, params=SamplingParams(max_tokens=3)))


def test_a_block_too_long_for_its_automaton_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    constraint = Constraint(automaton_of(np.array([(0, 1, 0), (0, 2, 1), (1, 1, 0)]), 0, np.array([0]), VOCAB))
    asked = Request("r", [1], SamplingParams(max_tokens=8, block_length=8), readers=(constraint,))
    monkeypatch.setattr("remask.readers.constraint.MAX_PATH_STEPS", 3 * 8)
    make_engine().check(asked)
    monkeypatch.setattr("remask.readers.constraint.MAX_PATH_STEPS", 3 * 8 - 1)
    with pytest.raises(ConfigError, match=r"blocks of at most 7 positions are taken, and these have 8; lower block"):
        make_engine().check(asked)


def test_models_whose_tokens_change_are_refused() -> None:
    for name, rule in (("gidd", {"canvas_length": 16}), ("llada2", {"remasking": "joint_threshold"})):
        model: Transformer = kinds.checkpoint(name).model
        constraint, _ = drawn(random.Random(0), model.config.vocab, kinds.MASK, (38,))
        asked = Request("r", [1], flat_params(max_tokens=LENGTH, **rule), readers=(constraint,))
        with pytest.raises(ConfigError, match="structured_outputs: tokens of a uniform model"):
            poisoned_engine(kinds.checkpoint(name).model, page_size=16).check(asked)


def test_models_of_the_test_have_an_end_token() -> None:
    assert MODELS["llada"].config.stop_ids == (EOS,)
