"""The trace of a finished request, as trainers read it and as `replay` takes it."""

from collections.abc import Sequence

from remask.engine.request import Request
from remask.policies.registry import name_of, settings_of
from remask.request.result import Transfer, Usage
from remask.request.trace import Trace, events_of


def trace_of(request: Request, transfers: Sequence[Transfer], usage: Usage, fingerprint: str) -> Trace:
    """The trace of a run of `request` that wrote `transfers`, on the model with this `fingerprint`.

    It names the prefix that was read, as `usage` tells, or the parts that were asked for: a replay reads the same.

    The request's parameters have a seed (`engine.build_request`).
    """
    return Trace(
        model=fingerprint,
        cache=name_of(request.policy),
        cache_config=settings_of(request.policy),
        prompt_tokens=len(request.prompt_token_ids),
        prefix_length=request.prefix_length if request.segments else usage.prefix_tokens or request.prefix_length,
        segments=request.segments,
        sampling=request.params.chosen(),
        formed=request.formed,
        events=events_of(transfers, len(request.prompt_token_ids)),
    )
