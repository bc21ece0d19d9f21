"""`profile` measures the depth table of a model, on prompts that are cut to every prefix ratio."""

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.checkpoint.loaded import LoadedModel
from remask.depth.conversations import Conversation, PromptSet, SystemPrompt
from remask.depth.cuts import Cut, cut_at, reachable
from remask.depth.limits import depth_at, depth_entries, limits_of, table_limits
from remask.depth.rule import DepthRule
from remask.depth.settings import ProfileSettings
from remask.depth.similarity import Measure, PrefixProbe
from remask.depth.table import DepthTable, Growth
from remask.errors import ConfigError
from remask.model.transformer import Transformer
from remask.policies.depth_lookup import DepthLookup

FIRST_SAMPLES = 8
STILL = 2  # doublings in a row that must leave the table unchanged


class Subject(Protocol):
    """The parts of an `LLM` that profiling needs."""

    loaded: LoadedModel
    model: Transformer
    progress: bool


class Cuts:
    """Requests numbered from 0, each cut to every ratio, and the similarities of their prefixes.

    Raises `ConfigError` where a ratio cannot be reached on a canvas of that length, where the canvas exceeds the model,
    and for models that are not masked.

    Attributes:
        ratios: in percent, ascending.
        canvas, response: tokens of the longest canvas, and masks at its end.
        definition: how similarity is computed.
    """

    def __init__(self, llm: Subject, prompts: PromptSet, settings: ProfileSettings, *, behind: bool = False) -> None:
        """As the class says; with `behind` what requests share stands behind their masks, and not in front."""
        shape = llm.model.config
        if shape.kind != "masked":
            raise ConfigError(
                f"a depth table is for bicache, which runs on masked models; {llm.loaded.name!r} ({shape.family}) is "
                f"{shape.kind}: profile a masked model"
            )
        self.canvas = settings.canvas or min(prompts.canvas, shape.max_length)
        if self.canvas > shape.max_length:
            raise ConfigError(f"canvas={self.canvas} exceeds the model's {shape.max_length} positions")
        self.response = 0 if settings.official else settings.response or prompts.response
        self.definition: Measure = "official" if settings.official else "joint" if settings.joint else "flat"
        self._prompts, self._seed, self._behind = prompts, settings.seed, behind
        system = len(prompts.tokens) if isinstance(prompts, SystemPrompt) else None
        self.ratios = reachable(settings.ratios, self.canvas, system)
        self._probe = PrefixProbe(llm.model, self.canvas)

    def measure(
        self,
        number: int,
        tick: Callable[[], object],
        head: Sequence[int] | None = None,
        layers: Sequence[int] | None = None,
    ) -> NDArray[np.float64]:
        """Return the similarities of one request, of K and V: [ratios, layers]. Calls `tick` once per ratio.

        `layers` says how many leading ones are computed at each ratio; those above are NaN. None: all.

        With `head` these tokens, a canvas long, are the prefix, cut to the same length wherever turns end. The question
        stays that of request `number`.
        """
        cuts, every = self.cut(number, head), self._probe.model.config.layers
        found = np.full((len(cuts), every), np.nan)
        for row, cut, count in zip(found, cuts, layers or [every] * len(cuts), strict=True):
            if count:
                row[:count] = self._similarity(cut, None if count == every else count).mean(axis=0)
            tick()
        return found

    def _similarity(self, cut: Cut, layers: int | None) -> NDArray[np.float64]:
        if not self._behind:
            return self._probe.similarity(cut.prompt, cut.masks, cut.prefix, self.definition, layers)
        shared, own = cut.prompt[: cut.prefix], cut.prompt[cut.prefix :]
        return self._probe.behind(own, cut.masks, shared, self.definition)

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
    llm: Subject, prompts: PromptSet, settings: ProfileSettings | None = None, progress: bool = False
) -> DepthTable:
    """Measure the depth table of a model (BiCache section 5.1).

    For each of N conversations and each ratio, the head of the conversation is the prefix and its tail the rest of a
    canvas; what is between them is left out. The prefix ends with a turn if one ends between half of the length that
    the longest canvas allows and all of it. The same conversations serve all ratios. Depths follow from their
    similarities by `settings.rule`.

    N starts at 8 and doubles. It is large enough when two doublings in a row leave the table within the tolerance.

    With `settings.needed_layers` a least depth that some request has already set bounds what later ones compute: of
    leading layers, those above it cannot change it.

    Raises `ConfigError` where a ratio cannot be reached on a canvas of that length, where the canvas exceeds the model,
    and for models that are not masked: `bicache`, which a table is for, is not defined on them.
    """
    settings = settings or ProfileSettings()
    cuts = Cuts(llm, prompts, settings)
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
            if settings.samples is None and stands_still(growth, settings.tolerance):
                break
    shape = llm.model.config
    return DepthTable(
        model=llm.loaded.name,
        fingerprint=llm.loaded.fingerprint,
        family=shape.family,
        layers=shape.layers,
        hidden=shape.hidden,
        vocab=shape.vocab,
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


def run_depth(similarity: Sequence[float], tau: float) -> int:
    """Number of leading layers whose similarity is strictly above `tau`."""
    return sum(1 for _ in takewhile(lambda value: value > tau, similarity))


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


def stands_still(growth: Sequence[Growth], tolerance: float) -> bool:
    """Whether the last growths of N all left the table within `tolerance`."""
    last = growth[-STILL:]
    return len(last) == STILL and all(step.distance <= tolerance for step in last)


def _sizes(settings: ProfileSettings) -> Iterator[int]:
    """Numbers of requests per ratio after which the table is looked at."""
    last = settings.samples or settings.max_samples
    size = FIRST_SAMPLES
    while size < last:
        yield size
        size *= 2
    yield last
