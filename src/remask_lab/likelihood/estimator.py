"""Which estimator of likelihoods a model has."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.likelihood.draws import Likelihood
from remask_lab.likelihood.masked import MaskDraws, MaskLikelihoods
from remask_lab.likelihood.names import MAX_ROWS
from remask_lab.likelihood.noised import NoiseDraws, NoiseLikelihoods
from remask_lab.likelihood.pairs import Pair

KINDS = ("masked", "uniform")
"""Kinds of models that have one."""


class LikelihoodEstimator(Protocol):
    """Estimates log-likelihoods of responses after prompts."""

    @property
    def draws(self) -> MaskDraws | NoiseDraws:
        """How it draws."""
        ...

    def check(self, pair: Pair) -> None:
        """Raise `ConfigError` on a pair that cannot be scored."""
        ...

    def score(
        self, pairs: Sequence[Pair], groups: Sequence[int] | None = None, progress: bool = False
    ) -> list[Likelihood]:
        """Return the log-likelihood of every response after its prompt. Pairs of one group share what is drawn."""
        ...

    def are_greedy(self, pairs: Sequence[Pair]) -> list[bool]:
        """Return whether greedy decoding would give each response."""
        ...


def open_estimator(llm: LLM, draws: Mapping[str, Any] | None = None, max_rows: int = MAX_ROWS) -> LikelihoodEstimator:
    """The estimator of the model's kind. `draws` are fields of `MaskDraws` or `NoiseDraws`; None leaves one out.

    Raises `ConfigError` on a kind that has none, on fields of the other kind, and on values that are not allowed.
    """
    kind = llm.model.config.kind
    given = {name: value for name, value in (draws or {}).items() if value is not None}
    if kind not in KINDS:
        raise ConfigError(
            f"likelihoods are bounds of masked and uniform models, and {llm.loaded.name!r} is a {kind} model, whose "
            "bound has another formula"
        )
    fields = MaskDraws if kind == "masked" else NoiseDraws
    for name in given:
        if name not in fields.__dataclass_fields__:
            raise ConfigError(
                f"{name}={given[name]!r} has no meaning for the likelihood of a {kind} model; leave it out"
            )
    if kind == "masked":
        return MaskLikelihoods(llm, MaskDraws(**given), max_rows)
    return NoiseLikelihoods(llm, NoiseDraws(**given), max_rows)
