"""From a request to a job: everything that can be checked before anything is computed."""

import secrets
import time

from remask.core.canvas import Canvas
from remask.core.checks import real
from remask.core.request import Request, Usage
from remask.engine.job import Decode, Job
from remask.errors import ConfigError
from remask.models.config import ModelConfig
from remask.policies.base import CachePolicy, Circumstances
from remask.sampling.masked import MaskedDecoder
from remask.sampling.rules import resolve


def make_job(
    request: Request, policy: CachePolicy, shape: ModelConfig, max_model_len: int, decode: Decode | None
) -> Job:
    """A job for `request` under `policy`. Raises `ConfigError` on a request that cannot run."""
    params = request.params
    _check_terms(request)
    length = _checked_length(request, shape, max_model_len)
    if params.stop and decode is None:
        raise ConfigError("stop texts need a tokenizer, and this model folder has none; use stop_token_ids")
    rule = resolve(params, shape.family, policy.traits.blockwise)
    policy.check(Circumstances(shape.layers, shape.shift, rule.ordered))
    job = Job(
        request=request,
        policy=policy,
        rule=rule,
        seed=secrets.randbits(62) if params.seed is None else params.seed,
        stops=frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else frozenset(shape.stop_ids)),
        layers=shape.layers,
        arrived=time.perf_counter(),
        decode=decode,
        usage=Usage(prompt_tokens=length - params.max_tokens),
    )
    # The decoder checks what depends on the canvas; better now than when the request begins.
    MaskedDecoder(params, rule, Canvas(request.prompt_token_ids, params.max_tokens, shape.mask_id), job.seed, "all")
    return job


def _check_terms(request: Request) -> None:
    """Raise `ConfigError` on terms of service that cannot be kept."""
    salt, priority = request.cache_salt, request.priority
    # A lone surrogate has no bytes to hash.
    if not isinstance(salt, str) or any("\ud800" <= char <= "\udfff" for char in salt):
        raise ConfigError(f"cache_salt must be a text of valid Unicode, empty for none, got {salt!r}")
    if isinstance(priority, bool) or not isinstance(priority, int):
        raise ConfigError(f"priority must be a whole number, lower ones first, got {priority!r}")
    real("deadline_s", request.deadline_s, 0, above=True, optional=True)


def _checked_length(request: Request, shape: ModelConfig, max_model_len: int) -> int:
    """Length of the canvas, once prompt and prefix are known to be fine."""
    prompt = list(request.prompt_token_ids)
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    bad = [t for t in prompt if isinstance(t, bool) or not isinstance(t, int) or not 0 <= t < shape.vocab]
    if bad:
        raise ConfigError(f"prompt_token_ids holds {bad[0]!r}; token ids are whole numbers from 0 to {shape.vocab - 1}")
    length = len(prompt) + request.params.max_tokens
    if length > max_model_len:
        raise ConfigError(
            f"prompt of {len(prompt)} tokens and max_tokens={request.params.max_tokens} make a canvas of {length}, but "
            f"max_model_len is {max_model_len}; shorten one of them or raise max_model_len"
        )
    wanted = request.prefix_length
    if isinstance(wanted, bool) or not isinstance(wanted, int) or not 0 <= wanted <= len(prompt):
        raise ConfigError(f"prefix_length must be from 0 to the prompt's {len(prompt)} tokens, got {wanted!r}")
    return length
