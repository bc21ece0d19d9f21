"""Text to token ids and back, chat templates, and the prefix that conversations share."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from itertools import takewhile, zip_longest
from typing import Any

from remask.checks.values import shown
from remask.errors import ConfigError
from remask.text.chat_template import ChatTemplate
from remask.text.incremental import INCOMPLETE
from remask.text.token_bytes import decoder_steps, named_bytes, token_bytes

_FIRST = 0x100000  # of private characters


class Quoting:
    """Quotes the names of some special tokens.

    Private characters from `_FIRST` on stand for the names, in their order. The one behind them stands before a private
    character that a text has itself.
    """

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(set(names) - {""})
        self._marks = {name: chr(_FIRST + place) for place, name in enumerate(ordered)}
        self._names = {mark: name for name, mark in self._marks.items()}
        self._escape = chr(_FIRST + len(ordered))
        private = f"[{chr(_FIRST)}-{self._escape}]"
        self.pattern = re.compile(_any_of(ordered) if ordered else "(?!)")
        self._quotable = re.compile(f"{self.pattern.pattern}|{private}")
        self._quote = re.compile(f"{self._escape}.|{private}", re.DOTALL)

    def quoted(self, value: Any) -> Any:
        """A text, or all texts of lists and objects, keys included, with private characters in place of names."""
        if isinstance(value, str):
            return self._quotable.sub(self._mark, value)
        if isinstance(value, Mapping):
            return {self.quoted(key): self.quoted(item) for key, item in value.items()}
        return [self.quoted(item) for item in value] if isinstance(value, list | tuple) else value

    def holds_quotes(self, text: str) -> bool:
        """Whether a text holds a private character."""
        return self._quote.search(text) is not None

    def plain(self, text: str) -> str:
        """A quoted text as it was."""
        return self._quote.sub(lambda match: self._names.get(match[0], match[0][-1]), text)

    def _mark(self, match: re.Match[str]) -> str:
        return self._marks.get(match[0], self._escape + match[0])


def _any_of(names: list[str]) -> str:
    """An expression of the longest of `names` that begins at a place, which looks at no character twice."""
    if names == [""]:
        return ""
    rest: dict[str, list[str]] = {}
    for name in names:
        if name:
            rest.setdefault(name[0], []).append(name[1:])
    branches = "|".join(re.escape(first) + _any_of(others) for first, others in rest.items())
    if "" in names:
        return f"(?:{branches})?"
    return f"(?:{branches})" if len(rest) > 1 else branches


ROLES = ("system", "user", "assistant", "tool")

_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

# Stands for the text of a turn that is continued while its template is applied; quoted texts have no use for it.
_HERE = "\U0010fffd"

_THINKING = "enable_thinking"  # of Qwen3's template, whose diffusion models were trained without

Messages = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of a checkpoint, for any number of threads. `decode` leaves out `special_ids` by default."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        # The first encoding changes what a checkpoint's settings say of truncation and padding, those after it only
        # read: from here on any thread may encode and decode.
        backend.encode("", verbose=False)
        self._template: ChatTemplate | None = None
        self._takes_texts: bool | None = None  # whether the template takes arguments that are texts
        self._kinds: frozenset[str] | None = None  # of its decoders, once they were asked for
        added = backend.added_tokens_decoder.items()
        self.special_ids: frozenset[int] = frozenset(backend.all_special_ids) | {i for i, t in added if t.special}
        names = {*backend.all_special_tokens, *(token.content for _, token in added if token.special)}
        self._quoting = Quoting(names)
        self._literal: Any = None

    def __len__(self) -> int:
        return len(self._backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can render messages."""
        return bool(self._backend.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None where there is none, or are several without a default."""
        template = self._backend.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Names of special tokens in it become these tokens.

        With `add_special_tokens` the tokenizer adds the special tokens that it puts around a text. Raises `ConfigError`
        where the text holds lone surrogates, which no tokenizer can read.
        """
        return _ids(self._backend, text, add_special_tokens)

    def encode_literally(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, but names of special tokens are text as any other."""
        if self._literal is None:
            # How a text is read is a state of the native tokenizer, so no one of them can serve both readings at a
            # time. A copy takes a tenth of a second, and few texts need it. Two threads may make one each.
            copy = deepcopy(self._backend)
            copy.encode("", split_special_tokens=True, verbose=False)
            self._literal = copy
        return _ids(self._literal, text, add_special_tokens, split_special_tokens=True)

    def quoted(self, value: Any) -> Any:
        """A text, or all texts of lists and objects, as `encode_quoted` takes them: names in them are no tokens."""
        return self._quoting.quoted(value)

    def encode_quoted(self, text: str) -> list[int]:
        """Token ids of a text of which some parts are `quoted`; names outside of these become special tokens.

        The tokenizer adds nothing around it. Raises `ConfigError` as `encode`.
        """
        quoting = self._quoting
        if not quoting.holds_quotes(text):
            return self.encode(text, add_special_tokens=False)
        _check_unicode(text)
        ids: list[int] = []
        trusted = at = 0  # where a run begins that holds no quotes, and what stands behind the last special token
        # Between two special tokens a text is read as a whole, whoever wrote its parts.
        for start, stop in [*(match.span() for match in quoting.pattern.finditer(text)), (len(text), len(text))]:
            if quoting.holds_quotes(text[at:start]):
                ids += self.encode(text[trusted:at], add_special_tokens=False)
                ids += self.encode_literally(quoting.plain(text[at:start]), add_special_tokens=False)
                trusted = start
            at = stop
        return ids + self.encode(text[trusted:], add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Spaces are not cleaned up."""
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        variables: Variables | None = None,
        *,
        continue_final_message: bool = False,
        control_tokens: bool = False,
    ) -> list[int]:
        """Token ids of `render_chat`'s text. Raises `ConfigError` as `render_chat` does.

        The template's special tokens become tokens, and names of special tokens in messages and variables are text;
        with `control_tokens` they become tokens too.
        """
        if not control_tokens:
            _check(messages)
            messages, variables = self.quoted(messages), self.quoted(variables)
        text = self.render_chat(
            messages, add_generation_prompt, variables, continue_final_message=continue_final_message
        )
        # The template writes the special tokens itself.
        return self.encode(text, add_special_tokens=False) if control_tokens else self.encode_quoted(text)

    def render_chat(
        self,
        messages: Messages,
        add_generation_prompt: bool = True,
        variables: Variables | None = None,
        *,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation by the checkpoint's chat template, with its special tokens.

        `messages` are objects of `role` (system, user, assistant or tool) and `content` (text).
        `add_generation_prompt` begins the assistant's turn at the end; with `continue_final_message` in its place the
        conversation ends within the assistant's last turn, behind its text as it was given. `variables` are further
        ones of the template; `enable_thinking` is false unless they say otherwise.

        Raises `ConfigError` where there is no chat template, a message is malformed, or the last turn cannot be
        continued, and as `ChatTemplate.render`.
        """
        _check(messages)
        if not self.has_chat_template:
            raise ConfigError(
                "The model's tokenizer has no chat template, so 'messages' cannot be rendered. Pass a plain prompt or "
                "token ids, or give the model a template: in its folder as chat_template.jinja, or in its GGUF file as "
                "tokenizer.chat_template."
            )
        template = self._template or self._chat_template()
        self._template = template
        if _THINKING in (self.chat_template or ""):
            variables = {_THINKING: False, **(variables or {})}
        if not continue_final_message:
            return template.render(messages, add_generation_prompt, variables)
        _check_continuation(messages[-1], add_generation_prompt)
        # Templates trim texts and cut them up, so the template gets another text in its place.
        turns = [*messages[:-1], {**messages[-1], "content": _HERE}]
        before, mark, _ = template.render(turns, False, variables).rpartition(_HERE)
        if not mark:
            raise ConfigError(
                "continue_final_message: the model's chat template does not write the text of the assistant's last "
                "turn, so it cannot be continued; leave continue_final_message out"
            )
        return f"{before}{messages[-1]['content']}"

    def shared_prefix(
        self,
        messages: Messages,
        tokens: Sequence[int] | None = None,
        variables: Variables | None = None,
        *,
        control_tokens: bool = False,
    ) -> int:
        """Number of leading tokens of `apply_chat(messages)` that come from the messages before the last user turn.

        This is the length of the longest token prefix that the whole conversation and these messages have in common.
        It is 0 where no message is before the last user turn, where there is no user turn, and where the template
        refuses a conversation that ends before it. `tokens` are those of `apply_chat(messages)`, if the caller has
        them. Raises `ConfigError` as `apply_chat`, for the whole conversation.
        """
        settings: dict[str, Any] = {"variables": variables, "control_tokens": control_tokens}
        whole = self.apply_chat(messages, **settings) if tokens is None else tokens
        users = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if not users or users[-1] == 0:
            return 0
        try:
            return self.prefix_through(messages, users[-1] - 1, whole, **settings)
        except ConfigError:
            return 0

    def prefix_through(
        self,
        messages: Messages,
        last: int,
        tokens: Sequence[int] | None = None,
        variables: Variables | None = None,
        *,
        control_tokens: bool = False,
    ) -> int:
        """Number of leading tokens of `apply_chat(messages)` that come from `messages[0]` to `messages[last]`.

        `tokens` are those of `apply_chat(messages)`, if the caller has them. Raises `ConfigError` as `apply_chat`, for
        the whole conversation and for one that ends at `messages[last]`.
        """
        settings: dict[str, Any] = {"variables": variables, "control_tokens": control_tokens}
        whole = self.apply_chat(messages, **settings) if tokens is None else tokens
        part = self.apply_chat(messages[: last + 1], add_generation_prompt=False, **settings)
        # One comparison in C: a prefix may have thousands of tokens, and most often all are common.
        if list(whole[: len(part)]) == part:
            return len(part)
        return next(place for place, (one, other) in enumerate(zip_longest(whole, part)) if one != other)

    def token_bytes(self, vocab: int) -> list[bytes | None]:
        """The bytes of each token id below `vocab`; None for special tokens. Raises `ConfigError` as `token_bytes`."""
        return token_bytes(self._backend, self.special_ids, vocab)

    def added_bytes(self, token: int, before: int | None) -> bytes | None:
        """The bytes that a token adds to a text which ends with the token `before`, or is empty where that is None.

        Joined, those of all tokens are the text, whatever the tokenizer does to spaces. They may be a part of a
        character. A special token adds none. None where the tokenizer does not tell them.
        """
        if token in self.special_ids:
            return b""
        if self._kinds is None:
            self._kinds = frozenset(step["type"] for step in decoder_steps(self._backend))
        name = self._backend.convert_ids_to_tokens(token)
        content = None if name is None else named_bytes(name, self._kinds)
        if content is not None:
            return content
        first = [] if before is None else [before]
        start, text = self.decode(first), self.decode([*first, token])
        text = text[len(start) :] if text.startswith(start) else self.decode([token])
        return None if INCOMPLETE in text else text.encode()

    def use_chat_template(self, template: str) -> None:
        """Render conversations by `template` (Jinja), in place of the checkpoint's own."""
        self._backend.chat_template = template
        self._template = self._takes_texts = None

    def use_plain_template(self) -> None:
        """Render conversations as a paragraph a turn, behind the special tokens that texts begin with."""
        first = list(takewhile(self.special_ids.__contains__, self.encode("a")))
        opening = json.dumps(self.decode(first, skip_special_tokens=False))
        self.use_chat_template(f"{{{{ {opening} }}}}{_PLAIN_TEMPLATE}")

    def with_arguments(self, messages: Messages) -> Messages:
        """`messages`, in which arguments of calls that are texts are as the chat template takes them.

        A template that fails on a text, or does not write it, gets an object that holds it.
        """
        if not any(isinstance(call["function"]["arguments"], str) for call in _calls(messages)):
            return messages
        if self._takes_texts is None:
            call = {"type": "function", "id": "call_1", "function": {"name": "f", "arguments": _HERE}}
            answer = {"role": "assistant", "content": "b", "tool_calls": [call]}
            turns: list[Mapping[str, Any]] = [{"role": "user", "content": "a"}, answer]
            try:
                self._takes_texts = _HERE in self.render_chat(turns, add_generation_prompt=False)
            except ConfigError:
                self._takes_texts = False
        if self._takes_texts:
            return messages
        copies = deepcopy(list(messages))
        for call in _calls(copies):
            function = call["function"]
            if isinstance(function["arguments"], str):
                function["arguments"] = {"arguments": function["arguments"]}
        return copies

    def _chat_template(self) -> ChatTemplate:
        try:
            text = self._backend.get_chat_template()
        except ValueError as error:
            raise ConfigError(f"The model's tokenizer has several chat templates and no default: {error}") from error
        return ChatTemplate(text, self._backend.special_tokens_map)


def _ids(backend: Any, text: str, add_special_tokens: bool, **settings: Any) -> list[int]:
    _check_unicode(text)
    ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens, verbose=False, **settings)
    return ids


def _check_unicode(text: str) -> None:
    """Raise `ConfigError` if a text has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"The text is not valid Unicode: {error}. Remove the lone surrogates.") from error


def _check(messages: Messages) -> None:
    """Raise `ConfigError` for the first malformed message."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            f"'messages' is {shown(messages)}; it must be a non-empty list of objects of 'role' and 'content'."
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"messages[{place}] is {shown(message)}; it must be an object of 'role' and 'content'.")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ConfigError(f"messages[{place}]: 'role' is {shown(role)}; it must be one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise ConfigError(f"messages[{place}]: 'content' is {shown(content)}; it must be text.")


def _check_continuation(last: Mapping[str, Any], add_generation_prompt: bool) -> None:
    """Raise `ConfigError` if `add_generation_prompt` is set, or if `last` is not an assistant's text without calls."""
    if add_generation_prompt:
        raise ConfigError(
            "continue_final_message=true needs add_generation_prompt=false: the last turn stays open, and none is "
            "begun behind it; send both"
        )
    if last["role"] != "assistant":
        raise ConfigError(
            f"messages: the last one is of the role {last['role']!r}, and an answer continues one of the assistant's "
            "(continue_final_message); end with such a message, or leave continue_final_message out"
        )
    if last.get("tool_calls"):
        raise ConfigError(
            "messages: the last one calls tools, so their results follow it and it cannot be continued; send these, "
            "or leave the calls out"
        )


def _calls(messages: Messages) -> list[Any]:
    """Return all tool calls of a conversation."""
    return [call for message in messages for call in message.get("tool_calls") or ()]
