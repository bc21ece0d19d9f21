"""Likelihoods under a uniform diffusion model: the variational bound for GIDD's noise, by Monte Carlo.

A draw takes one step of the chain, uniformly, and noises the response to the step's noisier level. Each draw gives T
times the summed divergences of `noise_bound` at that step. The mean over draws estimates the negative bound.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from remask.checks.values import one_of, whole
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.canvas import Canvas
from remask.request.sampling_params import SamplingParams
from remask.request.uniform_presets import ANCESTRAL, MARGINAL
from remask_lab.likelihood.draws import Likelihood, StratifiedDraws
from remask_lab.likelihood.names import MAX_ROWS, SCHEDULES
from remask_lab.likelihood.noise_bound import chain, divergences
from remask_lab.likelihood.pairs import Pair
from remask_lab.likelihood.uncached_pass import Job, UncachedPasses

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


class NoiseLikelihoods:
    """Estimates log-likelihoods of responses under a uniform model. Raises `ConfigError` on other kinds of models.

    A response is noised as a whole, as one block: under structured attention the prompt sees itself alone.
    """

    def __init__(self, llm: LLM, draws: NoiseDraws | None = None, max_rows: int = MAX_ROWS) -> None:
        config = llm.model.config
        if config.noise is None:
            raise ConfigError(
                f"the bound is of GIDD's noise, and {llm.loaded.name!r} is a {config.kind} model; use a uniform one"
            )
        self.draws = draws or NoiseDraws()
        self._llm, self._noise, self._passes = llm, config.noise, UncachedPasses(llm, max_rows)
        self._chain = chain(self._noise, self.draws.levels, self.draws.schedule, llm.model.device)

    def check(self, pair: Pair) -> None:
        """Raise `ConfigError` on a pair that cannot be scored."""
        self._passes.check(pair)
        if self._noise.mask_id in pair.response:
            raise ConfigError(f"the response holds the mask token {self._noise.mask_id}, which no uniform model writes")
        length, longest = self.draws.canvas_length, self._passes.config.max_length
        if length is not None and not len(pair) <= length <= longest:
            raise ConfigError(
                f"canvas_length={length} must hold prompt and response, {len(pair)} tokens, and the model reads "
                f"{longest}"
            )

    def score(
        self, pairs: Sequence[Pair], groups: Sequence[int] | None = None, progress: bool = False
    ) -> list[Likelihood]:
        """Return the log-likelihood of every response after its prompt.

        Pairs of one group get the same steps, and the same noise where their responses are equally long. By default
        all pairs are in one group. A result does not depend on the other pairs.

        Raises `ConfigError`, before anything runs, on a pair that cannot run.
        """
        for pair in pairs:
            self.check(pair)
        each = [0] * len(pairs) if groups is None else groups
        scored = []
        for pair, group in tqdm(
            list(zip(pairs, each, strict=True)), desc="likelihood", unit="resp", disable=not progress
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
        policy = self._llm.policy("none")
        changes = 1 if self._noise.only_masks else GREEDY_TOKENS
        requests = [
            Request(
                str(number),
                list(pair.prompt),
                SamplingParams(
                    max_tokens=len(pair.response),
                    block_length=len(pair.response),
                    steps_per_block=len(pair.response),
                    tokens_per_step=changes,
                    canvas_length=self.draws.canvas_length,
                    seed=self.draws.seed,
                    ignore_eos=True,
                ),
            ).with_policy(policy)
            for number, pair in enumerate(pairs)
        ]
        outputs = {output.id: output for output in self._llm.run(requests)}
        return [tuple(outputs[str(number)].token_ids) == tuple(pair.response) for number, pair in enumerate(pairs)]

    def _job(self, pair: Pair, noised: Noised) -> Job:
        prompt, response = len(pair.prompt), len(pair.response)
        canvas = Canvas(pair.prompt, np.concatenate([noised.tokens, noised.tail]), response)
        every = np.arange(len(canvas))
        predict = (every >= prompt) & (every < prompt + response)
        if not self._passes.config.structured_attention:
            return Job(canvas, predict)
        return Job(canvas, predict, np.where(every < prompt, prompt, len(canvas)))
