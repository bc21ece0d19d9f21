"""`profile` measures a table of similarities, on prompts that are cut to every prefix ratio."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.errors import ConfigError
from remask.policies.bicache import DepthLookup, percent
from remask.session import Session
from remask_lab.similarity.conversations import Conversation, PromptSet, SystemPrompt
from remask_lab.similarity.probe import Measure, PrefixProbe, limits_of, table_limits
from remask_lab.similarity.rule import DepthRule, ProfileSettings, depth_at, depth_entries
from remask_lab.similarity.table import Growth, SimilarityTable

RATIOS = (*range(5, 100, 5), 97, 98, 99)  # finer at the end, where depth rises fastest
SHORTEST_SUFFIX = 8  # tokens after the prefix below which a default ratio is left out


@dataclass(frozen=True, slots=True)
class Cut:
    """A canvas: `prompt`, whose first `prefix` tokens are the shared prefix, and `masks` masks behind it."""

    prompt: tuple[int, ...]
    prefix: int
    masks: int


def reachable(ratios: Sequence[int] | None, canvas: int, system: int | None = None) -> tuple[int, ...]:
    """Check the prefix ratios (percent) to measure, and return them ascending. None takes those of `RATIOS` that fit.

    `canvas` is the length of the longest canvas in tokens, and `system` that of the system prompt of all canvases, if
    they share one. Raises `ConfigError` where no prefix has exactly such a ratio, or none of `RATIOS` fits.
    """
    if system is not None:
        return _reachable_behind(system, ratios, canvas)
    prefixes = {ratio: _prefix_length(ratio, canvas) for ratio in range(100)}
    exact = {ratio for ratio, prefix in prefixes.items() if percent(prefix, canvas) == ratio and prefix < canvas}
    if ratios is None:
        fitting = [ratio for ratio in RATIOS if ratio in exact and canvas - prefixes[ratio] >= SHORTEST_SUFFIX]
        if not fitting:
            raise ConfigError(f"a canvas of {canvas} tokens is too short to profile; choose a longer one")
        return tuple(fitting)
    for ratio in ratios:
        if ratio not in exact:
            raise ConfigError(
                f"a canvas of {canvas} tokens cannot be cut at a prefix ratio of {ratio} %; choose a longer canvas"
            )
    return tuple(sorted(set(ratios)))


def _reachable_behind(system: int, ratios: Sequence[int] | None, canvas: int) -> tuple[int, ...]:
    """`reachable` for canvases that share a system prompt of `system` tokens."""
    cuts = {ratio: _system_cut(system, ratio, canvas) for ratio in (RATIOS if ratios is None else ratios)}
    suffixes = {ratio: cut[1] - cut[0] for ratio, cut in cuts.items() if cut is not None}  # tokens after the prefix
    if ratios is None:
        ratios = [ratio for ratio, suffix in suffixes.items() if suffix >= SHORTEST_SUFFIX]
    missing = [ratio for ratio in ratios if ratio not in suffixes]
    if missing or not ratios:
        raise ConfigError(
            f"behind a system prompt of {system} tokens no canvas of up to {canvas} has a prefix ratio of "
            f"{', '.join(map(str, missing)) or 'any measured'} %; use a longer system prompt, or other ratios"
        )
    return tuple(sorted(set(ratios)))


def _prefix_length(ratio: int, canvas: int) -> int:
    """Length of the prefix at `ratio` percent of the longest canvas, in tokens."""
    return max(1, round(ratio * canvas / 100))


def cut_at(first: Conversation, last: Sequence[int], ratio: int, canvas: int, response: int) -> Cut:
    """Cut a canvas of at most `canvas` tokens at `ratio` percent: the head of `first`, the tail of `last`, and masks.

    The prefix ends with a turn of `first` if one ends in the second half of what the longest canvas allows. Where all
    share a system prompt, the prefix is as much of it as fits, and the canvas as long as the ratio asks. Masks are
    `response`, or half of what follows the prefix if that is less.
    """
    longest = _prefix_length(ratio, canvas)
    lengths = None if first.system is None else _system_cut(first.system, ratio, canvas)
    if lengths is None:
        prefix = max((end for end in first.ends if longest <= 2 * end <= 2 * longest), default=longest)
        total = canvas if prefix == longest else round(100 * prefix / ratio)
        if total > canvas or percent(prefix, total) != ratio:
            prefix, total = longest, canvas
    else:
        prefix, total = lengths
    suffix = total - prefix
    masks = min(response, suffix // 2)
    return Cut((*first.tokens[:prefix], *last[len(last) - suffix + masks :]), prefix=prefix, masks=masks)


def _system_cut(system: int, ratio: int, canvas: int) -> tuple[int, int] | None:
    """Tokens of prefix and canvas at `ratio`, the prefix being the head of a system prompt; None if none is exact."""
    for prefix in range(min(system, _prefix_length(ratio, canvas)), 0, -1):
        total = min(canvas, round(100 * prefix / ratio)) if ratio else canvas
        if total > prefix and percent(prefix, total) == ratio:
            return prefix, total
    return None


FIRST_SAMPLES = 8
STILL = 2  # doublings in a row that must leave the table unchanged


class Cuts:
    """Requests numbered from 0, each cut to every ratio, and the similarities of their prefixes.

    `ratios` are in percent, ascending; `canvas` is the length of the longest canvas in tokens, and `response` counts
    the masks at its end. Raises `ConfigError` as `reachable` does, where the canvas exceeds the model's positions, and
    for models that are not masked.
    """

    def __init__(self, session: Session, prompts: PromptSet, settings: ProfileSettings) -> None:
        shape = session.model.config
        if shape.kind != "masked":
            raise ConfigError(
                f"depths are for bicache, which runs on masked models; {session.loaded.name!r} ({shape.family}) is "
                f"{shape.kind}: profile a masked model"
            )
        self.canvas = settings.canvas or min(prompts.canvas, shape.max_length)
        if self.canvas > shape.max_length:
            raise ConfigError(f"canvas={self.canvas} exceeds the model's {shape.max_length} positions")
        self.response = 0 if settings.official else settings.response or prompts.response
        self.definition: Measure = "official" if settings.official else "joint" if settings.joint else "flat"
        self._prompts, self._seed = prompts, settings.seed
        system = len(prompts.tokens) if isinstance(prompts, SystemPrompt) else None
        self.ratios = reachable(settings.ratios, self.canvas, system)
        self.probe = PrefixProbe(session.model, self.canvas)

    def measure(
        self,
        number: int,
        tick: Callable[[], object],
        head: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> NDArray[np.float64]:
        """Mean similarity of K and V of one request, float64 [ratios, layers]. Calls `tick` once per ratio.

        `layers` has the number of leading layers to compute at each ratio, None computes all, and the others are NaN.
        With `head`, tokens of a canvas' length, the prefix is cut from these in place of the request's own tokens.
        """
        cuts, layer_count = self.cut(number, head), self.probe.model.config.layers
        similarities = np.full((len(cuts), layer_count), np.nan)
        for row, cut, count in zip(similarities, cuts, layers or [layer_count] * len(cuts), strict=True):
            if count:
                row[:count] = self.similarity(cut, None if count == layer_count else count).mean(axis=0)
            tick()
        return similarities

    def similarity(self, cut: Cut, layers: int | None) -> NDArray[np.float64]:
        """Similarity of K and V of a canvas' prefix, [2, layers], in the first `layers` layers; None takes all."""
        return self.probe.similarity(cut.prompt, cut.masks, cut.prefix, self.definition, layers)

    def cut(self, number: int, head: Sequence[int] | None = None) -> list[Cut]:
        """The canvases that `measure` compares, one per ratio."""
        conversation = self.draw(number)
        head_source = conversation if head is None else Conversation(head, system=conversation.system)
        return [cut_at(head_source, conversation.tokens, ratio, self.canvas, self.response) for ratio in self.ratios]

    def draw(self, number: int) -> Conversation:
        """The conversation from which request `number` is cut, the same in every call."""
        # Each request has its own random stream, so a larger N keeps the requests of a smaller one.
        return self._prompts.draw(random.Random(f"{self._seed}:{number}"), self.canvas)


