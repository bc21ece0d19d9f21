"""Scores of logits that are spread over ranks, beside the scores of the same logits in one piece."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remask.denoising.noise import Noise
from remask.denoising.rules import MARGIN, NEGATIVE_ENTROPY
from remask.readers.guidance import PassGuidance, Residual, StoredGuidance
from remask.readers.implied import LogitOffsets, TokenPenalties
from remask.readers.logprobs import Ranking
from remask.sampling.filters import Draws
from remask.sampling.rows import Penalty, RowGroup
from remask.sampling.score import score
from remask.sampling.uniform_score import NoisyRows, Transition
from remask.sampling.vocabulary import WHOLE, SplitVocabulary, Vocabulary
from tests.parallel.threads import ThreadRanks, together

VOCAB, MASK = 37, 36
SIZES = pytest.mark.parametrize("size", [2, 3, 4])
NOISE = Noise(1.5, -9.0, 9.0, VOCAB, MASK)


def logits(rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def vocabulary(ranks: ThreadRanks) -> SplitVocabulary:
    return SplitVocabulary(ranks.shard.share(VOCAB), VOCAB, ranks.gather)


def part(ranks: ThreadRanks, x: Tensor) -> Tensor:
    held = ranks.shard.share(VOCAB)
    return x[:, held.start : held.stop].clone()


def split(size: int, x: Tensor, act: Any) -> list[Any]:
    """What `act(vocabulary, columns)` gives on each rank."""
    return together(size, lambda ranks: act(vocabulary(ranks), part(ranks, x)))


def columns(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts, dim=1)


@SIZES
@given(seed=st.integers(0, 1000), scale=st.sampled_from([0.1, 3.0, 40.0]))
@settings(max_examples=4, deadline=None)
def test_every_reduction(size: int, seed: int, scale: float) -> None:
    x, tokens = logits(5, seed, scale), torch.tensor([0, 36, 12, 12, 18])

    def check(act: Any, join: Any = lambda parts: parts[0], tolerance: float = 1e-5) -> None:
        found = split(size, x, act)
        torch.testing.assert_close(join(found), act(WHOLE, x.clone()), rtol=tolerance, atol=tolerance)

    for exact in (
        lambda v, y: v.best(y)[0],
        lambda v, y: v.best(y)[1],
        lambda v, y: v.top(y, 1)[0],
        lambda v, y: v.top(y, 20)[0],
        lambda v, y: v.top(y, 20)[1],
        lambda v, y: v.at(y, tokens),
        lambda v, y: v.draw(y, Draws(seed, 3, np.arange(5) * 9)),
    ):
        check(exact, tolerance=0)
    for near in (lambda v, y: v.sum(y.exp()), lambda v, y: v.logsumexp(y)):
        check(near)
    for near in (lambda v, y: v.softmax(y), lambda v, y: v.log_softmax(y), lambda v, y: v.one_hot(tokens, y)):
        check(near, columns)
    for count in (None, 1, 5, 36, 37, 90):
        check(lambda v, y, count=count: v.top_k(y, count), columns, 0)
    for share in (None, 0.0, 0.3, 0.9, 0.999, 1.0):
        check(lambda v, y, share=share: v.top_p(y, share), columns, 0)


@SIZES
@pytest.mark.parametrize("share", [1e-6, 0.1, 1.0])
def test_a_share_of_the_best(size: int, share: float) -> None:
    x = logits(5, 1, 3.0)
    assert torch.equal(columns(split(size, x, lambda v, y: v.min_p(y, share))), WHOLE.min_p(x, share))


@SIZES
def test_the_first_of_equal_logits_is_the_best(size: int) -> None:
    x = torch.zeros(3, VOCAB)
    x[1, [5, 30]] = 1
    x[2] = -torch.inf
    x[2, 20:] = -1
    for values, tokens in split(size, x, lambda v, y: v.best(y)):
        assert (values.tolist(), tokens.tolist()) == ([0, 1, -1], [0, 5, 20])


@SIZES
def test_a_nucleus_keeps_ties_with_its_last_token(size: int) -> None:
    x = torch.full((1, VOCAB), -torch.inf)
    x[0, [3, 10, 20, 35]] = torch.tensor([0.4, 0.2, 0.2, 0.2]).log()
    kept = columns(split(size, x, lambda v, y: v.top_p(y, 0.5)))
    assert kept.isfinite().nonzero()[:, 1].tolist() == [3, 10, 20, 35]
    assert columns(split(size, x, lambda v, y: v.top_p(y, 0.3))).isfinite().nonzero()[:, 1].tolist() == [3]


@SIZES
def test_logits_are_changed_on_the_rank_that_holds_them(size: int) -> None:
    x = logits(3)

    def act(v: Vocabulary, y: Tensor) -> Tensor:
        v.bar(y, [0, 18, 36])
        v.lower(y, torch.tensor([1, 18, 35]), torch.tensor([1.0, 2.0, 0.0]))
        LogitOffsets(np.array([36, 2, 17, 19]), np.array([1, -1, 2, 3], np.float32)).change(y, None, v)
        TokenPenalties(np.array([0, 20]), 2.0, np.array([20, 35]), np.array([1, 2], np.float32)).change(y, None, v)
        return y

    assert torch.equal(columns(split(size, x, act)), act(WHOLE, x.clone()))


def group(rows: slice, **more: Any) -> RowGroup:
    return replace(RowGroup(rows, None, "logits", 0.0, None, None, seed=5), **more)


def noisy(rows: int, **more: Any) -> NoisyRows:
    return NoisyRows(np.arange(rows) * 7 % VOCAB, **more)


MEASURES = [
    {"row_measure": measure, "basis": basis, "temperature": temperature, **narrow}
    for measure in (None, MARGIN, NEGATIVE_ENTROPY)
    for basis in ("logits", "tempered", "filtered")
    for temperature in (0.0, 0.7)
    for narrow in ({}, {"top_k": 4}, {"top_p": 0.8}, {"top_p": 0.9, "top_k": 7})
]
UNIFORM: list[dict[str, Any]] = [
    {"noisy": noisy(4, **kind), "temperature": temperature, "top_p": share}
    for kind in (
        {},
        {"weights": np.linspace(0.1, 1, 4, dtype=np.float32)},
        {"transition": Transition(NOISE, -1.0, 2.0)},
        {"transition": Transition(NOISE, -9.0, -8.0), "banned": (1, 30), "banned_rows": 2},
    )
    for temperature in (0.0, 1.3)
    for share in (None, 0.8)
]


@pytest.mark.few(2)
@SIZES
@pytest.mark.parametrize("seed", range(1))
def test_the_rows_of_every_kind_of_request_at_once(size: int, seed: int) -> None:
    kinds = [{}, *MEASURES, *UNIFORM, {"penalty": Penalty(np.array([-1, 3, 30, 36]), 2.0)}]
    groups = [group(slice(4 * at, 4 * at + 4), **kind) for at, kind in enumerate(kinds)]
    x = logits(4 * len(kinds), seed)
    whole = score(x.clone(), groups, MASK)
    for found in split(size, x, lambda v, y: score(y, groups, MASK, vocabulary=v)):
        assert torch.equal(found[0], whole[0])
        torch.testing.assert_close(found[1], whole[1], rtol=1e-4, atol=1e-6)


@SIZES
def test_log_probabilities(size: int) -> None:
    groups = [
        group(slice(0, 3), reads=(Ranking(5, VOCAB),)),
        group(slice(3, 5), reads=(Ranking(0, VOCAB),), temperature=0.7),
        group(slice(5, 6)),
    ]
    x, more = logits(6), Ranking(5, VOCAB).width
    x[0, MASK] = 99  # it is the most probable one, and is never listed
    whole = score(x.clone(), groups, MASK, width=more)
    for found in split(size, x, lambda v, y: score(y, groups, MASK, width=more, vocabulary=v)):
        assert torch.equal(found[3:8], whole[3:8]), "the same tokens"
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


@SIZES
def test_each_rank_keeps_its_part_of_the_guidance(size: int) -> None:
    x, scale = logits(6), 1.5

    def act(v: Vocabulary, y: Tensor) -> Tensor:
        kept = Residual()
        both = group(slice(0, 3), guide=slice(3, 6), reads=(PassGuidance(scale, kept),))
        later = group(slice(0, 2), reads=(StoredGuidance(scale, kept, np.array([0, 2])),))
        again = y[[0, 2]].clone()
        first = score(y, [both], MASK, vocabulary=v)
        return torch.cat((first, score(again, [later], MASK, vocabulary=v)), dim=1)

    whole = act(WHOLE, x.clone())
    assert torch.equal(whole[0, [0, 2]], whole[0, 3:])
    for found in split(size, x, act):
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-6)


@pytest.mark.few(2)
@SIZES
def test_no_logits_are_gathered(size: int) -> None:
    """What is exchanged has a few numbers a row, whatever the vocabulary."""
    sizes: list[int] = []

    def act(ranks: ThreadRanks) -> None:
        def gather(x: Tensor) -> Tensor:
            sizes.append(x.numel() // 4)
            return ranks.gather(x)

        v = SplitVocabulary(ranks.shard.share(VOCAB), VOCAB, gather)
        for kind in [{}, *MEASURES, *UNIFORM]:
            score(part(ranks, logits(4)), [group(slice(0, 4), **kind)], MASK, vocabulary=v)

    together(size, act)
    assert max(sizes) <= 14, "the largest top-k of these requests, logits and tokens"
