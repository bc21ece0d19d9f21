"""The loss of a workload's reference answers under a cache policy, whether or not the model would give these answers.

A reference is written in random order, with as many tokens a step as the workload's schedule has, and the
log-probability of each token is read in the step that writes it. So a token is predicted from the prompt, the tokens
that were written before, and what the policy caches of both. Under `none` the mean over orders is the bound that
`remask eval likelihood` estimates.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.engine.config import EngineConfig
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask.readers.forced import ForcedTokens
from remask.readers.logprobs import Logprobs
from remask.request.result import Transfer
from remask.request.sampling_params import SamplingParams
from remask.request.trace import TokenLogprob
from remask_lab.records.interval import mean_interval


@dataclass(frozen=True, slots=True)
class Reference:
    """A request, and the text of its right answer."""

    request: Request
    text: str


@dataclass(frozen=True, slots=True)
class Loss:
    """The loss of each token of a reference in nats, and the id of the most probable token there, [tokens] each.

    A loss is NaN if the policy had not predicted the token's position, as happens under policies with a window.
    """

    nats: NDArray[np.float64]
    best: NDArray[np.int64]


Losses: TypeAlias = Mapping[str, Loss]
"""By the request's id."""


def reference_requests(llm: LLM, references: Sequence[Reference], policy: CachePolicy, seed: int) -> list[Request]:
    """Requests that write the references under `policy`, each in an order that its index and `seed` decide.

    References without tokens are left out, and all of them on uniform models, which write a token in several steps, and
    on models without a tokenizer. Raises `ConfigError` if a request cannot run.
    """
    if llm.loaded.config.kind == "uniform" or llm.tokenizer is None:
        return []
    requests = []
    for number, reference in enumerate(references):
        tokens = llm.tokenizer.encode(reference.text, add_special_tokens=False)
        if tokens:
            requests.append(_forced_request(llm, reference.request.with_policy(policy), tokens, seed + number))
    return requests


def _forced_request(llm: LLM, request: Request, tokens: Sequence[int], seed: int) -> Request:
    """`request` with the response `tokens`, written in an order that `seed` decides, and their log-probabilities read.

    It writes as many tokens a step as the schedule of `request` does on average, and one without a schedule.
    """
    params, start = request.params, len(request.prompt_token_ids)
    response = range(start, start + len(tokens))
    # A threshold has no schedule of steps, and Dream's omits steps that would write nothing.
    masked = {"blocks": {"growing_canvas": False}, "threshold": 1.0}
    settings = masked if llm.loaded.config.kind == "masked" else {"block_length": params.block_length}
    base = replace(request, params=SamplingParams(max_tokens=len(tokens), ignore_eos=True, seed=seed, **settings))
    step_tokens = max(1, round(params.max_tokens / params.steps)) if params.steps else 1
    rng = np.random.default_rng(seed)
    transfers: list[Transfer] = []
    for block in llm.engine.check(base).decoding.block_ranges:
        for positions in _block_steps(rng, block, response, step_tokens, shift=bool(llm.loaded.config.shift)):
            values = [tokens[min(position - start, len(tokens) - 1)] for position in positions]
            transfers.append(Transfer(len(transfers), tuple(positions), tuple(values)))
    forced = base.with_readers(ForcedTokens(transfers), Logprobs(1))
    llm.engine.check(forced)
    return forced


def _block_steps(
    rng: np.random.Generator, block: range, response: range, step_tokens: int, *, shift: bool
) -> list[list[int]]:
    """The positions of a block that are written in each step: of the response in random order, then any behind it.

    With `shift` the first position has a step of its own, as a policy may predict no other in a block's first step.
    """
    positions: list[int] = rng.permutation([position for position in block if position in response]).tolist()
    steps: list[list[int]] = []
    if shift and block.start in positions:
        positions.remove(block.start)
        steps.append([block.start])
    steps += [sorted(positions[start : start + step_tokens]) for start in range(0, len(positions), step_tokens)]
    steps.append([position for position in block if position >= response.stop])
    return [step for step in steps if step]


def read_losses(llm: LLM, requests: Sequence[Request], engine: EngineConfig, progress: bool) -> Losses:
    """The losses of the requests of `reference_requests`, on an engine and a store of their own.

    Raises `ConfigError` if a request fails.
    """
    if not requests:
        return {}
    losses = {}
    for output in llm.session.run(requests, engine=llm.session.new_engine(engine), progress=progress):
        if output.error is not None:
            raise ConfigError(f"the reference answer {output.id} could not be read: {output.error}")
        tokens = output.logprobs or ()
        nats = [-token.logprob if _is_predicted(token) else np.nan for token in tokens]
        losses[output.id] = Loss(np.array(nats), np.array([token.top[0][0] for token in tokens], dtype=np.int64))
    return losses


def _is_predicted(token: TokenLogprob) -> bool:
    """Whether a step that wrote a token had predicted its position: if not, it and another token have probability 1."""
    return not (token.logprob == 0 and token.top[0][1] == 0 and token.top[0][0] != token.token_id)


def measure_losses(
    llm: LLM, references: Sequence[Reference], policy: CachePolicy, seed: int, engine: EngineConfig | None = None
) -> tuple[Losses, str | None]:
    """The losses of references under `policy`, and None; or nothing, and the reason why a request cannot run or fails.

    `engine` defaults to the session's.
    """
    try:
        requests = reference_requests(llm, references, policy, seed)
        return read_losses(llm, requests, engine or llm.session.engine_config, llm.session.progress), None
    except ConfigError as error:
        return {}, str(error)


def mean_loss(losses: Losses) -> dict[str, Any]:
    """The fields of a result: the mean loss of a token in nats, None without tokens, and the number of tokens."""
    nats = np.concatenate([np.empty(0), *(loss.nats for loss in losses.values())])
    nats = nats[np.isfinite(nats)]
    return {"loss": float(nats.mean()) if len(nats) else None, "loss_tokens": len(nats)}


def loss_differences(losses: Losses, others: Losses, clusters: Mapping[str, int]) -> dict[str, Any]:
    """The fields of a result: the mean of `losses` minus `others` in nats a token, and how often best tokens agree.

    Both predict the same canvases, so this is the loss of single passes. Each reference counts as much as any other,
    with the mean over the tokens that both had predicted. Intervals are over `clusters`, by request id. Empty if no
    token was predicted twice.
    """
    fields: dict[str, list[float]] = {"loss_over_none": [], "pass_agreement": []}
    reference_clusters: list[int] = []
    for name in [name for name in losses if name in others]:
        loss, other = losses[name], others[name]
        both = np.isfinite(loss.nats + other.nats)
        if both.any():
            fields["loss_over_none"].append(float((loss.nats - other.nats)[both].mean()))
            fields["pass_agreement"].append(float((loss.best == other.best)[both].mean()))
            reference_clusters.append(clusters[name])
    means: dict[str, Any] = {}
    for name, values in fields.items() if reference_clusters else ():
        means[name] = float(np.mean(values))
        means[f"{name}_interval"] = list(mean_interval(values, reference_clusters))
    return means
