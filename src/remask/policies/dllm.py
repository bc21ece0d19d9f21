"""`dllm-cache`: refreshes prompt and response at intervals of their own, and recomputes moved rows in between."""

from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias, get_args

import numpy as np

from remask.checks.fields import declare
from remask.checks.values import Choice, Real, Whole
from remask.errors import ConfigError
from remask.plan import Mask, Plan, Span, Spans, TopRho, View
from remask.policies.base import CachePolicy, RequestFacts, Schedule, Traits

Select: TypeAlias = Literal["value", "key", "random"]
SELECTS: tuple[Select, ...] = get_args(Select)
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

    With `select_layers` above 1 so many layers share one choice, made in the first of them: what moved there has moved
    in the next ones too. The paper chooses in each layer, and names sharing as future work.

    The authors also carry prompt rows through every step. Between prompt refreshes nothing reads these rows, so they
    are left out here. Only the row that predicts the first response position (Dream) stays live.
    """

    prompt_interval: int = declare(100, Whole(1), "Kp.")
    response_interval: int = declare(8, Whole(1), "Kr.")
    ratio: float = declare(0.25, Real(0, 1), "rho, from 0 (nothing in between) to 1, of all response positions.")
    cfg_interval: int = declare(
        1,
        Whole(1),
        "Kcfg; with classifier-free guidance the unconditional canvas runs every so many steps, and in the first five.",
    )
    select: Select = declare("value", Choice(SELECTS), "How the share is chosen.")
    select_layers: int = declare(
        1,
        Whole(1),
        "Consecutive layers that share a choice, from the second on; anew from a shared prefix's boundary.",
    )
    phase: Literal["up", "down"] = declare(
        "up",
        Choice(("up", "down")),
        "Steps are counted up from 0, as in the authors' code, or down from their number K to 1, as in the paper's "
        "text (a refresh where k = 0 modulo the interval), which needs a schedule that says how many there are.",
    )

    # Rows that are not computed add cached outputs; each canvas of a guided pair has caches and a clock.
    traits = Traits(schedule=Schedule(own_clocks=True), keeps=frozenset({"outputs"}), by_clock=True)

    def check(self, facts: RequestFacts) -> None:
        if self.phase == "down" and facts.steps is None:
            raise ConfigError(
                "phase='down' counts steps from their number, and here a threshold, a factor or the remasking rule "
                "decides how many there are; use phase='up', or sampling with 'steps'"
            )

    def guides(self, step: int) -> bool:
        return step < GUIDED_STEPS or step % self.cfg_interval == 0

    def plan(self, view: View) -> Plan:
        """The first layer computes all live rows; the others compute those that are due for a refresh or have moved."""
        refresh_prompt, refresh_response = self._due(view)
        count = 0 if refresh_response else self._count(view)
        make = partial(self._spans, view, refresh_prompt, refresh_response, count)
        drawn = self.select == "random" and count > 0
        spans = Spans(make()) if drawn else view.spans(("dllm-cache", refresh_prompt, refresh_response), make)
        # Guidance that is kept must serve the positions of later blocks too.
        predict = view.candidates if self.cfg_interval == 1 else view.noisy.copy()
        return Plan(spans, predict, refreshes=refresh_prompt or refresh_response)

    def repeats(self, view: View) -> int:
        """Until the next refresh, unless rows are drawn, which are others in every step."""
        drawn = self.select == "random" and self._count(view) > 0
        if drawn or any(self._due(view)) or self.cfg_interval > 1:
            return 0
        intervals = (self.prompt_interval, self.response_interval)
        if self.phase == "up":
            return min(interval - 1 - view.step % interval for interval in intervals)
        return min((self._clock(view) - 1) % interval for interval in intervals)

    def _clock(self, view: View) -> int:
        """What the interval must divide in a refresh."""
        if self.phase == "up":
            return view.step
        assert view.steps is not None
        return view.steps - view.step

    def _due(self, view: View) -> tuple[bool, bool]:
        """Whether the prompt is refreshed in a step, and the response. The first step fills both caches."""
        first, clock = not view.step, self._clock(view)
        return first or clock % self.prompt_interval == 0, first or clock % self.response_interval == 0

    def _count(self, view: View) -> int:
        """Rows of the response that are recomputed between refreshes."""
        return int((view.length - view.prompt) * self.ratio)

    def _spans(self, view: View, refresh_prompt: bool, refresh_response: bool, count: int) -> tuple[Span, ...]:
        response = view.rows(view.prompt, view.length)
        rows = view.everything if refresh_prompt else view.rows(view.prompt - view.shift, view.length)
        held = view.rows(0, 0) if refresh_prompt else rows & ~response
        if not refresh_response and not count:
            held = held | response
        deep = self._deep(view, rows, held, response, count) if view.layers > 1 else ()
        return (Span(range(1), rows), *deep)

    def _deep(self, view: View, rows: Mask, held: Mask, response: Mask, count: int) -> tuple[Span, ...]:
        """All layers but the first. Of the `response` only `count` rows are computed, where `count` is above 0."""
        layers = range(1, view.layers)
        if not count:
            return (Span(layers, rows, held=held if held.any() else None),)
        if self.select == "random":
            # The draw is made here, so the device has nothing to choose.
            groups = (range(i, min(i + self.select_layers, view.layers)) for i in layers[:: self.select_layers])
            return tuple(Span(part, rows, held=held | _undrawn(view, response, count, part.start)) for part in groups)
        pick = TopRho(response, count, self.select, first=layers.start, every=self.select_layers)
        return (Span(layers, rows, pick=pick, held=held if held.any() else None),)


def _undrawn(view: View, response: Mask, count: int, layer: int) -> Mask:
    """The response without the `count` rows drawn for `layer`. The draw depends on seed, step and layer alone."""
    positions = np.flatnonzero(response)
    drawn = np.random.default_rng([view.seed, view.step, layer]).permutation(positions)[:count]
    rest = response.copy()
    rest[drawn] = False
    return rest
