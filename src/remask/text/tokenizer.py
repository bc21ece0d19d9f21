"""Text to token ids and back, chat templates, and the prefix that conversations share."""

from collections.abc import Mapping, Sequence
from copy import deepcopy
from itertools import zip_longest
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, Qwen2Tokenizer

from remask.errors import CheckpointError, ConfigError
from remask.gguf.header import is_gguf, read_header
from remask.gguf.tokenizer import read_backend
from remask.text.chat_template import ChatTemplate
from remask.text.quoting import Quoting
from remask.text.token_bytes import token_bytes

ROLES = ("system", "user", "assistant", "tool")

_WHOLE, _VOCAB, _MERGES = "tokenizer.json", "vocab.json", "merges.txt"
_FILES = (
    _WHOLE,
    _VOCAB,
    _MERGES,
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)

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
        added = backend.added_tokens_decoder.items()
        self.special_ids: frozenset[int] = frozenset(backend.all_special_ids) | {i for i, t in added if t.special}
        names = {*backend.all_special_tokens, *(token.content for _, token in added if token.special)}
        self._quoting = Quoting(names)
        # How a text is read is a state of the native tokenizer, so no one of them can serve both readings at a time.
        self._literal = deepcopy(backend)
        self._literal.encode("", split_special_tokens=True, verbose=False)

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

        With `add_special_tokens` the tokenizer adds the special tokens that it puts around a text.

        Raises:
            ConfigError: the text holds lone surrogates, which no tokenizer can read.
        """
        _check_unicode(text)
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return ids

    def encode_literally(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """As `encode`, but names of special tokens are text as any other."""
        _check_unicode(text)
        ids: list[int] = self._literal.encode(
            text, add_special_tokens=add_special_tokens, split_special_tokens=True, verbose=False
        )
        return ids

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
        for start, stop in [*(found.span() for found in quoting.pattern.finditer(text)), (len(text), len(text))]:
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
        control_tokens: bool = False,
    ) -> list[int]:
        """Token ids of `render_chat`'s text. Raises `ConfigError` as `render_chat` does.

        The template's special tokens become tokens, and names of special tokens in messages and variables are text;
        with `control_tokens` they become tokens too.
        """
        if not control_tokens:
            _check(messages)
            messages, variables = self.quoted(messages), self.quoted(variables)
            return self.encode_quoted(self.render_chat(messages, add_generation_prompt, variables))
        # The template writes the special tokens itself.
        return self.encode(self.render_chat(messages, add_generation_prompt, variables), add_special_tokens=False)

    def render_chat(
        self, messages: Messages, add_generation_prompt: bool = True, variables: Variables | None = None
    ) -> str:
        """The text of a conversation by the checkpoint's chat template, with its special tokens.

        `messages` are objects of `role` (system, user, assistant or tool) and `content` (text).
        `add_generation_prompt` begins the assistant's turn at the end. `variables` are further ones of the template.

        Raises:
            ConfigError: there is no chat template, a message is malformed, or the template refuses the conversation,
                fails on it, or goes beyond a limit of `remask.text.chat_template`.
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
        return template.render(messages, add_generation_prompt, variables)

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
        them.

        Raises:
            ConfigError: as `apply_chat`, for the whole conversation.
        """
        told: dict[str, Any] = {"variables": variables, "control_tokens": control_tokens}
        whole = self.apply_chat(messages, **told) if tokens is None else tokens
        users = [place for place, message in enumerate(messages) if message["role"] == "user"]
        if not users or users[-1] == 0:
            return 0
        try:
            return self._common(whole, messages[: users[-1]], **told)
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

        `tokens` are those of `apply_chat(messages)`, if the caller has them.

        Raises:
            ConfigError: as `apply_chat`, for the whole conversation and for one that ends at `messages[last]`.
        """
        told: dict[str, Any] = {"variables": variables, "control_tokens": control_tokens}
        whole = self.apply_chat(messages, **told) if tokens is None else tokens
        return self._common(whole, messages[: last + 1], **told)

    def token_bytes(self, vocab: int) -> list[bytes | None]:
        """The bytes of each token id below `vocab`; None for special tokens. Raises `ConfigError` as `token_bytes`."""
        return token_bytes(self._backend, self.special_ids, vocab)

    def use_chat_template(self, template: str) -> None:
        """Render conversations by `template` (Jinja), in place of the checkpoint's own."""
        self._backend.chat_template = template
        self._template = None

    def _chat_template(self) -> ChatTemplate:
        try:
            text = self._backend.get_chat_template()
        except ValueError as error:
            raise ConfigError(f"The model's tokenizer has several chat templates and no default: {error}") from error
        return ChatTemplate(text, self._backend.special_tokens_map)

    def _common(self, whole: Sequence[int], messages: Messages, **told: Any) -> int:
        """Length of the longest token prefix that `whole` and `messages` have in common."""
        before = self.apply_chat(messages, add_generation_prompt=False, **told)
        # One comparison in C: a prefix may have thousands of tokens, and most often all are common.
        if list(whole[: len(before)]) == before:
            return len(before)
        return next(i for i, (one, other) in enumerate(zip_longest(whole, before)) if one != other)


