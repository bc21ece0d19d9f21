"""Checks a request before anything is computed, and makes it a pending request. The limits of one request."""

import secrets
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import attrgetter

from remask.checks import in_words
from remask.checks.fields import declared
from remask.checks.values import LARGEST, is_whole, shown
from remask.engine.config import EngineConfig
from remask.engine.request import PendingRequest, Request
from remask.errors import CanvasLengthError, ConfigError, UnknownNameError
from remask.model.config import ModelConfig
from remask.model.transformer import Transformer
from remask.plan.canvas import OPEN
from remask.policies.base import RequestFacts
from remask.policies.registry import names_for
from remask.readers.base import Asked, Reader
from remask.readers.implied import biases_of
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

    longest: int  # positions of a canvas
    steps: int
    row_layers: int | None

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> "RequestLimits":
        """The limits of an engine whose longest canvas has `max_model_len` positions."""
        steps = config.max_steps or STEPS_PER_POSITION * max_model_len
        return cls(max_model_len, steps, config.max_request_row_layers)

    def check_steps(self, params: SamplingParams) -> None:
        """Raise `ConfigError` where one of the fields that count steps exceeds the limit by itself."""
        for name in ("steps", "steps_per_block", "remasking.max_post_steps", *_OF_STEPS):
            value = attrgetter(name)(params)
            if value is not None and value > self.steps:
                raise ConfigError(f"{name}={value} is more than the {self.steps} steps {_WAY_OUT}")

    def check_work(self, steps: int, row_layers: int, params: SamplingParams) -> None:
        """Raise `ConfigError` on more work than a request may ask for."""
        if steps > self.steps:
            names = [name for name in _STEP_FIELDS if attrgetter(name)(params)] or ["max_tokens"]
            named = ", ".join(f"{name}={attrgetter(name)(params)}" for name in names)
            raise ConfigError(f"{named} make {steps} steps, more than the {self.steps} {_WAY_OUT}")
        if self.row_layers is not None and row_layers > self.row_layers:
            raise ConfigError(
                f"max_tokens={params.max_tokens} and {steps} steps may take {row_layers} row-layers, and a "
                f"request may take {self.row_layers}; send a shorter prompt, a shorter response or fewer steps, or "
                "raise max_request_row_layers"
            )


_OF_STEPS = ("remasking.max_steps_per_block", "uniform.correction_steps")
_STEP_FIELDS = ("steps_per_block", "steps", "remasking.max_post_steps", *_OF_STEPS, "block_length")
_WAY_OUT = "that a request may take; lower it, or raise max_steps"


