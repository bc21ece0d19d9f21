"""Text to token ids and back, conversations to token ids, and the prefix that requests share."""

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

_FIRST_MARK = 0x100000  # the first private character


class Quoting:
    """Quotes the names of special tokens in texts, so that a tokenizer does not read them as these tokens.

    A private character, a mark, replaces each name: `_FIRST_MARK` and those after it, in the order of the names. The
    next one is the escape, which precedes a private character of the text itself.

    Attributes:
        pattern: matches any of the names.
    """

    def __init__(self, names: Iterable[str]) -> None:
        ordered = sorted(set(names) - {""})
        self._marks = {name: chr(_FIRST_MARK + index) for index, name in enumerate(ordered)}
        self._names = {mark: name for name, mark in self._marks.items()}
        self._escape = chr(_FIRST_MARK + len(ordered))
        private = f"[{chr(_FIRST_MARK)}-{self._escape}]"
        self.pattern = re.compile(_prefix_tree(ordered) if ordered else "(?!)")
        self._quotable = re.compile(f"{self.pattern.pattern}|{private}")
        self._quote = re.compile(f"{self._escape}.|{private}", re.DOTALL)

    def quote(self, value: Any) -> Any:
        """Quote a text, or all texts of lists and objects, keys included. Returns other values as they are."""
        if isinstance(value, str):
            return self._quotable.sub(self._mark_for, value)
        if isinstance(value, Mapping):
            return {self.quote(key): self.quote(item) for key, item in value.items()}
        return [self.quote(item) for item in value] if isinstance(value, list | tuple) else value

    def has_quotes(self, text: str) -> bool:
        """Whether a text has a mark or an escape."""
        return self._quote.search(text) is not None

    def unquote(self, text: str) -> str:
        """The text whose `quote` is `text`."""
        return self._quote.sub(lambda match: self._names.get(match[0], match[0][-1]), text)

    def _mark_for(self, match: re.Match[str]) -> str:
        return self._marks.get(match[0], self._escape + match[0])


def _prefix_tree(names: list[str]) -> str:
    """A regular expression for the longest of `names` at a position, which reads no character twice."""
    if names == [""]:
        return ""
    suffixes: dict[str, list[str]] = {}  # by first character
    for name in names:
        if name:
            suffixes.setdefault(name[0], []).append(name[1:])
    branches = "|".join(re.escape(first) + _prefix_tree(tails) for first, tails in suffixes.items())
    if "" in names:
        return f"(?:{branches})?"
    return f"(?:{branches})" if len(suffixes) > 1 else branches


ROLES = ("system", "user", "assistant", "tool")

_PLAIN_TEMPLATE = (
    "{% for message in messages %}{{ message.role | capitalize }}: {{ message.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}Assistant:{% endif %}"
)

_PLACEHOLDER = "\U0010fffd"  # in place of a text while a template is applied; `Quoting` has no such mark
_THINKING = "enable_thinking"  # of Qwen3's template, whose diffusion models were trained without

Messages = Sequence[Mapping[str, Any]]
Variables = Mapping[str, Any]


