"""No pass waits for the device but where it reads tokens and confidences, once; tensors without data hold that.

Fake tensors have shapes and no numbers, so whatever looks at a number (`item`, `tolist`, `numpy`, a mask as an index, a
Python branch) raises. The one reading is answered here with numbers of our own.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from copy import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from remask.denoising.select import RankRule, top
from remask.engine import runner
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.member import Turn
from remask.engine.request import Request
from remask.families import preset
from remask.model.config import ModelConfig
from remask.model.transformer import Transformer
from remask.model.weights import empty_weights
from remask.policies import BiCache, CachePolicy, Dense, Reuse
from remask.policies.block import BlockDual, BlockPrefix
from remask.policies.dkv import DkvDecode, DkvGreedy, DkvPd, DkvPrefill
from remask.policies.dllm import DllmCache
from remask.policies.exact import Exact
from remask.policies.uniform_cache import UniformCache
from remask.readers.logprobs import Logprobs
from remask.sampling.choice import RANKED
from remask.sampling.decoder import Decoder
from tests.engine.own_policies import Measuring
from tests.engine.support import CPU, small_config
from tests.sampling_fields import flat_params

MASKED: tuple[CachePolicy, ...] = (
    Dense(),
    Reuse(),
    BlockPrefix(),
    BlockDual(),
    BlockDual("separate"),
    DkvDecode(2),
    DkvPrefill(),
    DkvPd(2),
    DkvGreedy(2),
    DllmCache(4, 2),
    DllmCache(4, 3, 0.5, select="key"),
    DllmCache(4, 3, 0.5, select="random"),
    Measuring(),
    BiCache(Dense(), 2, 2),
    BiCache(BlockDual(), 2, 2, "recomputed"),
    BiCache(DllmCache(4, 2), 2, 3),
)
# These two need rows that predict their own positions.
PAIRS = [("llada", each) for each in MASKED]
PAIRS += [("dream", each) for each in MASKED if not isinstance(each, DkvGreedy) and each != BlockDual("separate")]
SAMPLED: tuple[Mapping[str, Any], ...] = (
    {},
    {"temperature": 0.7, "top_k": 5, "top_p": 0.9},
    {"remasking": "entropy"},
    {"remasking": "topk_margin", "temperature": 1.0},
    {"cfg_scale": 1.5},
    {"cfg_scale": 0.5, "temperature": 0.5},
    {"threshold": 0.5},
)


class Reads:
    """Stands where results are read. What it answers is random: tokens that are no stops, and confidences.

    Where the device chooses positions, these are what the host would choose of the same numbers.
    """

    def __init__(self, vocab: int) -> None:
        self.vocab, self.shapes, self.order = vocab, list[tuple[int, ...]](), list[str]()
        self.turns: Sequence[Turn] = ()  # of the pass that was launched last
        self._rng = np.random.default_rng(0)

    def __call__(self, tensor: Tensor) -> "Read":
        self.order.append("launched")
        return Read(self, tensor, [copy(turn) for turn in self.turns])  # what they predict is cut when they are read

    def answer(self, shape: tuple[int, ...], turns: Sequence[Turn]) -> NDArray[Any]:
        self.order.append("read")
        self.shapes.append(shape)
        scores = self._rng.random(shape, dtype=np.float32)
        scores[0] = self._rng.integers(6, self.vocab - 2, shape[1:])
        at = 0
        for turn in turns:
            own = slice(at, at + len(turn.predicted))
            at = own.stop
            if turn.decoder is not None:
                scores[-1, own] = chosen(turn, turn.decoder, scores[1, own])
        return scores


def chosen(turn: Turn, decoder: Decoder, confidence: NDArray[np.float32]) -> NDArray[np.bool_]:
    """What the host would choose of the positions that are still noisy when a pass is read."""
    candidates, noisy = runner._candidates(turn, decoder), turn.member.canvases[0].canvas.noisy
    known, positions = candidates.choice, candidates.positions
    if not isinstance(known, RankRule):
        return np.isin(positions, [] if known is None else known)
    rows = np.flatnonzero((candidates.choice_kinds() == RANKED) & noisy[positions])
    passing = int((confidence[rows] >= known.threshold).sum())
    return np.isin(np.arange(len(positions)), rows[top(confidence[rows], max(known.least, passing))])


class Read:
    """What was launched, until it is waited for."""

    def __init__(self, reads: Reads, tensor: Tensor, turns: Sequence[Turn]) -> None:
        self.reads, self.shape, self.turns = reads, tuple(tensor.shape), turns

    def wait(self) -> NDArray[Any]:
        return self.reads.answer(self.shape, self.turns)


@pytest.fixture
def no_data() -> Iterator[None]:
    with FakeTensorMode():
        yield


def shape_of(family: str) -> ModelConfig:
    """As few layers as a boundary has layers below it and above it."""
    return replace(small_config(family), layers=3)


def fake_engine(config: ModelConfig, **limits: Any) -> Engine:
    model = Transformer(config, empty_weights(config, torch.float32, CPU))
    usual = {"max_num_seqs": 8, "max_model_len": 64, "page_size": 8, "store_budget_tokens": 64}
    return Engine(model, EngineConfig(**{**usual, **limits}), "fake")


def reads_of(engine: Engine, patch: pytest.MonkeyPatch) -> Reads:
    """What is read of the passes of an engine from now on."""
    reads, launch = Reads(engine.model.config.vocab), engine.runner.launch_scores
    patch.setattr(runner, "Arrival", reads)

    def launched(hidden: Tensor, turns: Sequence[Turn]) -> Any:
        reads.turns = turns if engine.config.overlap else ()
        return launch(hidden, turns)

    patch.setattr(engine.runner, "launch_scores", launched)
    return reads


def finish(engine: Engine, requests: list[Request], patch: pytest.MonkeyPatch) -> tuple[Reads, int]:
    """Run to the end. Returns what was read, and the number of passes."""
    reads = reads_of(engine, patch)
    for request in requests:
        engine.add(request)
    results = {event.id: event.result for _ in range(200) for event in engine.step() if event.result is not None}
    assert {name: result.error for name, result in results.items() if result is not None} == dict.fromkeys(
        request.id for request in requests
    )
    return reads, engine.stats.steps


def asked(name: str, policy: CachePolicy, rng: random.Random, **sampling: Any) -> Request:
    prompt = [7] * 12 + [rng.randrange(6, 60) for _ in range(rng.randrange(1, 9))]
    params = flat_params(**{"max_tokens": 8, "ignore_eos": True, "seed": rng.randrange(99), **sampling})
    return Request(name, prompt, params, 12, policy)


@pytest.mark.thorough
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize(("family", "policy"), PAIRS, ids=repr)
def test_a_pass_reads_once(family: str, policy: CachePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(repr(policy))
    ordered = {"remasking": "random"} if isinstance(policy, DkvGreedy) else {}
    sampled = [{}, {"temperature": 0.7}, {"cfg_scale": 1.5}] if ordered else SAMPLED
    requests = [asked(str(n), policy, rng, **{**more, **ordered}) for n, more in enumerate(sampled)]
    reads, passes = finish(fake_engine(shape_of(family)), requests, monkeypatch)
    assert 0 < len(reads.shapes) <= passes
    assert all(shape[0] == 2 + (policy.traits.measure is not None) for shape in reads.shapes)


@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.thorough)])
def test_a_pass_of_all_policies_and_samplers_reads_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    rng, requests = random.Random(family), list[Request]()
    for number, policy in enumerate(policy for name, policy in PAIRS if name == family):
        sampled = {"remasking": "random"} if isinstance(policy, DkvGreedy) else SAMPLED[number % len(SAMPLED)]
        requests.append(asked(str(number), policy, rng, **{"max_tokens": 4, **sampled}))
    engine = fake_engine(shape_of(family), max_num_seqs=2 * len(requests))
    reads, passes = finish(engine, requests, monkeypatch)
    assert 0 < len(reads.shapes) <= passes


@pytest.mark.thorough
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("family", ["llada", pytest.param("dream", marks=pytest.mark.soak)])
def test_plans_that_repeat_are_queued_before_anything_is_read(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All policies that go by clocks in one batch, beside refreshes, guidance and orders, which are read first."""
    rng, requests = random.Random(family), list[Request]()
    policies = [policy for name, policy in PAIRS if name == family and policy.traits.by_clock]
    rules: list[dict[str, Any]] = [{"temperature": 0.7}, {"cfg_scale": 1.5}, {"steps": 2, "block_length": 2}]
    for number, policy in enumerate(policies):
        rule = {"remasking": "random"} if isinstance(policy, DkvGreedy) else rules[number % len(rules)]
        requests.append(asked(str(number), policy, rng, **{"max_tokens": 4, **rule}))
    repeating = [
        asked(f"{number} alone", policy, rng, max_tokens=12) for number, policy in enumerate([Dense(), Reuse()])
    ]
    engine = fake_engine(shape_of(family), overlap=True, max_num_seqs=2 * len(requests))
    reads, passes = finish(engine, [*requests, *repeating], monkeypatch)
    stats = engine.stats
    assert stats.discarded_passes == 0
    assert stats.queued_passes == passes - 1 - stats.waited_passes > 0
    ahead = np.cumsum([1 if each == "launched" else -1 for each in reads.order])
    assert ahead.max() == 2
    assert np.count_nonzero(ahead == 2) == stats.queued_passes


