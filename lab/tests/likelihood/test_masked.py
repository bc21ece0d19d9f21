"""The Monte-Carlo likelihood against its exact expectation, enumerated on an independent dense model."""

from functools import cache
from itertools import combinations
from math import comb, log2
from pathlib import Path

import numpy as np
import pytest
import torch

from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.likelihood.masked import MaskDraws, MaskedPasses, MaskLikelihoods, draw_masks, every_mask
from remask_lab.likelihood.passes import Pair
from tests.engine import kinds
from tests.goldens import model_dir
from tests.goldens import uniform as uniform_goldens
from tests.oracles import dense

PROMPT = (7, 3, 11, 30, 2)
RESPONSE = (9, 4, 17, 4, 25, 40)
PAIR = Pair(PROMPT, RESPONSE)


@cache
def open_model(name: str) -> LLM:
    return LLM(str(model_dir(name)), dtype="float32", device="cpu")


@cache
def exact(name: str, prompt: tuple[int, ...], response: tuple[int, ...]) -> float:
    """Over every number of masks and every set of them, by the oracle."""
    model, length, total = dense.load(model_dir(name)), len(response), 0.0
    canvas = torch.tensor([*prompt, *response])
    for count in range(1, length + 1):
        for chosen in combinations(range(length), count):
            places = torch.tensor([len(prompt) + place for place in chosen])
            masked = canvas.clone()
            masked[places] = model.mask_id
            logits = model.predictions(model.forward(masked).logits)[places]
            found = logits.log_softmax(-1).gather(1, canvas[places][:, None]).sum()
            total += float(found) * (length / count) / (length * comb(length, count))
    return total


@pytest.mark.parametrize("name", ["llada", "dream"])
@pytest.mark.parametrize("prompt", [PROMPT, ()])
def test_all_sets_of_masks_give_the_expectation(name: str, prompt: tuple[int, ...]) -> None:
    (found,) = MaskLikelihoods(open_model(name), MaskDraws(samples=128)).score([Pair(prompt, RESPONSE)])
    assert found.log_likelihood == pytest.approx(exact(name, prompt, RESPONSE), abs=1e-4)
    assert (found.standard_error, found.draws, found.tokens) == (0, 0, 6)


@pytest.mark.parametrize("strata", [1, 8])
@pytest.mark.parametrize("name", ["llada", "dream"])
def test_draws_converge_to_the_expectation(name: str, strata: int) -> None:
    right, errors = exact(name, PROMPT, RESPONSE), []
    for samples in (64, 1024, 16384):
        draws = MaskDraws(samples=samples, strata=strata, seed=4, exact=False)
        (found,) = MaskLikelihoods(open_model(name), draws).score([PAIR])
        assert abs(found.log_likelihood - right) < 3.5 * found.standard_error
        assert found.draws == samples
        errors.append(found.standard_error)
    assert errors[-1] < 0.1
    halvings = -np.polyfit([6, 10, 14], [log2(error) for error in errors], 1)[0]
    assert halvings == pytest.approx(0.5, abs=0.1), "the error falls with the square root of the draws"


@pytest.mark.thorough
def test_standard_errors_are_honest_and_strata_lower_them() -> None:
    """Over many seeds: no bias, errors as large as they are told, and smaller ones for the same number of passes."""
    right, spread = exact("llada", PROMPT, RESPONSE), {}
    for strata in (1, 8):
        found = [
            MaskLikelihoods(open_model("llada"), MaskDraws(64, strata, seed, exact=False)).score([PAIR])[0]
            for seed in range(40)
        ]
        values = np.array([each.log_likelihood for each in found])
        told = np.sqrt(np.mean([each.standard_error**2 for each in found]))
        spread[strata] = values.std(ddof=1)
        assert abs(values.mean() - right) < 3.5 * spread[strata] / np.sqrt(len(values))
        assert told == pytest.approx(spread[strata], rel=0.3)
    assert spread[8] < 0.9 * spread[1]


@pytest.mark.parametrize("strata", [1, 4])
def test_numbers_of_masks_are_uniform_and_positions_too(strata: int) -> None:
    masks = draw_masks(5, MaskDraws(samples=20_000, strata=strata, seed=1))
    counts = masks.sum(axis=1)
    assert np.bincount(counts, minlength=6)[1:] / len(masks) == pytest.approx(0.2, abs=0.015)
    assert masks[counts == 2].mean(axis=0) == pytest.approx(0.4, abs=0.03)
    if strata == 4:
        assert (np.ptp(counts.reshape(-1, 4), axis=1) >= 3).all(), "a stratum covers the whole range"


