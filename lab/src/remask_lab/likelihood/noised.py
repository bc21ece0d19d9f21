"""Likelihoods under a uniform diffusion model: the variational bound for GIDD's noise, term by term, by Monte Carlo.

A draw takes one step of the chain, uniformly, and noises the response to the step's noisier level. Each draw gives T
times the summed divergences at that step. The mean over draws estimates the negative bound.

A chain has T steps between T + 1 levels of noise. Level 0 is the clean token, level T noise alone, and the levels
between lie on the sampler's grid of log-SNRs. The negative bound (D3PM, arXiv 2107.03006; the Uniform-Cache thesis,
equation 2.6) is a sum over the steps of

    KL(q(z_s | z_t, x) || p(z_s | z_t)),    s = t - 1,

in the mean over z_t drawn from q(z_t | x). At s = 0 the term is -log p(x | z_1). What the equation adds for the prior
is 0 here, as level T keeps nothing of x. p is the reverse step of a sampler, and the bound is one of that sampler:

    "ancestral": q with the predicted distribution of the clean token in the token's place (GIDD, arXiv 2503.04482);
    "ancestral_marginal": the mean of q over the predicted clean tokens (equation 2.4 of the thesis).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from remask.checks.values import one_of, whole
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.canvas import Canvas
from remask.request.sampling_groups import ANCESTRAL, MARGINAL
from remask.request.sampling_params import SamplingParams
from remask.sampling.noise import Noise, log_snrs
from remask_lab.likelihood import MAX_ROWS, SCHEDULES
from remask_lab.likelihood.draws import Likelihood, LikelihoodEstimator, StratifiedDraws
from remask_lab.likelihood.passes import Job, Pair, UncachedPasses

TINY = 1e-300  # stands for 0 under a logarithm whose factor is 0
GREEDY_TOKENS = 3  # positions that a step of greedy decoding may change, as in the Uniform-Cache thesis


@dataclass(frozen=True, slots=True)
class NoiseDraws(StratifiedDraws):
    """How noise is drawn.

    Attributes:
        levels: T, the steps of the chain. The bound of a longer chain is tighter, and costs no more.
        schedule: the grid of the levels, the sampler's "cosine" or "linear".
        sampler: whose reverse step the bound is of: "ancestral" (the default, GIDD's) or "ancestral_marginal".
        canvas_length: positions of the canvas. What stands after the response is noise, as the sampler has it there.
            None: the canvas ends with the response.
    """

    levels: int = 1000
    schedule: str = "cosine"
    canvas_length: int | None = None
    sampler: str = "ancestral"

    def __post_init__(self) -> None:
        StratifiedDraws.__post_init__(self)
        whole("levels", self.levels, low=1, high=2**24)
        one_of("schedule", self.schedule, SCHEDULES)
        one_of("sampler", self.sampler, ANCESTRAL)
        whole("canvas_length", self.canvas_length, low=1, optional=True)


@dataclass(frozen=True, slots=True)
class Noised:
    """A response with noise.

    Attributes:
        step: of the chain, from 1; the noise is that of the level of this number.
        tokens: of the response, int64 [L].
        tail: tokens after it, int64.
    """

    step: int
    tokens: NDArray[np.int64]
    tail: NDArray[np.int64]


class NoiseLikelihoods(LikelihoodEstimator):
    """Estimates log-likelihoods of responses under a uniform model. Raises `ConfigError` on other kinds of models.

    A response is noised as a whole, as one block: under structured attention the prompt sees itself alone.
    """

    def __init__(self, llm: LLM, draws: NoiseDraws | None = None, max_rows: int = MAX_ROWS) -> None:
        config = llm.model.config
        if config.noise is None:
            raise ConfigError(
                f"the bound is of GIDD's noise, and {llm.loaded.name!r} is a {config.kind} model; use a uniform one"
            )
        self.draws: NoiseDraws = draws or NoiseDraws()
        self._llm, self._noise, self._passes = llm, config.noise, UncachedPasses(llm, max_rows)
        self._chain = chain(self._noise, self.draws.levels, self.draws.schedule, llm.model.device)

    def check(self, pair: Pair) -> None:
        self._passes.check(pair)
        if self._noise.mask_id in pair.response:
            raise ConfigError(f"the response holds the mask token {self._noise.mask_id}, which no uniform model writes")
        length, longest = self.draws.canvas_length, self._passes.config.max_length
        if length is not None and not len(pair) <= length <= longest:
            raise ConfigError(
                f"canvas_length={length} must hold prompt and response, {len(pair)} tokens, and the model reads "
                f"{longest}"
            )

    def _score(self, pairs: Sequence[Pair], groups: Sequence[int], progress: bool) -> list[Likelihood]:
        scored = []
        for pair, group in tqdm(
            list(zip(pairs, groups, strict=True)), desc="likelihood", unit="resp", disable=not progress
        ):
            found = self.terms(pair, self.draw(pair, group))
            estimates = -self.draws.levels * found.reshape(-1, self.draws.strata).mean(axis=1)
            scored.append(self.draws.estimate(estimates, len(pair.response)))
        return scored

    def draw(self, pair: Pair, group: int = 0) -> list[Noised]:
        """Draw the noise of every sample, stratum by stratum."""
        draws, noise, length = self.draws, self._noise, len(pair.response)
        tail = 0 if draws.canvas_length is None else draws.canvas_length - len(pair)
        rng = np.random.default_rng([draws.seed, group, length])
        clean, uniform = (levels.cpu().numpy() for levels in (self._chain.clean, self._chain.uniform))
        found = []
        for point in draws.points(rng):
            step = min(int(point * draws.levels), draws.levels - 1) + 1
            kept = np.arange(length + tail) < length
            kept &= rng.random(length + tail) < clean[step]
            masked = rng.random(length + tail) >= np.where(
                np.arange(length + tail) < length, uniform[step], uniform[-1]
            )
            drawn = rng.integers(0, noise.vocab - 1, length + tail)
            drawn = np.where(masked, noise.mask_id, drawn + (drawn >= noise.mask_id))
            tokens = np.where(kept[:length], np.asarray(pair.response), drawn[:length])
            found.append(Noised(step, tokens, drawn[length:]))
        return found

    @torch.inference_mode()
    def terms(self, pair: Pair, noised: Sequence[Noised]) -> NDArray[np.float64]:
        """Return the divergence of the step of each draw, summed over the response: nats, [draws]."""
        length, found = len(pair.response), []
        for own in self._passes.chunks([len(pair) + len(each.tail) for each in noised]):
            chunk = noised[own]
            hidden = self._passes.hidden([self._job(pair, each) for each in chunk])
            steps = self._passes.send(np.repeat([each.step for each in chunk], length))
            clean = self._passes.send(np.tile(pair.response, len(chunk)))
            noisy = self._passes.send(np.concatenate([each.tokens for each in chunk]))
            sums = torch.zeros(len(hidden), dtype=torch.float64, device=hidden.device)
            for rows, logits in self._passes.logits(hidden):
                before, after = self._chain.at(steps[rows]), self._chain.at(steps[rows] - 1)
                of = (clean[rows], noisy[rows], before, after, self._noise.mask_id)
                sums[rows] = divergences(logits, *of, marginal=self.draws.sampler == MARGINAL)
            found.append(sums.reshape(len(chunk), length).sum(dim=1).cpu().numpy())
        return np.concatenate(found)

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Return whether greedy decoding would give each response.

        That is the adaptive sampler at temperature 0 with as many steps as positions, three changes a step (one where
        noise is masks alone), and the seed of the draws for the noise that it begins with.
        """
        for pair in pairs:
            self.check(pair)
            if not len(pair.prompt):
                raise ConfigError("greedy decoding begins after a prompt, and this response has none; give one token")
        policy = self._llm.session.policy("none")
        changes = 1 if self._noise.only_masks else GREEDY_TOKENS
        requests = [
            Request(
                str(number),
                list(pair.prompt),
                SamplingParams(
                    max_tokens=len(pair.response),
                    block_length=len(pair.response),
                    steps_per_block=len(pair.response),
                    uniform={"tokens_per_step": changes, "canvas_length": self.draws.canvas_length},
                    seed=self.draws.seed,
                    ignore_eos=True,
                ),
            ).with_policy(policy)
            for number, pair in enumerate(pairs)
        ]
        outputs = {output.id: output for output in self._llm.session.run(requests)}
        return [tuple(outputs[str(number)].token_ids) == tuple(pair.response) for number, pair in enumerate(pairs)]

    def _job(self, pair: Pair, noised: Noised) -> Job:
        prompt, response = len(pair.prompt), len(pair.response)
        canvas = Canvas(pair.prompt, np.concatenate([noised.tokens, noised.tail]), response)
        every = np.arange(len(canvas))
        predict = (every >= prompt) & (every < prompt + response)
        if not self._passes.config.structured_attention:
            return Job(canvas, predict)
        return Job(canvas, predict, np.where(every < prompt, prompt, len(canvas)))


@dataclass(frozen=True, slots=True)
class Levels:
    """Levels of noise, one for each row or for each level of a chain.

    Attributes:
        clean: the probability that a token is clean, float64 [N].
        uniform: the probability that noise is not the mask, float64 [N].
    """

    clean: Tensor
    uniform: Tensor

    def at(self, index: Tensor) -> "Levels":
        """The levels numbered `index` [M]."""
        return Levels(self.clean[index], self.uniform[index])

    def noise(self, vocab: int, mask_id: int) -> Tensor:
        """The probability of each token as noise, float64 [N, V]."""
        each = (self.uniform / (vocab - 1))[:, None].repeat(1, vocab)
        each[:, mask_id] = 1 - self.uniform
        return each


def chain(noise: Noise, steps: int, schedule: str, device: torch.device | None = None) -> Levels:
    """The levels 0 to `steps` of a chain on the grid `schedule`, "cosine" or "linear"."""
    log_snr = torch.from_numpy(log_snrs(schedule, steps, noise.min_log_snr, noise.max_log_snr)).to(device)
    clean = log_snr.sigmoid()
    clean[0], clean[-1] = 1.0, 0.0
    return Levels(clean, (log_snr + noise.shift).sigmoid())


def divergences(
    logits: Tensor,
    clean: Tensor,
    noisy: Tensor,
    before: Levels,
    after: Levels,
    mask_id: int,
    *,
    marginal: bool = False,
) -> Tensor:
    """Return KL(q(z_s | z_t, x) || p(z_s | z_t)) of each row in nats, float64 [N]. Differentiable in `logits`.

    `logits` [N, V] predict the clean tokens; the mask is never predicted. `clean` [N] are the tokens x, `noisy` [N] the
    tokens z_t, int64; `before` are the rows' levels t, `after` their levels s. p is the marginal reverse step, or else
    the one with the prediction in the clean token's place.
    """
    vocab = logits.shape[-1]
    barred = torch.arange(vocab, device=logits.device) == mask_id
    predicted = logits.double().masked_fill(barred, -torch.inf).softmax(dim=-1)
    known = torch.zeros_like(predicted).scatter_(1, clean[:, None], 1.0)
    then, now = after.noise(vocab, mask_id), before.noise(vocab, mask_id)
    kept = before.clean / after.clean  # the probability that a step from s to t keeps a token
    fresh = (1 - before.clean) * _at(now, noisy) - kept * (1 - after.clean) * _at(then, noisy)  # that it puts z_t there

    def forward(of: Tensor) -> tuple[Tensor, Tensor]:
        """q(z_s | x) [N, V], and q(z_t | x) [N] of the token that stands there."""
        ahead = after.clean[:, None] * of + (1 - after.clean)[:, None] * then
        return ahead, before.clean * _at(of, noisy) + (1 - before.clean) * _at(now, noisy)

    true, seen = forward(known)
    model, expected = _marginal(predicted, noisy, before, after, now, then) if marginal else forward(predicted)
    logs = true.clamp_min(TINY).log() - model.clamp_min(TINY).log()
    kept_term = kept * _at(true, noisy) * _at(logs, noisy)
    found: Tensor = (fresh * (true * logs).sum(dim=-1) + kept_term) / seen
    found = found + expected.clamp_min(TINY).log() - seen.log()
    if not marginal:
        return found
    # Noise that cannot have put z_t there leaves one clean token, and both steps keep it.
    return torch.where(_at(now, noisy) * (1 - before.clean) > 0, found, torch.zeros_like(found))


def _marginal(
    predicted: Tensor, noisy: Tensor, before: Levels, after: Levels, now: Tensor, then: Tensor
) -> tuple[Tensor, Tensor]:
    """The mean over x of q(z_s | x) / q(z_t | x), [N, V], and 1 [N]: what q(z_s | x) and q(z_t | x) are of one x.

    Each x has its own evidence q(z_t | x): the share of noise alone, and for the x that stands there the kept one more.
    """
    other = ((1 - before.clean) * _at(now, noisy)).clamp_min(TINY)
    evidence = other[:, None].repeat(1, predicted.shape[-1])
    evidence = evidence.scatter_add(1, noisy[:, None], before.clean[:, None])
    shares = predicted / evidence
    ahead = after.clean[:, None] * shares + (1 - after.clean)[:, None] * then * shares.sum(dim=-1, keepdim=True)
    return ahead, torch.ones_like(other)


def _at(values: Tensor, tokens: Tensor) -> Tensor:
    return values.gather(1, tokens[:, None])[:, 0]
