"""A request that has been checked and has not begun."""

import time
from collections.abc import Callable
from dataclasses import dataclass

from remask.engine.drafting import NO_DRAFTS, DraftRoom
from remask.engine.request import Request
from remask.request.result import FinishReason, Result, Usage
from remask.request.terms import PRIORITY_STEP_S
from remask.sampling.decoder import Decoding
from remask.text.stops import StopRule


@dataclass(slots=True, eq=False)
class PendingRequest:
    """What `Engine.check` returns and `Engine.submit` takes.

    Attributes:
        request: the request as it was given.
        decoding: how it is denoised.
        stops: what ends its response.
        row_layers: an upper bound of its work, see `RequestWork`.
        page_keys: identities of the exact pages that its prompt fills. Empty where no pages are shared.
        arrived: when it was submitted, by `clock`.
        clock: the engine's, in seconds.
        starts: how often it has begun or made the engine fail; more than once only after a failure of the engine.
        begun: whether its start has been reported.
        draft_room: what its drafts need.
        common: number of leading tokens that an earlier prompt has too; None where the request names its prefix.
    """

    request: Request
    decoding: Decoding
    stops: StopRule
    row_layers: int = 0
    page_keys: tuple[int, ...] = ()
    arrived: float = 0.0
    clock: Callable[[], float] = time.perf_counter
    starts: int = 0
    begun: bool = False
    draft_room: DraftRoom = NO_DRAFTS
    common: int | None = None

    @property
    def turn(self) -> float:
        """When it is its turn to begin, on the clock of `arrived`, among the requests of one body (`engine.turns`).

        The turn is fixed and later arrivals have later ones, so every request comes first after a while.
        """
        return self.arrived + PRIORITY_STEP_S * self.request.priority

    @property
    def elapsed_s(self) -> float:
        """Seconds since it was submitted."""
        return self.clock() - self.arrived

    @property
    def canvases(self) -> int:
        """Number of canvases that will run for it: two under classifier-free guidance."""
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
