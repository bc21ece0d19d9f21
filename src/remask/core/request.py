"""A request as the engine takes it, and what comes back."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from remask.core.sampling import SamplingParams
from remask.core.work import LayerWork

FinishReason: TypeAlias = Literal["stop", "length", "cancelled", "timeout", "error"]


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to answer.

    Attributes:
        id: names the request; no two in an engine at a time have the same.
        prompt_token_ids: the prompt, int [prompt].
        params: how it is sampled.
        prefix_length: leading tokens that may be shared with other requests; 0 shares nothing.
        cache_salt: only requests of the same salt share stored prefixes; one per tenant keeps tenants apart.
        priority: lower ones begin first, equal ones in order of arrival. It does not touch what runs already.
        deadline_s: seconds from arrival after which the request ends with "timeout", waiting or running; None: never.
        drafts: the engine also tells, pass by pass, what it predicted (`Draft`).
    """

    id: str
    prompt_token_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    prefix_length: int = 0
    cache_salt: str = ""
    priority: int = 0
    deadline_s: float | None = None
    drafts: bool = False


@dataclass(slots=True)
class Usage:
    """Work done for one request.

    `forwards` counts forward passes without the prefix-only pass; a guided pair counts as one. `row_layers` sums rows
    times layers computed in them, both branches of a guided pair included. `cached_tokens` were read from the prefix
    store. `prefix_depth` is the number of leading layers that read them; `prefix_note` says why none did where some
    were wanted. `steps` counts denoising steps and those of a correction, `correction_steps` the latter alone; it is
    None where no correction was asked for.
    """

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    steps: int = 0
    forwards: int = 0
    row_layers: int = 0
    prefix_depth: int = 0
    prefix_note: str | None = None
    correction_steps: int | None = None


@dataclass(frozen=True, slots=True)
class Transfer:
    """Positions on the canvas that got tokens at the end of `step`, in ascending order.

    They are final, except on uniform models, whose tokens may change again until their block is done, and until the
    response is corrected where that was asked for.
    """

    step: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Draft:
    """What a pass predicted: a token for each position in `positions`, final or not, and how confident the model is.

    `confidences` are on the scale of the request's `remasking`. `passes` tells what each pass of the step computed and
    what of the shared prefix it reused, fill passes before the one that predicts; of a guided pair the conditional one.
    """

    step: int
    positions: tuple[int, ...]
    token_ids: tuple[int, ...]
    confidences: tuple[float, ...]
    passes: tuple[tuple[LayerWork, ...], ...] = ()


@dataclass(frozen=True, slots=True)
class Result:
    """A finished request. `token_ids` end with the first honoured stop token, or are `max_tokens` long."""

    id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    usage: Usage
    trace: tuple[Transfer, ...]
    first_settled_s: float | None  # seconds from arrival until the first response token was final
    elapsed_s: float  # seconds from arrival until the end
    error: str | None = None