def check_request(
    request: Request,
    model: Transformer,
    limits: RequestLimits,
    decode: Decode | None,
    page_keys: Callable[[Request, Decoding], tuple[int, ...]],
) -> PendingRequest:
    """`request`, ready to begin. Raises `ConfigError` where it cannot run. `page_keys` is `Pages.keys`."""
    params, policy, shape, max_model_len = request.params, request.policy, model.config, limits.longest
    adapters = model.weights.adapters
    if request.adapter is not None and request.adapter not in adapters:
        raise UnknownNameError("adapter", request.adapter, adapters)
    _check_terms(request)
    _check_prompt(request, shape)
    _check_template(request, shape)
    stops = _stop_rule(request, shape, decode)
    whole = max_model_len >= shape.max_length
    limit = f"max_model_len is {max_model_len}{', all that the model takes' if whole else ''}"
    more = "" if whole else " or raise max_model_len"
    prompt, response = len(request.prompt_token_ids), params.max_tokens
    needed = prompt + response
    if needed > max_model_len and not shape.whole_canvas:
        raise CanvasLengthError(
            f"prompt of {prompt} tokens and max_tokens={response} make a canvas of {needed}, but {limit}; shorten one "
            f"of them{more}",
            prompt,
            response,
        )
    limits.check_steps(params)
    seed = secrets.randbits(62) if params.seed is None else params.seed
    seed = seed % LARGEST if seed < 0 else seed  # generators take no negative one
    schedule, readers = policy.traits.schedule, request.readers
    asked = Asked(request.prompt_token_ids, params, request.template, shape, stops, schedule, readers, seed)
    _check_readers(readers)
    decoding = _decoding(asked, limits, adapters)
    if decoding.length > max_model_len:
        block = max(map(len, decoding.block_ranges))
        cause = "canvas_length" if shape.kind == "uniform" else f"whole blocks of block_length={block}"
        raise ConfigError(
            f"{cause} make a canvas of {decoding.length}, but {limit}; lower that, shorten the prompt or the "
            f"response{more}"
        )
    if shape.kind not in policy.traits.kinds:
        kind, fitting = in_words((shape.kind,)), ", ".join(names_for(shape.kind))
        raise ConfigError(f"this cache policy is not defined on {kind} models ({shape.family}); use {fitting}")
    if shape.routing_block > 1 and not policy.traits.exact:
        raise ConfigError(
            f"this cache policy computes parts of blocks, and rows of this model ({shape.family}) choose experts from "
            f"one pool for each block of {shape.routing_block}, so that a row depends on all of its block; use exact "
            "or none"
        )
    for facts in _facts(decoding, request, shape):
        policy.check(facts)
    pending = PendingRequest(request, decoding, stops)
    for reader in readers:
        reader.check(asked, decoding)
    undrafted = _undrafted(asked, decoding) if params.mode == SPECULATION else None
    if undrafted is not None:
        raise ConfigError(
            f"mode {SPECULATION!r}: what {undrafted.name!r} reads or writes depends on the steps before; use mode 'ar'"
        )
    rows = decoding.max_length * pending.canvases
    pending.row_layers = decoding.max_passes(skips=schedule.idle_passes == "skipped") * rows * shape.layers
    limits.check_work(decoding.total_steps, pending.row_layers, params)
    pending.page_keys = page_keys(request, decoding)
    return pending


def _facts(decoding: Decoding, request: Request, shape: ModelConfig) -> Iterator[RequestFacts]:
    """Of a growing canvas those of the first block and of the last, which may be shorter."""
    layers, shift, ordered = shape.layers, shape.shift, decoding.ordered
    if not isinstance(decoding, GrowingDecoding):
        places, steps = decoding.response_template(request.response).open_places, decoding.scheduled_steps
        yield RequestFacts(layers, shift, ordered, decoding.length, places, steps)
        return
    for part in (decoding, decoding.last_block):
        places = len(decoding.block_ranges[part.number])
        yield RequestFacts(layers, shift, ordered, part.length, places, part.scheduled_steps)


def _check_readers(readers: Sequence[Reader]) -> None:
    names = [reader.name for reader in readers]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"readers: two of them are called {twice!r}, by which results name them; leave one out")


def _stop_rule(request: Request, shape: ModelConfig, decode: Decode | None) -> StopRule:
    params = request.params
    usual = frozenset() if params.ignore_eos or params.uniform.trim is False else frozenset(shape.stop_ids)
    extra = frozenset(params.stop_token_ids)
    token_ids, cut = (extra, usual) if shape.whole_canvas else (extra | usual, frozenset[int]())
    if not params.stop:
        return StopRule(token_ids, cut=cut)
    if decode is None:
        raise ConfigError("stop texts need a tokenizer, and this model folder has none; use stop_token_ids")
    return StopRule(token_ids, tuple(params.stop), decode, cut)


def _check_bias(params: SamplingParams, shape: ModelConfig) -> None:
    for token in params.logit_bias or ():
        if token >= shape.vocab:
            raise ConfigError(
                f"logit_bias names the token {token}, and the model has tokens from 0 to {shape.vocab - 1}"
            )
        if token == shape.mask_id:
            raise ConfigError(f"logit_bias names the mask token {token}, which is never chosen; leave it out")


