"""What the answers of several endpoints are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeAlias, cast

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from remask.request.result import Result
from remask.request.result import Usage as Used

if TYPE_CHECKING:
    from remask.answers.answer import Scored  # the process that reads bodies needs errors, and no PyTorch

Json: TypeAlias = dict[str, Any]


def doc(text: str) -> Any:
    """What the OpenAPI document says of a key."""
    return Field(description=text)


class Answer(TypedDict):
    """An object of an answer, which is a plain dictionary. It has no other keys than these."""


Answer.__pydantic_config__ = ConfigDict(extra="forbid")  # type: ignore[attr-defined] # also of subclasses


class RunningUsage(Answer):
    """Tokens of an answer so far."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class CachedTokens(Answer):
    """What was read from the prefix store."""

    cached_tokens: int


class Usage(RunningUsage):
    """Tokens of an answer. The prompt counts once, whatever the number of choices."""

    prompt_tokens_details: CachedTokens


class Work(Answer):
    """The work of an answer, all of its choices together."""

    steps: Annotated[int, doc("Denoising steps.")]
    forwards: Annotated[int, doc("Forward passes.")]
    row_layers: Annotated[int, doc("Rows times layers that these passes computed.")]
    prefix_row_layers: Annotated[int, doc("Rows times layers of the passes over a shared prefix that was not stored.")]
    correction_steps: NotRequired[Annotated[int, doc("Steps of a correction, where the request asked for one.")]]
    prefix_depth: Annotated[int, doc("Leading layers that read K/V of a shared prefix from the store.")]
    prefix_tokens: Annotated[int, doc("Length of that prefix.")]
    prefix_note: NotRequired[Annotated[str, doc("Why no shared prefix was read.")]]
    left_out: NotRequired[
        Annotated[list[str], doc("Types of tools and of their calls that were left out, as another server runs them.")]
    ]
    approximation: NotRequired[
        Annotated[str, doc("The cache policy that ran, where what it keeps may make other tokens than `none` would.")]
    ]


class TokenScore(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: Annotated[
        list[int] | None,
        doc(
            "What the token adds to the text behind the one before it, which may be a part of a character; null where "
            "the tokenizer does not tell it."
        ),
    ]


class ScoredToken(TokenScore):
    """A token of the answer, and the most probable ones in its place."""

    top_logprobs: list[TokenScore]
    step: Annotated[int, doc("The step that wrote it, counted from 0.")]


@dataclass(frozen=True, slots=True)
class Names:
    """What all objects of one answer repeat."""

    id: str
    created: int
    model: str
    fingerprint: str
    token_text: Callable[[int], str]
    token_bytes: Callable[[int, int | None], bytes | None]

    def spelled(self, item: "Scored", *, partial: bool = True) -> dict[int, str]:
        """What a token and the most probable ones in its place are called: by what they add to the text there.

        With `partial` one that is a part of a character is spelled by its bytes, as OpenAI's completions write them.
        Each has a name of its own: where one is taken, the next is called by its bytes or its number.
        """
        names: dict[int, str] = {}
        for token in (item.read.token_id, *(token for token, _ in item.read.top)):
            content = self.token_bytes(token, item.before)
            text = content.decode(errors="replace") if content else self.token_text(token)
            spelled = "bytes:" + "".join(f"\\x{byte:02x}" for byte in content or ())
            choices = [text, f"token_id:{token}"]
            if content and content != text.encode():
                choices = [spelled, *choices] if partial else [text, spelled, choices[1]]
            names.setdefault(token, next(name for name in choices if name not in names.values()))
        return names

    def scored(self, item: "Scored") -> ScoredToken:
        """A token with its log-probability, and those of the most probable ones, as chats and responses tell them."""
        names = self.spelled(item, partial=False)

        def score(token: int, logprob: float) -> TokenScore:
            content = self.token_bytes(token, item.before)
            return {"token": names[token], "logprob": logprob, "bytes": None if content is None else list(content)}

        own = score(item.read.token_id, item.read.logprob)
        return {**own, "top_logprobs": [score(*each) for each in item.read.top], "step": item.read.step}


def usage(results: Sequence[Result], choices: int = 1) -> Usage:
    """OpenAI's usage of one answer; `results` are in order, `choices` of them to a prompt, which counts once."""
    prompts = results[::choices]
    prompt = sum(result.usage.prompt_tokens for result in prompts)
    completion = sum(result.usage.completion_tokens for result in results)
    cached = sum(result.usage.cached_tokens for result in prompts)
    return {**running_usage(prompt, completion), "prompt_tokens_details": {"cached_tokens": cached}}


def running_usage(prompt: int, completion: int) -> RunningUsage:
    """What of OpenAI's usage is known while an answer is written."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def work(results: Sequence[Result], left_out: Sequence[str] = ()) -> Work:
    """The work of an answer, for which OpenAI's API has no fields."""
    total = Used.total([result.usage for result in results])
    told = {name: value for name in Work.__annotations__ if (value := getattr(total, name, None)) is not None}
    return cast("Work", told | ({"left_out": list(left_out)} if left_out else {}))
