"""What the answers of several endpoints are made of."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, NotRequired, TypeAlias, cast

from pydantic import ConfigDict, Field
from typing_extensions import TypedDict

from remask.request.result import Result
from remask.request.result import Usage as Used
from remask.text.incremental import INCOMPLETE

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
    approximation: NotRequired[
        Annotated[str, doc("The cache policy that ran, where what it keeps may make other tokens than `none` would.")]
    ]


class TokenScore(Answer):
    """A token and its log-probability."""

    token: str
    logprob: float
    bytes: Annotated[
        list[int] | None,
        doc("Also of a token that is a part of a character; null where the tokenizer does not tell them."),
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
    token_bytes: Callable[[int], bytes | None]

    def spelled(self, token: int) -> str:
        """The text of a token; of one that is a part of a character its bytes, as OpenAI's completions write them."""
        text, content = self.token_text(token), self.token_bytes(token)
        if content is None or content == text.encode():
            return text
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in content) if INCOMPLETE in text else text

    def scored(self, item: "Scored") -> ScoredToken:
        """A token with its log-probability, and those of the most probable ones, as chats and responses tell them."""
        top = [self._score(token, logprob) for token, logprob in item.read.top]
        return {**self._score(item.read.token_id, item.read.logprob), "top_logprobs": top, "step": item.read.step}

    def _score(self, token: int, logprob: float) -> TokenScore:
        content = self.token_bytes(token)
        told = None if content is None else list(content)
        return {"token": self.token_text(token), "logprob": logprob, "bytes": told}


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


def work(results: Sequence[Result]) -> Work:
    """The work of an answer, for which OpenAI's API has no fields."""
    total = Used.total([result.usage for result in results])
    told = {name: value for name in Work.__annotations__ if (value := getattr(total, name)) is not None}
    return cast("Work", told)
