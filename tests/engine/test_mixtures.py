"""Random mixtures of everything: what `check` accepts never fails, and an answer in the batch is the answer alone."""

import random
from dataclasses import replace

import numpy as np
import pytest

from remask.checks import KINDS, ModelKind
from remask.denoising.rules import names_on
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.plan.canvas import Template
from remask.policies import BiCache
from remask.policies.bicache import Earned
from remask.policies.registry import names_for
from remask.readers.decision import Reading
from remask.readers.forced import ForcedTokens
from remask.request.result import Result
from tests.engine.mixtures import NAMES, Drawing, engine_for, engine_limits, model_of
from tests.engine.support import DEADLINE, Work, let_pass, run, running_canvases, work_of, written

COUNT = 25
SEEDS = [0, *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(1, 26))]
DEAR = ("diffusion-gemma",)  # steps of several passes
QUICK = tuple(name for name in NAMES if name not in DEAR)
ENDED = ("stop", "length")


def numbers(result: Result) -> list[float]:
    """All log-probabilities, in one order."""
    tops = [value for each in result.trace for top in each.top_logprobs for _, value in top]
    return (
        [value for each in result.trace for value in each.logprobs]
        + tops
        + [x for read in result.reads.values() for r in read.values() for x in r]
    )


class Mixture:
    """One engine, and all that was asked of it."""

    def __init__(self, family: str, seed: int) -> None:
        self.family, self.rng = family, random.Random(f"mixture {family} {seed}")
        self.limits = engine_limits(self.rng, family)
        self.engine = engine_for(family, **self.limits)
        self.asked: dict[str, Request] = {}
        self.results: dict[str, Result] = {}
        self.forced: dict[str, str] = {}  # of which request each one is

    def run(self, count: int) -> None:
        """They join while others run; some are cancelled, or late, and some that have ended are forced again."""
        rng, engine = self.rng, self.engine
        joins: dict[int, list[Request]] = {}
        for asked in Drawing(rng, engine).requests(count):
            joins.setdefault(rng.randrange(count), []).append(asked)
        step = 0
        while engine.busy or joins:
            for asked in joins.pop(step, []):
                self.submit(asked)
            if rng.random() < 0.03:
                engine.cancel(rng.choice([*self.asked, "nobody"]))
            open_ = [*engine._lifecycle.waiting, *(running.pending for running in engine._lifecycle.unfinished())]
            late = [each.request.id for each in open_ if each.request.deadline_s is not None]
            if late and rng.random() < 0.05:
                let_pass(engine, rng.choice(late), DEADLINE)
            for event in engine.step():
                if event.result is not None:
                    self.end(event.result)
            step += 1
            assert step < 5000, f"stuck with {engine.waiting} waiting and {running_canvases(engine)} running"
        engine.check_integrity()

    def submit(self, asked: Request) -> None:
        self.engine.add(asked)
        self.asked[asked.id] = asked

    def end(self, result: Result) -> None:
        asked = self.asked[result.id]
        assert result.error is None, (self.limits, asked, result.error)
        self.results[result.id] = result
        original = (
            asked.reader(ForcedTokens) is None and asked.reader(Reading) is None and result.finish_reason in ENDED
        )
        if original and self.rng.random() < 0.25:
            self.force(asked, result)

    def force(self, asked: Request, result: Result) -> None:
        params = asked.params
        again = replace(at_depth(asked, result), id=f"{asked.id} again", deadline_s=None).with_readers(
            ForcedTokens(result.trace)
        )
        shape = self.engine.model.config
        unwritten = shape.self_conditioning or shape.edit_tokens is not None
        if unwritten or params.uniform.correction_steps or params.uniform.revision_tokens:
            with pytest.raises(ConfigError, match="forced tokens"):
                self.engine.check(again)
            return
        self.submit(again)
        self.forced[again.id] = asked.id

    def compare(self) -> None:
        for name, result in self.results.items():
            if result.finish_reason not in ENDED:
                continue
            asked = self.asked[name]
            same(self.alone(asked, result), result, asked)
            if asked.template is not None:
                check_kept(asked, asked.template, result)
        for name, original in self.forced.items():
            one, other = self.results[original], self.results[name]
            if other.finish_reason in ENDED:
                assert (other.token_ids, other.finish_reason) == (one.token_ids, one.finish_reason)
                assert written(other) == written(one)

    def alone(self, asked: Request, result: Result) -> Result:
        """The answer of an engine that has nothing else to do."""
        limits = {**self.limits, "overlap": False, "graphs": False, "max_row_layers": None, "max_refreshes": None}
        asked, read = at_depth(asked, result), result.usage.prefix_tokens
        if read and asked.policy.traits.sharing == "prefix":
            # What was read depends on who came before; how it was read does not.
            asked = replace(asked, prefix_length=read, find_prefix=False)
        return run(engine_for(self.family, **limits), [Work(replace(asked, deadline_s=None), asked.policy)])[asked.id]