def _decoding(asked: Asked, limits: RequestLimits, adapters: Collection[str]) -> Decoding:
    """The decoding that a reader brings, or that of the model's kind, which checks the sampling parameters."""
    prompt, params, template, shape, seed = asked.prompt, asked.params, asked.template, asked.shape, asked.seed
    for reader in asked.readers:
        special = reader.decoding(asked)
        if special is not None:
            return special
    check_fields(params, shape.kind)
    _check_bias(params, shape)
    if shape.self_conditioning:
        assert shape.block_length is not None
        formed = any(reader.formed for reader in asked.readers)
        return CanvasDecoding.of(prompt, params, shape.block_length, shape.vocab, seed, template, has_form=formed)
    if params.renoising != RenoisingParams():
        raise ConfigError(f"renoising is for models that write canvases of noise; leave it out on {shape.family}")
    if shape.causal_prefix:
        drafter = shape.drafter if shape.drafter in adapters else None
        return CausalDecoding.of(prompt, params, shape.block_length, shape.mask_id, seed, template, drafter)
    for path in ("mode", "speculation.draft_window", "speculation.max_draft_window", "speculation.lora"):
        if attrgetter(path)(params) is not None:
            raise ConfigError(f"{path} is for models that are decoded in several modes; leave it out on {shape.family}")
    if shape.kind == "block_causal":
        block, routing, most = shape.block_length, shape.routing_block, limits.steps
        decoding = BlockCausalDecoding.of(
            prompt, params, shape.sampling, block, shape.mask_id, seed, template,
            edit_tokens=shape.edit_tokens, routing=routing, max_steps=most,
        )  # fmt: skip
        if decoding.rule.edits and shape.sampling.opens_blocks:
            raise ConfigError(
                f"remasking {decoding.rule.name!r} edits tokens, which is not defined on {shape.family} models: they "
                "commit the first token of a block before the others; use another rule"
            )
        return decoding
    if shape.kind == "uniform":
        assert shape.noise is not None
        canvas = min(shape.max_length, limits.longest)
        stops, structured = shape.stop_ids, shape.structured_attention
        if shape.whole_canvas:
            return WholeCanvasDecoding.on_canvas(prompt, params, shape.noise, stops, canvas, seed, template)
        return UniformDecoding.of(prompt, params, shape.noise, stops, canvas, seed, structured, template)
    blockwise, masked = asked.schedule.blockwise, MaskedDecoding
    if canvas_grows(params, shape.sampling, template):
        masked = GrowingDecoding
    return masked.of(prompt, params, shape.sampling, shape.mask_id, seed, blockwise=blockwise, template=template)


def _undrafted(asked: Asked, decoding: Decoding) -> Reader | None:
    """A reader whose reading depends on more than a row and its position; None without one."""
    readers = (*asked.readers, *biases_of(asked.params, decoding.canvas()))
    return next((reader for reader in readers if not reader.drafted), None)


def _check_terms(request: Request) -> None:
    for name in ("cache_salt", "priority", "deadline_s"):
        declared(Terms)[name].check(name, getattr(request, name))


def _check_template(request: Request, shape: ModelConfig) -> None:
    template, length = request.template, request.params.max_tokens
    if template is None:
        return
    if len(template) != length:
        raise ConfigError(f"max_tokens={length} is not the canvas' length of {len(template)}; leave it out")
    if not template.holes:
        raise ConfigError("canvas has no hole, so there is nothing to generate; give a part with mask")
    bad = [token for token in template.tokens if token != OPEN and not 0 <= token < shape.vocab]
    if bad:
        raise ConfigError(f"canvas holds the token id {bad[0]}; token ids go from 0 to {shape.vocab - 1}")


def _check_prompt(request: Request, shape: ModelConfig) -> None:
    prompt = list(request.prompt_token_ids)
    if not prompt:
        raise ConfigError("the prompt is empty; give at least one token")
    # Prompts are long and mostly right, so they are checked without a loop over their tokens first.
    if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= shape.vocab:
        bad = [t for t in prompt if not is_whole(t, 0, shape.vocab - 1)]
        if bad:
            allowed = f"token ids are whole numbers from 0 to {shape.vocab - 1}"
            raise ConfigError(f"prompt_token_ids holds {shown(bad[0])}; {allowed}")
    wanted = request.prefix_length
    if not is_whole(wanted, 0, len(prompt)):
        raise ConfigError(f"prefix_length must be from 0 to the prompt's {len(prompt)} tokens, got {shown(wanted)}")
