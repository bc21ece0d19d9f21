"""Limits of one request that depend on the model or on the operator."""

from dataclasses import dataclass

from remask.engine.config import EngineConfig
from remask.engine.drafting import DraftRoom
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask.sampling.decoder import Decoding

STEPS_PER_POSITION = 4  # of the default limit of steps


@dataclass(frozen=True, slots=True)
class RequestWork:
    """The work that a request asks for, known before it runs.

    Attributes:
        steps: denoising steps that its parameters name, those of a correction included.
        row_layers: an upper bound: row-layers of the passes of these steps, if each computed all rows in all
            layers. A cache policy computes fewer.
    """

    steps: int
    row_layers: int


@dataclass(frozen=True, slots=True)
class RequestLimits:
    """Limits of one request. Each error names the field, the value, the limit and the way out."""

    steps: int
    row_layers: int | None

    @classmethod
    def of(cls, config: EngineConfig, max_model_len: int) -> "RequestLimits":
        """The limits of an engine whose longest canvas has `max_model_len` positions."""
        steps = config.max_steps or STEPS_PER_POSITION * max_model_len
        return cls(steps, config.max_request_row_layers)

    def check_steps(self, params: SamplingParams) -> None:
        """Raise `ConfigError` where one of the fields that count steps exceeds the limit by itself."""
        for name in ("steps", "steps_per_block", "max_post_steps", "correction_steps"):
            value = getattr(params, name)
            if value is not None and value > self.steps:
                raise ConfigError(f"{name}={value} is more than the {self.steps} steps {_WAY_OUT}")

    def check_work(self, work: RequestWork, params: SamplingParams) -> None:
        """Raise `ConfigError` on more work than a request may ask for."""
        if work.steps > self.steps:
            names = [name for name in _STEP_FIELDS if getattr(params, name)] or ["max_tokens"]
            named = ", ".join(f"{name}={getattr(params, name)}" for name in names)
            raise ConfigError(f"{named} make {work.steps} steps, more than the {self.steps} {_WAY_OUT}")
        if self.row_layers is not None and work.row_layers > self.row_layers:
            raise ConfigError(
                f"max_tokens={params.max_tokens} and {work.steps} steps may take {work.row_layers} row-layers, and a "
                f"request may take {self.row_layers}; send a shorter prompt, a shorter response or fewer steps, or "
                "raise max_request_row_layers"
            )


_STEP_FIELDS = ("steps_per_block", "steps", "max_post_steps", "correction_steps", "block_length")
_WAY_OUT = "that a request may take; lower it, or raise max_steps"


def work_of(decoding: Decoding, canvases: int, layers: int, drafts: DraftRoom, *, skips: bool) -> RequestWork:
    """The work of a request on `canvases` canvases. `skips`: no pass is run for a step that transfers nothing."""
    rows = (decoding.longest * canvases + drafts.drafts * drafts.rows) * layers
    return RequestWork(decoding.total_steps, decoding.passes(skips=skips) * rows)
