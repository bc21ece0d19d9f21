"""The loss of a workload's reference answers under a cache policy, whether or not the model could give them itself.

A reference is written in random order, as many tokens a step as the workload's schedule has, each read in the step
that writes it. So every token is predicted from the prompt, those that stand already, and what the policy caches of
both. Under `none` the mean over orders is the bound that `remask eval likelihood` estimates.
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
    """A request, and the text that would be its answer."""

    request: Request
    text: str


@dataclass(frozen=True, slots=True)
class Loss:
    """What was read of one reference: token by token its loss in nats, and the token that was the most probable one.

    A loss is NaN where the policy had not predicted the token that the reference wrote, as those with a window do.
    """

    nats: NDArray[np.float64]
    best: NDArray[np.int64]


Losses: TypeAlias = Mapping[str, Loss]
"""By the request's id."""


def written(llm: LLM, references: Sequence[Reference], policy: CachePolicy, seed: int) -> list[Request]:
    """Requests that write the references under `policy`. A reference and `seed` decide the order of its tokens.

    None are there of references without a token, and on uniform models, whose tokens have no one step that writes them.
    Raises `ConfigError` on a request that cannot run.
    """
    if llm.loaded.config.kind == "uniform" or llm.tokenizer is None:
        return []
    requests = []
    for number, reference in enumerate(references):
        tokens = llm.tokenizer.encode(reference.text, add_special_tokens=False)
        if tokens:
            requests.append(_written(llm, reference.request.with_policy(policy), tokens, seed + number))
    return requests


def _written(llm: LLM, request: Request, tokens: Sequence[int], seed: int) -> Request:
    params, prompt = request.params, len(request.prompt_token_ids)
    masked = llm.loaded.config.kind == "masked"
    # A threshold has no schedule, and Dream's passes over steps that would write nothing.
    own = {"blocks": {"growing_canvas": False}, "threshold": 1.0} if masked else {"block_length": params.block_length}
    base = replace(request, params=SamplingParams(max_tokens=len(tokens), ignore_eos=True, seed=seed, **own))
    blocks = llm.engine.check(base).decoding.block_ranges
    at_once = max(1, round(params.max_tokens / params.steps)) if params.steps else 1
    rng, transfers = np.random.default_rng(seed), list[Transfer]()
    for block in blocks:
        places = rng.permutation([place for place in block if prompt <= place < prompt + len(tokens)])
        first: list[list[int]] = []
        if llm.loaded.config.shift:  # a policy may compute the row before a block in the first step alone, and no other
            first, places = [[each] for each in places if each == block.start], places[places != block.start]
        steps = first + [sorted(places[start : start + at_once].tolist()) for start in range(0, len(places), at_once)]
        behind = [place for place in block if place >= prompt + len(tokens)]  # of the last block; none of it is read
        for chosen in filter(None, [*steps, behind]):
            placed = [tokens[min(place - prompt, len(tokens) - 1)] for place in chosen]
            transfers.append(Transfer(len(transfers), tuple(chosen), tuple(placed)))
    forced = base.with_readers(ForcedTokens(transfers), Logprobs(1))
    llm.engine.check(forced)
    return forced


def losses_of(llm: LLM, requests: Sequence[Request], engine: EngineConfig, progress: bool) -> Losses:
    """The losses of the requests of `written`, on an engine and a store of their own.

    Raises `ConfigError` where a request fails.
    """
    read = {}
    for output in (
        llm.session.run(requests, engine=llm.session.new_engine(engine), progress=progress) if requests else ()
    ):
        if output.error is not None:
            raise ConfigError(f"the reference answer {output.id} could not be read: {output.error}")
        found = output.logprobs or ()
        nats = [-each.logprob if _predicted(each) else np.nan for each in found]
        read[output.id] = Loss(np.array(nats), np.array([each.top[0][0] for each in found], dtype=np.int64))
    return read


def _predicted(token: TokenLogprob) -> bool:
    """Whether the step that wrote a token had predicted it: its own and another one cannot both be certain."""
    return not (token.logprob == 0 and token.top[0][1] == 0 and token.top[0][0] != token.token_id)


def measured_loss(
    llm: LLM, references: Sequence[Reference], policy: CachePolicy, seed: int, engine: EngineConfig | None = None
) -> tuple[Losses, str | None]:
    """The losses of references under `policy`, and why there are none: it cannot run so short a response, or so."""
    try:
        requests, engine = written(llm, references, policy, seed), engine or llm.session.engine_config
        return losses_of(llm, requests, engine, llm.session.progress), None
    except ConfigError as error:
        return {}, str(error)


def mean_loss(losses: Losses) -> dict[str, Any]:
    """The mean loss of a token in nats as a row of results holds it, and of how many; None where none was read."""
    read = np.concatenate([np.empty(0), *(each.nats for each in losses.values())])
    read = read[np.isfinite(read)]
    return {"loss": float(read.mean()) if len(read) else None, "loss_tokens": len(read)}


def beside(losses: Losses, others: Losses, clusters: Mapping[str, int]) -> dict[str, Any]:
    """How much larger the loss of a token is than under `others`, and how often the best token is the same.

    Both read the same canvases, so this is what single passes lose. Means over references, which are as likely to be
    short as long, of tokens that both had predicted, with intervals over `clusters`. Empty where there are none.
    """
    found: dict[str, list[float]] = {"loss_over_none": [], "pass_agreement": []}
    own: list[int] = []
    for name in losses:
        one, other = losses[name], others.get(name)
        both = np.isfinite(one.nats + other.nats) if other is not None else np.zeros(0, dtype=np.bool_)
        if other is not None and both.any():
            found["loss_over_none"].append(float((one.nats - other.nats)[both].mean()))
            found["pass_agreement"].append(float((one.best == other.best)[both].mean()))
            own.append(clusters[name])
    means: dict[str, Any] = {}
    for key, values in found.items() if own else ():
        means[key], means[f"{key}_interval"] = float(np.mean(values)), list(mean_interval(values, own))
    return means
