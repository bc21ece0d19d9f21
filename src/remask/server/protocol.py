"""Request bodies: OpenAI's fields that are supported, and the declared ones. Any other is refused by its name."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, field_validator, model_validator

from remask.checks.fields import Declared, declared
from remask.checks.values import LARGEST, Settings, json_object
from remask.errors import ConfigError
from remask.request.forms import StructuredOutputs
from remask.request.questions import Decisions
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.declared import Checked, given, with_declared
from remask.server.fields import FOREIGN_TO_READS, read_fields
from remask.server.known import known_kind
from remask.server.limits import MAX_ITEMS
from remask.server.tools import Tool, ToolCalls, format_of

MAX_KEYWORDS = 64  # of the outermost level of a JSON schema
_MAX_TOKENS = declared(SamplingParams)["max_tokens"]
_TERMS = declared(Terms)
_TOP_LOGPROBS = _TERMS["top_logprobs"]
_VARIABLES = Declared(
    Settings("variables of the chat template", 64, 2**20),
    None,
    "Variables that the chat template reads beside the messages.",
)
PARAMETERS = Declared(Settings("keywords of JSON Schema", MAX_KEYWORDS), None, "A JSON schema of the arguments.")

MAX_TOKEN_IDS = 1 << 20
MAX_NAME = 1024  # characters of a name that somebody chose: of a model, a user, a call
MAX_TEXT = 1 << 24  # characters of any text; the server's own limits are below it
RELEVANCE = "Does the document answer the query?"
MAX_TOOLS = 128

# The first item that does not fit ends the check: a list may hold a million of them.
Count: TypeAlias = Annotated[int, Field(ge=-LARGEST, le=LARGEST)]
TokenIds: TypeAlias = Annotated[list[Count], Field(max_length=MAX_TOKEN_IDS, fail_fast=True)]
Name: TypeAlias = Annotated[str, Field(max_length=MAX_NAME)]
LongText: TypeAlias = Annotated[str, Field(max_length=MAX_TEXT)]
Texts: TypeAlias = Annotated[list[LongText], Field(max_length=MAX_ITEMS, fail_fast=True)]
TokenLists: TypeAlias = Annotated[list[TokenIds], Field(max_length=MAX_ITEMS, fail_fast=True)]


class Body(BaseModel):
    """A body with strict JSON types (no text for numbers), without unknown fields and NaN."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(Body):
    """Options of a stream. `include_usage` adds a last chunk that holds the usage.

    `include_obfuscation` is ignored: chunks carry no padding.
    """

    include_usage: bool = False
    include_obfuscation: bool = False


class CacheControl(Body):
    """Marks the end of the part of a conversation that is shared with other requests."""

    type: Literal["ephemeral"]


class TextPart(Body):
    """A part of a message's content. Texts are the only kind that is supported."""

    type: Literal["text"]
    text: LongText

    @model_validator(mode="before")
    @classmethod
    def _text(cls, part: Any) -> Any:
        return known_kind("messages", part, frozenset(["text"]))


class CalledFunction(Body):
    """The function of a tool call. `arguments` are the text of a JSON object."""

    name: Name
    arguments: LongText

    @field_validator("arguments")
    @classmethod
    def _is_object(cls, text: str) -> str:
        _arguments(text)
        return text


class ToolCall(Body):
    """A call of a tool in an assistant's turn."""

    id: Name | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    @property
    def rendered(self) -> dict[str, Any]:
        """The call in the form that chat templates read: with arguments as an object."""
        function = {"name": self.function.name, "arguments": _arguments(self.function.arguments)}
        return {"type": self.type, "function": function} | ({} if self.id is None else {"id": self.id})


