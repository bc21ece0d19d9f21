"""A request, as every caller gives it to the engine, as fronts build it, and as it waits once it is checked."""

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
    """Whose turn a request takes: that of a client, and of one of the bodies that it sent. They are only compared."""

    client: str = ""
    body: str = ""


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer, and how.

    Attributes:
        id: names the request. No two requests in an engine have the same id at a time.
        prompt_token_ids: the prompt, int [prompt].
        params: the sampling parameters.
        prefix_length: number of leading tokens that may be shared with other requests. 0 shares nothing.
        find_prefix: `prefix_length` is a guess: nobody said what is shared. An engine with `prefix_sharing="auto"` may
            find it, where the guess is too short to be worth sharing.
        policy: the cache policy. The default caches nothing.
        adapter: name of the adapter that the model computes it with; None: the base alone.
        cache_salt: only requests with the same salt share stored prefixes. One salt per tenant keeps tenants apart.
        priority: requests with lower numbers begin first, and equal ones in order of arrival; each number weighs as
            much as `PRIORITY_STEP_S` seconds of waiting, so none waits for ever. Requests that already run are not
            affected.
        deadline_s: the request ends with "timeout" this many seconds after its arrival, waiting or running. None sets
            no limit.
        owner: who takes turns with others, in the queue and in steps.
        template: the fixed parts and the holes of the response, `params.max_tokens` places. None is one hole.
        continues: the prompt ends within the text that the response goes on with, so the first space of the response
            depends on it.
        readers: what is read of predicted rows beside their tokens, or decides these (`remask.readers`): one of a kind.
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
        """What the response is made of."""
        return Template.plain(self.params.max_tokens) if self.template is None else self.template

    @property
    def context(self) -> Sequence[int]:
        """Tokens before the response that its text depends on."""
        return self.prompt_token_ids[-MAX_CHAR_TOKENS:] if self.continues else ()

    @property
    def salt(self) -> str:
        """What stored K/V are salted with: the tenant's salt and the adapter. No two pairs of them give the same."""
        if self.adapter is None and not self.cache_salt:
            return ""
        adapter = self.adapter or ""
        return f"{len(adapter)}:{adapter}{self.cache_salt}"

    @property
    def formed(self) -> bool:
        """Whether the response is whole wherever it ends."""
        return any(reader.formed for reader in self.readers)

    def reader(self, kind: type[R]) -> R | None:
        """Its reader of this kind; None where it has none."""
        return next((reader for reader in self.readers if isinstance(reader, kind)), None)

    def with_readers(self, *readers: Reader | None) -> "Request":
        """The same request with these readers, each in place of one of its kind; None changes nothing."""
        new = [reader for reader in readers if reader is not None]
        others = [reader for reader in self.readers if type(reader) not in map(type, new)]
        return replace(self, readers=(*others, *new))

    def with_policy(self, policy: CachePolicy) -> "Request":
        """The same request under another cache policy."""
        return replace(self, policy=policy)


@dataclass(slots=True, eq=False)
class PendingRequest:
    """What `Engine.check` returns and `Engine.submit` takes."""

    request: Request
    decoding: Decoding  # how it is denoised
    stops: StopRule  # what ends its response
    # An upper bound of its work: all rows in all layers of each pass. A cache policy computes fewer.
    row_layers: int = 0
    # Identities of the exact pages that its prompt fills. Empty where no pages are shared.
    page_keys: tuple[int, ...] = ()
    arrived: float = 0.0  # when it was submitted, by `clock`
    clock: Callable[[], float] = time.perf_counter  # the engine's, in seconds
    starts: int = 0  # how often it has begun or made the engine fail; more than once only after a failure of the engine
    begun: bool = False  # whether its start has been reported
    # Number of leading tokens that an earlier prompt has too; None where the request names its prefix
    common: int | None = None

    @property
    def response(self) -> Template:
        """The fixed parts and holes of the response."""
        return self.decoding.response_template(self.request.response)

    @property
    def turn(self) -> float:
        """When it comes among requests of its body, by the clock of `arrived`: fixed, so that each comes first once."""
        return self.arrived + PRIORITY_STEP_S * self.request.priority

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was submitted."""
        return self.clock() - self.arrived

    @property
    def canvases(self) -> int:
        """Two under classifier-free guidance."""
        return 2 if self.request.params.cfg_scale > 0 else 1

    @property
    def given_tokens(self) -> int:
        """Tokens of the prompt and of the fixed parts of the response."""
        request = self.request
        fixed = 0 if request.template is None else len(request.template) - request.template.open_places
        return len(request.prompt_token_ids) + fixed

    def result(self, reason: FinishReason, error: str | None = None) -> Result:
        """The result of a request that ends before it begins."""
        usage = Usage(prompt_tokens=self.given_tokens)
        return Result(self.request.id, (), reason, usage, (), None, self.elapsed_s, error)


def request_of(
    name: str,
    tokens: Sequence[int],
    params: SamplingParams,
    policy: CachePolicy,
    terms: Terms,
    shape: ModelConfig,
    *,
    shared: int,
    find_prefix: bool = True,
    constraint: Constraint | None = None,
    template: Template | None = None,
    continues: bool = False,
    drafts: bool = False,
) -> Request:
    """The request of these terms on a model of this `shape`; `shared` is its default `prefix_length`.

    Without `find_prefix` the client named that default, by other means than a term. `constraint` is the compiled
    `structured_outputs` of the terms; `template` is made of its canvas or suffix. `continues` is that of `Request`.

    If the trace is to be returned, the seed is drawn here, so that the trace holds it. Raises `ConfigError` on terms
    that the kind of model cannot meet.
    """
    if terms.return_step_maps and shape.edit_tokens is not None:
        raise ConfigError(
            f"return_step_maps: {shape.family} models that delete and insert move tokens, so no place has a first step "
            "of its own; send return_trace, which tells what each step wrote"
        )
    if terms.return_step_maps and shape.kind == "uniform":
        raise ConfigError(
            "return_step_maps: the tokens of a uniform model may change in every step of their block, so the first "
            "step that wrote one says nothing of the last; send return_trace, which tells all of them"
        )
    if terms.return_trace and params.seed is None:
        params = replace(params, seed=secrets.randbits(62))
    # The trace of a model whose tokens change or move holds no log-probabilities: `check_request` says why.
    scored = shape.kind != "uniform" and shape.edit_tokens is None
    traced = 0 if terms.return_trace and scored else None
    top = traced if terms.top_logprobs is None else terms.top_logprobs
    return Request(
        id=name,
        prompt_token_ids=tokens,
        params=params,
        prefix_length=shared if terms.prefix_length is None else terms.prefix_length,
        find_prefix=find_prefix and terms.prefix_length is None,
        policy=policy,
        adapter=terms.adapter,
        cache_salt=terms.cache_salt,
        priority=terms.priority,
        deadline_s=terms.deadline_s,
        template=template,
        continues=continues,
    ).with_readers(constraint, None if top is None else Logprobs(top), Drafts() if drafts else None)