def profile(
    session: Session, prompts: PromptSet, settings: ProfileSettings | None = None, progress: bool = False
) -> SimilarityTable:
    """Measure the depths that similarities give a model (BiCache section 5.1).

    For each of N conversations and each ratio, the head of the conversation is the prefix and its tail the rest of a
    canvas. The prefix ends with a turn if one ends between half of the length that the longest canvas allows and all of
    it. Depths follow from similarities by `settings.rule`.

    N starts at 8 and doubles, until two doublings in a row leave the table within the tolerance. With
    `settings.needed_layers` a least depth that some request has already set bounds what later ones compute. Raises
    `ConfigError` as `Cuts` does.
    """
    settings = settings or ProfileSettings()
    cuts = Cuts(session, prompts, settings)
    measured: list[NDArray[np.float64]] = []  # [ratios, layers] each
    growth: list[Growth] = []
    last_lookup: DepthLookup | None = None
    with tqdm(desc="profiling", unit="canvas", disable=not progress) as bar:
        for size in _sizes(settings):
            bar.total = size * len(cuts.ratios)
            while len(measured) < size:
                layers = _needed_layers(settings, measured) if settings.needed_layers and measured else None
                measured.append(cuts.measure(len(measured), bar.update, layers=layers))
            limits = rule_limits(settings.rule, cuts.ratios, measured)
            entries = depth_entries(limits, settings.tau)
            lookup = DepthLookup(entries)
            if last_lookup is not None:
                growth.append(Growth(size, table_distance(last_lookup, lookup, cuts.ratios)))
                bar.set_postfix(samples=size, L1=growth[-1].distance)
            last_lookup = lookup
            last_steps = growth[-STILL:]
            stable = len(last_steps) == STILL and all(step.distance <= settings.tolerance for step in last_steps)
            if settings.samples is None and stable:
                break
    return SimilarityTable(
        model=session.loaded.name,
        layers=session.model.config.layers,
        tau=settings.tau,
        definition=cuts.definition,
        samples=len(measured),
        source=f"{prompts.source}; canvases of up to {cuts.canvas} tokens, {cuts.response} masks; seed {settings.seed}",
        rule=settings.rule,
        entries=entries,
        limits=limits,
        curves={} if settings.needed_layers else mean_curves(cuts.ratios, measured),
        request_depths={}
        if settings.needed_layers
        else request_depths(settings.rule, cuts.ratios, measured, settings.tau),
        growth=tuple(growth),
    )


