"""Checks of a request before anything is computed, which make it a pending request; the limits of a request."""

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

from remask.checks import in_words
from remask.checks.fields import declared
from remask.checks.values import LARGEST, is_whole, shown
from remask.engine.config import EngineConfig
from remask.engine.request import PendingRequest, Request
from remask.errors import CanvasLengthError, ConfigError, PromptError, UnknownNameError
from remask.model.config import ModelConfig
from remask.model.transformer import Transformer
from remask.plan.canvas import OPEN
from remask.policies.base import RequestFacts
from remask.policies.registry import names_for
from remask.readers.base import Reader, RequestView
from remask.readers.implied import logit_readers
from remask.request.sampling_groups import RenoisingParams
from remask.request.sampling_params import SPECULATION, SamplingParams
from remask.request.terms import Terms
from remask.sampling.block_causal import BlockCausalDecoding
from remask.sampling.canvases import CanvasDecoding
from remask.sampling.causal import CausalDecoding
from remask.sampling.decoder import Decoding
from remask.sampling.defaults import check_fields
from remask.sampling.growing import GrowingDecoding, canvas_grows
from remask.sampling.masked import MaskedDecoding
from remask.sampling.uniform import UniformDecoding
from remask.sampling.whole_canvas import WholeCanvasDecoding
from remask.text.incremental import Decode, StopRule

STEPS_PER_POSITION = 4  # of the default limit of steps


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request. Each error names the field, the value, the limit and the way out."""

    max_canvas: int  # positions
    steps: int
    row_layers: int | None

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> "RequestLimits":
        """The limits of an engine whose longest canvas has `max_model_len` positions."""
        steps = config.max_steps or STEPS_PER_POSITION * max_model_len
        return cls(max_model_len, steps, config.max_request_row_layers)

    def check_steps(self, params: SamplingParams) -> None:
        """Raise `ConfigError` if one of the fields that count steps exceeds the limit by itself."""
        for name in ("steps", "steps_per_block", "remasking.max_post_steps", *_BLOCK_STEP_FIELDS):
            value = attrgetter(name)(params)
            if value is not None and value > self.steps:
                raise ConfigError(f"{name}={value} is more than the {self.steps} steps {_WAY_OUT}")

    def check_work(self, steps: int, row_layers: int, params: SamplingParams) -> None:
        """Raise `ConfigError` if a request takes more steps or row-layers than it may."""
        if steps > self.steps:
            names = [name for name in _STEP_FIELDS if attrgetter(name)(params)] or ["max_tokens"]
            values = ", ".join(f"{name}={attrgetter(name)(params)}" for name in names)
            raise ConfigError(f"{values} make {steps} steps, more than the {self.steps} {_WAY_OUT}")
        if self.row_layers is not None and row_layers > self.row_layers:
            raise ConfigError(
                f"max_tokens={params.max_tokens} and {steps} steps may take {row_layers} row-layers, and a "
                f"request may take {self.row_layers}; send a shorter prompt, a shorter response or fewer steps, or "
                "raise max_request_row_layers"
            )


_BLOCK_STEP_FIELDS = ("remasking.max_steps_per_block", "uniform.correction_steps")
_STEP_FIELDS = ("steps_per_block", "steps", "remasking.max_post_steps", *_BLOCK_STEP_FIELDS, "block_length")
_WAY_OUT = "that a request may take; lower it, or raise max_steps"


def check_request(
    request: Request,
    model: Transformer,
    limits: RequestLimits,
    decode: Decode | None,
    page_keys: Callable[[Request, Decoding], tuple[int, ...]],
) -> PendingRequest:
    """Check `request`, and return it ready to begin. Raises `ConfigError` if it cannot run.

    `decode` returns the text of tokens; None without a tokenizer. `page_keys` is `Pages.keys`.
    """
    params, config = request.params, model.config
    adapters = model.weights.adapters
    if request.adapter is not None and request.adapter not in adapters:
        raise UnknownNameError("adapter", request.adapter, adapters)
    _check_terms(request)
    _check_prompt(request, config)
    _check_template(request, config)
    stops = _stop_rule(request, config, decode)
    _check_length(request, config, limits.max_canvas)
    limits.check_steps(params)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    if seed < 0:
        seed %= LARGEST  # random generators take no negative seed
    schedule, readers = request.policy.traits.schedule, request.readers
    view = RequestView(request.prompt_token_ids, params, request.template, config, stops, schedule, readers, seed)
    _check_readers(readers)
    decoding = _make_decoding(view, limits, adapters)
    _check_block_length(decoding, config, limits.max_canvas)
    _check_policy(request, decoding, config)
    pending = PendingRequest(request, decoding, stops)
    for reader in readers:
        reader.check(view, decoding)
    if params.mode == SPECULATION:
        _check_rowwise(view, decoding)
    rows = decoding.max_length * pending.canvas_count
    pending.row_layers = decoding.max_passes(skips=schedule.idle_passes == "skipped") * rows * config.layers
    limits.check_work(decoding.total_steps, pending.row_layers, params)
    pending.page_keys = page_keys(request, decoding)
    return pending


def _check_length(request: Request, config: ModelConfig, max_canvas: int) -> None:
    """Raise `CanvasLengthError` if prompt and response are too long, except where the model fixes the canvas."""
    prompt_length, response_length = len(request.prompt_token_ids), request.params.max_tokens
    length = prompt_length + response_length
    if length > max_canvas and not config.whole_canvas:
        limit, way_out = _limit_in_words(config, max_canvas)
        raise CanvasLengthError(
            f"prompt of {prompt_length} tokens and max_tokens={response_length}",
            f" make a canvas of {length}, but {limit}; shorten one of them{way_out}",
            prompt_length,
            response_length,
        )


def _check_block_length(decoding: Decoding, config: ModelConfig, max_canvas: int) -> None:
    """Raise `ConfigError` if the canvas of `decoding`, which has whole blocks, is too long."""
    if decoding.length > max_canvas:
        limit, way_out = _limit_in_words(config, max_canvas)
        block = max(map(len, decoding.block_ranges))
        cause = "canvas_length" if config.kind == "uniform" else f"whole blocks of block_length={block}"
        raise ConfigError(
            f"{cause} make a canvas of {decoding.length}, but {limit}; lower that, shorten the prompt or the "
            f"response{way_out}"
        )


def _limit_in_words(config: ModelConfig, max_canvas: int) -> tuple[str, str]:
    """The limit of a canvas' length, and the advice to raise it, which is empty if the model takes no more."""
    if max_canvas >= config.max_length:
        return f"max_model_len is {max_canvas}, all that the model takes", ""
    return f"max_model_len is {max_canvas}", " or raise max_model_len"


