"""A request, as every caller gives it to the engine."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, TypeVar

from remask.plan.canvas import Template
from remask.policies.base import CachePolicy
from remask.policies.dense import Dense
from remask.readers.base import Reader
from remask.request.sampling_params import SamplingParams
from remask.request.segments import Segment

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
        segments: parts of the prompt that may be shared with other requests, wherever they stand, in place of a prefix.
        policy: the cache policy. The default caches nothing.
        cache_salt: only requests with the same salt share stored prefixes. One salt per tenant keeps tenants apart.
        priority: requests with lower numbers begin first, and equal ones in order of arrival; each number weighs as
            much as `PRIORITY_STEP_S` seconds of waiting, so none waits for ever. Requests that already run are not
            affected.
        deadline_s: the request ends with "timeout" this many seconds after its arrival, waiting or running. None sets
            no limit.
        owner: who takes turns with others, in the queue and in steps.
        template: the fixed parts and the holes of the response, `params.max_tokens` places. None is one hole.
        readers: what is read of predicted rows beside their tokens, or decides these (`remask.readers`): one of a kind.
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prefix_length: int = 0
    find_prefix: bool = field(default=False, kw_only=True)
    segments: Sequence[Segment] = field(default=(), kw_only=True)
    policy: CachePolicy = Dense()  # noqa: RUF009 - policies are frozen
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    owner: Owner = field(default=Owner(), kw_only=True)
    template: Template | None = field(default=None, kw_only=True)
    readers: tuple[Reader, ...] = field(default=(), kw_only=True)

    @property
    def response(self) -> Template:
        """What the response is made of."""
        return Template.plain(self.params.max_tokens) if self.template is None else self.template

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
        kept = [reader for reader in self.readers if type(reader) not in map(type, new)]
        return replace(self, readers=(*kept, *new))

    def with_policy(self, policy: CachePolicy) -> "Request":
        """The same request under another cache policy."""
        return replace(self, policy=policy)
