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
SHORTEST_REST = 8  # tokens after the prefix below which a default ratio is left out


@dataclass(frozen=True, slots=True)
class Cut:
    """A canvas: `prompt`, whose first `prefix` tokens are the shared prefix, followed by `masks` masks."""

    prompt: tuple[int, ...]
    prefix: int
    masks: int


def reachable(ratios: Sequence[int] | None, canvas: int, system: int | None = None) -> tuple[int, ...]:
    """Return the ratios to measure, ascending. None takes those of `RATIOS` that fit.

    `system` is the length of the system prompt of all canvases. Raises `ConfigError` where a given ratio cannot be
    reached exactly on a canvas of this length, or with so short a system prompt, or none fits.
    """
    if system is not None:
        return _behind(system, ratios, canvas)
    reached = {r for r in range(100) if percent(_longest(r, canvas), canvas) == r and _longest(r, canvas) < canvas}
    if ratios is None:
        chosen = [r for r in RATIOS if r in reached and canvas - _longest(r, canvas) >= SHORTEST_REST]
        if not chosen:
            raise ConfigError(f"a canvas of {canvas} tokens is too short to profile; choose a longer one")
        return tuple(chosen)
    for ratio in ratios:
        if ratio not in reached:
            raise ConfigError(
                f"a canvas of {canvas} tokens cannot be cut at a prefix ratio of {ratio} %; choose a longer canvas"
            )
    return tuple(sorted(set(ratios)))


def _behind(system: int, ratios: Sequence[int] | None, canvas: int) -> tuple[int, ...]:
    """As `reachable`, behind a system prompt."""
    found = {ratio: _behind_system(system, ratio, canvas) for ratio in (RATIOS if ratios is None else ratios)}
    fitting = {ratio: lengths[1] - lengths[0] for ratio, lengths in found.items() if lengths is not None}
    if ratios is None:
        ratios = [ratio for ratio, rest in fitting.items() if rest >= SHORTEST_REST]
    missing = [ratio for ratio in ratios if ratio not in fitting]
    if missing or not ratios:
        raise ConfigError(
            f"behind a system prompt of {system} tokens no canvas of up to {canvas} has a prefix ratio of "
            f"{', '.join(map(str, missing)) or 'any measured'} %; use a longer system prompt, or other ratios"
        )
    return tuple(sorted(set(ratios)))


def _longest(ratio: int, canvas: int) -> int:
    """Return the prefix length of the longest canvas at this ratio."""
    return max(1, round(ratio * canvas / 100))


