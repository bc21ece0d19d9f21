"""The bound of uniform models against its enumeration on an independent dense model."""

import itertools
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_groups import ANCESTRAL, MARGINAL
from remask.request.sampling_params import SamplingParams
from remask.sampling.noise import Noise
from remask_lab.likelihood.masked import MaskLikelihoods
from remask_lab.likelihood.noised import Noised, NoiseDraws, NoiseLikelihoods, chain, divergences
from remask_lab.likelihood.passes import Pair
from remask_lab.likelihood.scores import open_estimator
from tests.checkpoint import checkpoints
from tests.engine import kinds
from tests.leftovers import lasting_folder
from tests.oracles import bound, gidd

VOCAB, MASK = 6, 5
PROMPT, RESPONSE = (1, 0, 3), (4, 2)
PAIR = Pair(PROMPT, RESPONSE)
SHIFTS = {"uniform": 1000.0, "hybrid": 0.5, "masks": -1000.0}
STEPS = 5


@cache
def folder(noise: str, structured: bool = True) -> Path:
    """A random model of six tokens."""
    raw = kinds.GIDD | {"vocab_size": VOCAB, "mask_token_id": MASK, "eos_token_id": 4, "noise_type": SHIFTS[noise]}
    raw |= {} if structured else {"structured_attention": False}
    tensors = checkpoints.random_tensors(raw)
    tensors["lm_head.weight"] *= 3  # predictions that are worth something
    return checkpoints.write(lasting_folder() / "model", raw, tensors)


@cache
def open_model(noise: str, structured: bool = True) -> LLM:
    return LLM(str(folder(noise, structured)), dtype="float32", device="cpu")


@cache
def predict(noise: str, noisy: Sequence[int], structured: bool = True, tail: tuple[int, ...] = ()) -> np.ndarray:
    """The oracle's distribution of the clean tokens."""
    model = gidd.load(folder(noise, structured))
    canvas = torch.tensor([*PROMPT, *noisy, *tail])
    seen = gidd.structured(torch.arange(len(canvas)) >= len(PROMPT)) if structured else None
    logits = model.forward(canvas, visible=seen).logits[len(PROMPT) : len(PROMPT) + len(noisy)].clone()
    logits[:, MASK] = -torch.inf
    return logits.softmax(-1).double().numpy()


def oracle_chain(noise: str, steps: int = STEPS, kind: str = "cosine") -> bound.Chain:
    return bound.chain(steps, SHIFTS[noise], VOCAB, MASK, -9.0, 9.0, kind)


@pytest.mark.few(4)
@pytest.mark.parametrize("sampler", ANCESTRAL)
@pytest.mark.parametrize("structured", [True, False])
@pytest.mark.parametrize("noise", SHIFTS)
def test_terms_of_all_noise_make_the_bound(noise: str, structured: bool, sampler: str) -> None:
    """Every noisy response of every level, weighed by its probability: no draw is left to chance."""
    exact = oracle_chain(noise)
    marginal = sampler == MARGINAL
    wanted = bound.negative_bound(exact, RESPONSE, lambda noisy: predict(noise, tuple(noisy), structured), marginal)
    estimator = NoiseLikelihoods(open_model(noise, structured), NoiseDraws(levels=STEPS, sampler=sampler))
    found, none = 0.0, np.empty(0, dtype=np.int64)
    for level in range(1, STEPS + 1):
        rows = exact.marginal(level)
        every = [z for z in itertools.product(range(VOCAB), repeat=2) if rows[4, z[0]] * rows[2, z[1]] > 0]
        terms = estimator.terms(PAIR, [Noised(level, np.array(noisy), none) for noisy in every])
        found += sum(rows[4, a] * rows[2, b] * term for (a, b), term in zip(every, terms, strict=True))
    assert found == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize("marginal", [False, True])
@pytest.mark.parametrize("noise", SHIFTS)
def test_the_bound_is_below_the_likelihood_of_the_sampler(noise: str, marginal: bool) -> None:
    """And the chain of one step is exact: there it is the product of the predictions from noise."""

    def own(noisy: Sequence[int]) -> np.ndarray:
        return predict(noise, tuple(noisy))

    for steps in (1, 2, STEPS):
        exact = oracle_chain(noise, steps)
        below = -bound.negative_bound(exact, RESPONSE, own, marginal)
        assert below <= bound.log_likelihood(exact, RESPONSE, own, marginal) + 1e-9


@pytest.mark.parametrize("strata", [1, 8])
def test_draws_converge_to_the_bound(strata: int) -> None:
    right = -bound.negative_bound(oracle_chain("hybrid"), RESPONSE, lambda z: predict("hybrid", tuple(z)))
    draws = NoiseDraws(samples=768, strata=strata, seed=3, levels=STEPS)
    (found,) = NoiseLikelihoods(open_model("hybrid"), draws).score([PAIR])
    assert abs(found.log_likelihood - right) < 3.5 * found.standard_error
    assert found.standard_error < 0.15 * abs(right)
    assert (found.tokens, found.draws) == (2, 768)


