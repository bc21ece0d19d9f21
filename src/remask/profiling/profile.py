"""`profile`: the depth table of a model, measured on prompts cut to every prefix ratio, with as many as it takes."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from remask.core.depth import DepthLookup, percent
from remask.errors import ConfigError
from remask.models.loaded import LoadedModel
from remask.models.transformer import Transformer
from remask.profiling.conversations import PromptSet
from remask.profiling.depth_table import DepthTable, Growth
from remask.profiling.similarity import Measure, PrefixProbe

RATIOS = (*range(5, 100, 5), 97, 98, 99)  # finer at the end, where depth rises fastest
FIRST_SAMPLES = 8
STILL = 2  # growths in a row that must leave the table as it was
SHORTEST_REST = 8  # tokens after the prefix below which a default ratio is left out


class Subject(Protocol):
    """What is profiled: an `LLM`, of which profiling needs no more than this."""

    loaded: LoadedModel
    model: Transformer
    progress: bool


@dataclass(frozen=True, slots=True)
class ProfileSettings:
    """How to profile.

    Attributes:
        tau: similarity that a layer must exceed.
        ratios: prefix ratios in percent; None takes every 5 % from 5 to 95, and 97 to 99, as far as they fit.
        samples: requests per ratio; None grows their number until the table stands still.
        max_samples: where growing ends anyway.
        tolerance: L1 distance between tables, in layers per ratio, that counts as standing still.
        official: the authors' profiler: no masks, r = prefix / (prefix + user prompt), one cosine per token. Otherwise
            the paper's definition on the canvas as BiCache sees it: masks included, flattened K and V.
        canvas: tokens of the longest canvas; None takes the prompt set's usual length, at most the model's.
        response: masks at the end of a canvas, at most half of what follows the prefix; None: the prompt set's.
        seed: of the choice of prompts.
    """

    tau: float = 0.97
    ratios: tuple[int, ...] | None = None
    samples: int | None = None
    max_samples: int = 512
    tolerance: float = 0.0
    official: bool = False
    canvas: int | None = None
    response: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.tau < 1:
            raise ConfigError(f"tau must lie between 0 and 1, got {self.tau}")
        if not self.tolerance >= 0:
            raise ConfigError(f"tolerance must be >= 0 layers, got {self.tolerance}")
        for name, least in {"samples": 1, "max_samples": 1, "canvas": 2, "response": 1}.items():
            value = getattr(self, name)
            if value is not None and value < least:
                raise ConfigError(f"{name} must be at least {least}, got {value}")
        if self.ratios is not None and (not self.ratios or any(not 0 <= r < 100 for r in self.ratios)):
            raise ConfigError(f"ratios must be percents from 0 to 99, got {list(self.ratios)}")


@dataclass(frozen=True, slots=True)
class _Cut:
    """How a conversation becomes a canvas: its first `prefix` tokens, its last `suffix` ones, and masks."""

    prefix: int
    suffix: int
    masks: int

    def prompt(self, tokens: Sequence[int]) -> list[int]:
        """The canvas without its masks."""
        return [*tokens[: self.prefix], *tokens[len(tokens) - self.suffix :]]


def profile(
    llm: Subject, prompts: PromptSet, settings: ProfileSettings | None = None, progress: bool = False
) -> DepthTable:
    """Measure the depth table of a model (BiCache section 5.1).

    For each of N conversations and each ratio, the head of the conversation is the prefix and its tail the rest of a
    canvas; what stood between them is left out. The prefix ends with a turn where one ends between half of what the
    longest canvas allows and all of it. The same conversations serve all ratios. Depth is the number of leading layers
    whose mean similarity over the conversations exceeds tau.

    N starts at 8 and doubles. It is large enough when two doublings in a row leave the table as it was.

    Raises `ConfigError` where a ratio cannot be reached on a canvas of that length, where the canvas exceeds the model,
    and for models that are not masked: `bicache`, which a table is for, is not defined on them.
    """
    settings = settings or ProfileSettings()
    shape = llm.model.config
    if shape.kind != "masked":
        raise ConfigError(
            f"a depth table is for bicache, which runs on masked models; {llm.loaded.name!r} ({shape.family}) is "
            f"{shape.kind}: profile a masked model"
        )
    canvas = settings.canvas or min(prompts.canvas, shape.max_length)
    if canvas > shape.max_length:
        raise ConfigError(f"canvas={canvas} exceeds the model's {shape.max_length} positions")
    response = 0 if settings.official else settings.response or prompts.response
    measure: Measure = "official" if settings.official else "flat"
    ratios = _reachable(settings.ratios, canvas)
    probe = PrefixProbe(llm.model, canvas)
    measured: list[NDArray[np.float64]] = []  # [ratios, layers] each
    growth: list[Growth] = []
    before: DepthLookup | None = None
    with tqdm(desc="profiling", unit="canvas", disable=not progress) as bar:
        for size in _sizes(settings):
            bar.total = size * len(ratios)
            while len(measured) < size:
                # Each request has a random stream of its own, so that growing N keeps the requests so far.
                conversation = prompts.draw(random.Random(f"{settings.seed}:{len(measured)}"), canvas)
                cuts = [_cut(ratio, canvas, response, conversation.ends) for ratio in ratios]
                measured.append(_measure(probe, conversation.tokens, cuts, measure, bar.update))
            curves = mean_curves(ratios, measured)
            entries = depth_entries(curves, settings.tau)
            lookup = DepthLookup(entries)
            if before is not None:
                growth.append(Growth(size, table_distance(before, lookup, ratios)))
                bar.set_postfix(samples=size, L1=growth[-1].distance)
            before = lookup
            if settings.samples is None and stands_still(growth, settings.tolerance):
                break
    return DepthTable(
        model=llm.loaded.name,
        fingerprint=llm.loaded.fingerprint,
        family=shape.family,
        layers=shape.layers,
        hidden=shape.hidden,
        vocab=shape.vocab,
        tau=settings.tau,
        definition=measure,
        samples=len(measured),
        source=f"{prompts.source}; canvases of up to {canvas} tokens, {response} masks; seed {settings.seed}",
        entries=entries,
        curves=curves,
        request_depths=request_depths(ratios, measured, settings.tau),
        growth=tuple(growth),
    )


def run_depth(similarity: Sequence[float], tau: float) -> int:
    """Number of leading layers whose similarity is strictly above `tau`."""
    return sum(1 for _ in takewhile(lambda value: value > tau, similarity))


def depth_entries(curves: Mapping[int, Sequence[float]], tau: float) -> dict[int, int]:
    """Entries of the table of these mean similarities: a ratio is added where it is deeper than all before it."""
    entries: dict[int, int] = {}
    deepest = 0
    for ratio in sorted(curves):
        depth = run_depth(curves[ratio], tau)
        if depth > deepest:
            entries[ratio] = deepest = depth
    return entries


def mean_curves(ratios: Iterable[int], measured: Sequence[NDArray[np.float64]]) -> dict[int, tuple[float, ...]]:
    """Mean similarity per layer of each ratio, to six digits; `measured` holds [ratios, layers] per request."""
    means = np.mean(measured, axis=0).round(6).tolist()
    return {ratio: tuple(curve) for ratio, curve in zip(ratios, means, strict=True)}


def request_depths(ratios: Iterable[int], measured: Sequence[NDArray[np.float64]], tau: float) -> dict[int, float]:
    """Mean of the depths that single requests have, per ratio: what the paper's text describes."""
    depths = [[run_depth(curve, tau) for curve in request.tolist()] for request in measured]
    return dict(zip(ratios, np.mean(depths, axis=0).round(3).tolist(), strict=True))


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


