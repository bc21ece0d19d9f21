"""Which sampling parameters mean something on which kind of model."""

from remask.checks.fields import declared
from remask.checks.kinds import ModelKind, in_words
from remask.errors import ConfigError
from remask.remasking.rules import RULES, names_on
from remask.request.sampling_params import SamplingParams

_WHY = dict.fromkeys(
    ("repetition_penalty", "frequency_penalty", "presence_penalty"),
    "Positions are filled here in any order, several at a time and each before what stands to its left, so no token "
    "comes again at one of them; logit_bias and stop work on every model. ",
)


def check_fields(params: SamplingParams, kind: ModelKind) -> None:
    """Raise `ConfigError` where a parameter is set that has no meaning on a model of this kind."""
    fields = declared(SamplingParams)
    for name, field in fields.items():
        if kind not in field.kinds and getattr(params, name) != field.default:
            own = ", ".join(name for name, other in fields.items() if kind in other.kinds and not other.for_all)
            raise ConfigError(
                f"{name} is for {in_words(field.kinds)} models, and this one is {in_words((kind,))}; "
                f"leave it out. {_WHY.get(name, '')}Parameters of such models alone: {own}"
            )
    if params.remasking is not None and kind not in RULES.get(params.remasking).kinds:
        fitting = ", ".join(names_on(kind))
        raise ConfigError(f"remasking {params.remasking!r} is not defined on {in_words((kind,))} models; use {fitting}")
