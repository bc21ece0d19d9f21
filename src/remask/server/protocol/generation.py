"""Bodies of chat and text completions: OpenAI's fields, and the declared sampling parameters and terms."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import PrivateAttr, model_validator

from remask.checks.fields import declared
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Part, Terms
from remask.server.fields import FOREIGN
from remask.server.protocol.base import (
    NO_SERVER_TOOLS,
    Body,
    Checked,
    Count,
    LongText,
    Name,
    Texts,
    TokenIds,
    TokenLists,
    declared_fields,
    with_declared,
)
from remask.server.protocol.conversation import (
    NOT_HOSTED,
    VARIABLES,
    ChosenTool,
    Hosted,
    Messages,
    Offers,
    ResponseFormat,
    ToolOffer,
    chars_of,
)
from remask.server.tools import ForcedCalls, Tool, ToolCalls, detect_call_format

_MAX_TOKENS = declared(SamplingParams)["max_tokens"]
_TOP_LOGPROBS = declared(Terms)["top_logprobs"]


class StreamOptions(Body):
    """Options of a stream. `include_usage` adds a last chunk that holds the usage.

    With `continuous_usage_stats` beside it every other chunk has the usage so far. `include_obfuscation` is ignored:
    chunks carry no padding.
    """

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


@with_declared(SamplingParams, Terms)
class GenerationBody(Body):
    """What chat and text completions have in common, beside the declared sampling parameters and terms."""

    model: Name | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stream_drafts: bool | None = None
    return_token_ids: bool | None = None
    response_format: ResponseFormat | None = None
    echo: bool | None = None
    user: Name | None = None
    foreign = FOREIGN

    @model_validator(mode="after")
    def _check_echo(self) -> "GenerationBody":
        if self.echo and not getattr(self, "continue_final_message", False):
            raise ConfigError(
                "echo is not supported: an answer repeats no prompt, only the message that it continues "
                "(continue_final_message of chats). Leave it out, or send false"
            )
        return self

    @property
    def continued(self) -> str:
        """The beginning of the answer that the prompt ends with, or ""."""
        return ""

    @property
    def left_out(self) -> Sequence[str]:
        """Types of its hosted tools and of their calls, which are left out."""
        return ()

    @property
    def choices(self) -> int:
        """How many answers to each prompt it asks for."""
        return 1 if self.n is None else self.n

    @property
    def texts_name(self) -> str:
        """The field that holds its texts."""
        return "prompt"

    @property
    def prompt_chars(self) -> list[int]:
        """Characters of each prompt, 0 of token ids, plus those of the fixed texts of its response."""
        terms = declared_fields(self, Terms)
        canvas: Sequence[Part] = terms.get("canvas") or ()
        fixed_chars = len(terms.get("suffix") or "") + sum(len(part.text or "") for part in canvas)
        return [chars + fixed_chars for chars in self._own_prompt_chars]

    @property
    def _own_prompt_chars(self) -> list[int]:
        raise NotImplementedError

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request sets, by name."""
        return declared_fields(self, SamplingParams)

    @property
    def form_name(self) -> str:
        """The field that asks for the form of its answer, for errors."""
        if self.structured_outputs is None and self.response_format is not None:  # type: ignore[attr-defined]
            return self.response_format.name
        forced = self.structured_outputs is None and getattr(self, "tools", None)  # type: ignore[attr-defined]
        return "tools" if forced else "structured_outputs"

    @property
    def length_name(self) -> str:
        """The field that sets `max_tokens`, for errors."""
        return "max_tokens"

    @property
    def asks_form(self) -> bool:
        """Whether it asks for a form of its answer, by `response_format` or `structured_outputs`."""
        return self.response_format is not None or self.structured_outputs is not None  # type: ignore[attr-defined]

    @cached_property
    def own_terms(self) -> Terms:
        """The declared terms, with the form from `response_format` or `structured_outputs`.

        Raises `ConfigError` if it has both.
        """
        terms = Terms(**declared_fields(self, Terms))
        form = None if self.response_format is None else self.response_format.form
        if form is None:
            return terms
        if terms.structured_outputs is not None and self.response_format is not None:
            name = self.response_format.name
            raise ConfigError(f"{name} and structured_outputs both say the answer's form; send one of them")
        return replace(terms, structured_outputs=form)

    @property
    def terms(self) -> Terms:
        """The terms of the request. Raises `ConfigError` if two of its fields contradict each other."""
        return self.own_terms