def cut_at(first: Conversation, last: Sequence[int], ratio: int, canvas: int, response: int) -> Cut:
    """Cut a canvas of at most `canvas` tokens at `ratio` percent: the head of `first`, the tail of `last`, and masks.

    The prefix ends with a turn of `first` if that makes it long enough. Where all have one system prompt, it is as much
    of that as fits, however short the canvas gets.
    """
    longest = _longest(ratio, canvas)
    fitting = None if first.system is None else _behind_system(first.system, ratio, canvas)
    if fitting is None:
        prefix = max((end for end in first.ends if longest <= 2 * end <= 2 * longest), default=longest)
        total = canvas if prefix == longest else round(100 * prefix / ratio)
        if total > canvas or percent(prefix, total) != ratio:
            prefix, total = longest, canvas
    else:
        prefix, total = fitting
    rest = total - prefix
    masks = min(response, rest // 2)
    return Cut((*first.tokens[:prefix], *last[len(last) - rest + masks :]), prefix, masks)


def _behind_system(system: int, ratio: int, canvas: int) -> tuple[int, int] | None:
    """Prefix and length of a canvas whose prefix is a system prompt of `system` tokens, or as much of it as fits."""
    for prefix in range(min(system, _longest(ratio, canvas)), 0, -1):
        total = min(canvas, round(100 * prefix / ratio)) if ratio else canvas
        if total > prefix and percent(prefix, total) == ratio:
            return prefix, total
    return None


FIRST_SAMPLES = 8
STILL = 2  # doublings in a row that must leave the table unchanged


class Cuts:
    """Requests numbered from 0, each cut to every ratio, and the similarities of their prefixes.

    Raises `ConfigError` where a ratio cannot be reached on a canvas of that length, where the canvas exceeds the model,
    and for models that are not masked. `ratios` are in percent, ascending; `canvas` and `response` the tokens of the
    longest canvas and the masks at its end.
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
        """Return the similarities of one request, of K and V: [ratios, layers]. Calls `tick` once per ratio.

        `layers` says how many leading ones are computed at each ratio; those above are NaN. None: all. With `head`
        these tokens, a canvas long, are the prefix, cut to the same length wherever turns end, before the question of
        request `number`.
        """
        cuts, every = self.cut(number, head), self.probe.model.config.layers
        found = np.full((len(cuts), every), np.nan)
        for row, cut, count in zip(found, cuts, layers or [every] * len(cuts), strict=True):
            if count:
                row[:count] = self.similarity(cut, None if count == every else count).mean(axis=0)
            tick()
        return found

    def similarity(self, cut: Cut, layers: int | None) -> NDArray[np.float64]:
        """Of K and V of the prefix of a canvas, [2, layers]; None: all layers."""
        return self.probe.similarity(cut.prompt, cut.masks, cut.prefix, self.definition, layers)

    def cut(self, number: int, head: Sequence[int] | None = None) -> list[Cut]:
        """Return the canvases that `measure` compares, one per ratio."""
        conversation = self.draw(number)
        first = conversation if head is None else Conversation(head, system=conversation.system)
        return [cut_at(first, conversation.tokens, ratio, self.canvas, self.response) for ratio in self.ratios]

    def draw(self, number: int) -> Conversation:
        """Return the conversation from which request `number` is cut. It is the same in every call."""
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
    before: DepthLookup | None = None
    with tqdm(desc="profiling", unit="canvas", disable=not progress) as bar:
        for size in _sizes(settings):
            bar.total = size * len(cuts.ratios)
            while len(measured) < size:
                layers = _needed(settings, measured) if settings.needed_layers and measured else None
                measured.append(cuts.measure(len(measured), bar.update, layers=layers))
            limits = rule_limits(settings.rule, cuts.ratios, measured)
            entries = depth_entries(limits, settings.tau)
            lookup = DepthLookup(entries)
            if before is not None:
                growth.append(Growth(size, table_distance(before, lookup, cuts.ratios)))
                bar.set_postfix(samples=size, L1=growth[-1].distance)
            before = lookup
            last = growth[-STILL:]
            still = len(last) == STILL and all(step.distance <= settings.tolerance for step in last)
            if settings.samples is None and still:
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

    They end where similarities were not computed (NaN) of some request.
    """
    found = _by_ratio(ratios, table_limits(rule, np.array(measured)))
    return {ratio: tuple(takewhile(math.isfinite, limits)) for ratio, limits in found.items()}


def request_depths(
    rule: DepthRule, ratios: Iterable[int], measured: Sequence[NDArray[np.float64]], tau: float
) -> dict[int, float]:
    """Mean of the depths that single requests have under `rule`, per ratio, fractions kept."""
    depths = [[depth_at(limits, tau) for limits in request] for request in limits_of(rule, np.array(measured)).tolist()]
    return dict(zip(ratios, np.mean(depths, axis=0).round(3).tolist(), strict=True))


def _needed(settings: ProfileSettings, measured: Sequence[NDArray[np.float64]]) -> list[int]:
    """How many leading layers may still lower the least depth at each ratio."""
    layers, found = measured[0].shape[1], table_limits(settings.rule, np.array(measured))
    depths = [depth_at(limits, settings.tau) for limits in found.tolist()]
    above = settings.rule.boundary == "safe"  # the layer above the depth is looked at too
    return [min(layers, depth + above) if depth else 0 for depth in depths]


def _by_ratio(ratios: Iterable[int], values: NDArray[np.float64]) -> dict[int, tuple[float, ...]]:
    return {ratio: tuple(row) for ratio, row in zip(ratios, values.round(6).tolist(), strict=True)}


def table_distance(before: DepthLookup, after: DepthLookup, ratios: Sequence[int]) -> float:
    """L1 distance of two tables in layers, averaged over `ratios`."""
    return sum(abs(before.depth(r, 100) - after.depth(r, 100)) for r in ratios) / len(ratios)


def _sizes(settings: ProfileSettings) -> Iterator[int]:
    """Numbers of requests per ratio after which the table is looked at."""
    last = settings.samples or settings.max_samples
    size = FIRST_SAMPLES
    while size < last:
        yield size
        size *= 2
    yield last
