"""The terms of a request: all fields other than prompt and sampling parameters. Each is declared here only."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from remask.checks.fields import Nested, check, declare, declared, documented, parse, unknown_name_error
from remask.checks.values import LARGEST, LIST, POSITIONS, AnyOf, Flag, ListOf, Real, Settings, Text, Whole, shown
from remask.errors import ConfigError
from remask.request.forms import StructuredOutputs
from remask.request.sampling_params import PARAMETER, SamplingParams
from remask.request.trace import TOP_LOGPROBS

SAMPLING = "sampling"  # the object of a request in which its sampling parameters may stand
PRIORITY_STEP_S = 10.0  # a request of the next higher priority number begins as if it had arrived so much later
MAX_PARTS = 4096
"""Most parts of a canvas."""


@documented
@dataclass(frozen=True, slots=True)
class MaskLength:
    """The length of a hole. Raises `ConfigError` when made, naming the field and what is allowed."""

    min: int = declare(0, Whole(0, POSITIONS), "Positions that hold no padding, at least.")
    max: int | None = declare(None, Whole(1, POSITIONS), "Positions of the hole.")

    def __post_init__(self) -> None:
        check(self, "canvas.mask.")
        if self.max is None:
            raise ConfigError('canvas.mask needs max, the positions of the hole, as in {"mask": {"max": 16}}')
        if self.min > self.max:
            raise ConfigError(f"canvas.mask: min={self.min} is more than max={self.max}; lower it")


@documented
@dataclass(frozen=True, slots=True)
class Part:
    """A part of a response: one of its fields is set. Raises `ConfigError` when made, naming the field."""

    text: str | None = declare(None, Text(POSITIONS, empty=True), "A text that stands there as it is.")
    token_ids: Sequence[int] | None = declare(
        None, ListOf(Whole(0, POSITIONS), "token ids", LIST), "Tokens that stand there as they are."
    )
    mask: MaskLength | int | None = declare(
        None,
        AnyOf((Whole(1, POSITIONS), Nested(MaskLength, "mask field"))),
        "A hole of so many tokens, or of `min` to `max` tokens.",
    )

    def __post_init__(self) -> None:
        check(self, "canvas.")
        names = [name for name in ("text", "token_ids", "mask") if getattr(self, name) is not None]
        if len(names) != 1:
            raise ConfigError(
                f"a part of canvas needs exactly one of text, token_ids and mask; got {', '.join(names) or 'none'}"
            )
        length = self.mask
        if isinstance(length, int):
            object.__setattr__(self, "mask", MaskLength(length, length))
        elif length is not None and not isinstance(length, MaskLength):
            object.__setattr__(self, "mask", parse(MaskLength, length, "canvas.mask", "mask field"))


@documented
@dataclass(frozen=True, slots=True)
class Terms:
    """The terms of one request, in a JSONL line or in a body. `None` leaves a choice to the command or server.

    Raises `ConfigError` when made, naming the field, the value and what is allowed.
    """

    prefix_length: int | None = declare(
        None,
        Whole(0, POSITIONS),
        "Leading prompt tokens that may be shared with other requests, 0 for none; by default everything before the "
        "last user turn of a conversation, and nothing of a text or of token ids, unless `--prefix-sharing auto` "
        "finds it.",
    )
    cache: str | None = declare(
        None,
        Text(1024, noun="the name of a cache policy"),
        "Cache policy, or a composition such as `bicache+block-dual`; null takes the default of the command or server.",
    )
    cache_config: Mapping[str, Any] | None = declare(
        None, Settings("settings of the policy", 64), "Settings of the cache policy."
    )
    adapter: str | None = declare(
        None,
        Text(1024),
        "Name of an adapter that is loaded beside the model (`--lora-modules`), with which this request is computed; "
        "null is the model itself. A server takes the name as `model` too.",
    )
    cache_salt: str = declare(
        "",
        Text(1024, empty=True),
        "Only requests of the same salt share stored prefixes; one per tenant keeps them apart.",
    )
    priority: int = declare(
        0,
        Whole(-LARGEST),
        "Requests of lower priority numbers begin first, equal ones in order of arrival. "
        f"Each number counts as much as {PRIORITY_STEP_S:g} seconds of waiting.",
    )
    deadline_s: float | None = declare(
        None,
        Real(0, 1e8, above=True),
        'Seconds from arrival after which the request ends with "timeout"; null sets no deadline.',
    )
    top_logprobs: int | None = declare(
        None,
        Whole(0, TOP_LOGPROBS),
        "Report the log-probability of each token in the step that wrote it, and of so many of the most probable "
        "tokens there; null reports none.",
        kinds=("masked", "block_causal"),
    )
    return_trace: bool = declare(False, Flag(), "Report what each step wrote, and all else that the run depended on.")
    return_step_maps: bool = declare(
        False,
        Flag(),
        "Report for each token the step that first wrote it, counted from 1, as trainers read it.",
        kinds=("masked", "block_causal"),
    )
    structured_outputs: StructuredOutputs | None = declare(
        None,
        Nested(StructuredOutputs, "structured_outputs field"),
        "The form of the answer, which it always has; of the hole, where a canvas has one.",
        kinds=("masked", "block_causal"),
    )
    canvas: Sequence[Part] | None = declare(
        None,
        ListOf(Nested(Part, "part field"), "parts", MAX_PARTS, total_limit=2 * LIST),
        "What the response is made of: parts of fixed `text` or `token_ids`, and holes (`mask`), a number of tokens or "
        "an object of `min` and `max`.",
    )
    control_tokens: bool | None = declare(
        None,
        Flag(),
        "Whether names of special tokens in the texts of a request become these tokens. By default they do in a plain "
        "`prompt`, which is in the model's own format; in messages, tools, `canvas` and `suffix` they are text as any "
        "other.",
    )
    suffix: str | None = declare(
        None, Text(POSITIONS), "Text after the response, which fills the `max_tokens` positions before it."
    )

    def __post_init__(self) -> None:
        check(self)
        if self.canvas is not None and self.suffix is not None:
            raise ConfigError("canvas and suffix both say what stands around the response; send one of them")

    @classmethod
    def from_mapping(cls, values: object) -> "Terms":
        """Terms from JSON-like values. Raises `ConfigError` on unknown names and on values of the wrong kind."""
        return parse(cls, values, "a request", "term")


class TermKeywords(TypedDict, total=False):
    """The types of the fields of `Terms` that methods of `LLM` take as keywords.

    `cache` and `canvas` are left out, which these methods take in other forms, and so are the fields that make an
    answer in JSON report more.
    """

    prefix_length: int | None
    cache_config: Mapping[str, Any] | None
    adapter: str | None
    cache_salt: str
    priority: int
    deadline_s: float | None
    top_logprobs: int | None
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None
    control_tokens: bool | None
    suffix: str | None


def flatten_sampling(request: Mapping[str, Any], other_fields: Iterable[str]) -> Mapping[str, Any]:
    """Move the parameters of the object `sampling` of a request (a JSONL line or a body) to its top level.

    Returns a new mapping, or the request itself if it has no such object. `other_fields` are the names that the request
    may have beside sampling parameters. Raises `ConfigError` if a parameter is in both places or one of the
    `other_fields` in the object, and `UnknownNameError` if a name in the object is neither.
    """
    if SAMPLING not in request:
        return request
    sampling: Any = {} if request[SAMPLING] is None else request[SAMPLING]
    if not isinstance(sampling, Mapping):
        raise ConfigError(f"{SAMPLING} must be an object of sampling parameters, got {shown(sampling)}")
    check_sampling(sampling, other_fields)
    parameters = {name: value for name, value in sampling.items() if value is not None}
    duplicate = next((name for name in parameters if request.get(name) is not None), None)
    if duplicate is not None:
        raise ConfigError(f"{duplicate} is both in the request and in its {SAMPLING!r}; leave one of them out")
    return {**{name: value for name, value in request.items() if name != SAMPLING}, **parameters}


def check_sampling(values: Mapping[str, Any], other_fields: Iterable[str] = ()) -> None:
    """Check that an object of sampling parameters has no other keys.

    Raises `ConfigError`, which says where the key belongs, if it is a term or one of the `other_fields` of a request,
    and `UnknownNameError` if it is unknown.
    """
    parameters = declared(SamplingParams)
    for name in values:
        if name not in parameters and name in {*declared(Terms), *other_fields}:
            raise ConfigError(f"{name} is not a sampling parameter: it belongs in the request, beside {SAMPLING!r}")
        if name not in parameters:
            raise unknown_name_error(SamplingParams, PARAMETER, str(name), parameters)