def _reachable(ratios: Sequence[int] | None, canvas: int) -> tuple[int, ...]:
    """The ratios to measure, ascending. Those that were asked for must be reached exactly on a canvas this long."""
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


def _longest(ratio: int, canvas: int) -> int:
    """Prefix of a canvas of the greatest length."""
    return max(1, round(ratio * canvas / 100))


def _cut(ratio: int, canvas: int, response: int, ends: Sequence[int]) -> _Cut:
    """A canvas of at most `canvas` tokens at `ratio` percent, its prefix one of `ends` if one is long enough."""
    longest = _longest(ratio, canvas)
    prefix = max((end for end in ends if longest <= 2 * end <= 2 * longest), default=longest)
    total = canvas if prefix == longest else round(100 * prefix / ratio)
    if total > canvas or percent(prefix, total) != ratio:
        prefix, total = longest, canvas
    rest = total - prefix
    masks = min(response, rest // 2)
    return _Cut(prefix, rest - masks, masks)


def _measure(
    probe: PrefixProbe, tokens: Sequence[int], cuts: Iterable[_Cut], measure: Measure, tick: Callable[[], object]
) -> NDArray[np.float64]:
    """Similarities of one conversation, K and V averaged with equal weight: [ratios, layers]. `tick`s per ratio."""
    rows = []
    for cut in cuts:
        rows.append(probe.similarity(cut.prompt(tokens), cut.masks, cut.prefix, measure).mean(axis=0))
        tick()
    return np.stack(rows)