def test_noise_behind_the_response_is_seen() -> None:
    draws = NoiseDraws(samples=4, strata=1, levels=STEPS, canvas_length=9)
    estimator = NoiseLikelihoods(open_model("uniform"), draws)
    exact = oracle_chain("uniform")
    for noised in estimator.draw(PAIR):
        assert (noised.tail.shape, MASK in noised.tail) == ((4,), False)
        clean = predict("uniform", tuple(noised.tokens.tolist()), True, tuple(noised.tail.tolist()))
        wanted = bound.step_divergence(exact, noised.step, RESPONSE, noised.tokens.tolist(), clean)
        assert estimator.terms(PAIR, [noised])[0] == pytest.approx(wanted, rel=1e-4, abs=1e-7)


@pytest.mark.parametrize("marginal", [False, True])
@pytest.mark.parametrize("kind", ["cosine", "linear"])
@pytest.mark.parametrize("noise", SHIFTS)
def test_long_chains_keep_their_digits_and_gradients(noise: str, kind: str, marginal: bool) -> None:
    """Steps of a long chain differ by little: their divergences still sum to what the enumeration says."""
    steps, exact = 400, oracle_chain(noise, 400, kind)
    levels = chain(Noise(SHIFTS[noise], -9.0, 9.0, VOCAB, MASK), steps, kind)
    rng = np.random.default_rng(0)
    logits = torch.from_numpy(rng.normal(size=(steps, VOCAB))).float().requires_grad_()
    places = torch.arange(1, steps + 1)
    noisy = torch.tensor([int(rng.choice(VOCAB, p=exact.marginal(int(place))[2])) for place in places])
    clean = torch.full((steps,), 2)
    found = divergences(logits, clean, noisy, levels.at(places), levels.at(places - 1), MASK, marginal=marginal)
    barred = logits.detach().double().masked_fill(torch.arange(VOCAB) == MASK, -torch.inf).softmax(-1).numpy()
    wanted = [
        bound.step_divergence(exact, int(place), [2], [int(noisy[row])], barred[row : row + 1], marginal)
        for row, place in enumerate(places)
    ]
    assert found.tolist() == pytest.approx(wanted, rel=1e-5, abs=1e-12)
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert logits.grad is not None
    assert logits.grad.isfinite().all()


def test_draws_depend_on_seed_group_and_length_alone() -> None:
    estimator = NoiseLikelihoods(open_model("uniform"), NoiseDraws(samples=32, strata=4, levels=50))
    other = Pair((1, 2), (0, 1, 3))
    (alone,) = estimator.score([PAIR], [1])
    _, among = estimator.score([other, PAIR], [0, 1])
    assert among == alone
    (different,) = estimator.score([PAIR], [2])
    assert different.log_likelihood != alone.log_likelihood
    assert [each.step for each in estimator.draw(PAIR)] == [each.step for each in estimator.draw(Pair((), (0, 1)))]


@pytest.mark.parametrize("noise", ["uniform", "masks"])
def test_greedy_is_what_the_engine_decodes(noise: str) -> None:
    llm = open_model(noise)
    params = SamplingParams(
        max_tokens=4,
        block_length=4,
        steps_per_block=4,
        uniform={"tokens_per_step": 1 if noise == "masks" else 3},
        seed=0,
        ignore_eos=True,
    )
    (output,) = llm.generate([list(PROMPT)], params, cache="none")
    right = Pair(PROMPT, output.token_ids)
    wrong = Pair(PROMPT, [(token + 1) % 4 for token in right.response])
    estimator = NoiseLikelihoods(llm)
    assert estimator.are_greedy([wrong, right, wrong]) == [False, True, False]
    assert estimator.are_greedy([]) == []
    with pytest.raises(ConfigError, match="begins after a prompt"):
        estimator.are_greedy([Pair((), (1,))])


@pytest.mark.parametrize(
    ("pair", "settings", "message"),
    [
        (Pair(PROMPT, ()), {}, "has no tokens"),
        (Pair(PROMPT, [MASK]), {}, "the mask token 5"),
        (Pair([1] * 40, [2] * 40), {}, "the model reads 64"),
        (PAIR, {"canvas_length": 4}, "canvas_length=4 must hold"),
        (PAIR, {"canvas_length": 65}, "the model reads 64"),
        (PAIR, {"levels": 0}, "levels must be"),
        (PAIR, {"schedule": "square"}, "schedule"),
        (PAIR, {"sampler": "adaptive"}, "Unknown sampler 'adaptive'"),
        (PAIR, {"samples": 9}, "multiple of strata=8"),
        (PAIR, {"exact": True}, "exact=True has no meaning"),
    ],
)
def test_what_cannot_be_scored(pair: Pair, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        open_estimator(open_model("uniform"), settings).score([pair])


def test_each_kind_has_its_estimator() -> None:
    masked = LLM("bundled-transit", dtype="float32", device="cpu")
    assert isinstance(open_estimator(masked, {"samples": 16}), MaskLikelihoods)
    assert isinstance(open_estimator(open_model("uniform"), {"levels": None}), NoiseLikelihoods)
    with pytest.raises(ConfigError, match="levels=5 has no meaning"):
        open_estimator(masked, {"levels": 5})
    with pytest.raises(ConfigError, match="a masked model; use a uniform one"):
        NoiseLikelihoods(masked)
    causal = LLM(str(kinds.checkpoint("sdar").folder), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match="a block_causal model"):
        open_estimator(causal)
