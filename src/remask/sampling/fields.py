"""Which sampling parameters mean something on which kind of model."""

from dataclasses import fields

from remask.core.kinds import ModelKind
from remask.core.sampling import REMASKING, SamplingParams
from remask.errors import ConfigError

_KINDS: dict[str, tuple[ModelKind, ...]] = {
    "steps": ("masked",),
    "remasking": ("masked", "block_causal"),
    "eps": ("masked",),
    "threshold": ("masked", "block_causal"),
    "factor": ("masked",),
    "cfg_scale": ("masked",),
    "order": ("masked",),
    "slowfast": ("masked",),
    "fallback": ("block_causal",),
    "sub_block_length": ("block_causal",),
    "eb_threshold": ("block_causal",),
    "sampler": ("uniform",),
    "tokens_per_step": ("uniform",),
    "schedule": ("uniform",),
    "canvas_length": ("uniform",),
    "initial_canvas": ("uniform",),
    "min_tokens": ("uniform",),
    "correction_steps": ("uniform",),
    "correction_temperature": ("uniform",),
    "correction_tokens": ("uniform",),
}
_BLOCK_CAUSAL = ("low_confidence", "sequential", "entropy_bounded")
_REMASKING = {
    "masked": tuple(name for name in REMASKING if name not in _BLOCK_CAUSAL or name == "low_confidence"),
    "block_causal": _BLOCK_CAUSAL,
}


def check_fields(params: SamplingParams, kind: ModelKind) -> None:
    """Raise `ConfigError` where a parameter is set that has no meaning on a model of this kind."""
    for field in fields(params):
        kinds = _KINDS.get(field.name)
        if kinds is not None and kind not in kinds and getattr(params, field.name) != field.default:
            known = ", ".join(name for name, allowed in _KINDS.items() if kind in allowed)
            raise ConfigError(
                f"{field.name} is for {' and '.join(map(_words, kinds))} models, and this one is {_words(kind)}; "
                f"leave it out. Parameters of such models alone: {known}"
            )
    allowed = _REMASKING.get(kind, ())
    if params.remasking is not None and params.remasking not in allowed:
        raise ConfigError(
            f"remasking {params.remasking!r} is not defined on {_words(kind)} models; use {', '.join(allowed)}"
        )


def _words(kind: ModelKind) -> str:
    return kind.replace("_", "-")
