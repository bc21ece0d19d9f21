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
from remask.policies import CachePolicy
from remask.request.questions import Decisions
from remask.request.sampling_params import SamplingParams
from remask.request.terms import Terms
from remask.server.bodies import ITEM, LONG
from remask.server.config import CHARS_A_TOKEN, ServerConfig
from remask.server.errors import ApiError
from remask.server.protocol.conversation import Message, TokenizeBody
from remask.server.protocol.generation import ChatBody, CompletionBody, GenerationBody
from remask.server.protocol.reads import ReadBody
from remask.server.tools import ToolCalls, in_words
from remask.text.prompts import text_tokens
from remask.text.tokenizer import Tokenizer


class Intake:
    """Makes requests of bodies. Everything here is host work on texts, and safe on any threads beside the engine's.

    Raises `ConfigError` when made, where the model folder has no tokenizer or the default cache policy cannot be.
    """

    def __init__(self, llm: LLM, config: ServerConfig) -> None:
        if llm.tokenizer is None:
            raise ConfigError(
                f"the model folder of {llm.loaded.name!r} has no tokenizer, and a server takes and answers text; put "
                "the tokenizer's files into it"
            )
        self.session, self.config, self._refused = llm.session, config, llm.refused_adapters
        self.tokenizer: Tokenizer = llm.tokenizer
        for name in config.model_names:
            if name in llm.loaded.adapters or name in llm.refused_adapters:
                raise ConfigError(f"{name!r} is a name of the model and of an adapter; name the adapter otherwise")
        adapters, session = (None, *llm.loaded.adapters), self.session
        policy, *_ = [session.policy(*session.default_cache(adapter), adapter=adapter) for adapter in adapters]
        # A default policy or parameter that the model cannot take fails now, and not with the first request.
        session.engine.check(
            Request("defaults", [0], session.params({}, config.sampling, prompt_tokens=1), policy=policy)
        )
        self.numbers = itertools.count()  # clients may send one request id twice, and the engine's must differ
        self._seeds = random.Random(config.seed)
        self.max_prompt_chars = config.max_prompt_chars or CHARS_A_TOKEN * llm.engine.max_model_len
        self.max_request_chars = config.max_request_chars or 4 * self.max_prompt_chars

    def check_model(self, name: str | None, field: str = "model") -> None:
        """Raise a 404 for a model that is not served, which `field` names. No name means the one that is."""
        if name is not None and name not in self.model_names:
            served = ", ".join(self.model_names)
            why = self._refused.get(name)
            wrong = "does not exist" if why is None else f"is an adapter that could not be loaded: {why}"
            raise ApiError(404, f"the model {name!r} {wrong}; served: {served}", field, "model_not_found")

    @property
    def model_names(self) -> Sequence[str]:
        """The names that requests may give as `model`: those of the model, then those of its adapters."""
        return *self.config.model_names, *self.session.loaded.adapters

    def terms(self, body: GenerationBody | ReadBody) -> Terms:
        """The terms of a body, whose `model` may name an adapter.

        Raises a 404 for a model that is not served, and `ConfigError` where two of its fields contradict each other.
        """
        self.check_model(body.model)
        terms = body.terms
        if terms.adapter in self._refused:
            self.check_model(terms.adapter, "adapter")
        if body.model not in self.session.loaded.adapters:
            return terms
        if terms.adapter not in (None, body.model):
            raise ConfigError(f"model={body.model!r} and adapter={terms.adapter!r} are two adapters; send one of them")
        return replace(terms, adapter=body.model)

    def check_priority(self, priority: int, *, leads: bool) -> None:
        """Raise `ConfigError` for a priority before that of others which the request may not have.

        `leads` says whether its key may have one at all.
        """
        most = self.config.max_priority if leads else 0
        if priority < -most:
            why = "" if leads else ", as a negative one needs a priority key"
            raise ConfigError(f"priority={priority} is not open to this request: send {-most} or more{why}")

    def check_size(self, body: GenerationBody | TokenizeBody) -> int:
        """About how many characters are to be tokenized for a body; each of its texts counts for some more.

        A form that is still to be compiled counts as a long text, as that may take seconds. It looks at lengths alone,
        before any text is read. Raises `ConfigError` on more messages, prompts or characters than the server takes.
        """
        name = body.texts_name
        messages = getattr(body, "messages", None) or ()
        if len(messages) > self.config.max_messages:
            raise ConfigError(f"{name} holds {len(messages)} messages; at most {self.config.max_messages} are taken")
        if isinstance(body, GenerationBody):
            self._check_choices(body)
        lengths = body.lengths
        most, together = self.max_prompt_chars, self.max_request_chars
        if max(lengths) > most:
            raise ConfigError(f"{name} has {max(lengths)} characters; at most {most} are taken (max_prompt_chars)")
        if sum(lengths) > together:
            raise ConfigError(
                f"{name} has {sum(lengths)} characters altogether; at most {together} are taken (max_request_chars)"
            )
        size = sum(lengths) + ITEM * len(lengths)
        return max(size, LONG) if isinstance(body, GenerationBody) and self._compiles(body) else size

    def _compiles(self, body: GenerationBody) -> bool:
        """Whether the form of its answers, or that of a call that must be made, is still to be compiled."""
        calls = self.calls(body)
        if calls is not None and calls.forced is not None:
            return self.session.compiles(calls.constraint)
        return self.session.compiles(body.own_terms.structured_outputs) if body.asks_form else False

    def check_decisions(self, decisions: Sequence[Decisions]) -> int:
        """The same for decisions. Raises `ConfigError` on more than the server takes."""
        most, together = self.max_prompt_chars, self.max_request_chars
        longest = max(decisions, key=lambda about: about.transcript.chars)
        if longest.transcript.chars > most:
            name = "state" if longest.input is None else "input"
            raise ConfigError(
                f"{name} has {longest.transcript.chars} characters; at most {most} are taken (max_prompt_chars)"
            )
        total = sum(about.chars for about in decisions)
        if total > together:
            raise ConfigError(
                f"questions have {total} characters altogether, each as often as it has labels, and at most {together} "
                "are taken (max_request_chars); ask fewer at a time"
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
        """Token ids of a conversation, which ends as in `Tokenizer.render_chat`; `variables` are those of its template.

        `name` is the field that holds it. Raises `ConfigError` where it holds calls of tools or their results, of
        which the template tells nothing.
        """
        calls = any(message.role == "tool" or message.tool_calls for message in messages)
        if calls and "tool" not in (self.tokenizer.chat_template or "") and not self.tools_by_form:
            raise ConfigError(
                f"{name}: calls of tools and their results are nothing that the model's chat template tells it of; "
                "say them as text in turns of the user and the assistant, or start the server with a --chat-template "
                "that does"
            )
        return self.tokenizer.apply_chat(
            self._rendered(messages, variables),
            add_generation_prompt,
            variables,
            continue_final_message=continue_final_message,
            control_tokens=control_tokens is True,
        )

    @cached_property
    def tools_by_form(self) -> bool:
        """Whether a model that its template does not tell of tools may choose calls by the form of its answer."""
        return self.config.tools_by_form and self.session.takes_forms

    def _rendered(
        self, messages: Sequence[Message], variables: Mapping[str, Any] | None
    ) -> Sequence[Mapping[str, Any]]:
        """Messages in the form that the chat template reads: one without tools gets these, and calls, as texts."""
        rendered = [message.rendered for message in messages]
        template, tools = self.tokenizer.chat_template or "", (variables or {}).get("tools")
        calls = any(message.role == "tool" or message.tool_calls for message in messages) and "tool" not in template
        if (calls or (tools and "tools" not in template)) and self.tools_by_form:
            return in_words(rendered, tools)
        return self.tokenizer.with_arguments(rendered)

    def chat(self, body: ChatBody, request_id: str) -> list[Request]:
        """One request for each of `n` choices."""
        terms = self.terms(body)
        control = terms.control_tokens
        tokens = self.conversation(body.messages, *body.ending, body.variables, control, body.texts_name)
        calls, around = self.calls(body), None
        beginning = body.continued if terms.canvas is None else ""  # the form of a canvas is that of its hole
        if calls is not None and calls.forced is not None:
            kind = self.session.loaded.config.kind
            if kind == "uniform":
                raise ConfigError(
                    "tool_choice: a call that must be made is held to its schema, and tokens of a uniform model may "
                    "change once they are chosen; send 'auto', or use a masked or block-causal model"
                )
            terms, around = replace(terms, structured_outputs=calls.constraint), calls.around
            beginning = beginning if around is None else ""
            # No block sees what is behind it, so that what closes a call would say nothing.
            if around is not None and kind == "block_causal":
                around = around[0], ""
        marked = any(message.cache_control is not None for message in body.messages)
        prompts = [(tokens, self._shared(body, tokens))]
        return self._requests(body, terms, prompts, request_id, around, beginning, find_prefix=not marked)

    def calls(self, body: GenerationBody) -> ToolCalls | None:
        """What a body says of calls of tools; None where it offers none. Raises `ConfigError` as `ChatBody.calls`."""
        if not isinstance(body, ChatBody):
            return None
        template = self.tokenizer.chat_template
        by_form = bool(body.tools) and "tools" not in (template or "") and self.tools_by_form
        return body.calls(template, by_form=by_form)

    def completion(self, body: CompletionBody, request_id: str) -> list[Request]:
        """One request for each of `n` choices of each prompt."""
        terms = self.terms(body)
        prompts = [
            text_tokens(prompt, self.tokenizer, terms.control_tokens) if isinstance(prompt, str) else prompt
            for prompt in body.prompts
        ]
        return self._requests(body, terms, [(tokens, 0) for tokens in prompts], request_id)

    def _shared(self, body: ChatBody, tokens: Sequence[int]) -> int:
        """Length of a conversation's shared prefix: to the last marker, or to the last user turn."""
        marks = [place for place, message in enumerate(body.messages) if message.cache_control is not None]
        length = body.terms.prefix_length
        if length is not None:
            if marks:
                raise ConfigError("prefix_length and cache_control both say what is shared; send one of them")
            return length
        variables = body.variables
        messages = self._rendered(body.messages, variables)
        control = body.terms.control_tokens is True
        if marks:
            last = marks[-1] + len(messages) - len(body.messages)  # behind a turn that tells of tools
            return self.tokenizer.prefix_through(messages, last, tokens, variables, control_tokens=control)
        return self.tokenizer.shared_prefix(messages, tokens, variables, control_tokens=control)

    def _requests(
        self,
        body: GenerationBody,
        terms: Terms,
        prompts: Sequence[tuple[list[int], int]],
        request_id: str,
        around: tuple[str, str] | None = None,
        beginning: str = "",
        *,
        find_prefix: bool = True,
    ) -> list[Request]:
        for name in ("stream_options", "stream_drafts"):
            if getattr(body, name) and not body.stream:
                raise ConfigError(f"{name} is for streams: send it with stream=true, or leave it out")
        session, sampling = self.session, body.sampling
        policy, shape = self.policy(terms), self.session.loaded.config
        more: dict[str, Any] = {
            "constraint": session.constraint(terms.structured_outputs, beginning),
            "drafts": bool(body.stream_drafts),
            "find_prefix": find_prefix,
            "continues": bool(body.continued),
        }
        requests: list[Request] = []
        for tokens, shared in prompts:
            params, template = session.response(
                terms, sampling, len(tokens), defaults=self.config.sampling, around=around
            )
            for choice in range(body.choices):
                name = f"{request_id}-{next(self.numbers)}"
                seeded = self._seeded(params, choice)
                requests.append(
                    request_of(name, tokens, seeded, policy, terms, shape, shared=shared, template=template, **more)
                )
        return requests

    def _check_choices(self, body: GenerationBody) -> None:
        choices, prompts = body.choices, len(body.prompts) if isinstance(body, CompletionBody) else 1
        if choices < 1 or choices * prompts > self.config.max_choices:
            raise ConfigError(
                f"n={choices} for {prompts} prompts: n must be at least 1, and n times the prompts at most "
                f"{self.config.max_choices}"
            )

    def policy(self, terms: Terms) -> CachePolicy:
        """The cache policy of a request. Raises `ConfigError` where its terms name none that can be."""
        return self.session.policy_of(terms)

    def _seeded(self, params: SamplingParams, choice: int) -> SamplingParams:
        """Choices of one request differ, and a seed, its own or a default one, gives the same ones again."""
        if params.seed is not None:
            return replace(params, seed=(params.seed + choice) % LARGEST)  # a negative one, too, as an engine takes it
        return params if self.config.seed is None else replace(params, seed=self._seeds.randrange(LARGEST))