def load_tokenizer(folder: Path) -> Tokenizer | None:
    """The tokenizer of a checkpoint, a folder or a GGUF file; None if there is none.

    In a folder two layouts load: `tokenizer.json` (LLaDA), and `vocab.json` with `merges.txt` (Dream), which is a Qwen2
    tokenizer.
    Special tokens and the chat template come from `tokenizer_config.json` and `chat_template.jinja`. Code in the
    folder is never run, even if `auto_map` or `tokenizer_class` name some.

    Raises:
        CheckpointError: the files are incomplete or malformed.
    """
    if is_gguf(folder):
        return _in_gguf(folder)
    held = [name for name in _FILES if (folder / name).is_file()]
    if not held:
        return None
    # Each class is named here, because `AutoTokenizer` reads `auto_map`, and stops if that names remote code.
    if _WHOLE in held:
        layout: Any = PreTrainedTokenizerFast
    elif _VOCAB in held and _MERGES in held:
        layout = Qwen2Tokenizer
    else:
        raise CheckpointError(
            f"{folder} has a tokenizer's {', '.join(held)}, but neither {_WHOLE} nor {_VOCAB} with {_MERGES}, one of "
            "which it takes to load it. The download is incomplete, or the tokenizer is of another kind: save it as "
            f"{_WHOLE}."
        )
    try:
        return Tokenizer(layout.from_pretrained(folder, trust_remote_code=False, local_files_only=True))
    # Malformed files raise anything from KeyError to the bare Exception of the tokenizers' native code.
    except Exception as error:
        raise CheckpointError(
            f"The tokenizer in {folder} ({', '.join(held)}) cannot be loaded: {type(error).__name__}: {error}. "
            "Download its files again."
        ) from error


def _in_gguf(path: Path) -> Tokenizer | None:
    try:
        backend = read_backend(read_header(path))
        return None if backend is None else Tokenizer(backend)
    except CheckpointError:
        raise
    # As below: whatever the native code raises on parts that do not fit each other.
    except Exception as error:
        raise CheckpointError(
            f"The tokenizer in {path} cannot be loaded: {type(error).__name__}: {error}. Download it again."
        ) from error


def _check_unicode(text: str) -> None:
    """Raise `ConfigError` for a text that no encoding can carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(f"The text is not valid Unicode: {error}. Remove the lone surrogates.") from error


def _check(messages: Messages) -> None:
    """Raise `ConfigError` for the first malformed message."""
    if isinstance(messages, str | bytes) or not isinstance(messages, Sequence) or not messages:
        raise ConfigError(
            f"'messages' is {messages!r}; it must be a non-empty list of objects of 'role' and 'content'."
        )
    for place, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise ConfigError(f"messages[{place}] is {message!r}; it must be an object of 'role' and 'content'.")
        role, content = message.get("role"), message.get("content")
        if role not in ROLES:
            raise ConfigError(f"messages[{place}]: 'role' is {role!r}; it must be one of {', '.join(ROLES)}.")
        if not isinstance(content, str):
            raise ConfigError(f"messages[{place}]: 'content' is {content!r}; it must be text.")
