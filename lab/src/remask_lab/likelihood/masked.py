"""Likelihoods under a masked diffusion model, by the Monte-Carlo estimator of LLaDA (arXiv 2502.09992).

A draw masks l of a response's L tokens. l is uniform from 1 to L, and the positions are drawn without replacement. Each
draw gives L / l times the summed log-probability of the masked tokens, given all others. The mean over draws estimates
a lower bound of the log-likelihood: the mean log-likelihood over all orders in which the tokens could be decoded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import comb

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from remask.checks.values import check_whole
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.canvas import Canvas
from remask.plan.spans import Mask
from remask_lab.likelihood import MAX_ROWS
from remask_lab.likelihood.passes import Job, Pair, UncachedPasses

TOGETHER = 64  # pairs whose masks are in memory at the same time
MAX_BITS = 63  # of a set of masks as an int64

Floats = NDArray[np.float64]
MaskedPair = tuple[Pair, Mask]
"""A pair, and the mask of its response: bool [response], at least one position."""


@dataclass(frozen=True, slots=True)
class Likelihood:
    """The estimated log-likelihood of one response.

    Attributes:
        log_likelihood: in nats, summed over the response's tokens. Its expectation is a lower bound.
        standard_error: of the estimate, in nats; 0 where nothing was drawn.
        tokens: length of the response.
        draws: number of draws; 0 where the expectation itself was computed.
    """

    log_likelihood: float
    standard_error: float
    tokens: int
    draws: int


@dataclass(frozen=True, slots=True)
class MaskDraws:
    """How many sets of masks are drawn for a response, and how.

    Attributes:
        samples: draws for a response, a multiple of `strata` and at least twice as many.
        strata: size of a group of draws whose numbers of masks are evenly spaced, each still uniform by itself; 1 draws
            independently.
        seed: determines the draws, together with the response's length and the pair's group.
        exact: whether all sets of masks are computed where these are at most `samples`.
    """

    samples: int = 128
    strata: int = 8
    seed: int = 0
    exact: bool = True

    def __post_init__(self) -> None:
        check_whole("strata", self.strata, low=1)
        check_whole("samples", self.samples, low=1)
        check_whole("seed", self.seed, low=0)
        if self.samples % self.strata or self.samples < 2 * self.strata:
            raise ConfigError(
                f"samples={self.samples} must be a multiple of strata={self.strata}, and at least two of them: "
                "the standard error comes from how they differ"
            )

    def points(self, rng: np.random.Generator) -> Floats:
        """Draw numbers that are uniform in [0, 1), float64 [samples], stratum by stratum."""
        # One uniform number shifts the evenly spaced points of a stratum round the circle, so each point is uniform.
        starts = rng.random(self.samples // self.strata).repeat(self.strata)
        return (starts + np.tile(np.arange(self.strata) / self.strata, self.samples // self.strata)) % 1.0

    def estimate(self, strata: Floats, tokens: int) -> Likelihood:
        """The estimate for a response of `tokens` tokens from the means of its strata in nats, float64 [strata]."""
        error = float(strata.std(ddof=1) / np.sqrt(len(strata)))
        return Likelihood(float(strata.mean()), error, tokens, self.samples)


class MaskLikelihoods:
    """Estimates log-likelihoods of responses under a masked model. Raises `ConfigError` on other kinds of models."""

    def __init__(self, llm: LLM, draws: MaskDraws | None = None, max_rows: int = MAX_ROWS) -> None:
        self.draws: MaskDraws = draws or MaskDraws()
        self._passes = MaskedPasses(llm, max_rows)

    def check(self, pair: Pair) -> None:
        """Raise `ConfigError` on a pair that cannot be scored."""
        self._passes.check(pair)

    def score(
        self, pairs: Sequence[Pair], groups: Sequence[int] | None = None, progress: bool = False
    ) -> list[Likelihood]:
        """Estimate the log-likelihood of every response after its prompt.

        Pairs of one group, by default all, get the same masks where their responses are equally long, which takes
        noise out of their comparison. A result does not depend on the other pairs. Raises `ConfigError`, before
        anything runs, on a pair that cannot run.
        """
        for pair in pairs:
            self.check(pair)
        return self._score(pairs, [0] * len(pairs) if groups is None else groups, progress)

    def _score(self, pairs: Sequence[Pair], groups: Sequence[int], progress: bool) -> list[Likelihood]:
        """Score checked pairs, `TOGETHER` at a time."""
        scored = []
        with tqdm(total=len(pairs), desc="likelihood", unit="resp", disable=not progress) as bar:
            for start in range(0, len(pairs), TOGETHER):
                mask_sets = list(map(self._draw, pairs[start : start + TOGETHER], groups[start : start + TOGETHER]))
                log_probs = self._passes.log_probabilities([masked for masks in mask_sets for masked in masks.masked])
                parts = np.split(log_probs, np.cumsum([len(masks.masked) for masks in mask_sets])[:-1])
                scored += [masks.estimate(part, self.draws) for masks, part in zip(mask_sets, parts, strict=True)]
                bar.update(len(mask_sets))
        return scored

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Whether greedy decoding, the most confident token a step, would give each response.

        A pair is decoded until its first token that differs.
        """
        for pair in pairs:
            self.check(pair)
        masks = [np.ones(len(pair.response), dtype=np.bool_) for pair in pairs]
        pending = list(range(len(pairs)))
        while pending:
            steps = self._passes.most_confident([(pairs[number], masks[number]) for number in pending])
            for number, (position, token) in zip(pending, steps, strict=True):
                masks[number][position] = token != pairs[number].response[position]
            equal = [number for number, step in zip(pending, steps, strict=True) if not masks[number][step[0]]]
            pending = [number for number in equal if masks[number].any()]
        return [not mask.any() for mask in masks]

    def _draw(self, pair: Pair, group: int) -> "_MaskSets":
        """All sets of masks of a pair where these are few enough, and drawn ones otherwise."""
        draws, length = self.draws, len(pair.response)
        if draws.exact and length < MAX_BITS and 2**length - 1 <= draws.samples:
            masks, weights = every_mask(length)
            return _MaskSets([(pair, mask) for mask in masks], weights, None)
        masks = draw_masks(length, draws, group)
        # A set that is drawn twice is computed once.
        distinct, set_of_draw = np.unique(masks, axis=0, return_inverse=True)
        return _MaskSets([(pair, mask) for mask in distinct], length / distinct.sum(axis=1), set_of_draw.reshape(-1))