class Message(Body):
    """One turn. With `cache_control` the shared prefix ends at the end of this message.

    An assistant's turn that calls tools may have no text. The role `developer` is another name of `system`.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: LongText | Annotated[list[TextPart], Field(max_length=MAX_ITEMS, fail_fast=True)]
    name: Name | None = None
    tool_calls: Annotated[list[ToolCall], Field(max_length=MAX_ITEMS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None
    cache_control: CacheControl | None = None

    @model_validator(mode="before")
    @classmethod
    def _without_nothing(cls, message: Any) -> Any:
        """Leave out what asks for nothing: clients send back whole messages as they got them."""
        if not isinstance(message, Mapping):
            return message
        kept = {name: value for name, value in message.items() if value is not None or name == "content"}
        for name in ("tool_calls", "annotations"):
            if kept.get(name) == []:
                del kept[name]
        calls = kept.get("role") == "assistant" and "tool_calls" in kept
        return kept | {"content": ""} if calls and kept.get("content") is None else kept

    @model_validator(mode="after")
    def _check_calls(self) -> "Message":
        for name, role in (("tool_calls", "assistant"), ("tool_call_id", "tool")):
            if getattr(self, name) is not None and self.role != role:
                raise ConfigError(f"messages: {name} is of the role {role!r}, and this message's is {self.role!r}")
        return self

    @property
    def chars(self) -> int:
        """Characters of its texts and its names."""
        texts = [self.content] if isinstance(self.content, str) else [part.text for part in self.content]
        calls = [text for call in self.tool_calls or () for text in (call.function.name, call.function.arguments)]
        return len(self.name or "") + sum(map(len, [*texts, *calls]))

    @property
    def rendered(self) -> dict[str, Any]:
        """The message in the form that chat templates read."""
        text = self.content if isinstance(self.content, str) else "".join(part.text for part in self.content)
        more: dict[str, Any] = {"name": self.name, "tool_call_id": self.tool_call_id}
        if self.tool_calls is not None:
            more["tool_calls"] = [call.rendered for call in self.tool_calls]
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text, **{name: value for name, value in more.items() if value is not None}}


Messages: TypeAlias = Annotated[list[Message], Field(min_length=1, max_length=MAX_ITEMS, fail_fast=True)]


class Function(Body):
    """A function that the model may call. `parameters` is a JSON schema; forced calls always follow it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$", max_length=64)]
    description: LongText | None = None
    parameters: Annotated[dict[str, Any] | None, Checked("tools: parameters", PARAMETERS)] = None
    strict: bool | None = None


class ToolOffer(Body):
    """A tool of a request. Functions are the only kind."""

    type: Literal["function"]
    function: Function

    @property
    def rendered(self) -> dict[str, Any]:
        """The tool in the form that chat templates read."""
        kept = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": self.type, "function": {"parameters": {"type": "object", "properties": {}}} | kept}


class ChosenFunction(Body):
    """The name of the function to call."""

    name: Name


class ChosenTool(Body):
    """The tool that the answer calls."""

    type: Literal["function"]
    function: ChosenFunction


class JsonSchema(Body):
    """A schema that an answer follows. `name` and `description` say what it is for; an answer is always `strict`."""

    name: Name | None = None
    description: LongText | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema", max_length=MAX_KEYWORDS)]
    strict: bool | None = None