@pytest.mark.usefixtures("no_data")
def test_every_rule_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    rules: list[dict[str, Any]] = [{"factor": 0.9}, {"remasking": "origin"}]
    rules.append({"remasking": "confidence_threshold", "threshold": 0.5})
    requests = [asked(str(n), Dense(), rng, **rule) for n, rule in enumerate(rules)]
    requests[0] = requests[0].with_readers(Logprobs(2))
    reads, passes = finish(fake_engine(shape_of("llada"), overlap=True), requests, monkeypatch)
    assert len(reads.shapes) == passes


@pytest.mark.usefixtures("no_data")
def test_prefixes_are_copied_without_a_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    rules: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"cfg_scale": 1.5}]
    policy = BiCache(BlockDual(), 2, 2)
    whole = [asked(str(n), policy, rng, max_tokens=4, **more) for n, more in enumerate(rules)]
    engine = fake_engine(shape_of("llada"))
    reads, passes = finish(engine, [replace(each, prefix_length=10) for each in whole], monkeypatch)
    assert 0 < len(reads.shapes) <= passes
    assert engine.stats.prefix_passes == 1


class Looking(Transformer):
    def head_input(self, h: Tensor) -> Tensor:
        return super().head_input(h) if h.sum().item() else h


@pytest.mark.usefixtures("no_data")
def test_whatever_looks_at_a_number_fails() -> None:
    config = small_config("llada")
    model = Looking(config, empty_weights(config, torch.float32, CPU))
    engine = Engine(model, EngineConfig(max_num_seqs=1, max_model_len=64, page_size=8), "fake")
    engine.add(asked("r", Dense(), random.Random(0)))
    (result,) = [event.result for event in engine.step() if event.result is not None]
    assert result.error is not None
    assert "_local_scalar_dense" in result.error