@dataclass(frozen=True, slots=True)
class _MaskSets:
    """The different sets of masks of one pair.

    Attributes:
        weights: the factor of each set's log-probability.
        set_of_draw: index of the set of each draw; None where all sets are computed.
    """

    masked: list[MaskedPair]
    weights: Floats
    set_of_draw: NDArray[np.intp] | None

    def estimate(self, log_probs: Floats, draws: MaskDraws) -> Likelihood:
        """The estimate from the summed log-probability of each set's masked tokens, in nats."""
        length = len(self.masked[0][0].response)
        weighted = log_probs * self.weights
        if self.set_of_draw is None:
            return Likelihood(float(weighted.sum()), 0.0, length, 0)
        return draws.estimate(weighted[self.set_of_draw].reshape(-1, draws.strata).mean(axis=1), length)


def draw_masks(length: int, draws: MaskDraws, group: int = 0) -> Mask:
    """Draw sets of masks, bool [samples, length], stratum by stratum."""
    rng = np.random.default_rng([draws.seed, group, length])
    masks = np.zeros((draws.samples, length), dtype=np.bool_)
    counts = np.minimum((draws.points(rng) * length).astype(np.int64), length - 1) + 1
    for mask, count in zip(masks, counts, strict=True):
        mask[rng.permutation(length)[:count]] = True
    return masks