class ResponseFormat(Body):
    """OpenAI's way to ask for the form of an answer."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @property
    def form(self) -> StructuredOutputs | None:
        """The form, None for any text. Raises `ConfigError` on a schema that is missing or cannot be guaranteed."""
        if (self.json_schema is not None) != (self.type == "json_schema"):
            raise ConfigError("response_format: json_schema and the type 'json_schema' go together")
        if self.type == "text":
            return None
        if self.json_schema is None:
            return StructuredOutputs(json_object=True)
        return StructuredOutputs(json=self.json_schema.schema_)


def offered(**function: Any) -> ToolOffer:
    """A tool of another API, whose fields are checked already."""
    return ToolOffer.model_construct(type="function", function=Function.model_construct(**function))


def chosen(name: str) -> ChosenTool:
    """The choice of a tool, the same."""
    return ChosenTool.model_construct(type="function", function=ChosenFunction.model_construct(name=name))


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
    user: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, body: Any) -> Any:
        return read_fields(body, cls.model_fields)

    @property
    def fixed_chars(self) -> int:
        """Characters of the texts that the response is to hold."""
        terms: Any = given(self, Terms)
        parts = [each.text for each in terms.get("canvas") or () if each.text is not None]
        return sum(map(len, [*parts, terms.get("suffix") or ""]))

    @property
    def sampling(self) -> dict[str, Any]:
        """The sampling parameters that the request sets, by name."""
        return given(self, SamplingParams)

    @property
    def asks_form(self) -> bool:
        """Whether it asks for the form of its answer, in either way."""
        return self.response_format is not None or self.structured_outputs is not None  # type: ignore[attr-defined]

    @cached_property
    def own_terms(self) -> Terms:
        """The declared terms, with the form that is asked for in either way.

        Raises `ConfigError` where two of its fields contradict each other.
        """
        terms = Terms(**given(self, Terms))
        form = None if self.response_format is None else self.response_format.form
        if form is None:
            return terms
        if terms.structured_outputs is not None:
            raise ConfigError("response_format and structured_outputs both say the answer's form; send one of them")
        return replace(terms, structured_outputs=form)

    @property
    def terms(self) -> Terms:
        """The terms of the request. Raises `ConfigError` where two of its fields contradict each other."""
        return self.own_terms


class ChatBody(GenerationBody):
    """Body of `/v1/chat/completions`."""

    messages: Messages
    max_completion_tokens: Annotated[int | None, Checked("max_completion_tokens", _MAX_TOKENS)] = None
    logprobs: bool | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[dict[str, Any] | None, Checked("chat_template_kwargs", _VARIABLES)] = None
    tools: Annotated[list[ToolOffer], Field(max_length=MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChosenTool | None = None
    parallel_tool_calls: bool | None = None
    _calls: tuple[str | None, ToolCalls | None] | None = PrivateAttr(None)  # with the template that they are for
    _texts_name: str = PrivateAttr("messages")

    @classmethod
    def translated(cls, texts_name: str, **fields: Any) -> "ChatBody":
        """The body that another API's comes to, whose `fields` are checked already.

        `texts_name` is what that API calls the messages, for errors.
        """
        made = cls.model_construct(**fields)
        made._texts_name = texts_name
        return made

    @property
    def texts_name(self) -> str:
        """The field that holds the conversation."""
        return self._texts_name

    @property
    def offered(self) -> list[ToolOffer]:
        """The tools that the model is told of. Raises `ConfigError` where a choice is made among none."""
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise ConfigError("tool_choice asks for a call, and there are no tools; send some")
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def variables(self) -> dict[str, Any] | None:
        """Variables of the chat template: the request's own, and its tools."""
        if not self.offered:
            return self.chat_template_kwargs
        if "tools" in (self.chat_template_kwargs or {}):
            raise ConfigError("tools and chat_template_kwargs both name tools; send the former")
        return {**(self.chat_template_kwargs or {}), "tools": [tool.rendered for tool in self.offered]}

    def calls(self, template: str | None) -> ToolCalls | None:
        """What the request says of calls, under a chat `template`; None where there are no tools to call.

        Raises `ConfigError` where a call cannot be made as it is asked for.
        """
        if self._calls is None or self._calls[0] is not template:
            self._calls = template, self._called(template)
        return self._calls[1]

    def _called(self, template: str | None) -> ToolCalls | None:
        tools, choice = [Tool(each.function.name, each.function.parameters) for each in self.offered], self.tool_choice
        names = [tool.name for tool in tools]
        if len(set(names)) < len(names):
            raise ConfigError("tools: two of them have one name; give each a name of its own")
        if not tools:
            return None
        if isinstance(choice, ChosenTool):
            if choice.function.name not in names:
                raise ConfigError(
                    f"tool_choice names {choice.function.name!r}, which is none of tools: {', '.join(names)}"
                )
            tools = [tool for tool in tools if tool.name == choice.function.name]
        elif choice != "required" and (template is None or "tools" not in template):
            raise ConfigError(
                "tools: the model's chat template does not tell it of tools, so it would call none by itself; send "
                "tool_choice 'required' or the name of one, or start the server with a --chat-template that does"
            )
        forced: Any = "named" if isinstance(choice, ChosenTool) else "required" if choice == "required" else None
        if forced is not None:
            self._check_free(self.own_terms)
        return ToolCalls(tools, forced, self.parallel_tool_calls is False, format_of(template))

    def _check_free(self, terms: Terms) -> None:
        """Raise `ConfigError` where something else says what the answer is, too."""
        for name in ("canvas", "suffix", "structured_outputs"):
            if getattr(terms, name) is not None:
                raise ConfigError(f"{name} and tool_choice both say what the answer is; send one of them")

    @property
    def sampling(self) -> dict[str, Any]:
        """The same, with the newer name of `max_tokens`. Raises `ConfigError` where the two names contradict."""
        own = super().sampling
        length = self.max_completion_tokens
        if length is not None and own.setdefault("max_tokens", length) != length:
            raise ConfigError("max_tokens and max_completion_tokens are two names of one thing; send one of them")
        return own

    @cached_property
    def terms(self) -> Terms:
        """The same, in which `logprobs` says whether there are any."""
        terms = self.own_terms
        if not self.logprobs and terms.top_logprobs:
            raise ConfigError(f"top_logprobs={terms.top_logprobs} needs logprobs=true; send both, or neither")
        return replace(terms, top_logprobs=(terms.top_logprobs or 0) if self.logprobs else None)


