"""`bicache`: reuse of a shared prefix in shallow layers, and its refreshes in deep ones."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from types import MappingProxyType
from typing import ClassVar, Literal

from remask.checks.fields import check, declare
from remask.checks.values import Choice, Flag, OrNull, Whole, is_whole, shown
from remask.errors import ConfigError
from remask.plan import Plan, PrefixHit, Span, Spans, View
from remask.policies.base import Around, CachePolicy, RequestFacts, Traits, UnreadReason
from remask.policies.dense import Dense


def percent(prefix_length: int, canvas_length: int) -> int:
    """The prefix ratio r in percent of the canvas, masks included. Halves round to even, as in the authors' code."""
    return round(prefix_length / canvas_length * 100)


@dataclass(frozen=True, slots=True)
class DepthLookup:
    """Depth b over prefix ratio r in percent, increasing in both (BiCache section 5.1).

    Raises `ConfigError` if a ratio is no percentage or the depths decrease.
    """

    entries: Mapping[int, int]  # depths by prefix ratio in percent

    def __post_init__(self) -> None:
        entries = dict(sorted(self.entries.items()))
        if any(not 0 <= ratio <= 100 for ratio in entries):
            raise ConfigError(f"depth table: ratios are percents from 0 to 100, got {list(entries)}")
        depths = list(entries.values())
        if any(depth < 0 for depth in depths) or depths != sorted(depths):
            raise ConfigError(f"depth table: depths must not decrease as the ratio grows, got {entries}")
        object.__setattr__(self, "entries", MappingProxyType(entries))

    def depth(self, prefix_length: int, canvas_length: int) -> int:
        """The depth at the largest ratio in the table that is at most this request's; 0 (reuse nothing) if none is.

        Lengths are in tokens.
        """
        request_ratio = percent(prefix_length, canvas_length)
        return max((depth for ratio, depth in self.entries.items() if ratio <= request_ratio), default=0)


@dataclass(frozen=True, slots=True)
class Earned:
    """A depth that audits of requests earn (`policies.earned`)."""

    start: DepthLookup | None = None  # the depths until there are audits; None: nothing is read until then

    def start_depth(self, prefix_length: int, canvas_length: int) -> int:
        """The depth that is read until there are audits, for lengths in tokens."""
        return 0 if self.start is None else self.start.depth(prefix_length, canvas_length)


class _Refreshing(Around):
    """A policy that refreshes the rows of a prefix at intervals, around any inner policy."""

    __slots__ = ()
    refresh_interval: int | None

    @property
    def traits(self) -> Traits:
        """Idle passes run, because they may be refreshes."""
        traits = self.inner.traits
        return replace(traits, kinds=("masked",), exact=False, schedule=replace(traits.schedule, idle_passes="all"))

    def repeats(self, view: View) -> int:
        """As the inner policy, but at most up to the next refresh."""
        if self._is_refresh(view):
            return 0
        repeats = self.inner.repeats(view)
        interval = self.refresh_interval
        return repeats if interval is None else min(repeats, interval - 1 - view.step % interval)

    def _is_refresh(self, view: View) -> bool:
        """Whether this pass computes the prefix rows."""
        interval = self.refresh_interval
        is_due = view.step == 0 if interval is None else view.step % interval == 0
        # After a fill pass that refreshed, the next pass of the step reads the K/V that it wrote.
        return is_due and view.pass_index == 0