def with_length(sampling: dict[str, Any], name: str, length: int | None) -> dict[str, Any]:
    """Set `max_tokens` in `sampling` to the `length` that the field `name` of another API gives, and return `sampling`.

    Raises `ConfigError` if `max_tokens` has another value.
    """
    if length is not None and sampling.setdefault("max_tokens", length) != length:
        raise ConfigError(f"max_tokens and {name} are two names of one thing; send one of them")
    return sampling


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Checked("max_completion_tokens", _MAX_TOKENS)] = None
    logprobs: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Checked("chat_template_kwargs", VARIABLES)] = None
    tools: Offers[ToolOffer] | None = None
    tool_choice: Annotated[Literal["none", "auto", "required"] | ChosenTool | None, NOT_HOSTED] = None
    parallel_tool_calls: bool | None = None
    _calls: tuple[Any, ToolCalls | None] | None = PrivateAttr(None)  # the arguments and the result of `calls`
    _texts_name: str = PrivateAttr("messages")
    _hosted: Sequence[Hosted] = PrivateAttr(())  # of its conversation
    _length_name: str | None = PrivateAttr(None)

    @classmethod
    def translated(cls, texts_name: str, length_name: str, hosted: Sequence[Hosted], **fields: Any) -> "ChatBody":
        """The chat body of a body of another API, with `fields` that are checked already.

        `texts_name` and `length_name` are that API's names of `messages` and `max_tokens`, for errors. `hosted` are
        the parts that were left out of the messages. Raises `ConfigError` on fields that its answers have no place for.
        """
        for name in ("return_step_maps", "return_trace"):
            if fields.get(name):
                raise ConfigError(f"{name}: answers of this API have no place for it; send it to /v1/chat/completions")
        body = cls.model_construct(**fields)
        body._texts_name = texts_name
        body._length_name = length_name
        body._hosted = hosted
        return body

    @property
    def texts_name(self) -> str:
        return self._texts_name

    @property
    def _own_prompt_chars(self) -> list[int]:
        return [chars_of(self.messages, self.variables)]

    @property
    def length_name(self) -> str:
        newer = self.max_completion_tokens is not None and "max_tokens" not in super().sampling
        return self._length_name or ("max_completion_tokens" if newer else "max_tokens")

    @property
    def ending(self) -> tuple[bool, bool]:
        """How its conversation ends: `add_generation_prompt` and `continue_final_message`."""
        return self.add_generation_prompt, bool(self.continue_final_message)

    @property
    def continued(self) -> str:
        return self.messages[-1].text if self.continue_final_message else ""

    @property
    def offers(self) -> list[ToolOffer]:
        """The tools that the model may call. Raises `ConfigError` if `tool_choice` needs one and there are none."""
        tools = [tool for tool in self.tools or () if isinstance(tool, ToolOffer)]
        choice = self.tool_choice
        if not tools and choice not in (None, "none", "auto"):
            if self.left_out:
                raise ConfigError(f"tool_choice asks for a call of {', '.join(self.left_out)}, and {NO_SERVER_TOOLS}")
            raise ConfigError("tool_choice asks for a call, and there are no tools; send some")
        return [] if choice == "none" else tools

    @property
    def left_out(self) -> Sequence[str]:
        hosted = *(tool for tool in self.tools or () if isinstance(tool, Hosted)), *self._hosted
        return list(dict.fromkeys(part.type for part in hosted))

    @property
    def variables(self) -> dict[str, Any] | None:
        """Variables of the chat template, with the tools. Raises `ConfigError` if tools are in two fields."""
        if not self.offers:
            return self.chat_template_kwargs
        if "tools" in (self.chat_template_kwargs or {}):
            raise ConfigError("tools and chat_template_kwargs both name tools; send the former")
        return {**(self.chat_template_kwargs or {}), "tools": [tool.rendered for tool in self.offers]}

    def calls(self, template: str | None, *, by_form: bool = False) -> ToolCalls | None:
        """What the request says of calls, or None if it offers no tools. The result is cached.

        With `by_form`, a model whose chat `template` has no tools chooses calls by the form of its answer. Raises
        `ConfigError` if calls cannot be made as requested.
        """
        key = template, by_form
        if self._calls is None or self._calls[0] != key:
            self._calls = key, self._tool_calls(*key)
        return self._calls[1]

    def _tool_calls(self, template: str | None, by_form: bool) -> ToolCalls | None:
        """Check the tools, and make the result of `calls`."""
        tools = [Tool(tool.function.name, tool.function.parameters) for tool in self.offers]
        if len({tool.name for tool in tools}) < len(tools):
            raise ConfigError("tools: two of them have one name; give each a name of its own")
        if not tools:
            return None
        if isinstance(self.tool_choice, ChosenTool):
            tools = [self._find_tool(self.tool_choice.function.name, tools)]
        forced = self._forced_calls(template, by_form)
        if forced is not None:
            self._check_form_is_free(forced)
        return ToolCalls(
            tools=tools,
            forced=forced,
            single=self.parallel_tool_calls is False,
            format=detect_call_format(template),
            text_form=self.own_terms.structured_outputs if forced == "choice" else None,
        )

    def _forced_calls(self, template: str | None, by_form: bool) -> ForcedCalls | None:
        """How the form of the answer forces calls, or None if the prompt alone tells of the tools.

        Raises `ConfigError` if neither the form nor the prompt would tell of them.
        """
        if isinstance(self.tool_choice, ChosenTool):
            return "named"
        if self.tool_choice == "required":
            return "required"
        if "tools" in (template or ""):
            return None
        if not by_form:
            raise ConfigError(
                "tools: the model's chat template does not tell it of tools, so it would call none by itself; send "
                "tool_choice 'required' or the name of one, or start the server with a --chat-template that does"
            )
        return "choice"

    def _check_form_is_free(self, forced: ForcedCalls) -> None:
        """Raise `ConfigError` if another field prescribes the answer whose form forces calls."""
        terms = self.own_terms
        # A choice is between calls and a text, and that text may have a form of its own.
        form = None if forced == "choice" else terms.structured_outputs
        fields = {"canvas": terms.canvas, "suffix": terms.suffix, self.form_name: form}
        name = next((name for name, value in fields.items() if value is not None), None)
        if name is not None:
            source = "tools" if forced == "choice" else "tool_choice"
            raise ConfigError(f"{name} and {source} both say what the answer is; send one of them")

    def _find_tool(self, name: str, tools: Sequence[Tool]) -> Tool:
        """Return the tool of this name. Raises `ConfigError` if it is hosted or not among `tools`."""
        if any(isinstance(tool, Hosted) and tool.name == name for tool in self.tools or ()):
            raise ConfigError(f"tool_choice names {name!r}, and {NO_SERVER_TOOLS}")
        tool = next((tool for tool in tools if tool.name == name), None)
        if tool is None:
            names = ", ".join(tool.name for tool in tools)
            raise ConfigError(f"tool_choice names {name!r}, which is none of tools: {names}")
        return tool

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request sets, by name. `max_completion_tokens` is the newer `max_tokens`.

        Raises `ConfigError` if the two differ.
        """
        return with_length(super().sampling, "max_completion_tokens", self.max_completion_tokens)

    @cached_property
    def terms(self) -> Terms:
        """The terms of the request. `top_logprobs` is None unless `logprobs` is true. Raises `ConfigError`."""
        terms = self.own_terms
        if not self.logprobs and terms.top_logprobs:
            raise ConfigError(f"top_logprobs={terms.top_logprobs} needs logprobs=true; send both, or neither")
        return replace(terms, top_logprobs=(terms.top_logprobs or 0) if self.logprobs else None)


class TranslatedBody(Body):
    """A body of another API, which becomes that of a chat."""

    _chat: ChatBody = PrivateAttr()

    @model_validator(mode="after")
    def _translate(self) -> Self:
        self._chat = self._as_chat()
        return self

    def _as_chat(self) -> ChatBody:
        raise NotImplementedError

    @property
    def chat(self) -> ChatBody:
        """The same request as a body of chat completions."""
        return self._chat


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`. A prompt is text or token ids; a list of prompts gives a choice for each."""

    prompt: LongText | Texts | TokenIds | TokenLists
    logprobs: Annotated[int | None, Checked("logprobs", _TOP_LOGPROBS)] = None

    @cached_property
    def prompts(self) -> list[Any]:
        """Its prompts, each a text or token ids."""
        prompt = self.prompt
        return list(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else [prompt]

    @property
    def _own_prompt_chars(self) -> list[int]:
        return [len(prompt) if isinstance(prompt, str) else 0 for prompt in self.prompts]

    @cached_property
    def terms(self) -> Terms:
        """The terms of the request, with `logprobs` as another name of `top_logprobs`. Raises `ConfigError`."""
        terms = self.own_terms
        count = self.logprobs
        if count is None:
            return terms
        if terms.top_logprobs not in (None, count):
            raise ConfigError("logprobs and top_logprobs are two names of one thing; send one of them")
        return replace(terms, top_logprobs=count)