def mean_curves(ratios: Iterable[int], measured: Sequence[NDArray[np.float64]]) -> dict[int, tuple[float, ...]]:
    """Mean similarity per layer of each ratio, to six digits; `measured` holds [ratios, layers] per request."""
    return _by_ratio(ratios, np.mean(measured, axis=0))


def rule_limits(
    rule: DepthRule, ratios: Iterable[int], measured: Sequence[NDArray[np.float64]]
) -> dict[int, tuple[float, ...]]:
    """Limits of the table that `rule` makes of these requests, to six digits; `measured` as in `mean_curves`.

    They end at the first layer that was not computed (NaN) for some request.
    """
    limits_by_ratio = _by_ratio(ratios, table_limits(rule, np.array(measured)))
    return {ratio: tuple(takewhile(math.isfinite, limits)) for ratio, limits in limits_by_ratio.items()}


def request_depths(
    rule: DepthRule, ratios: Iterable[int], measured: Sequence[NDArray[np.float64]], tau: float
) -> dict[int, float]:
    """Mean of the depths that single requests have under `rule`, per ratio, fractions kept."""
    depths = [[depth_at(limits, tau) for limits in request] for request in limits_of(rule, np.array(measured)).tolist()]
    return dict(zip(ratios, np.mean(depths, axis=0).round(3).tolist(), strict=True))


def _needed_layers(settings: ProfileSettings, measured: Sequence[NDArray[np.float64]]) -> list[int]:
    """How many leading layers, at each ratio, can still lower the least depth of the requests so far."""
    layers, limits = measured[0].shape[1], table_limits(settings.rule, np.array(measured))
    depths = [depth_at(row, settings.tau) for row in limits.tolist()]
    extra = settings.rule.boundary == "safe"  # the layer above the depth is looked at too
    return [min(layers, depth + extra) if depth else 0 for depth in depths]


def _by_ratio(ratios: Iterable[int], values: NDArray[np.float64]) -> dict[int, tuple[float, ...]]:
    """The rows of `values` [ratios, layers] by ratio, rounded to six digits."""
    return {ratio: tuple(row) for ratio, row in zip(ratios, values.round(6).tolist(), strict=True)}


def table_distance(before: DepthLookup, after: DepthLookup, ratios: Sequence[int]) -> float:
    """L1 distance of two tables in layers, averaged over `ratios`."""
    return sum(abs(before.depth(ratio, 100) - after.depth(ratio, 100)) for ratio in ratios) / len(ratios)


def _sizes(settings: ProfileSettings) -> Iterator[int]:
    """Numbers of requests per ratio after which the table is computed."""
    largest = settings.samples or settings.max_samples
    size = FIRST_SAMPLES
    while size < largest:
        yield size
        size *= 2
    yield largest
