"""Gains and posteriors against the recorded steps of the original and against the documented edges."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from remask.denoising.noise import Noise
from remask.sampling.filters import Draws, top_k, top_p
from remask.sampling.uniform_score import NoisyRows, Transition, gain, read_noisy, reverse_step
from tests.goldens import uniform as goldens
from tests.oracles import bound
from tests.oracles import uniform_sampling as oracle

SCORES, PROBABILITIES = 5e-6, 1e-5
MASK, VOCAB = 3, 12


def noise_of(shift: float, vocab: int = VOCAB, mask: int = MASK) -> Noise:
    return Noise(shift, -9.0, 9.0, vocab, mask)


def recorded_noise(case: dict[str, Any]) -> Noise:
    common = goldens.sampling("torch_steps")[0]
    return noise_of(case["noise_type"], common["vocab_size"], common["mask_token_id"])


def test_recorded_gains_and_choices() -> None:
    compared = 0
    for case, tensors in goldens.cases("torch_steps", "adaptive"):
        noise = recorded_noise(case)
        for row, current in enumerate(tensors["z"]):
            prior = noise.probability(current.numpy(), case["log_snr"])
            weights = torch.from_numpy((prior / prior.sum() if prior.sum() else prior).astype(np.float32))
            scores = gain(tensors["logits"][row], current, weights)
            torch.testing.assert_close(scores, tensors["score"][row], rtol=0, atol=SCORES)
            compared += 1
    assert compared >= 36


def test_recorded_posteriors() -> None:
    compared = 0
    for case, tensors in goldens.cases("torch_steps", "ancestral"):
        step = Transition(recorded_noise(case), case["log_snr_t"], case["log_snr_s"])
        greedy = case["temperature"] == 0
        for row, current in enumerate(tensors["z"]):
            logits = tensors["logits"][row] / (1 if greedy else case["temperature"])
            logits = top_p(top_k(logits, case["top_k"] or None), case["top_p"])
            chances = reverse_step(logits, current, step, greedy=greedy)
            torch.testing.assert_close(chances, tensors["p_s_given_t"][row], rtol=0, atol=PROBABILITIES)
            compared += 1
    assert compared >= 80


@pytest.mark.parametrize("marginal", [False, True])
@pytest.mark.parametrize("greedy", [False, True])
@pytest.mark.parametrize("shift", [1000.0, -1000.0, 9.0, 0.0, -4.0])
def test_every_reverse_step_is_a_distribution_without_the_mask_where_noise_has_none(
    shift: float, greedy: bool, marginal: bool
) -> None:
    """Whatever stands there and whatever is predicted, also where the formula is 0 / 0."""
    noise = noise_of(shift)
    logits = torch.randn(VOCAB, VOCAB)
    logits[:, MASK] = -torch.inf
    current = torch.arange(VOCAB)
    for before, after in ((-9.0, -8.0), (-1.0, 2.0), (8.0, 9.0)):
        chances = reverse_step(logits, current, Transition(noise, before, after, marginal), greedy=greedy)
        torch.testing.assert_close(chances.sum(-1), torch.ones(VOCAB), rtol=0, atol=1e-5)
        assert (chances >= 0).all()
        if shift == 1000.0:
            assert (chances[:, MASK] == 0).all()
        if shift == -1000.0:
            stays = torch.eye(VOCAB)[current != MASK]  # even where something else is predicted
            torch.testing.assert_close(chances[current != MASK], stays, rtol=0, atol=1e-6)
            assert (chances[current != MASK][stays == 0] == 0).all()


def chain_of(noise: Noise, before: float, after: float) -> bound.Chain:
    """The two levels of a step as 2 and 1 of a chain in float64, level 0 clean."""
    levels = (math.inf, after, before)
    share = [1 / (1 + math.exp(-level)) for level in levels]
    even = [1 / (1 + math.exp(-min(level + noise.shift, 700))) for level in levels]
    rows = np.array([[1 - each if token == MASK else each / (VOCAB - 1) for token in range(VOCAB)] for each in even])
    chain = bound.Chain(np.array(share), rows)
    np.testing.assert_allclose(chain.marginal(1) @ chain.transition(2), chain.marginal(2), atol=1e-12)
    return chain


@pytest.mark.parametrize("shift", [1000.0, 2.0, -3.0])
def test_the_marginal_step_is_the_mean_over_all_clean_tokens(shift: float) -> None:
    """And the other one is not."""
    noise, rng = noise_of(shift), np.random.default_rng(3)
    logits = torch.from_numpy(rng.normal(size=(VOCAB, VOCAB)) * 3).float()
    logits[:, MASK] = -torch.inf
    current = torch.tensor([token for token in range(VOCAB) if shift < 1000 or token != MASK])
    clean = logits.double().softmax(-1).numpy()
    for before, after in ((-4.0, -1.0), (0.5, 0.6), (2.0, 3.0), (4.0, 9.0)):
        exact = chain_of(noise, before, after)
        marginal, placed = (Transition(noise, before, after, each) for each in (True, False))
        wanted = np.stack([exact.marginal_reverse(2, clean[token], token) for token in current.tolist()])
        other = np.stack([exact.reverse(2, clean[token], token) for token in current.tolist()])
        assert np.abs(other - wanted).max() > 1e-3
        for step, expected in ((marginal, wanted), (placed, other)):
            chances = reverse_step(logits[current], current, step, greedy=False)
            np.testing.assert_allclose(chances.numpy(), expected, atol=2e-6)
        sure, plain = (reverse_step(logits[current], current, step, greedy=True) for step in (marginal, placed))
        torch.testing.assert_close(sure, plain, rtol=0, atol=1e-6)


def test_a_mask_that_noise_never_yields_is_replaced_as_the_forward_process_would() -> None:
    noise, logits = noise_of(1000.0), torch.full((1, VOCAB), -torch.inf)
    logits[0, 5] = 0
    chances = reverse_step(logits, torch.tensor([MASK]), Transition(noise, -9.0, 0.0), greedy=True)[0]
    assert chances[MASK] == 0
    assert float(chances[5]) == pytest.approx(0.5 + 0.5 / (VOCAB - 1), abs=1e-6)
    assert float(chances[0]) == pytest.approx(0.5 / (VOCAB - 1), abs=1e-6)


def test_rows_whose_tokens_noise_cannot_have_put_there_gain_nothing() -> None:
    current = torch.tensor([0, MASK])
    logits = torch.zeros(2, VOCAB)
    logits[:, 5] = 3
    logits[:, MASK] = -torch.inf
    assert gain(logits, current, torch.zeros(2)).tolist() == [0, 0]
    assert gain(logits, torch.tensor([5, 5]), torch.ones(2)).tolist() == [0, 0], "the best token stands there"


def rows(current: list[int], **given: Any) -> NoisyRows:
    return NoisyRows(np.array(current), np.full(len(current), 0.5, dtype=np.float32), **given)


def test_the_mask_is_never_read_and_end_tokens_only_where_they_may_stand() -> None:
    logits = torch.zeros(3, VOCAB)
    logits[:, MASK], logits[:, 1], logits[:, 2], logits[:, 7] = 9, 8, 7, 6
    before = logits.clone()
    noisy = rows([0, 0, 0], banned=(1, 2), banned_rows=2)
    tokens, scores = read_noisy(logits, noisy, MASK, 0.0, None, None, Draws(0))
    assert tokens.tolist() == [7, 7, 1]
    assert torch.equal(logits, before)
    allowed = logits.clone()
    allowed[:, MASK] = -torch.inf
    allowed[:2, [1, 2]] = -torch.inf
    share = allowed.softmax(-1)
    torch.testing.assert_close(scores, (share.amax(-1) - share[:, 0]) * 0.5)


def test_temperature_and_filters_move_the_draw_but_not_the_gain() -> None:
    logits, noisy = torch.randn(400, VOCAB), rows([0] * 400)
    plain = read_noisy(logits, noisy, MASK, 0.0, None, None, Draws(0))
    drawn = read_noisy(logits, noisy, MASK, 1.5, None, None, Draws(0))
    assert torch.equal(plain[1], drawn[1])
    assert not torch.equal(plain[0], drawn[0])
    assert torch.equal(plain[0], read_noisy(logits, noisy, MASK, 1.5, 1, None, Draws(0))[0])
    assert MASK not in drawn[0].tolist()


def test_top_k_comes_before_top_p() -> None:
    """As in the original: of three equal tokens and a tail, top-k leaves the three, of which top-p 0.5 needs two."""
    logits = torch.full((VOCAB,), 0.05).log()
    logits[4:7] = math.log(0.2)
    noisy = rows([0] * 400)
    tokens = read_noisy(logits.expand(400, -1), noisy, MASK, 1.0, 3, 0.5, Draws(1))[0]
    assert len(set(tokens.tolist())) == 2


@pytest.mark.parametrize("marginal", [False, True])
@pytest.mark.parametrize("shift", [1000.0, 2.0, -1000.0])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_drawn_tokens_follow_the_reverse_step(shift: float, temperature: float, marginal: bool) -> None:
    """Chi-square of many draws of one row against a reverse step of our own, in float64."""
    torch.manual_seed(int(shift) + 7)
    logits, noise, draws = torch.randn(VOCAB).double(), oracle.Noise(shift, VOCAB, MASK), 40_000
    before, after = -0.4, 1.1
    allowed = logits.clone()
    allowed[MASK] = -torch.inf
    clean = oracle.filtered(allowed, temperature, 6, 0.95)
    for current in (MASK, 7) if shift < 1000 else (int(clean.argmax()), 7):
        if shift == -1000 and current != MASK and clean[current] == 0:
            continue
        now, then = oracle.mixture(noise, before), oracle.mixture(noise, after)
        own = oracle.marginal if marginal else oracle.posterior
        expected = own(clean[None], torch.tensor([current]), now, then)[0] * draws
        rows = NoisyRows(np.full(draws, current), None, Transition(noise_of(shift), before, after, marginal))
        tokens, scores = read_noisy(logits.float().expand(draws, -1), rows, MASK, temperature, 6, 0.95, Draws(11))
        counts = torch.bincount(tokens.long(), minlength=VOCAB)
        assert (scores == 1).all()
        assert not counts[expected == 0].any()
        kept = expected > 5
        surprise = float(((counts - expected).square()[kept] / expected[kept]).sum())
        assert surprise < 45, "of at most 11 degrees of freedom: exceeded once in 100,000 times"
