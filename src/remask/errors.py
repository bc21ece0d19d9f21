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
    """Prompt and response make a canvas that is too long. The message is what makes it, followed by `problem`.

    Attributes:
        prompt_length, response_length: their numbers of tokens.
    """

    def __init__(self, parts: str, problem: str, prompt_length: int, response_length: int) -> None:
        super().__init__(parts + problem)
        self.problem = problem
        self.prompt_length = prompt_length
        self.response_length = response_length


class PromptError(ConfigError):
    """The tokens of a prompt cannot be used. The message names them `prompt_token_ids`."""


class FormError(ConfigError):
    """An answer cannot have the requested form. The message is the name of the field, followed by `problem`."""

    field = "structured_outputs"

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem = problem

    def __str__(self) -> str:
        return self.field + self.problem


LAST_TAG: Final = "v0.1.0a1"  # the tag of the last version with the names of `REPLACEMENTS`
_USE_PAPERS: Final = "use 'python -m remask_lab papers profile', which measures depths by the rule of the BiCache paper"
_INSTALL_CACHES: Final = "install remask-caches, which provides it (pip install remask-caches, in a checkout ./caches)"
_SIMILARITY_OPTIONS: Final = (
    *("tau", "ratios", "samples", "max-samples", "official", "joint", "needed-layers", "canvas", "response"),
    *("over-layers", "over-requests", "at-boundary", "plot"),
)
_USE_TAG: Final = "use that version"
_NOISE_OPTIONS: Final = ("mc-levels", "mc-schedule", "mc-sampler", "canvas-length")
REPLACEMENTS: Final[Mapping[str, str]] = {
    "speculate": "leave it out: the answer is the same; on a model of three modes use mode 'linear_speculation'",
    **dict.fromkeys(("acache", "elastic-cache", "entropy-cache"), _INSTALL_CACHES),
    "slowfast": f"{_INSTALL_CACHES}; its parameters are those of 'remasking.config'",
    "SlowFastKnobs": f"{_INSTALL_CACHES}; give its parameters as 'remasking.config'",
    "replay": "run the request of the trace again with its `sampling`, `cache` and `cache_config`",
    "segments": "send documents that several requests share in one order, as a shared prefix (`prefix_length`)",
    "remask_humaneval": "use lm-eval's own task, 'humaneval'",
    "remask_mbpp": "use lm-eval's own task, 'mbpp'",
    "bench serve": "use guidellm or 'vllm bench serve', as docs/load.md shows",
    **dict.fromkeys((f"analyze {name}" for name in ("decoding", "drift", "features", "routing", "steps")), _USE_TAG),
    **dict.fromkeys(("analyze first-predictions", "analyze leakage"), "use 'remask profile --input FILE'"),
    "analyze memory": "use 'remask inspect store', or that version",
    "analyze reuse": "use 'remask bench --caches none,reuse,bicache', or that version",
    **dict.fromkeys(("analyze grid", "analyze precision"), "use 'remask bench --variants', or that version"),
    "analyze curves": "use 'remask bench --caches all', or that version",
    **dict.fromkeys((f"profile --{name}" for name in _SIMILARITY_OPTIONS), _USE_PAPERS),
    **dict.fromkeys(("profile ops --bars", "profile ops --beside"), "use '--json', or that version"),
    "likelihood of uniform models": "use 'remask eval gen-ppl', or that version",
    **dict.fromkeys((f"eval {task} --{name}" for task in ("likelihood", "tasks") for name in _NOISE_OPTIONS), _USE_TAG),
    **dict.fromkeys(("gpu-bounds", "paper-shapes", "speed host"), _USE_TAG),
}
"""Fields, policies, commands and options that have left, by name, each with its replacement."""


class UnknownNameError(ConfigError):
    """A name of some `kind` is not one of the `candidates`. `path` precedes the name in the message.

    The message suggests the most similar name and lists all. If there are more than `MAX_LISTED`, it suggests up to
    `SUGGESTIONS` similar ones instead, and lists all only if none is similar. For a name that remask has dropped, it
    says what replaces it.
    """

    MAX_LISTED = 16  # names
    SUGGESTIONS = 3
    MAX_CHARS = 1024  # of the name, whose rest is left out: a client may send one of megabytes

    def __init__(self, kind: str, name: str, candidates: Iterable[str], path: str = "") -> None:
        self.kind = kind
        if len(name) > self.MAX_CHARS:
            name = f"{name[: self.MAX_CHARS]}..."
        self.name = path + name
        if name in REPLACEMENTS:
            super().__init__(f"The {kind} {self.name!r} left after {LAST_TAG}: {REPLACEMENTS[name]}.")
            return
        names = sorted(candidates)
        is_long = len(names) > self.MAX_LISTED
        count, cutoff = (self.SUGGESTIONS, 0.6) if is_long else (1, 0.5)
        message = f"Unknown {kind} {self.name!r}."
        similar = [repr(candidate) for candidate in difflib.get_close_matches(name, names, n=count, cutoff=cutoff)]
        if similar:
            leading = f"{', '.join(similar[:-1])} or " if len(similar) > 1 else ""
            message += f" Did you mean {leading}{similar[-1]}?"
        if not (is_long and similar):
            message += f" Available: {', '.join(names) or 'none'}."
        super().__init__(message)


class PluginError(ConfigError):
    """Another package, which the message names, provides something unusable or a name that exists already."""


class CheckpointError(RemaskError):
    """A checkpoint folder or file is missing, truncated, or does not fit the model."""


class PlanError(RemaskError):
    """A plan reads K/V that were never written, or contradicts itself: a defect of a policy, not of a request."""


class ConstraintError(RemaskError):
    """Settled tokens begin no answer of the requested form: a defect of remask, not of a request."""


class DecisionError(RemaskError):
    """A question of a decision has no answer, as its pass failed."""


class IntegrityError(RemaskError):
    """Pages, leases or slots are not conserved: a defect of the engine, not of a request."""


class TableError(RemaskError):
    """A depth table file cannot be read, or belongs to another model."""


class RecordError(RemaskError):
    """A file of measured results cannot be read or written, or belongs to another measurement."""


class OutputError(RemaskError):
    """A file of answers, a picture or a page cannot be written, such as on a full disk."""


class DeployError(RemaskError):
    """Ray could not be started or reached, or could not start the replicas of a model."""


class RankLostError(RemaskError):
    """A process with a part of the model has ended or is out of step, so nothing more can be computed."""


class QueueFullError(RemaskError):
    """The maximal number of requests waits; try again later."""


class DrainingError(RemaskError):
    """The engine takes no new requests, as it is about to stop."""


class EngineDeadError(RemaskError):
    """The engine's loop has stopped for good, by an error that its log has."""