def at_depth(asked: Request, result: Result) -> Request:
    """The request with the depth that its usage reports, where audits had earned it."""
    policy = asked.policy
    if isinstance(policy, BiCache) and isinstance(policy.depth, Earned):
        return replace(asked, policy=policy.with_depth(result.usage.prefix_depth))
    return asked


def check_kept(asked: Request, template: Template, result: Result) -> None:
    """What is fixed stands there, nothing wrote to it, and holes have as many tokens as they want."""
    fixed = template.pinned[: len(result.token_ids)]
    found = np.array(result.token_ids)
    assert (found[fixed] == np.array(template.tokens)[: len(found)][fixed]).all()
    places = {position - len(asked.prompt_token_ids) for each in result.trace for position in each.positions}
    assert places.isdisjoint(np.flatnonzero(template.pinned).tolist())
    for hole in template.holes:
        assert set(found[hole.start : hole.start + hole.min_length].tolist()).isdisjoint(template.padding)
    if template.tail == len(template):
        assert len(found) == len(template), "nothing ends a response whose end is fixed"


def same(one: Result, other: Result, asked: Request) -> None:
    assert (one.token_ids, one.finish_reason, one.error) == (other.token_ids, other.finish_reason, None), asked
    assert written(one) == written(other), asked
    assert [each.edits for each in one.trace] == [each.edits for each in other.trace]
    np.testing.assert_allclose(numbers(one), numbers(other), atol=1e-4)
    if asked.policy.traits.sharing == "prefix":  # pages that others have computed are read, and not computed
        assert work_of(one.usage) == work_of(other.usage), asked


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("family", [*QUICK, *(pytest.param(name, marks=pytest.mark.thorough) for name in DEAR)])
def test_mixtures_of_everything(family: str, seed: int) -> None:
    mixture = Mixture(family, seed)
    # Canvases that are denoised as a whole stay for longest, so more of them are cancelled or late.
    count = 2 * COUNT if mixture.engine.model.config.whole_canvas else COUNT
    mixture.run(count)
    mixture.compare()
    ended = [name for name, result in mixture.results.items() if result.finish_reason in ENDED]
    assert len(ended) > count // 3


@pytest.mark.parametrize("kind", KINDS)
def test_every_policy_and_rule_has_its_turn(kind: ModelKind) -> None:
    """What is not accepted on one family is on another one of its kind."""
    families = [name for name in NAMES if model_of(name).config.kind == kind]
    rng = random.Random(f"turns {kind}")
    engines = [engine_for(name, page_size=None) for name in families]
    for policy in names_for(kind):
        assert any(Drawing(rng, engine).accepted("r", policy, None) for engine in engines), policy
    for rule in names_on(kind):
        found = [Drawing(rng, engine).accepted("r", "none", rule) for engine in engines]
        assert any(asked is not None and asked.params.remasking.rule == rule for asked in found), rule
