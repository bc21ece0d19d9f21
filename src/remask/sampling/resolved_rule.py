"""The remasking rule of a request, with the model family's choices filled in."""

from dataclasses import dataclass

from remask.errors import ConfigError
from remask.remasking.rules import REMASKING, RULES, Remasking, names_on
from remask.request.sampling_params import SamplingDefaults, SamplingParams

EPS = 1e-3  # end of Dream's time schedule, as published


@dataclass(frozen=True, slots=True)
class Rule:
    """How the noisy positions of one request are scored and chosen.

    `eps` is set where Dream's time schedule decides how many positions a step transfers.
    """

    remasking: Remasking
    eps: float | None


def resolve(params: SamplingParams, defaults: SamplingDefaults, blockwise: bool = False) -> Rule:
    """Return the rule of one request on a masked model whose family has these defaults.

    `blockwise` is that trait of the cache policy. Raises `ConfigError` where parameters contradict each other.
    """
    dynamic = params.threshold is not None or params.factor is not None
    rule = RULES.get(params.remasking or defaults.remasking)
    if dynamic and not rule.thresholds:
        if params.remasking is not None:
            name = "threshold" if params.threshold is not None else "factor"
            fitting = " or ".join(name for name in names_on("masked") if RULES.get(name).thresholds)
            raise ConfigError(f"{name} compares probabilities: use it with remasking {fitting}, not {rule.name}")
        rule = REMASKING["low_confidence"]
    if dynamic and params.eps is not None:
        raise ConfigError("eps shapes Dream's time schedule, and threshold and factor use no schedule; set one of them")
    by_family = rule.timed == "by_family" and (defaults.time_schedule or params.eps is not None)
    timed = rule.timed == "always" or by_family
    if params.eps is not None and not timed:
        raise ConfigError(f"eps shapes Dream's time schedule; remasking {rule.name!r} does not use one")
    if rule.blockwise is not None and blockwise:
        return Rule(RULES.get(rule.blockwise), None)
    return Rule(rule, (EPS if params.eps is None else params.eps) if timed else None)
