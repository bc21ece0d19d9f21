"""The error tree: everything that remask raises on purpose derives from `RemaskError`.

Messages name the field, the value, what is allowed and the way out.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final


class RemaskError(Exception):
    """Base of all errors raised by remask on purpose."""


class ConfigError(RemaskError, ValueError):
    """A setting, an option or a request field has a value that cannot be used."""


class CanvasLengthError(ConfigError):
    """Prompt and response make a longer canvas than there may be.

    Attributes:
        prompt, response: tokens of each.
    """

    def __init__(self, message: str, prompt: int, response: int) -> None:
        super().__init__(message)
        self.prompt, self.response = prompt, response


class FormError(ConfigError):
    """An answer cannot have the form that is asked for. `problem` is what stands behind the name of the field."""

    field = "structured_outputs"

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.field + self.problem


LAST_FULL: Final = "v0.1.0a1"  # the tag of the last version that has what `LEFT` names
_RULE: Final = "use 'python -m remask_lab papers profile', which measures depths by the rule of the BiCache paper"
_CACHES: Final = "install remask-caches, which provides it (pip install remask-caches, in a checkout ./caches)"
_OF_SIMILARITY: Final = (
    *("tau", "ratios", "samples", "max-samples", "official", "joint", "needed-layers", "canvas", "response"),
    *("over-layers", "over-requests", "at-boundary", "plot"),
)
_THAT: Final = "use that version"
_OF_NOISE: Final = ("mc-levels", "mc-schedule", "mc-sampler", "canvas-length")
LEFT: Final[Mapping[str, str]] = {
    "speculate": "leave it out: the answer is the same; on a model of three modes use mode 'linear_speculation'",
    **dict.fromkeys(("acache", "elastic-cache", "entropy-cache"), _CACHES),
    "slowfast": f"{_CACHES}; its parameters are those of 'remasking.config'",
    "SlowFastKnobs": f"{_CACHES}; give its parameters as 'remasking.config'",
    "replay": "run the request of the trace again with its `sampling`, `cache` and `cache_config`",
    "segments": "send documents that several requests share in one order, as a shared prefix (`prefix_length`)",
    "remask_humaneval": "use lm-eval's own task, 'humaneval'",
    "remask_mbpp": "use lm-eval's own task, 'mbpp'",
    "bench serve": "use guidellm or 'vllm bench serve', as docs/load.md shows",
    **dict.fromkeys((f"analyze {name}" for name in ("decoding", "drift", "features", "routing", "steps")), _THAT),
    **dict.fromkeys(("analyze first-predictions", "analyze leakage"), "use 'remask profile --input FILE'"),
    "analyze memory": "use 'remask inspect store', or that version",
    "analyze reuse": "use 'remask bench --caches none,reuse,bicache', or that version",
    **dict.fromkeys(("analyze grid", "analyze precision"), "use 'remask bench --variants', or that version"),
    "analyze curves": "use 'remask bench --caches all', or that version",
    **dict.fromkeys((f"profile --{name}" for name in _OF_SIMILARITY), _RULE),
    **dict.fromkeys(("profile ops --bars", "profile ops --beside"), "use '--json', or that version"),
    "likelihood of uniform models": "use 'remask eval gen-ppl', or that version",
    **dict.fromkeys((f"eval {one} --{name}" for one in ("likelihood", "tasks") for name in _OF_NOISE), _THAT),
    **dict.fromkeys(("gpu-bounds", "paper-shapes", "speed host"), _THAT),
}
"""What has left: fields, policies, commands and their options by name, each with what to use in its place."""


class UnknownNameError(ConfigError):
    """A name that stands for nothing. The message suggests the nearest and lists what exists; of many, the nearest.

    Of a name that has left it says what to use instead.
    """

    LISTED = 16  # names in one line, at most
    NEAREST = 3

    def __init__(self, kind: str, name: str, known: Iterable[str], within: str = "") -> None:
        self.kind, self.name = kind, within + name  # `within` is the path to it
        if name in LEFT:
            super().__init__(f"The {kind} {self.name!r} left after {LAST_FULL}: {LEFT[name]}.")
            return
        names = sorted(known)
        if len(names) > self.LISTED:
            near = difflib.get_close_matches(name, names, n=self.NEAREST) or difflib.get_close_matches(
                name, names, n=self.NEAREST, cutoff=0.0
            )
            *others, last = map(repr, near)
            question = f"{', '.join(others)} or {last}" if others else last
            super().__init__(f"Unknown {kind} {self.name!r}. Did you mean {question}?")
            return
        near = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        super().__init__(f"Unknown {kind} {self.name!r}.{hint} Available: {', '.join(names) or 'none'}.")


class PluginError(ConfigError):
    """Another package provides something that remask cannot use, or a name that is taken; the message names it."""


class CheckpointError(RemaskError):
    """A checkpoint folder or file is missing, truncated, or does not fit the model."""


class PlanError(RemaskError):
    """A plan reads what was never written, or contradicts itself: a defect of a policy, never of a user."""


class ConstraintError(RemaskError):
    """Settled tokens are no beginning of any answer of the form that was asked for: a defect, never of a user."""


class DecisionError(RemaskError):
    """A question of a decision could not be read, as the pass that was to do so failed."""


class IntegrityError(RemaskError):
    """Pages, leases or slots are not conserved: a defect of the engine, never of a user."""


class TableError(RemaskError):
    """A depth table file cannot be read, or belongs to another model."""


class RecordError(RemaskError):
    """A file of measured results cannot be read or written, or belongs to another measurement."""


class OutputError(RemaskError):
    """A file of answers, a picture or a page cannot be written, such as on a full disk."""


class DeployError(RemaskError):
    """Ray could not be started or reached, or could not start the replicas of a model."""


class RankLostError(RemaskError):
    """A process that computes a part of the model has ended, or is out of step: nothing more can be computed."""


class QueueFullError(RemaskError):
    """As many requests are accepted as may wait: try again later."""


class DrainingError(RemaskError):
    """The engine takes no new requests, as it is about to stop."""


class EngineDeadError(RemaskError):
    """The engine's loop has stopped for good, by a defect that its log names."""