def every_mask(length: int) -> tuple[Mask, Floats]:
    """All non-empty sets of masks, bool [2 ** length - 1, length], and their factors in the expectation, float64."""
    numbers = np.arange(1, 2**length)
    masks = (numbers[:, None] >> np.arange(length)) % 2 == 1
    # A number of masks has the probability 1 / length, and a set of that size 1 / comb. The factor is the product of
    # both with length / masks.
    weights = np.array([1 / (count * comb(length, count)) for count in masks.sum(axis=1).tolist()])
    return masks, weights


class MaskedPasses(UncachedPasses):
    """Runs canvases of a masked model once each. Raises `ConfigError` on other kinds of models."""

    def __init__(self, llm: LLM, max_rows: int = MAX_ROWS) -> None:
        super().__init__(llm, max_rows)
        if self.config.kind != "masked":
            raise ConfigError(
                f"likelihoods are estimated by masking a response, which {llm.loaded.name!r}, a {self.config.kind} "
                "model, is not trained for in this form; use a masked model (LLaDA, Dream)"
            )

    def log_probabilities(self, masked: Sequence[MaskedPair]) -> NDArray[np.float64]:
        """Sum the log-probabilities of each pair's masked tokens, given all others: nats, float64 [pairs].

        Probabilities are over the whole vocabulary, the mask token included, as confidences are.
        """
        sums = [np.empty(0)]
        for chunk, hidden in self._run(masked):
            targets = np.concatenate([np.asarray(pair.response)[mask] for pair, mask in chunk])
            owner = np.repeat(np.arange(len(chunk)), [int(mask.sum()) for _, mask in chunk])
            device_targets = self.send(targets)
            device_owner = self.send(owner)
            total = torch.zeros(len(chunk), dtype=torch.float64, device=hidden.device)
            for rows, logits in self.logits(hidden):
                log_probs = logits.gather(1, device_targets[rows, None])[:, 0] - logits.logsumexp(dim=-1)
                total.index_add_(0, device_owner[rows], log_probs.double())
            sums.append(total.cpu().numpy())
        return np.concatenate(sums)

    @torch.inference_mode()
    def most_confident(self, masked: Sequence[MaskedPair]) -> list[tuple[int, int]]:
        """The position in each pair's response that a greedy step transfers, and the token that it writes."""
        steps = []
        for chunk, hidden in self._run(masked):
            tokens, confidence = [], []
            for _, logits in self.logits(hidden):
                total = logits.logsumexp(dim=-1)
                logits[:, self.config.mask_id] = -torch.inf
                best, token = logits.max(dim=-1)
                tokens.append(token)
                confidence.append(best - total)
            stacked = torch.stack((torch.cat(tokens).double(), torch.cat(confidence).double())).cpu().numpy()
            edges = np.cumsum([int(mask.sum()) for _, mask in chunk])[:-1]
            for (_, mask), (pair_tokens, pair_confidence) in zip(chunk, np.split(stacked, edges, axis=1), strict=True):
                best_index = int(pair_confidence.argmax())
                steps.append((int(np.flatnonzero(mask)[best_index]), int(pair_tokens[best_index])))
        return steps

    def _run(self, masked: Sequence[MaskedPair]) -> Iterator[tuple[Sequence[MaskedPair], Tensor]]:
        """Yield chunks of `masked`, and the final hidden states of their masked positions, [M, D]."""
        for chunk in self.chunks([len(pair) for pair, _ in masked]):
            yield masked[chunk], self.hidden([self._job(pair, mask) for pair, mask in masked[chunk]])

    def _job(self, pair: Pair, mask: Mask) -> Job:
        """The canvas of `pair` with its response masked by `mask`, whose masked positions are predicted."""
        canvas = Canvas(pair.prompt, pair.response, len(pair.response))
        canvas.tokens[len(pair.prompt) :][mask] = self.config.mask_id
        return Job(canvas, np.concatenate([np.zeros(len(pair.prompt), dtype=np.bool_), mask]))
