"""What a measurement of reuse in deep layers came to, and what it shows in words."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

ANOTHER, ONCE, PERIODIC = "another request", "once", "periodic"
SETTINGS = (ANOTHER, ONCE, PERIODIC)
_WORDS = {ANOTHER: "another request's", ONCE: "computed once", PERIODIC: "refreshed"}


@dataclass(frozen=True, slots=True)
class ReuseReport:
    """How much the prefix K/V that are read in deep layers are like those of a pass without a cache.

    Attributes:
        requests, steps: how many; steps are those of the longest request.
        layers: of the model. `depth`: per request, its shallow layers, whose K/V come from the store in all settings.
        refresh_interval: R of the periodic setting.
        similarity: per setting, mean over requests, [layers][steps].
        deep: per setting, mean over each request's deep layers and over requests, step by step.
        deep_mean: per setting, mean of all deep layers, steps and requests.
    """

    requests: int
    steps: int
    layers: int
    depth: tuple[int, ...]
    refresh_interval: int
    similarity: Mapping[str, tuple[tuple[float, ...], ...]]
    deep: Mapping[str, tuple[float, ...]]
    deep_mean: Mapping[str, float]


def reading(report: ReuseReport) -> str:
    """What the numbers show, in one paragraph."""
    means = report.deep_mean
    once = [value for value in report.deep[ONCE] if not math.isnan(value)]
    shallow = sorted(set(report.depth))
    depth = f"{shallow[0]}" if len(shallow) == 1 else f"{shallow[0]} to {shallow[-1]}"
    text = (
        f"In the layers above depth {depth} (of {report.layers}), K/V from another request have a mean similarity of "
        f"{means[ANOTHER]:.3f} to fresh ones, K/V computed once in the request {means[ONCE]:.3f}, and K/V refreshed "
        f"every {report.refresh_interval} steps {means[PERIODIC]:.3f}."
    )
    order = sorted(SETTINGS, key=lambda name: means[name], reverse=True)
    text += f" Best is {_WORDS[order[0]]}, then {_WORDS[order[1]]}, then {_WORDS[order[2]]}."
    if report.steps <= report.refresh_interval:
        return f"{text} No request lasts longer than one refresh interval, so the last two are the same."
    return f"{text} Computed once, it goes from {once[0]:.3f} in the first step to {once[-1]:.3f} in step {len(once)}."
