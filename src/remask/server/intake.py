"""From request bodies to requests of the engine."""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

from remask.checks.values import LARGEST
from remask.engine.request import Request, request_of
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.questions import Decisions
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.bodies import CHARS_PER_TEXT, LONG_CHARS
from remask.server.config import CHARS_A_TOKEN, ServerConfig
from remask.server.errors import ApiError
from remask.server.protocol.conversation import Message, TokenizeBody
from remask.server.protocol.generation import ChatBody, CompletionBody, GenerationBody
from remask.server.protocol.reads import ReadBody
from remask.server.tools import ToolCalls, messages_with_tools_as_text
from remask.text.prompts import text_tokens
from remask.text.tokenizer import Tokenizer


class Intake:
    """Makes engine requests from request bodies. It works on texts on the host, and is safe to call from any thread.

    The constructor raises `ConfigError` if the model folder has no tokenizer, or the model cannot run the default cache
    policy or sampling parameters.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        if llm.tokenizer is None:
            raise ConfigError(
                f"the model folder of {llm.loaded.name!r} has no tokenizer, and a server takes and answers text; put "
                "the tokenizer's files into it"
            )
        self.session = llm.session
        self.config = config
        self._refused_adapters = llm.refused_adapters
        self.tokenizer: Tokenizer = llm.tokenizer
        for name in config.model_names:
            if name in llm.loaded.adapters or name in llm.refused_adapters:
                raise ConfigError(f"{name!r} is a name of the model and of an adapter; name the adapter otherwise")
        # A default policy or parameter that the model cannot take fails here, not with the first request.
        session = self.session
        policy = session.policy(*session.default_cache(None), adapter=None)
        for adapter in llm.loaded.adapters:
            session.policy(*session.default_cache(adapter), adapter=adapter)
        params = session.params({}, config.sampling, prompt_tokens=1)
        session.engine.check(Request("defaults", [0], params, policy=policy))
        self.numbers = itertools.count()  # clients may send one request id twice, and the engine's must differ
        self._seeds = random.Random(config.seed)
        self.max_prompt_chars = config.max_prompt_chars or CHARS_A_TOKEN * llm.engine.max_model_len
        self.max_request_chars = config.max_request_chars or 4 * self.max_prompt_chars

    def check_model(self, name: str | None, field: str = "model") -> None:
        """Raise a 404 that names `field` if `name` is not a served model. None is the server's own model."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            reason = self._refused_adapters.get(name)
            problem = "does not exist" if reason is None else f"is an adapter that could not be loaded: {reason}"
            raise ApiError(404, f"the model {name!r} {problem}; served: {served}", field, "model_not_found")

    @property
    def model_names(self) -> Sequence[str]:
        """The names that requests may give as `model`: those of the model, then those of its adapters."""
        return *self.config.model_names, *self.session.loaded.adapters

    def terms(self, body: GenerationBody | ReadBody) -> Terms:
        """The terms of a body, with the adapter that its `model` names, if any.

        Raises a 404 if the model is not served, and `ConfigError` if two fields contradict each other.
        """
        self.check_model(body.model)
        terms = body.terms
        if terms.adapter in self._refused_adapters:
            self.check_model(terms.adapter, "adapter")
        if body.model not in self.session.loaded.adapters:
            return terms
        if terms.adapter not in (None, body.model):
            raise ConfigError(f"model={body.model!r} and adapter={terms.adapter!r} are two adapters; send one of them")
        return replace(terms, adapter=body.model)

    def check_priority(self, priority: int, *, leads: bool) -> None:
        """Raise `ConfigError` if the request may not have this `priority`.

        `leads` says whether it may have a negative one at all, which puts it before others.
        """
        lowest = -self.config.max_priority if leads else 0
        if priority < lowest:
            reason = "" if leads else ", as a negative one needs a priority key"
            raise ConfigError(f"priority={priority} is not open to this request: send {lowest} or more{reason}")

    def check_size(self, body: GenerationBody | TokenizeBody) -> int:
        """Return the size of the work on a body in characters: those of its texts, and `CHARS_PER_TEXT` for each.

        If its form must be compiled, which may take seconds, the size is that of a long text at least. Only lengths are
        read, no text. Raises `ConfigError` on more messages, prompts or characters than the server takes.
        """
        name = body.texts_name
        messages = getattr(body, "messages", None) or ()
        if len(messages) > self.config.max_messages:
            raise ConfigError(f"{name} holds {len(messages)} messages; at most {self.config.max_messages} are taken")
        if isinstance(body, GenerationBody):
            self._check_choices(body)
        prompt_chars = body.prompt_chars
        longest = max(prompt_chars)
        total = sum(prompt_chars)
        if longest > self.max_prompt_chars:
            raise ConfigError(
                f"{name} has {longest} characters; at most {self.max_prompt_chars} are taken (max_prompt_chars)"
            )
        if total > self.max_request_chars:
            raise ConfigError(
                f"{name} has {total} characters altogether; at most {self.max_request_chars} are taken "
                "(max_request_chars)"
            )
        size = total + CHARS_PER_TEXT * len(prompt_chars)
        if isinstance(body, GenerationBody) and self._needs_compilation(body):
            return max(size, LONG_CHARS)
        return size

    def _needs_compilation(self, body: GenerationBody) -> bool:
        """Whether the form of its answers, or that of a forced tool call, must be compiled."""
        calls = self.calls(body)
        if calls is not None and calls.forced is not None:
            return self.session.needs_compilation(calls.constraint)
        return body.asks_form and self.session.needs_compilation(body.own_terms.structured_outputs)

    def check_decisions(self, decisions: Sequence[Decisions]) -> int:
        """Return how many characters must be tokenized. Raises `ConfigError` on more than the server takes."""
        longest = max(decisions, key=lambda item: item.transcript.chars)
        if longest.transcript.chars > self.max_prompt_chars:
            name = "state" if longest.input is None else "input"
            raise ConfigError(
                f"{name} has {longest.transcript.chars} characters; at most {self.max_prompt_chars} are taken "
                "(max_prompt_chars)"
            )
        total = sum(item.chars for item in decisions)
        if total > self.max_request_chars:
            raise ConfigError(
                f"questions have {total} characters altogether, each as often as it has labels, and at most "
                f"{self.max_request_chars} are taken (max_request_chars); ask fewer at a time"
            )
        return total

    def conversation(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
        control_tokens: bool | None = None,
        name: str = "messages",
    ) -> list[int]:
        """Return the token ids of a conversation. The flags are those of `Tokenizer.render_chat`.

        `variables` are passed to the chat template; `name` is the field of the body, for errors. Raises `ConfigError`
        if the messages hold calls of tools or their results, and neither the template nor `tools_by_form` writes them.
        """
        if self._has_unwritable_calls(messages) and not self.tools_by_form:
            raise ConfigError(
                f"{name}: calls of tools and their results are nothing that the model's chat template tells it of; "
                "say them as text in turns of the user and the assistant, or start the server with a --chat-template "
                "that does"
            )
        return self.tokenizer.apply_chat(
            self._template_messages(messages, variables),
            add_generation_prompt=add_generation_prompt,
            variables=variables,
            continue_final_message=continue_final_message,
            control_tokens=control_tokens is True,
        )

    @cached_property
    def tools_by_form(self) -> bool:
        """Whether models whose chat template has no tools may choose calls by the form of their answer."""
        return self.config.tools_by_form and self.session.supports_forms

    def _has_unwritable_calls(self, messages: Sequence[Message]) -> bool:
        """Whether the messages hold calls of tools or their results, and the chat template has no place for them."""
        has_calls = any(message.role == "tool" or message.tool_calls for message in messages)
        return has_calls and "tool" not in (self.tokenizer.chat_template or "")

    def _template_messages(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None
    ) -> Sequence[Mapping[str, Any]]:
        """Messages as the chat template reads them, with tools and calls as texts if it has no place for them."""
        rendered = [message.rendered for message in messages]
        tools = (variables or {}).get("tools")
        has_unwritable_tools = bool(tools) and "tools" not in (self.tokenizer.chat_template or "")
        if (has_unwritable_tools or self._has_unwritable_calls(messages)) and self.tools_by_form:
            return messages_with_tools_as_text(rendered, tools)
        return self.tokenizer.fit_arguments(rendered)

    def chat(self, body: ChatBody, request_id: str) -> list[Request]:
        """The requests of a chat, one for each of `n` choices. Raises `ConfigError`, and a 404 for an unknown model."""
        terms = self.terms(body)
        tokens = self.conversation(body.messages, *body.ending, body.variables, terms.control_tokens, body.texts_name)
        calls = self.calls(body)
        affixes: tuple[str, str] | None = None
        beginning = body.continued if terms.canvas is None else ""  # the form of a canvas is that of its hole
        if calls is not None and calls.forced is not None:
            kind = self.session.loaded.config.kind
            if kind == "uniform":
                raise ConfigError(
                    "tool_choice: a call that must be made is held to its schema, and tokens of a uniform model may "
                    "change once they are chosen; send 'auto', or use a masked or block-causal model"
                )
            terms = replace(terms, structured_outputs=calls.constraint)
            affixes = calls.affixes
            beginning = beginning if affixes is None else ""
            # Blocks do not see what follows them, so the end of the call would only cost positions.
            if affixes is not None and kind == "block_causal":
                affixes = affixes[0], ""
        has_marker = any(message.cache_control is not None for message in body.messages)
        prompts = [(tokens, self._shared_length(body, tokens))]
        return self._requests(
            body, terms, prompts, request_id, affixes=affixes, beginning=beginning, find_prefix=not has_marker
        )

    def calls(self, body: GenerationBody) -> ToolCalls | None:
        """What a body says of calls of tools, or None if it offers no tools. Raises like `ChatBody.calls`."""
        if not isinstance(body, ChatBody):
            return None
        template = self.tokenizer.chat_template
        by_form = bool(body.tools) and "tools" not in (template or "") and self.tools_by_form
        return body.calls(template, by_form=by_form)

    def completion(self, body: CompletionBody, request_id: str) -> list[Request]:
        """The requests of a completion, one for each of `n` choices of each prompt. Raises like `chat`."""
        terms = self.terms(body)
        prompts = [
            text_tokens(prompt, self.tokenizer, terms.control_tokens) if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]
        return self._requests(body, terms, [(tokens, 0) for tokens in prompts], request_id)

    def _shared_length(self, body: ChatBody, tokens: Sequence[int]) -> int:
        """Return the length in tokens of the prefix that a conversation shares.

        The length is `prefix_length` if it is set. Otherwise the prefix ends behind the last `cache_control` marker, or
        without markers before the last user turn. Raises `ConfigError` if the body has a length and a marker.
        """
        marked = [index for index, message in enumerate(body.messages) if message.cache_control is not None]
        length = body.terms.prefix_length
        if length is not None:
            if marked:
                raise ConfigError("prefix_length and cache_control both say what is shared; send one of them")
            return length
        variables = body.variables
        messages = self._template_messages(body.messages, variables)
        control = body.terms.control_tokens is True
        if marked:
            last = marked[-1] + len(messages) - len(body.messages)  # a turn with the tools may have been added in front
            return self.tokenizer.prefix_through(messages, last, tokens, variables, control_tokens=control)
        return self.tokenizer.shared_prefix(messages, tokens, variables, control_tokens=control)

    def _requests(
        self,
        body: GenerationBody,
        terms: Terms,
        prompts: Sequence[tuple[list[int], int]],
        request_id: str,
        *,
        affixes: tuple[str, str] | None = None,
        beginning: str = "",
        find_prefix: bool = True,
    ) -> list[Request]:
        """Build a request for each choice of each prompt: a pair of its token ids, and how many of them are shared.

        `affixes` are texts before and behind the hole of the answer, and `beginning` is the text of the answer that the
        prompt ends with. The other arguments are those of `request_of`. Raises `ConfigError` on fields of streams in a
        body without one, and what `Session.response` and `Session.constraint` raise.
        """
        for name in ("stream_options", "stream_drafts"):
            if getattr(body, name) and not body.stream:
                raise ConfigError(f"{name} is for streams: send it with stream=true, or leave it out")
        session = self.session
        sampling = body.sampling
        policy = session.policy_of(terms)
        config = session.loaded.config
        options: dict[str, Any] = {
            "constraint": session.constraint(terms.structured_outputs, beginning),
            "drafts": bool(body.stream_drafts),
            "find_prefix": find_prefix,
            "continues": bool(body.continued),
        }
        requests: list[Request] = []
        for tokens, prefix_length in prompts:
            params, template = session.response(
                terms, sampling, len(tokens), defaults=self.config.sampling, affixes=affixes
            )
            options |= {"prefix_length": prefix_length, "template": template}
            for choice in range(body.choices):
                name = f"{request_id}-{next(self.numbers)}"
                choice_params = self._choice_params(params, choice)
                requests.append(request_of(name, tokens, choice_params, policy, terms, config, **options))
        return requests

    def _check_choices(self, body: GenerationBody) -> None:
        choices = body.choices
        prompts = len(body.prompts) if isinstance(body, CompletionBody) else 1
        limit = self.config.max_choices
        if not 1 <= choices * prompts <= limit:
            raise ConfigError(f"n times the number of prompts must be from 1 to {limit}, got {choices} x {prompts}")

    def _choice_params(self, params: SamplingParams, choice: int) -> SamplingParams:
        """Return the sampling parameters of the choice with this number, which has a seed of its own.

        The seed follows from that of the request. A request without one gets the next of the seeds that the server's
        seed generates, or none if the server has no seed either.
        """
        if params.seed is not None:
            seed = params.seed + choice
            # Generators take no negative seed; one of an engine's range stays, as `LLM` draws by it.
            return replace(params, seed=seed if 0 <= seed <= LARGEST else seed % LARGEST)
        if self.config.seed is None:
            return params
        return replace(params, seed=self._seeds.randrange(LARGEST))
