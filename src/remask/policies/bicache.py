"""`bicache`: reuse of a shared prefix in shallow layers, and its refreshes in deep ones."""

from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import Literal

from remask.checks.values import flag, is_whole, one_of, whole
from remask.errors import ConfigError
from remask.plan import Plan, PrefixHit, Span, Spans, View
from remask.policies.base import CachePolicy, RequestFacts, Traits
from remask.policies.dense import Dense
from remask.policies.depth_lookup import DepthLookup

BOUNDARIES = ("stored", "recomputed")


@dataclass(frozen=True, slots=True)
class BiCache(CachePolicy):
    """BiCache (arXiv 2606.07571, section 5) over any inner policy.

    Below the boundary the K/V of the prefix come from the store, and its rows are never computed. Above it the prefix
    rows rejoin every `refresh_interval` steps, where they restart from the stored boundary state. In between they stay
    out. K/V of the first layer above the boundary depend on that state alone, so they are the store's too. Without a
    shared prefix this is the inner policy. Stored parts that stand elsewhere in the prompt are treated alike, all at
    one boundary.

    Where the depth is 0 nothing is read from the store, and equation 5 still holds for all layers: the prefix's K/V are
    the request's own, and renewed on refreshes alone (`within_request`).

    Attributes:
        inner: the policy for everything but the prefix.
        depth: number of shallow layers, or a table that gives it from the prefix ratio.
        refresh_interval: R; steps with step % R == 0 refresh. None refreshes at step 0 only.
        boundary_state: "stored" restarts the deep layers from the prefix-only pass (the paper). "recomputed" also runs
            the prefix rows through the shallow layers on refresh steps, against the leased K/V, so that the deep layers
            start from states which have seen the suffix; it costs the whole canvas on those steps.
        within_request: at depth 0 the prefix is refreshed every `refresh_interval` steps within the request, in all
            layers; if not, this is the inner policy there. None: it is where a table says 0, and not where `depth=0`
            is set, which asks for nothing to be reused.
    """

    inner: CachePolicy = field(default_factory=Dense)
    depth: int | DepthLookup = 0
    refresh_interval: int | None = 16
    boundary_state: Literal["stored", "recomputed"] = field(default="stored", metadata={"setting": "boundary"})
    within_request: bool | None = field(default=None, metadata={"unset": None})

    def __post_init__(self) -> None:
        if isinstance(self.inner, BiCache):
            raise ConfigError("bicache+bicache: both would own the shared prefix; name bicache once")
        if "attention" in self.inner.traits.keeps:
            raise ConfigError(
                "bicache cannot wrap elastic-cache: one restarts rows from the store's hidden states, the "
                "other from the request's own; name one of them"
            )
        depth: object = self.depth
        if not isinstance(depth, DepthLookup) and not is_whole(depth, 0):
            raise ConfigError(f"depth must be a number of layers >= 0 or 'table', got {depth!r}")
        whole("refresh_interval", self.refresh_interval, low=1, optional=True)
        one_of("boundary", self.boundary_state, BOUNDARIES)
        if self.within_request is not None:
            flag("within_request", self.within_request)
            if is_whole(depth, 1):
                raise ConfigError(
                    f"within_request={self.within_request!r} says what happens at depth 0, and depth={depth!r}; leave "
                    "it out"
                )

    @property
    def traits(self) -> Traits:
        """The traits of the inner policy, except that idle passes run, because they may be refreshes."""
        return _traits(self.inner)

    @property
    def without_prefix(self) -> CachePolicy:
        """The inner policy."""
        return self.inner

    def within(self, parts: tuple[range, ...]) -> CachePolicy:
        """Refreshes of `parts` within the request, over the inner policy; or the inner policy alone."""
        wanted = self.depth != 0 if self.within_request is None else self.within_request
        return WithinRequest(self.inner, parts, self.refresh_interval) if parts and wanted else self.inner

    def check(self, facts: RequestFacts) -> None:
        """Refuses a depth beyond the model's layers, and what the inner policy refuses."""
        layers = facts.layers
        if isinstance(self.depth, int) and self.depth > layers:
            raise ConfigError(f"depth={self.depth} exceeds the model's {layers} layers; use 0 to {layers}")
        self.inner.check(facts)

    def guides(self, step: int) -> bool:
        """As the inner policy."""
        return self.inner.guides(step)

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:
        """Depth b, from the table or as given, at most `layers`."""
        depth = self.depth.depth(prefix, canvas) if isinstance(self.depth, DepthLookup) else self.depth
        return min(depth, layers)

    def leased_layers(self, boundary: int, layers: int) -> int:
        """With a stored boundary one more than `boundary`: the K/V there are a function of the stored state alone.

        An inner policy that keeps outputs needs slots of its own for the rows that it computes there.
        """
        stored = self.boundary_state == "stored" and "outputs" not in self.inner.traits.keeps
        return min(boundary + stored, layers)

    def refreshes(self, step: int) -> bool:
        """Whether the prefix rows rejoin the deep layers in this step."""
        return _due(self.refresh_interval, step)

    def repeats(self, view: View) -> int:
        """As the inner policy, until the prefix rows rejoin or leave."""
        if view.prefix is None or view.prefix.boundary == view.layers:
            return self.inner.repeats(view)
        return 0 if self._rejoins(view, view.prefix) else _repeats(self.inner, self.refresh_interval, view)

    def draft_rows(self, canvas: int, response: int, block: int) -> int | None:
        """As the inner policy: between refreshes the prefix is read, and no plan repeats beyond one."""
        return self.inner.draft_rows(canvas, response, block)

    def _rejoins(self, view: View, hit: PrefixHit) -> bool:
        """Whether this pass computes the prefix rows above the boundary."""
        return self.refreshes(view.step) and view.pass_index == 0 and hit.boundary < view.layers

    def plan(self, view: View) -> Plan:
        """The inner plan, cut at the boundary, with the prefix rows taken out below and put in above on refreshes."""
        plan = self.inner.plan(view)
        if view.prefix is None:
            return plan
        # At boundary = layers no deep rows are left to refresh. After a fill pass that refreshed, the next pass of the
        # step reads the K/V that it wrote.
        refresh = self._rejoins(view, view.prefix)
        start = 0 if self.boundary_state == "recomputed" else view.prefix.boundary
        return _over_prefix(plan, view, view.prefix, start, refresh=refresh)


