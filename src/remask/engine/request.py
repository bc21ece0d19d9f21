"""Requests: as callers pass them to the engine, and as they wait once they are checked."""

import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from remask.errors import ConfigError
from remask.model.config import ModelConfig
from remask.plan.canvas import Template
from remask.policies.base import CachePolicy
from remask.policies.dense import Dense
from remask.readers.base import Reader
from remask.readers.constraint import Constraint
from remask.readers.drafts import Drafts
from remask.readers.logprobs import Logprobs
from remask.request.result import FinishReason, Result, Usage
from remask.request.sampling_params import SamplingParams
from remask.request.terms import PRIORITY_STEP_S, Terms
from remask.sampling.decoder import Decoding
from remask.text.incremental import MAX_CHAR_TOKENS, StopRule

R = TypeVar("R", bound=Reader)


class Owner(NamedTuple):
    """The client of a request and the HTTP body that it came in, which take turns with others. Only equality counts."""

    client: str = ""
    body: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and how to answer it.

    Attributes:
        id: names the request. The open requests of an engine have different ids.
        prompt_token_ids: the prompt, int [prompt].
        params: the sampling parameters.
        prefix_length: number of leading tokens that may be shared with other requests. 0 shares nothing.
        find_prefix: whether `prefix_length` is a guess, because nobody named the shared prefix. If it is too short to
            be worth sharing, an engine with `prefix_sharing="auto"` looks for a longer one.
        policy: the cache policy. The default caches nothing.
        adapter: name of the adapter that the model computes it with; None for the base model.
        cache_salt: only requests with the same salt share stored prefixes. One salt per tenant separates tenants.
        priority: requests with lower numbers begin first, and equal ones in order of arrival. One unit weighs as much
            as `PRIORITY_STEP_S` seconds of waiting, so every request begins eventually. Running requests are not
            affected.
        deadline_s: the request ends with "timeout" this many seconds after its arrival, waiting or running. None sets
            no limit.
        owner: with whom it shares turns, in the queue and in steps.
        template: the fixed parts and the holes of the response, `params.max_tokens` places. None is one hole.
        continues: whether the prompt ends within a text that the response continues, so that the first space of the
            response depends on the prompt.
        readers: read numbers from predicted rows, or decide their tokens (`remask.readers`); at most one of each type.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prefix_length: int = 0
    find_prefix: bool = field(default=False, kw_only=True)
    policy: CachePolicy = Dense()  # noqa: RUF009 - policies are frozen
    adapter: str | None = field(default=None, kw_only=True)
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    owner: Owner = field(default=Owner(), kw_only=True)
    template: Template | None = field(default=None, kw_only=True)
    continues: bool = field(default=False, kw_only=True)
    readers: tuple[Reader, ...] = field(default=(), kw_only=True)

    @property
    def response(self) -> Template:
        """The template of the response; without one, a single hole."""
        return Template.plain(self.params.max_tokens) if self.template is None else self.template

    @property
    def context(self) -> Sequence[int]:
        """The last tokens of the prompt, as far as the text of the response depends on them."""
        return self.prompt_token_ids[-MAX_CHAR_TOKENS:] if self.continues else ()

    @property
    def salt(self) -> str:
        """The salt of stored K/V, made of the tenant's salt and the adapter. Different pairs give different salts."""
        if self.adapter is None and not self.cache_salt:
            return ""
        adapter = self.adapter or ""
        return f"{len(adapter)}:{adapter}{self.cache_salt}"

    @property
    def has_form(self) -> bool:
        """Whether a reader prescribes the form of the response, so that it is complete wherever it ends."""
        return any(reader.has_form for reader in self.readers)

    def reader(self, reader_type: type[R]) -> R | None:
        """Its reader of this type; None if it has none."""
        return next((reader for reader in self.readers if isinstance(reader, reader_type)), None)

    def with_readers(self, *readers: Reader | None) -> "Request":
        """The request with `readers` added, each of which replaces one of its type. None are ignored."""
        new_readers = [reader for reader in readers if reader is not None]
        others = [reader for reader in self.readers if type(reader) not in map(type, new_readers)]
        return replace(self, readers=(*others, *new_readers))

    def with_policy(self, policy: CachePolicy) -> "Request":
        """The request under another cache policy."""
        return replace(self, policy=policy)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """A checked request: `Engine.check` returns it, and `Engine.submit` takes it."""

    request: Request
    decoding: Decoding  # how it is denoised
    stops: StopRule  # ends its response
    # Upper bound of its work: all rows in all layers of each pass. A cache policy computes fewer.
    row_layers: int = 0
    # Keys of the exact pages that its prompt fills; empty if no pages are shared
    page_keys: tuple[int, ...] = ()
    arrived: float = 0.0  # when it was submitted, by `clock`
    clock: Callable[[], float] = time.perf_counter  # the engine's, in seconds
    starts: int = 0  # how often it has begun or made the engine fail; more than once only after a failure of the engine
    start_reported: bool = False
    # Number of leading tokens that it shares with a recent prompt; None if the request names its prefix
    common_tokens: int | None = None

    @property
    def response(self) -> Template:
        """The fixed parts and holes of the response."""
        return self.decoding.response_template(self.request.response)

    @property
    def queue_time(self) -> float:
        """Its order among the requests of its body, in seconds by `clock`. It never changes, so each gets its turn."""
        return self.arrived + PRIORITY_STEP_S * self.request.priority

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was submitted."""
        return self.clock() - self.arrived

    @property
    def canvas_count(self) -> int:
        """Number of its canvases: two under classifier-free guidance, otherwise one."""
        return 2 if self.request.params.cfg_scale > 0 else 1

    @property
    def input_tokens(self) -> int:
        """Number of tokens of the prompt and of the fixed parts of the response."""
        request = self.request
        fixed = 0 if request.template is None else len(request.template) - request.template.open_places
        return len(request.prompt_token_ids) + fixed

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        """The result if the request ends before it begins."""
        usage = Usage(prompt_tokens=self.input_tokens)
        return Result(
            self.request.id, (), reason, usage, trace=(), first_settled_s=None, elapsed_s=self.elapsed_s, error=error
        )


def request_of(
    request_id: str,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    policy: CachePolicy,
    terms: Terms,
    config: ModelConfig,
    *,
    prefix_length: int,
    find_prefix: bool = True,
    constraint: Constraint | None = None,
    template: Template | None = None,
    continues: bool = False,
    drafts: bool = False,
) -> Request:
    """The request with these `terms` on a model of this `config`.

    `prefix_length` counts if the terms have none; `find_prefix` is False if the client has named the prefix in another
    way. `constraint` is the compiled `structured_outputs` of the terms, and `template` is made of its canvas or suffix.
    `continues` is that of `Request`. With `drafts` the request gets a `Drafts` reader.

    If the terms return the trace, the seed is drawn here, so that the trace has it. Raises `ConfigError` on terms that
    the kind of model cannot meet.
    """
    if terms.return_step_maps:
        _check_step_maps(config)
    if terms.return_trace and params.seed is None:
        params = replace(params, seed=secrets.randbits(62))
    return Request(
        id=request_id,
        prompt_token_ids=prompt_token_ids,
        params=params,
        prefix_length=prefix_length if terms.prefix_length is None else terms.prefix_length,
        find_prefix=find_prefix and terms.prefix_length is None,
        policy=policy,
        adapter=terms.adapter,
        cache_salt=terms.cache_salt,
        priority=terms.priority,
        deadline_s=terms.deadline_s,
        template=template,
        continues=continues,
    ).with_readers(constraint, _logprobs(terms, config), Drafts() if drafts else None)


def _check_step_maps(config: ModelConfig) -> None:
    """Raise `ConfigError` if a model's tokens change or move, so that step maps would mean nothing."""
    if config.edit_tokens is not None:
        raise ConfigError(
            f"return_step_maps: {config.family} models that delete and insert move tokens, so no place has a first "
            "step of its own; send return_trace, which tells what each step wrote"
        )
    if config.kind == "uniform":
        raise ConfigError(
            "return_step_maps: the tokens of a uniform model may change in every step of their block, so the first "
            "step that wrote one says nothing of the last; send return_trace, which tells all of them"
        )


def _logprobs(terms: Terms, config: ModelConfig) -> Logprobs | None:
    """The reader of the log-probabilities that the terms ask for, or that their trace has; None if there are none."""
    if terms.top_logprobs is not None:
        return Logprobs(terms.top_logprobs)
    # The trace of a model whose tokens change or move has no log-probabilities: `check_request` says why.
    has_logprobs = terms.return_trace and config.kind != "uniform" and config.edit_tokens is None
    return Logprobs(0) if has_logprobs else None