@dataclass(frozen=True, slots=True)
class BiCache(_Refreshing):
    """BiCache (arXiv 2606.07571, section 5) over any inner policy.

    Below the boundary layer the K/V of the prefix come from the store, and the prefix rows are never computed. From the
    boundary on the prefix rows are computed every `refresh_interval` steps, starting with the stored boundary state,
    and left out in between. The K/V of the first of these layers depend on that state alone, so they come from the
    store too. Without a shared prefix this is the inner policy.

    At depth 0 nothing is read from the store, and this is the inner policy. With `within_request` equation 5 still
    holds there, in all layers: the prefix's K/V belong to the request, and only refreshes renew them.

    Attributes:
        inner: the policy for everything but the prefix.
        depth: number of shallow layers, a table that gives it from the prefix ratio, or the depth that audits earn.
    """

    inner: CachePolicy = field(default_factory=Dense)
    depth: int | DepthLookup | Earned = 0
    refresh_interval: int | None = declare(
        16, OrNull(Whole(1)), "R; steps with step % R == 0 refresh. None refreshes at step 0 only."
    )
    boundary_state: Literal["stored", "recomputed"] = declare(
        "stored",
        Choice(("stored", "recomputed")),
        "`stored` restarts the deep layers from the prefix-only pass (the paper). `recomputed` also runs the prefix "
        "rows through the shallow layers on refresh steps, against the leased K/V, so that the deep layers start from "
        "states which have seen the suffix; it costs the whole canvas on those steps.",
        setting="boundary",
    )
    within_request: bool = declare(
        False,
        Flag(),
        "At depth 0 the prefix is refreshed every `refresh_interval` steps within the request, in all layers; if not, "
        "this is the inner policy there.",
        unset=False,
    )

    def __post_init__(self) -> None:
        check(self)
        if isinstance(self.inner, BiCache):
            raise ConfigError("bicache+bicache: both would own the shared prefix; name bicache once")
        if "inputs" in self.inner.traits.keeps:
            raise ConfigError(
                f"bicache cannot wrap {type(self.inner).__name__}: one restarts rows from the store's hidden states, "
                "the other keeps the request's own; name one of them"
            )
        depth: object = self.depth
        if not isinstance(depth, DepthLookup | Earned) and not is_whole(depth, 0):
            raise ConfigError(f"depth must be a number of layers >= 0, 'table' or 'earned', got {shown(depth)}")
        if self.within_request and is_whole(depth, 1):
            raise ConfigError(f"within_request=True says what happens at depth 0, and depth={depth}; leave it out")

    def within(self, prefix_length: int) -> CachePolicy:
        if prefix_length and self.within_request:
            return WithinRequest(self.inner, prefix_length, self.refresh_interval)
        return self.inner

    def with_depth(self, depth: int) -> "BiCache":
        """This policy with a number of layers as its depth."""
        return replace(self, depth=depth, within_request=self.within_request and not depth)

    @property
    def at_start_depth(self) -> "BiCache":
        """This policy with the depths that apply before any audit; it reads nothing if there are none."""
        return replace(self, depth=self.depth.start or DepthLookup({})) if isinstance(self.depth, Earned) else self

    def check(self, facts: RequestFacts) -> None:
        layers = facts.layers
        if isinstance(self.depth, int) and self.depth > layers:
            raise ConfigError(f"depth={self.depth} exceeds the model's {layers} layers; use 0 to {layers}")
        self.inner.check(facts)

    def boundary(self, prefix_length: int, canvas_length: int, layers: int) -> int:
        """Depth b, from the table or the setting, at most `layers`. For an earned depth the upper bound `layers`."""
        if isinstance(self.depth, Earned):
            return layers
        depth = self.depth.depth(prefix_length, canvas_length) if isinstance(self.depth, DepthLookup) else self.depth
        return min(depth, layers)

    def unread_reason(self, prefix_length: int, canvas_length: int) -> UnreadReason:
        """Why depth 0 applies at this prefix ratio: no audit has proven more, or the setting or the table says so."""
        ratio = percent(prefix_length, canvas_length)
        no_layer = f"no layer reads a prefix of {prefix_length} tokens, {ratio} % of the canvas"
        if isinstance(self.depth, Earned):
            return UnreadReason("depth", f"{no_layer}: audits have not proven yet that one may")
        if not isinstance(self.depth, DepthLookup):
            return UnreadReason("depth", "depth=0 reads no shared prefix")
        smallest = min(self.depth.entries, default=None)
        if smallest is None:
            return UnreadReason("short", f"{no_layer}: the depth table is empty")
        if ratio < smallest:
            return UnreadReason("short", f"{no_layer}: the depth table begins at {smallest} %")
        return UnreadReason("depth", f"{no_layer}: the depth table gives 0 there")

    def leased_layers(self, boundary: int, layers: int) -> int:
        """One more than `boundary` if rows restart from stored states there and the inner policy keeps no outputs."""
        restarts_from_store = self.boundary_state == "stored" and "outputs" not in self.inner.traits.keeps
        return min(boundary + int(restarts_from_store), layers)

    def repeats(self, view: View) -> int:
        """As the inner policy, but at most up to the next refresh, if there are layers to refresh."""
        if view.prefix is None or view.prefix.boundary == view.layers:
            return self.inner.repeats(view)
        return _Refreshing.repeats(self, view)

    def plan(self, view: View) -> Plan:
        """The inner plan, without the prefix rows below the boundary, and with them above it on refreshes."""
        plan = self.inner.plan(view)
        if view.prefix is None:
            return plan
        refresh = self._is_refresh(view) and view.prefix.boundary < view.layers  # else all layers read the store
        start = 0 if self.boundary_state == "recomputed" else view.prefix.boundary
        return _over_prefix(plan, view, view.prefix, start=start, refresh=refresh)