@pytest.mark.thorough
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("policy", [UniformCache(), BlockPrefix(), Dense()], ids=repr)
def test_uniform_models(policy: CachePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(preset("gidd-tiny"), max_length=64)
    rng, sampled = random.Random(1), list[dict[str, Any]]()
    for more in ({}, {"temperature": 0.7, "top_k": 3}, {"sampler": "ancestral", "tokens_per_step": None}):
        sampled += [{**more, "min_tokens": 4}, {**more, "correction_steps": 2}]
    requests = [
        replace(asked(str(n), policy, rng, **{"block_length": 4, "steps_per_block": 2, **more}), prefix_length=0)
        for n, more in enumerate(sampled)
    ]
    reads, passes = finish(fake_engine(config), requests, monkeypatch)
    assert len(reads.shapes) == passes


@pytest.mark.thorough
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("policy", [Exact(8), Dense()], ids=repr)
def test_block_causal_models(policy: CachePolicy, monkeypatch: pytest.MonkeyPatch) -> None:
    config = replace(preset("sdar-tiny"), max_length=64)
    rng = random.Random(2)
    sampled: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.7},
        {"remasking": "entropy_bounded"},
        {"threshold": 0.5},
    )
    sampled += ({"remasking": "joint_threshold", "penalty_lambda": 0.5},)
    requests = [replace(asked(str(n), policy, rng, **more), prefix_length=0) for n, more in enumerate(sampled)]
    reads, passes = finish(fake_engine(config), requests, monkeypatch)
    assert 0 < len(reads.shapes) <= passes