class CompletionBody(GenerationBody):
    """Body of `/v1/completions`. A prompt is text or token ids; a list of prompts gives a choice for each."""

    prompt: LongText | Texts | TokenIds | TokenLists
    logprobs: Annotated[int | None, Checked("logprobs", _TOP_LOGPROBS)] = None

    @cached_property
    def terms(self) -> Terms:
        """The same, in which `logprobs` is another name of `top_logprobs`."""
        terms, count = self.own_terms, self.logprobs
        if count is None:
            return terms
        if terms.top_logprobs not in (None, count):
            raise ConfigError("logprobs and top_logprobs are two names of one thing; send one of them")
        return replace(terms, top_logprobs=count)


class ReadBody(Body):
    """What the bodies of decisions, scores and rankings have in common. They take no sampling parameters."""

    model: Name | None = None
    user: Name | None = None
    cache: Annotated[str | None, Checked("cache", _TERMS["cache"])] = None
    cache_config: Annotated[dict[str, Any] | None, Checked("cache_config", _TERMS["cache_config"])] = None
    cache_salt: Annotated[str | None, Checked("cache_salt", _TERMS["cache_salt"])] = None
    priority: Annotated[int | None, Checked("priority", _TERMS["priority"])] = None
    deadline_s: Annotated[float | None, Checked("deadline_s", _TERMS["deadline_s"])] = None

    @model_validator(mode="before")
    @classmethod
    def _read_fields(cls, body: Any) -> Any:
        return read_fields(body, cls.model_fields, FOREIGN_TO_READS)

    @property
    def terms(self) -> Terms:
        """The terms of each of its canvases."""
        names = ("cache", "cache_config", "cache_salt", "priority")
        return Terms(**{name: getattr(self, name) for name in names if getattr(self, name) is not None})

    @property
    def questions_count(self) -> int:
        """How many questions it asks."""
        raise NotImplementedError


@with_declared(Decisions)
class DecisionsBody(ReadBody):
    """Body of `/v1/decisions`."""

    @property
    def questions_count(self) -> int:
        """How many questions it asks."""
        return len(self.questions or ())  # type: ignore[attr-defined]

    @property
    def asked(self) -> Decisions:
        """The decisions. Raises `ConfigError` on a question that cannot be asked."""
        return Decisions(**given(self, Decisions))


class RelevanceBody(ReadBody):
    """What the bodies of scores and rankings have in common."""

    instructions: LongText = RELEVANCE
    labels: Annotated[list[Name], Field(min_length=2, max_length=2)] | None = None


class ScoreBody(RelevanceBody):
    """Body of `/v1/score`: one query and its documents, or as many queries as documents.

    `text_1` and `text_2` are the older names of `queries` and `documents`.
    """

    queries: LongText | Texts | None = None
    documents: LongText | Texts | None = None
    text_1: LongText | Texts | None = None
    text_2: LongText | Texts | None = None

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """The queries and the documents. Raises `ConfigError` where they do not go together."""
        sides = []
        for new, old in (("queries", "text_1"), ("documents", "text_2")):
            found = [each for each in (getattr(self, new), getattr(self, old)) if each is not None]
            if len(found) != 1:
                raise ConfigError(f"{new} and {old} are two names of one thing; send one of them")
            sides.append([found[0]] if isinstance(found[0], str) else list(found[0]))
        queries, documents = sides
        if not documents or len(queries) not in (1, len(documents)):
            raise ConfigError(
                f"documents: {len(queries)} queries and {len(documents)} documents; send one query, or as many as "
                "documents, and one document at least"
            )
        return queries, documents

    @property
    def questions_count(self) -> int:
        """How many pairs it has."""
        return len(self.pairs[1])


class RerankBody(RelevanceBody):
    """Body of `/v1/rerank`. Without `top_n` all documents are returned, and 0 asks for all too."""

    query: LongText
    documents: Annotated[Texts, Field(min_length=1)]
    top_n: Annotated[int | None, Field(ge=0, le=LARGEST)] = None

    @property
    def questions_count(self) -> int:
        """How many documents it has."""
        return len(self.documents)


class TokenizeBody(Body):
    """Body of `/tokenize`, with a text or a conversation."""

    model: Name | None = None
    prompt: LongText | None = None
    messages: Messages | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: Annotated[dict[str, Any] | None, Checked("chat_template_kwargs", _VARIABLES)] = None
    control_tokens: bool | None = None


class DetokenizeBody(Body):
    """Body of `/detokenize`."""

    model: Name | None = None
    tokens: TokenIds


def _arguments(text: str) -> dict[str, Any]:
    """The object that the arguments of a tool call are. Raises `ConfigError` where they are none."""
    return json_object("messages: the arguments of a tool call", text)