def test_weights_of_all_sets_sum_to_what_a_constant_is_worth() -> None:
    masks, weights = every_mask(5)
    assert len(np.unique(masks, axis=0)) == len(masks) == 31
    assert weights @ masks.sum(axis=1) == pytest.approx(5), "five tokens of one nat each"


def test_draws_depend_on_seed_group_and_length_alone() -> None:
    draws = MaskDraws(samples=32, seed=3)
    assert (draw_masks(9, draws, 1) == draw_masks(9, draws, 1)).all()
    assert (draw_masks(9, draws, 1) != draw_masks(9, draws, 2)).any()
    estimator = MaskLikelihoods(open_model("llada"), MaskDraws(samples=32, exact=False))
    other = Pair((1, 2, 3, 4), tuple(range(20, 31)))
    (alone,) = estimator.score([PAIR], [1])
    _, among = estimator.score([other, PAIR], [0, 1])
    assert among == alone
    (different,) = estimator.score([PAIR], [2])
    assert different.log_likelihood != alone.log_likelihood


@pytest.mark.parametrize("rows", [1, 11, 30, 4096])
def test_how_many_canvases_share_a_pass_changes_nothing(rows: int) -> None:
    passes = MaskedPasses(open_model("llada"), rows)
    rng = np.random.default_rng(0)
    jobs = [(Pair(PROMPT[: number % 3], RESPONSE), rng.random(6) < 0.5) for number in range(7)]
    jobs = [(pair, mask | (np.arange(6) == 2)) for pair, mask in jobs]
    one_by_one = [float(MaskedPasses(open_model("llada")).log_probabilities([job])[0]) for job in jobs]
    assert passes.log_probabilities(jobs).tolist() == pytest.approx(one_by_one, abs=1e-4)


@pytest.mark.parametrize("name", ["llada", "dream"])
def test_greedy_is_what_the_engine_decodes(name: str) -> None:
    llm = open_model(name)
    params = SamplingParams(max_tokens=5, remasking="low_confidence", ignore_eos=True)
    (output,) = llm.generate([list(PROMPT)], params, cache="none")
    estimator = MaskLikelihoods(llm)
    right = Pair(PROMPT, output.token_ids)
    wrong = [
        Pair(PROMPT, (*right.response[:place], (right.response[place] + 1) % 30, *right.response[place + 1 :]))
        for place in range(5)
    ]
    assert estimator.are_greedy([wrong[0], right, *wrong[1:], right]) == [False, True, *[False] * 4, True]
    assert estimator.are_greedy([]) == []


def test_long_responses_are_drawn_and_not_enumerated() -> None:
    (found,) = MaskLikelihoods(open_model("llada"), MaskDraws(samples=16)).score([Pair((), tuple(range(1, 31)) * 3)])
    assert found.draws == 16
    assert np.isfinite(found.log_likelihood)


@pytest.mark.parametrize(
    ("pair", "message"),
    [
        (Pair(PROMPT, ()), "has no tokens"),
        (Pair(range(100), [5] * 100_000), "the model reads"),
        (Pair([-1], [5]), "token ids go from 0 to"),
        (Pair([1], [10**6]), "token ids go from 0 to"),
    ],
)
def test_pairs_that_cannot_be_run(pair: Pair, message: str) -> None:
    estimator = MaskLikelihoods(open_model("llada"))
    with pytest.raises(ConfigError, match=message):
        estimator.score([PAIR, pair])
    with pytest.raises(ConfigError, match=message):
        estimator.are_greedy([PAIR, pair])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"samples": 100}, "multiple of strata=8"),
        ({"samples": 8}, "at least two"),
        ({"strata": 0}, "strata must be"),
        ({"samples": 1, "strata": 1}, "at least two"),
        ({"seed": -1}, "seed must be"),
    ],
)
def test_draws_that_cannot_be_made(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        MaskDraws(**settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("folder", "kind"),
    [(uniform_goldens.model_dir("unif"), "uniform"), (kinds.checkpoint("sdar").folder, "block_causal")],
)
def test_other_kinds_are_refused(folder: Path, kind: str) -> None:
    llm = LLM(str(folder), dtype="float32", device="cpu")
    with pytest.raises(ConfigError, match=f"a {kind} model"):
        MaskLikelihoods(llm)