@dataclass(frozen=True, slots=True)
class WithinRequest(CachePolicy):
    """BiCache at depth 0: equation 5 in all layers, for a request that reads nothing from the store.

    The rows of the shared parts are computed every `refresh_interval` steps, and keep the K/V that these steps gave
    them in between. They are the request's own, so no memory is shared.

    Attributes:
        inner: the policy for everything but the parts.
        parts: positions of the parts in the prompt, ascending.
        refresh_interval: R; steps with step % R == 0 refresh. None refreshes at step 0 only.
    """

    inner: CachePolicy = field(default_factory=Dense)
    parts: tuple[range, ...] = ()
    refresh_interval: int | None = 16

    @property
    def traits(self) -> Traits:
        """As those of `BiCache`."""
        return _traits(self.inner)

    @property
    def without_prefix(self) -> CachePolicy:
        """The inner policy."""
        return self.inner

    def check(self, facts: RequestFacts) -> None:
        """As the inner policy."""
        self.inner.check(facts)

    def guides(self, step: int) -> bool:
        """As the inner policy."""
        return self.inner.guides(step)

    def repeats(self, view: View) -> int:
        """As the inner policy, until the parts are refreshed, and not beyond a refresh."""
        return 0 if self._rejoins(view) else _repeats(self.inner, self.refresh_interval, view)

    def draft_rows(self, canvas: int, response: int, block: int) -> int | None:
        """As the inner policy; see `BiCache`."""
        return self.inner.draft_rows(canvas, response, block)

    def _rejoins(self, view: View) -> bool:
        return _due(self.refresh_interval, view.step) and view.pass_index == 0

    def plan(self, view: View) -> Plan:
        """The inner plan, with the rows of the parts put in on refreshes, and taken out elsewhere."""
        nothing_leased = PrefixHit(sum(map(len, self.parts)), 0, 0, self.parts)
        return _over_prefix(self.inner.plan(view), view, nothing_leased, 0, refresh=self._rejoins(view))


def _due(interval: int | None, step: int) -> bool:
    return step == 0 if interval is None else step % interval == 0


def _traits(inner: CachePolicy) -> Traits:
    traits = inner.traits
    return replace(traits, kinds=("masked",), schedule=replace(traits.schedule, idle_passes="all"))


def _repeats(inner: CachePolicy, interval: int | None, view: View) -> int:
    """Repeats of a step without refresh: as many as the inner policy allows, up to the next refresh."""
    repeats = inner.repeats(view)
    return repeats if interval is None else min(repeats, interval - 1 - view.step % interval)


def _over_prefix(plan: Plan, view: View, hit: PrefixHit, start: int, *, refresh: bool) -> Plan:
    """An inner `plan` without the rows of `hit`; on a `refresh` they are computed from layer `start` on."""
    placed = partial(_placed, plan.spans, hit, start if refresh else None)
    return plan.over(view.spans((plan.spans, refresh), placed), refreshes=refresh)


@lru_cache(maxsize=64)
def _placed(spans: Spans, hit: PrefixHit, start: int | None) -> Spans:
    """`spans` with the prefix rows taken out, and put in from layer `start` on. Canvases with the same get the same."""
    prefix = hit.rows(len(spans[0].rows))

    def rejoin(span: Span) -> Span:
        if start is None or span.layers.start < start:
            return span
        leased = span.layers.start < hit.layers
        frozen = prefix if span.frozen is None else prefix | span.frozen
        return replace(span, rows=span.rows | prefix, frozen=frozen if leased else span.frozen)

    def without(span: Span) -> Span:
        return replace(span, rows=span.rows & ~prefix) if (span.rows & prefix).any() else span

    def restart(span: Span) -> Span:
        # Above the leased layers a row has other pages, in which no choice of the layers below is noted.
        pick = span.pick
        if pick is None or not pick.first < hit.layers <= span.layers.start:
            return span
        return replace(span, pick=replace(pick, first=hit.layers))

    return spans.map(without).cut(hit.boundary).cut(hit.layers).map(rejoin).map(restart)