def _check_policy(request: Request, decoding: Decoding, config: ModelConfig) -> None:
    """Raise `ConfigError` if the cache policy cannot work on the model, or for this request."""
    traits = request.policy.traits
    if config.kind not in traits.kinds:
        kind, fitting = in_words((config.kind,)), ", ".join(names_for(config.kind))
        raise ConfigError(f"this cache policy is not defined on {kind} models ({config.family}); use {fitting}")
    if config.routing_block > 1 and not traits.exact:
        raise ConfigError(
            f"this cache policy computes parts of blocks, and rows of this model ({config.family}) choose experts from "
            f"one pool for each block of {config.routing_block}, so that a row depends on all of its block; use exact "
            "or none"
        )
    for facts in _policy_facts(decoding, request, config):
        request.policy.check(facts)


def _policy_facts(decoding: Decoding, request: Request, config: ModelConfig) -> Iterator[RequestFacts]:
    """Yield the facts that a policy checks. Those of a growing canvas are about its first block, then its last one."""
    facts = partial(RequestFacts, layers=config.layers, shift=config.shift, ordered=decoding.ordered)
    if not isinstance(decoding, GrowingDecoding):
        open_places, steps = decoding.response_template(request.response).open_places, decoding.scheduled_steps
        yield facts(canvas=decoding.length, response=open_places, steps=steps)
        return
    for block in (decoding, decoding.last_block):
        open_places = len(decoding.block_ranges[block.number])
        yield facts(canvas=block.length, response=open_places, steps=block.scheduled_steps)


def _check_readers(readers: Sequence[Reader]) -> None:
    names = [reader.name for reader in readers]
    duplicate = next((name for name in names if names.count(name) > 1), None)
    if duplicate is not None:
        raise ConfigError(f"readers: two are called {duplicate!r}, and results name readers; leave one out")


def _stop_rule(request: Request, config: ModelConfig, decode: Decode | None) -> StopRule:
    """The stops of a response, and of the model unless ignored. Raises `ConfigError` on stop texts without `decode`."""
    params = request.params
    ignores_eos = params.ignore_eos or params.uniform.trim is False
    model_stops = frozenset[int]() if ignores_eos else frozenset(config.stop_ids)
    token_ids = frozenset(params.stop_token_ids)
    cut_ids = frozenset[int]()
    if config.whole_canvas:
        cut_ids = model_stops
    else:
        token_ids |= model_stops
    if not params.stop:
        return StopRule(token_ids, cut_ids=cut_ids)
    if decode is None:
        raise ConfigError("stop texts need a tokenizer, and this model folder has none; use stop_token_ids")
    return StopRule(token_ids, tuple(params.stop), decode, cut_ids)


def _check_bias(params: SamplingParams, config: ModelConfig) -> None:
    """Raise `ConfigError` if `logit_bias` names the mask token, or a token that the model does not have."""
    for token in params.logit_bias or ():
        if token >= config.vocab:
            raise ConfigError(
                f"logit_bias names the token {token}, and the model has tokens from 0 to {config.vocab - 1}"
            )
        if token == config.mask_id:
            raise ConfigError(f"logit_bias names the mask token {token}, which is never chosen; leave it out")