@dataclass(frozen=True, slots=True)
class WithinRequest(_Refreshing):
    """BiCache at depth 0: equation 5 in all layers, for a request that reads nothing from the store.

    The rows of the shared prefix are computed every `refresh_interval` steps, and their K/V are kept in between. These
    belong to the request, so no memory is shared.

    Attributes:
        inner: the policy for everything but the prefix.
        prefix: length of the prefix in tokens.
    """

    inner: CachePolicy = field(default_factory=Dense)
    prefix: int = 0
    refresh_interval: int | None = 16
    name: ClassVar[str] = "bicache (within_request)"

    def plan(self, view: View) -> Plan:
        nothing_leased = PrefixHit(self.prefix, boundary=0)
        return _over_prefix(self.inner.plan(view), view, nothing_leased, start=0, refresh=self._is_refresh(view))


def _over_prefix(plan: Plan, view: View, hit: PrefixHit, *, start: int, refresh: bool) -> Plan:
    """Return the inner `plan` without the prefix rows of `hit`; on a `refresh` they are live from layer `start` on."""
    make_spans = partial(_spans_over_prefix, plan.spans, hit, start if refresh else None)
    return plan.over(view.spans((plan.spans, refresh), make_spans), refreshes=refresh)


@lru_cache(maxsize=64)
def _spans_over_prefix(spans: Spans, hit: PrefixHit, start: int | None) -> Spans:
    """Return `spans` without the prefix rows of `hit` (`start` None), or with them in the layers from `start` on.

    Cached, so that canvases with equal arguments share one object.
    """
    prefix = hit.rows(len(spans[0].rows))

    def add_prefix(span: Span) -> Span:
        if start is None or span.layers.start < start:
            return span
        is_leased = span.layers.start < hit.layers
        frozen = prefix if span.frozen is None else prefix | span.frozen
        return replace(span, rows=span.rows | prefix, frozen=frozen if is_leased else span.frozen)

    def remove_prefix(span: Span) -> Span:
        return replace(span, rows=span.rows & ~prefix) if (span.rows & prefix).any() else span

    def restart_pick(span: Span) -> Span:
        # Above the leased layers rows have other pages, which hold no choice of the layers below.
        pick = span.pick
        if pick is None or pick.first >= hit.layers or span.layers.start < hit.layers:
            return span
        return replace(span, pick=replace(pick, first=hit.layers))

    return spans.map(remove_prefix).cut(hit.boundary).cut(hit.layers).map(add_prefix).map(restart_pick)
