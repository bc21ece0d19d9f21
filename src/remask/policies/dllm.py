"""`dllm-cache`: refreshes prompt and response at intervals of their own, and recomputes moved rows in between."""

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import numpy as np

from remask.core.checks import one_of, real, whole
from remask.core.plan import Mask, Plan, Span, TopRho, View
from remask.errors import ConfigError
from remask.policies.base import CachePolicy, RequestFacts, Schedule, Traits

Select: TypeAlias = Literal["value", "key", "random"]
SELECTS: tuple[Select, ...] = ("value", "key", "random")
Phase: TypeAlias = Literal["up", "down"]
PHASES: tuple[Phase, ...] = ("up", "down")
GUIDED_STEPS = 5  # first steps in which the unconditional canvas always runs, as in the authors' code


@dataclass(frozen=True, slots=True)
class DllmCache(CachePolicy):
    """dLLM-Cache (arXiv 2506.06295): K, V, attention and FFN outputs are cached per layer.

    Prompt rows are computed every `prompt_interval` steps, response rows every `response_interval`; steps are counted
    over the request, and the first one computes both. In between, the share `ratio` of the response whose value vectors
    moved most is recomputed, layer by layer. The first layer is always computed, as its inputs are the tokens
    themselves.

    `select` names the rule that chooses rows (the paper's ablation). "key" compares keys in place of values, and renews
    K in place of V for all rows that it compares. "random" draws the rows of each layer from the request's seed and the
    step. It compares nothing, so it renews only the rows that it draws.

    The authors also carry prompt rows through every step. Between prompt refreshes nothing reads these rows, so they
    are left out here. Only the row that predicts the first response position (Dream) stays live.

    Attributes:
        prompt_interval: Kp.
        response_interval: Kr.
        ratio: rho, from 0 (nothing in between) to 1, of all response positions.
        guidance_interval: Kcfg; with classifier-free guidance the unconditional canvas runs every so many steps, and in
            the first five.
        select: how the share is chosen.
        phase: steps are counted up from 0, as in the authors' code, or "down" from their number K to 1, as in the
            paper's text (a refresh where k = 0 modulo the interval). "down" needs a schedule that says how many steps
            there are.
    """

    prompt_interval: int = 100
    response_interval: int = 8
    ratio: float = 0.25
    guidance_interval: int = field(default=1, metadata={"setting": "cfg_interval"})
    select: Select = "value"
    phase: Phase = "up"

    def __post_init__(self) -> None:
        whole("prompt_interval", self.prompt_interval, low=1)
        whole("response_interval", self.response_interval, low=1)
        real("ratio", self.ratio, low=0, high=1)
        whole("cfg_interval", self.guidance_interval, low=1)
        one_of("select", self.select, SELECTS)
        one_of("phase", self.phase, PHASES)

    @property
    def traits(self) -> Traits:
        """Rows that are not computed add cached outputs; each canvas of a guided pair has caches and a clock."""
        return Traits(schedule=Schedule(own_clocks=True), keeps=frozenset({"outputs"}))

    def check(self, facts: RequestFacts) -> None:
        """Refuses to count down where nothing says from where."""
        if self.phase == "down" and facts.steps is None:
            raise ConfigError(
                "phase='down' counts steps from their number, and here a threshold, a factor or the remasking rule "
                "decides how many there are; use phase='up', or sampling with 'steps'"
            )

    def guides(self, step: int) -> bool:
        """In the first five steps, and every Kcfg steps."""
        return step < GUIDED_STEPS or step % self.guidance_interval == 0

    def plan(self, view: View) -> Plan:
        """The first layer computes all live rows; the others compute those that are due for a refresh or have moved."""
        response = np.arange(view.length) >= view.prompt
        first = not view.step
        clock = view.step if self.phase == "up" else (view.steps or 0) - view.step
        refresh_prompt = first or clock % self.prompt_interval == 0
        refresh_response = first or clock % self.response_interval == 0
        rows = view.everything if refresh_prompt else np.arange(view.length) >= view.prompt - view.shift
        held: Mask = rows & ~response if not refresh_prompt else np.zeros(view.length, dtype=np.bool_)
        count = 0 if refresh_response else int(int(response.sum()) * self.ratio)
        if not refresh_response and not count:
            held = held | response
        deep = self._deep(view, rows, held, response, count) if view.layers > 1 else ()
        # Guidance that is kept must serve the positions of later blocks too.
        predict = view.candidates if self.guidance_interval == 1 else view.noisy.copy()
        return Plan((Span(range(1), rows), *deep), predict, refreshes=refresh_prompt or refresh_response)

    def _deep(self, view: View, rows: Mask, held: Mask, response: Mask, count: int) -> tuple[Span, ...]:
        """All layers but the first. Of the `response` only `count` rows are computed, where `count` is above 0."""
        layers = range(1, view.layers)
        if not count:
            return (Span(layers, rows, held=held if held.any() else None),)
        if self.select == "random":
            # The draw is made here, so the device has nothing to choose.
            return tuple(Span(range(i, i + 1), rows, held=held | _undrawn(view, response, count, i)) for i in layers)
        return (Span(layers, rows, pick=TopRho(response, count, self.select), held=held if held.any() else None),)


def _undrawn(view: View, response: Mask, count: int, layer: int) -> Mask:
    """The response without the `count` rows drawn for `layer`. The draw depends on seed, step and layer alone."""
    positions = np.flatnonzero(response)
    drawn = np.random.default_rng([view.seed, view.step, layer]).permutation(positions)[:count]
    rest = response.copy()
    rest[drawn] = False
    return rest