class Tokenizer:
    """The tokenizer of a checkpoint. Safe on any thread.

    Attributes:
        special_ids: the special tokens, which `decode` omits by default.
    """

    def __init__(self, backend: Any) -> None:
        """`backend` is transformers' tokenizer or a `NativeTokenizer`."""
        self._backend = backend
        # The first encoding replaces the checkpoint's settings of truncation and padding; further ones change nothing,
        # so that from here on any thread may encode and decode.
        backend.encode("", verbose=False)
        self._literal_backend: Any = None  # made by `encode_literally`
        self._compiled_template: ChatTemplate | None = None  # made by the first `render_chat`
        self._accepts_text_arguments: bool | None = None  # whether the template does; see `fit_arguments`
        self._decoder_types: frozenset[str] | None = None  # made by `added_bytes`
        special = {id_: token for id_, token in backend.added_tokens_decoder.items() if token.special}
        self.special_ids = frozenset[int]({*backend.all_special_ids, *special})
        self._quoting = Quoting({*backend.all_special_tokens, *(token.content for token in special.values())})

    def __len__(self) -> int:
        return len(self._backend)

    @property
    def has_chat_template(self) -> bool:
        """Whether `apply_chat` can render messages."""
        return bool(self._backend.chat_template)

    @property
    def chat_template(self) -> str | None:
        """The text of the chat template; None without one, or with several of which none is the default."""
        template = self._backend.chat_template
        return template.get("default") if isinstance(template, dict) else template

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`. Names of special tokens in it become these tokens.

        With `add_special_tokens` the tokenizer adds the special tokens that it puts around a text. Raises `ConfigError`
        if the text has lone surrogates, which no tokenizer can read.
        """
        return _encode(self._backend, text, add_special_tokens)

    def encode_literally(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, but names of special tokens are ordinary text."""
        if self._literal_backend is None:
            # Whether names are text is a state of the native tokenizer, so one of them cannot do both at a time. A copy
            # takes a tenth of a second, and few texts need it. Two threads may make one each.
            copy = deepcopy(self._backend)
            copy.encode("", split_special_tokens=True, verbose=False)
            self._literal_backend = copy
        return _encode(self._literal_backend, text, add_special_tokens, split_special_tokens=True)

    def quote(self, value: Any) -> Any:
        """Quote a text, or all texts of lists and objects, such that `encode_quoted` reads names in them as text."""
        return self._quoting.quote(value)

    def encode_quoted(self, text: str) -> list[int]:
        """Token ids of a text with parts that were quoted; names outside of these parts become special tokens.

        The tokenizer adds no special tokens around it. Raises `ConfigError` as `encode`.
        """
        quoting = self._quoting
        if not quoting.has_quotes(text):
            return self.encode(text, add_special_tokens=False)
        _check_unicode(text)
        ids: list[int] = []
        encoded = 0  # characters whose ids are in `ids`
        begin = 0  # of the text behind the last special token
        # Text between two special tokens is encoded as a whole, as a token may span quoted and unquoted parts.
        for start, stop in [*(match.span() for match in quoting.pattern.finditer(text)), (len(text), len(text))]:
            if quoting.has_quotes(text[begin:start]):
                ids += self.encode(text[encoded:begin], add_special_tokens=False)
                ids += self.encode_literally(quoting.unquote(text[begin:start]), add_special_tokens=False)
                encoded = start
            begin = stop
        return ids + self.encode(text[encoded:], add_special_tokens=False)

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`. Spaces are not cleaned up."""
        text: str = self._backend.decode(
            list(ids), skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )
        return text

    def apply_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        variables: Variables | None = None,
        continue_final_message: bool = False,
        control_tokens: bool = False,
    ) -> list[int]:
        """Token ids of the text of `render_chat`. Raises `ConfigError` as `render_chat`.

        Names of special tokens in the template become tokens. In messages and variables they are text, unless
        `control_tokens` is set.
        """
        _check_messages(messages)
        if not control_tokens:
            messages = self.quote(messages)
            variables = self.quote(variables)
        text = self._render_checked(messages, add_generation_prompt, variables, continue_final_message)
        # The template itself writes the special tokens around the text.
        return self.encode(text, add_special_tokens=False) if control_tokens else self.encode_quoted(text)

    def render_chat(
        self,
        messages: Messages,
        *,
        add_generation_prompt: bool = True,
        variables: Variables | None = None,
        continue_final_message: bool = False,
    ) -> str:
        """The text of a conversation by the checkpoint's chat template, with its special tokens.

        `messages` are objects of `role` (system, user, assistant or tool) and `content` (text). The text ends with the
        beginning of an assistant's turn if `add_generation_prompt`; instead, with `continue_final_message`, it ends
        within the assistant's last turn, after that message's content. `variables` are further ones of the template;
        `enable_thinking` is false unless they set it.

        Raises `ConfigError` if there is no chat template, a message is malformed, or the last turn cannot be continued,
        and as `ChatTemplate.render`.
        """
        _check_messages(messages)
        return self._render_checked(messages, add_generation_prompt, variables, continue_final_message)

    def _render_checked(
        self,
        messages: Messages,
        add_generation_prompt: bool,
        variables: Variables | None,
        continue_final_message: bool,
    ) -> str:
        """Render messages that are well-formed, as `render_chat` does, which says what is raised."""
        if self._compiled_template is None:
            self._compiled_template = self._compile_template()
        template = self._compiled_template
        if _THINKING in (self.chat_template or ""):
            variables = {_THINKING: False, **(variables or {})}
        if not continue_final_message:
            return template.render(messages, add_generation_prompt=add_generation_prompt, variables=variables)
        _check_continuation(messages[-1], add_generation_prompt)
        # Templates may trim and split a text, so the template gets a placeholder.
        turns = [*messages[:-1], {**messages[-1], "content": _PLACEHOLDER}]
        rendered = template.render(turns, add_generation_prompt=False, variables=variables)
        text, placeholder, _ = rendered.rpartition(_PLACEHOLDER)
        if not placeholder:
            raise ConfigError(
                "continue_final_message: the model's chat template does not write the text of the assistant's last "
                "turn, so it cannot be continued; leave continue_final_message out"
            )
        return f"{text}{messages[-1]['content']}"

    def shared_prefix(
        self,
        messages: Messages,
        tokens: Sequence[int] | None = None,
        variables: Variables | None = None,
        *,
        control_tokens: bool = False,
    ) -> int:
        """Number of leading tokens of `apply_chat(messages)` that come from the messages before the last user turn.

        It is 0 if no message is before the last user turn, if there is no user turn, and if the template refuses a
        conversation that ends before it. `tokens` are those of `apply_chat(messages)`, if the caller has them. Raises
        `ConfigError` as `apply_chat`, for the whole conversation.
        """
        settings: dict[str, Any] = {"variables": variables, "control_tokens": control_tokens}
        if tokens is None:
            tokens = self.apply_chat(messages, **settings)
        user_turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
        if not user_turns or user_turns[-1] == 0:
            return 0
        try:
            return self.prefix_through(messages, user_turns[-1] - 1, tokens, **settings)
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

        This is the length of the longest common prefix of the tokens of both conversations. `tokens` are those of
        `apply_chat(messages)`, if the caller has them. Raises `ConfigError` as `apply_chat`, for the whole conversation
        and for one that ends at `messages[last]`.
        """
        settings: dict[str, Any] = {"variables": variables, "control_tokens": control_tokens}
        if tokens is None:
            tokens = self.apply_chat(messages, **settings)
        prefix = self.apply_chat(messages[: last + 1], add_generation_prompt=False, **settings)
        # One comparison in C: a prefix may have thousands of tokens, and most often all are common.
        if list(tokens[: len(prefix)]) == prefix:
            return len(prefix)
        return next(
            index for index, (token, prefix_token) in enumerate(zip_longest(tokens, prefix)) if token != prefix_token
        )

    def token_bytes(self, vocab_size: int) -> list[bytes | None]:
        """The bytes of each token id below `vocab_size`; None for special tokens.

        Raises `FormError` as `remask.text.token_bytes.token_bytes`.
        """
        return token_bytes(self._backend, self.special_ids, vocab_size)

    def added_bytes(self, token: int, predecessor: int | None) -> bytes | None:
        """The bytes that `token` adds to a text whose last token is `predecessor`, or to an empty text if that is None.

        Joined in order, the bytes of a text's tokens are the text; those of one token may be a part of a character. A
        special token adds none, and is no `predecessor`, as decoding skips it. Returns None if the tokenizer's decoder
        does not say which bytes a token stands for.
        """
        if token in self.special_ids:
            return b""
        if self._decoder_types is None:
            self._decoder_types = frozenset(step["type"] for step in decoder_steps(self._backend))
        name = self._backend.convert_ids_to_tokens(token)
        content = None if name is None else named_bytes(name, self._decoder_types)
        if content is not None:
            return content
        context = [] if predecessor is None else [predecessor]
        context_text = self.decode(context)
        text = self.decode([*context, token])
        added_text = text[len(context_text) :] if text.startswith(context_text) else self.decode([token])
        return None if INCOMPLETE in added_text else added_text.encode()

    def use_chat_template(self, template: str) -> None:
        """Render conversations by `template`, a Jinja text, in place of the checkpoint's own."""
        self._backend.chat_template = template
        self._compiled_template = None
        self._accepts_text_arguments = None

    def use_plain_template(self) -> None:
        """Render conversations as one paragraph a turn, after the special tokens that `encode` puts before a text."""
        leading = list(takewhile(self.special_ids.__contains__, self.encode("a")))
        opening = json.dumps(self.decode(leading, skip_special_tokens=False))
        self.use_chat_template(f"{{{{ {opening} }}}}{_PLAIN_TEMPLATE}")

    def fit_arguments(self, messages: Messages) -> Messages:
        """`messages` whose tool calls have arguments that the chat template can write; the argument is not changed.

        If the template fails on arguments that are a text, or does not write it, an object with the text replaces it.
        """
        if not any(isinstance(call["function"]["arguments"], str) for call in _tool_calls(messages)):
            return messages
        if self._accepts_text_arguments is None:
            call = {"type": "function", "id": "call_1", "function": {"name": "f", "arguments": _PLACEHOLDER}}
            answer = {"role": "assistant", "content": "b", "tool_calls": [call]}
            turns: list[Mapping[str, Any]] = [{"role": "user", "content": "a"}, answer]
            try:
                text = self.render_chat(turns, add_generation_prompt=False)
                self._accepts_text_arguments = _PLACEHOLDER in text
            except ConfigError:
                self._accepts_text_arguments = False
        if self._accepts_text_arguments:
            return messages
        copies = deepcopy(list(messages))
        for call in _tool_calls(copies):
            function = call["function"]
            if isinstance(function["arguments"], str):
                function["arguments"] = {"arguments": function["arguments"]}
        return copies

    def _compile_template(self) -> ChatTemplate:
        """Raises `ConfigError` if there is no chat template, or no default among several."""
        if not self.has_chat_template:
            raise ConfigError(
                "The model's tokenizer has no chat template, so 'messages' cannot be rendered. Pass a plain prompt or "
                "token ids, or give the model a template: in its folder as chat_template.jinja, or in its GGUF file as "
                "tokenizer.chat_template."
            )
        text = self.chat_template
        if text is None:
            names = ", ".join(self._backend.chat_template)
            raise ConfigError(f"The model's tokenizer has several chat templates and no default: {names}")
        return ChatTemplate(text, self._backend.special_tokens_map)


def _encode(backend: Any, text: str, add_special_tokens: bool, **settings: Any) -> list[int]:
    _check_unicode(text)
    ids: list[int] = backend.encode(text, add_special_tokens=add_special_tokens, verbose=False, **settings)
    return ids


def _check_unicode(text: str) -> None:
    """Raise `ConfigError` if a text has lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"The text is not valid Unicode: {error}. Remove the lone surrogates.") from error


def _check_messages(messages: Messages) -> None:
    """Raise `ConfigError` for the first malformed message."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            f"'messages' is {shown(messages)}; it must be a non-empty list of objects of 'role' and 'content'."
        )
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"messages[{index}] is {shown(message)}; it must be an object of 'role' and 'content'.")
        role = message.get("role")
        content = message.get("content")
        if role not in ROLES:
            raise ConfigError(f"messages[{index}]: 'role' is {shown(role)}; it must be one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise ConfigError(f"messages[{index}]: 'content' is {shown(content)}; it must be text.")


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


def _tool_calls(messages: Messages) -> list[Any]:
    return [call for message in messages for call in message.get("tool_calls") or ()]
