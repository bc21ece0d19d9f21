"""Builds the engine's request from prompt, parameters and terms, for every front (Python, commands, server)."""

import secrets
from collections.abc import Iterator, Sequence
from dataclasses import replace

from remask.checks.kinds import ModelKind
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.plan.canvas import Template
from remask.policies.base import CachePolicy
from remask.readers.base import Reader
from remask.readers.constraint import Constraint
from remask.readers.drafts import Drafts
from remask.readers.logprobs import Logprobs
from remask.readers.replay import Replay
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.request.trace import MAX_EVENTS


def request_of(
    name: str,
    tokens: Sequence[int],
    params: SamplingParams,
    policy: CachePolicy,
    terms: Terms,
    kind: ModelKind,
    *,
    shared: int,
    find_prefix: bool = True,
    constraint: Constraint | None = None,
    template: Template | None = None,
    drafts: bool = False,
) -> Request:
    """The request of these terms on a model of this `kind`; `shared` is its default `prefix_length`.

    Without `find_prefix` the client named that default, by other means than a term. `constraint` is the compiled
    `structured_outputs` of the terms; `template` is made of its canvas or suffix.

    If the trace is to be returned, the seed is drawn here, so that the run can be repeated. Raises
    `ConfigError` on terms that the kind of model, or a replay of another prompt, cannot meet.
    """
    if terms.return_step_maps and kind == "uniform":
        raise ConfigError(
            "return_step_maps: the tokens of a uniform model may change in every step of their block, so the first "
            "step that wrote one says nothing of the last; send return_trace, which tells all of them"
        )
    if terms.return_trace and _most_steps(params) > MAX_EVENTS:
        raise ConfigError(
            f"return_trace: a trace holds at most {MAX_EVENTS} steps, and max_tokens={params.max_tokens} with these "
            f"steps may take {_most_steps(params)}; ask for fewer, or leave return_trace out"
        )
    if terms.return_trace and params.seed is None:
        params = replace(params, seed=secrets.randbits(62))
    # The trace of a uniform model holds no log-probabilities: `check_request` says why.
    traced = 0 if terms.return_trace and kind != "uniform" else None
    top = traced if terms.top_logprobs is None else terms.top_logprobs
    return Request(
        id=name,
        prompt_token_ids=tokens,
        params=params,
        prefix_length=terms.shared(shared),
        find_prefix=find_prefix and terms.prefix_length is None and terms.segments is None and terms.replay is None,
        segments=terms.parts,
        policy=policy,
        cache_salt=terms.cache_salt,
        priority=terms.priority,
        deadline_s=terms.deadline_s,
        template=template,
        readers=tuple(_readers(terms, len(tokens), top, constraint, drafts=drafts)),
    )


def _readers(
    terms: Terms, prompt: int, top: int | None, constraint: Constraint | None, *, drafts: bool
) -> Iterator[Reader]:
    """The readers of these terms, for a prompt of `prompt` tokens."""
    if constraint is not None:
        yield constraint
    if terms.replay is not None:
        yield Replay(terms.replay.transfers(prompt), formed=terms.replay.formed)
    if top is not None:
        yield Logprobs(top)
    if drafts:
        yield Drafts()


def _most_steps(params: SamplingParams) -> int:
    """An upper bound of the steps that write something: one for each token, or the steps that were asked for."""
    blocks = -(-params.max_tokens // (params.block_length or params.max_tokens))
    asked = max(params.steps or 0, (params.steps_per_block or 0) * blocks)
    return max(params.max_tokens, asked) + (params.correction_steps or 0)
