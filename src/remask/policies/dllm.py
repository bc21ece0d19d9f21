"""`dllm-cache` refreshes prompt and response at separate intervals, and recomputes rows that changed in between."""

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
    over the request, and the first one computes both. In between, the fraction `ratio` of response rows whose value
    vectors changed most is recomputed, layer by layer. The first layer is always computed, as its inputs are the tokens
    themselves.

    `select` names the rule that chooses rows (the paper's ablation). "key" compares keys instead of values, and so
    renews K instead of V of all rows that it compares. "random" draws the rows of each layer from the request's seed
    and the step; without a comparison, only the drawn rows are renewed.

    With `select_layers` above 1, that many consecutive layers share the choice of the first of them. The paper chooses
    in each layer, and names sharing as future work.

    The authors also compute prompt rows in every step. Between prompt refreshes nothing reads them, so they are left
    out here, but for the row that predicts the first response position (Dream).
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
        1, Whole(1), "Consecutive layers that share a choice, from the second on; anew from a shared prefix's boundary."
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
        """The first layer computes all live rows, the others those that are due for a refresh or changed most."""
        refresh_prompt, refresh_response = self._due_refreshes(view)
        count = 0 if refresh_response else self._pick_count(view)
        make_spans = partial(self._spans, view, refresh_prompt, refresh_response, count)
        if self.select == "random" and count > 0:  # other rows in every step
            spans = Spans(make_spans())
        else:
            spans = view.spans(("dllm-cache", refresh_prompt, refresh_response), make_spans)
        # Guidance that later steps reuse must cover the positions of later blocks too.
        predict = view.candidates if self.cfg_interval == 1 else view.noisy.copy()
        return Plan(spans, predict, refreshes=refresh_prompt or refresh_response)

    def repeats(self, view: View) -> int:
        """Until the next refresh, unless every step draws other rows."""
        draws_rows = self.select == "random" and self._pick_count(view) > 0
        if draws_rows or any(self._due_refreshes(view)) or self.cfg_interval > 1:
            return 0
        intervals = (self.prompt_interval, self.response_interval)
        if self.phase == "up":
            return min(interval - 1 - view.step % interval for interval in intervals)
        return min((self._clock(view) - 1) % interval for interval in intervals)

    def _clock(self, view: View) -> int:
        """The step number that a refresh interval must divide."""
        if self.phase == "up":
            return view.step
        assert view.steps is not None
        return view.steps - view.step

    def _due_refreshes(self, view: View) -> tuple[bool, bool]:
        """Whether the step refreshes the prompt, and whether it refreshes the response. The first step fills both."""
        if view.step == 0:
            return True, True
        clock = self._clock(view)
        return clock % self.prompt_interval == 0, clock % self.response_interval == 0

    def _pick_count(self, view: View) -> int:
        """Number of response rows that are recomputed between refreshes."""
        return int((view.length - view.prompt) * self.ratio)

    def _spans(self, view: View, refresh_prompt: bool, refresh_response: bool, count: int) -> tuple[Span, ...]:
        """The spans of a pass that recomputes `count` response rows, or all of them if the response is refreshed."""
        response = view.rows(view.prompt, view.length)
        rows = view.everything if refresh_prompt else view.rows(view.prompt - view.shift, view.length)
        held = view.rows(0, 0) if refresh_prompt else rows & ~response
        if not refresh_response and not count:
            held = held | response
        deep = self._deep_spans(view, rows, held, response, count) if view.layers > 1 else ()
        return (Span(range(1), rows), *deep)

    def _deep_spans(self, view: View, rows: Mask, held: Mask, response: Mask, count: int) -> tuple[Span, ...]:
        """The spans of all layers but the first: all `rows` but `held` are computed, and only `count` of `response`.

        With a `count` of 0 the rows of `response` are treated like any other.
        """
        layers = range(1, view.layers)
        if not count:
            return (Span(layers, rows, held=held if held.any() else None),)
        if self.select == "random":
            # Rows are drawn on the host, so the device chooses nothing.
            groups = (range(i, min(i + self.select_layers, view.layers)) for i in layers[:: self.select_layers])
            return tuple(
                Span(group, rows, held=held | _rows_not_drawn(view, response, count, group.start)) for group in groups
            )
        pick = TopRho(response, count, self.select, first=layers.start, every=self.select_layers)
        return (Span(layers, rows, pick=pick, held=held if held.any() else None),)


def _rows_not_drawn(view: View, response: Mask, count: int, layer: int) -> Mask:
    """Return `response` without the `count` rows drawn for `layer`. The draw depends on seed, step and layer alone."""
    positions = np.flatnonzero(response)
    drawn = np.random.default_rng([view.seed, view.step, layer]).permutation(positions)[:count]
    rows = response.copy()
    rows[drawn] = False
    return rows