def _make_decoding(view: RequestView, limits: RequestLimits, adapters: Collection[str]) -> Decoding:
    """The decoding that a reader brings, or else that of the model's kind. Raises `ConfigError` on bad parameters."""
    prompt, params, template, config, seed = view.prompt, view.params, view.template, view.shape, view.seed
    for reader in view.readers:
        special = reader.decoding(view)
        if special is not None:
            return special
    check_fields(params, config.kind)
    _check_bias(params, config)
    if config.self_conditioning:
        assert config.block_length is not None
        has_form = any(reader.has_form for reader in view.readers)
        return CanvasDecoding.of(prompt, params, config.block_length, config.vocab, seed, template, has_form=has_form)
    if params.renoising != RenoisingParams():
        raise ConfigError(f"renoising is for models that write canvases of noise; leave it out on {config.family}")
    if config.causal_prefix:
        drafter = config.drafter if config.drafter in adapters else None
        return CausalDecoding.of(prompt, params, config.block_length, config.mask_id, seed, template, drafter)
    for path in ("mode", "speculation.draft_window", "speculation.max_draft_window", "speculation.lora"):
        if attrgetter(path)(params) is not None:
            raise ConfigError(
                f"{path} is for models that are decoded in several modes; leave it out on {config.family}"
            )
    if config.kind == "block_causal":
        decoding = BlockCausalDecoding.of(
            prompt,
            params,
            config.sampling,
            config.block_length,
            config.mask_id,
            seed,
            template,
            edit_tokens=config.edit_tokens,
            routing=config.routing_block,
            max_steps=limits.steps,
        )
        if decoding.rule.edits and config.sampling.opens_blocks:
            raise ConfigError(
                f"remasking {decoding.rule.name!r} edits tokens, which is not defined on {config.family} models: they "
                "commit the first token of a block before the others; use another rule"
            )
        return decoding
    if config.kind == "uniform":
        assert config.noise is not None
        canvas_length = min(config.max_length, limits.max_canvas)
        stops = config.stop_ids
        if config.whole_canvas:
            return WholeCanvasDecoding.on_canvas(prompt, params, config.noise, stops, canvas_length, seed, template)
        return UniformDecoding.of(
            prompt, params, config.noise, stops, canvas_length, seed, config.structured_attention, template
        )
    decoding_type = GrowingDecoding if canvas_grows(params, config.sampling, template) else MaskedDecoding
    blockwise = view.schedule.blockwise
    return decoding_type.of(
        prompt, params, config.sampling, config.mask_id, seed, blockwise=blockwise, template=template
    )


def _check_rowwise(view: RequestView, decoding: Decoding) -> None:
    """Raise `ConfigError` if a reader depends on more than a row and its position, which excludes drafts."""
    for reader in (*view.readers, *logit_readers(view.params, decoding.canvas())):
        if not reader.rowwise:
            raise ConfigError(
                f"mode {SPECULATION!r}: what {reader.name!r} reads or writes depends on the steps before; use mode 'ar'"
            )


def _check_terms(request: Request) -> None:
    for name in ("cache_salt", "priority", "deadline_s"):
        declared(Terms)[name].check(name, getattr(request, name))


def _check_template(request: Request, config: ModelConfig) -> None:
    """Raise `ConfigError` if the template has another length than the response, no hole, or an unknown token."""
    template, length = request.template, request.params.max_tokens
    if template is None:
        return
    if len(template) != length:
        raise ConfigError(f"max_tokens={length} is not the canvas' length of {len(template)}; leave it out")
    if not template.holes:
        raise ConfigError("canvas has no hole, so there is nothing to generate; give a part with mask")
    invalid = [token for token in template.tokens if token != OPEN and not 0 <= token < config.vocab]
    if invalid:
        raise ConfigError(f"canvas holds the token id {invalid[0]}; token ids go from 0 to {config.vocab - 1}")


def _check_prompt(request: Request, config: ModelConfig) -> None:
    """Raise `PromptError` on an empty prompt or an unknown token, and `ConfigError` on a prefix beyond the prompt."""
    prompt = list(request.prompt_token_ids)
    if not prompt:
        raise PromptError("the prompt is empty; give at least one token")
    # Prompts are long and mostly valid, so the loop over their tokens runs only if a fast check fails.
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= config.vocab:
        invalid = [token for token in prompt if not is_whole(token, 0, config.vocab - 1)]
        if invalid:
            allowed = f"token ids are whole numbers from 0 to {config.vocab - 1}"
            raise PromptError(f"prompt_token_ids holds {shown(invalid[0])}; {allowed}")
    length = request.prefix_length
    if not is_whole(length, 0, len(prompt)):
        raise ConfigError(f"prefix_length must be from 0 to the prompt's {len(prompt)} tokens, got {shown(length)}")
