"""A request's sampling parameters with the model family's choices filled in."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

from remask.core.sampling import SamplingParams
from remask.errors import ConfigError

Measure: TypeAlias = Literal["probability", "margin", "entropy"]

_TIME_SCHEDULED = ("entropy", "topk_margin", "maskgit_plus", "origin")
_MEASURES: dict[str, Measure] = {"entropy": "entropy", "topk_margin": "margin"}


@dataclass(frozen=True, slots=True)
class Rule:
    """How candidates are scored and chosen.

    `eps` is set where Dream's time schedule decides how many are transferred. `filtered` says that confidence is taken
    from the distribution after temperature, top-k and top-p, as Dream does; LLaDA takes it before.
    """

    remasking: str
    measure: Measure
    eps: float | None
    filtered: bool

    @property
    def ordered(self) -> bool:
        """Whether the positions of a step are known before its pass."""
        return self.remasking in ("order", "random")


def resolve(params: SamplingParams, family: str, blockwise: bool = False) -> Rule:
    """The rule for one request on a model of `family`; `blockwise` as the cache policy has it.

    Raises `ConfigError` where parameters contradict each other.
    """
    dynamic = params.threshold is not None or params.factor is not None
    default = "entropy" if family == "dream" and not dynamic else "low_confidence"
    remasking = params.remasking or default
    allowed = ("low_confidence", "maskgit_plus", "confidence_threshold")
    if dynamic and remasking not in allowed:
        name = "threshold" if params.threshold is not None else "factor"
        raise ConfigError(
            f"{name} compares probabilities: use it with remasking {' or '.join(allowed)}, not {remasking}"
        )
    if dynamic and params.eps is not None:
        raise ConfigError("eps shapes Dream's time schedule, and threshold and factor use no schedule; set one of them")
    timed = remasking in _TIME_SCHEDULED and (family == "dream" or remasking == "origin" or params.eps is not None)
    if params.eps is not None and not timed:
        raise ConfigError(f"eps shapes Dream's time schedule; remasking {remasking!r} does not use one")
    eps = (params.eps if params.eps is not None else 1e-3) if timed else None
    filtered = remasking in _TIME_SCHEDULED or remasking == "confidence_threshold"
    if remasking == "confidence_threshold" and blockwise:
        # Under Fast-dLLM's block caches the threshold is compared within the block, without a budget.
        return Rule("maskgit_plus", "probability", None, filtered)
    return Rule(remasking, _MEASURES.get(remasking, "probability"), eps, filtered)
