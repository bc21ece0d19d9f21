"""The tokenizer of a checkpoint: of a folder, of a GGUF file (its pre-tokenizer by name), or of bytes."""

import logging
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from remask.checkpoint.gguf_header import Header, is_gguf, read_header
from remask.checkpoint.settings import ModelSettings
from remask.checkpoint.source import resolve_model
from remask.errors import CheckpointError, ConfigError
from remask.families.fields import Fields
from remask.model.config import ModelConfig
from remask.text.native import NativeTokenizer
from remask.text.token_bytes import printable_bytes
from remask.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_TOKENIZER, _VOCAB, _MERGES = "tokenizer.json", "vocab.json", "merges.txt"
_FILES = (
    *(_TOKENIZER, _VOCAB, _MERGES, "tokenizer.model", "tokenizer_config.json", "special_tokens_map.json"),
    "added_tokens.json",
)


def load_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of the checkpoint at `path`, a folder or a GGUF file. Returns None if there is none.

    In a folder two layouts load: `tokenizer.json` (LLaDA), and `vocab.json` with `merges.txt` (Dream), which is a Qwen2
    tokenizer. Special tokens and the chat template come from `tokenizer_config.json` and `chat_template.jinja`. Code in
    the folder is never run, even if `auto_map` or `tokenizer_class` name some. Raises `CheckpointError` if files are
    incomplete or malformed.
    """
    if is_gguf(path):
        return _gguf_tokenizer(path)
    names = [name for name in _FILES if (path / name).is_file()]
    if not names:
        return None
    # Each class is named here, because `AutoTokenizer` reads `auto_map`, and stops if that names remote code.
    # The import takes most of a second, and neither GGUF files nor bytes need it.
    if _TOKENIZER in names:
        from transformers import PreTrainedTokenizerFast

        tokenizer_class: Any = PreTrainedTokenizerFast
    elif _VOCAB in names and _MERGES in names:
        from transformers import Qwen2Tokenizer

        tokenizer_class = Qwen2Tokenizer
    else:
        raise CheckpointError(
            f"{path} has a tokenizer's {', '.join(names)}, but neither {_TOKENIZER} nor {_VOCAB} with {_MERGES}. "
            "The download is incomplete, or the tokenizer is of a kind that cannot be loaded: save it as "
            f"{_TOKENIZER}."
        )
    try:
        return Tokenizer(tokenizer_class.from_pretrained(path, trust_remote_code=False, local_files_only=True))
    # Malformed files raise anything from KeyError to the bare Exception of the tokenizers' native code.
    except Exception as error:
        raise CheckpointError(
            f"The tokenizer in {path} ({', '.join(names)}) cannot be loaded: {type(error).__name__}: {error}. "
            "Download its files again."
        ) from error


def read_tokenizer(
    settings: ModelSettings, config: ModelConfig, folder: Path | None, template: str | None = None
) -> Tokenizer | None:
    """The tokenizer of a model in `folder`. Returns None if there is none, and `settings.reads` needs none.

    If it has no chat template, it gets `template`, the family's, or for chats a plain one, with a warning. Random
    weights, which have no folder, read texts as bytes. Raises `ConfigError` if texts cannot be read, and
    `CheckpointError` if files cannot be used.
    """
    if settings.reads is None:
        return None
    tokenizer = _find_tokenizer(settings, config, folder)
    if tokenizer is None:
        if settings.reads != "tokens" or settings.chat_template is not None:
            lacks = "no chat template and no tokenizer" if settings.reads == "chat" else "no tokenizer"
            raise ConfigError(
                f"the model {settings.model!r} has {lacks}, so it reads no texts; put a tokenizer into its folder, or "
                "name one with --tokenizer PATH_OR_ID (LLM(tokenizer=...))"
            )
    elif settings.chat_template is not None:
        tokenizer.use_chat_template(settings.chat_template)
    elif template is not None and not tokenizer.has_chat_template:
        tokenizer.use_chat_template(template)
    elif settings.reads == "chat" and not tokenizer.has_chat_template:
        log.warning(
            "the model %r has no chat template, so turns are plain paragraphs that begin with 'User:' and "
            "'Assistant:', which it may not know; --chat-template FILE gives it one",
            settings.model,
        )
        tokenizer.use_plain_template()
    return tokenizer


def _find_tokenizer(settings: ModelSettings, config: ModelConfig, folder: Path | None) -> Tokenizer | None:
    """The tokenizer that `settings` name, else that of `folder`, else for texts one of bytes, else None.

    Raises `ConfigError` if the named place has none, or one with more tokens than the model.
    """
    if settings.tokenizer is not None:
        tokenizer = load_tokenizer(resolve_model(settings.tokenizer, weights=False))
        if tokenizer is None:
            raise ConfigError(f"tokenizer: there is none in {settings.tokenizer!r}; name a folder or hub id with one")
        if len(tokenizer) > config.vocab:
            raise ConfigError(
                f"tokenizer: that of {settings.tokenizer!r} has {len(tokenizer)} tokens, and the model "
                f"{settings.model!r} knows {config.vocab}; name the one that the model was trained with"
            )
        return tokenizer
    if folder is not None:
        return load_tokenizer(folder)
    return byte_tokenizer(config.vocab, config.mask_id, config.stop_ids) if settings.reads == "text" else None


def _gguf_tokenizer(path: Path) -> Tokenizer | None:
    """The tokenizer of a GGUF file. Returns None if it has none; raises `CheckpointError` if it cannot be used."""
    try:
        backend = read_backend(read_header(path))
        return None if backend is None else Tokenizer(backend)
    except CheckpointError:
        raise
    # The native code raises a bare Exception if parts do not fit each other.
    except Exception as error:
        raise CheckpointError(
            f"The tokenizer in {path} cannot be loaded: {type(error).__name__}: {error}. Download it again."
        ) from error


_KEY = "tokenizer.ggml."
_NORMAL, _CONTROL, _USER_DEFINED, _UNUSED = 1, 3, 4, 5  # types of tokens; others are texts that BPE does not make
# The longest texts of all tokens and of added tokens, which BPE does not make, and the most added tokens: several
# times those of published files. An expression that nests with each of their characters finds these in texts.
_MAX_TEXT, _MAX_ADDED_TEXT, _MAX_ADDED = 2**9, 2**7, 2**13
# Where a text is cut before BPE, as the tokenizers of these models say it themselves.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_BAILING = _QWEN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)", 1)
# Digits one by one, and white space ahead of one in one piece, as these are cut off first.
_SMOLLM = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?=\p{N})|\s+(?!\S)|\s+"
PATTERNS: Mapping[str, str | None] = {
    "gpt-2": None,
    "qwen2": _QWEN,
    "smollm": _SMOLLM,
    "llama-bpe": _LLAMA,
    "llada-moe": _BAILING,
    "bailingmoe": _BAILING,
    "bailingmoe2": _BAILING,
}
"""The pre-tokenizers that are known, by `tokenizer.ggml.pre`; None: that of GPT-2."""
# Architectures of whose files the converter always says that texts begin with the first token, which their own
# tokenizers do not put there: a prompt is to have the ids that it has with the model's folder.
_NO_BOS = ("llada",)
_ROLES = {"bos": "bos_token", "eos": "eos_token", "padding": "pad_token", "mask": "mask_token", "unknown": "unk_token"}


def read_backend(header: Header) -> NativeTokenizer | None:
    """The tokenizer in a GGUF file. Returns None if the file has none.

    Leaves out tokens of the type "unused", and merges whose result is not a token. Raises `CheckpointError`, naming
    file, key and value, if a key is missing or has a value that cannot be used.
    """
    fields, values = Fields(str(header.file), header.values), header.values
    if values.get(f"{_KEY}model", "none") in ("none", "no_vocab"):
        return None
    fields.only(f"{_KEY}model", "gpt2")
    pre = values.get(f"{_KEY}pre")
    if not isinstance(pre, str) or pre not in PATTERNS:
        raise fields.unfit(f"{_KEY}pre", ", ".join(PATTERNS))
    tokens, token_types = _tokens(header)
    vocab = {token: number for number, token in enumerate(tokens) if token_types[number] != _UNUSED}
    backend = Backend(models.BPE(vocab=vocab, merges=_merges(header, vocab), ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _pre_tokenizer(PATTERNS[pre])
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens(_added_tokens(header, tokens, token_types))
    ids = {role: fields.token(f"{_KEY}{role}_token_id", len(tokens), 0) for role in _ROLES}
    # Only control tokens are special: the text of a normal token in a prompt must have no effect.
    special = {
        _ROLES[role]: tokens[number]
        for role, number in ids.items()
        if values.get(f"{_KEY}{role}_token_id") is not None and token_types[number] == _CONTROL
    }
    bos = fields.flag(f"{_KEY}add_bos_token", False) and values.get("general.architecture") not in _NO_BOS
    eos = fields.flag(f"{_KEY}add_eos_token", False)
    template_parts = [special.get("bos_token") if bos else None, "$A", special.get("eos_token") if eos else None]
    parts = [part for part in template_parts if part is not None]
    if len(parts) > 1:
        names = [(part, vocab[part]) for part in parts if part != "$A"]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=names)
    template = values.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise fields.unfit("tokenizer.chat_template", "a text")
    return NativeTokenizer(backend, special, template)


def _pre_tokenizer(pattern: str | None) -> pre_tokenizers.PreTokenizer:
    """Cuts texts by the regular expression `pattern`; None: by that of GPT-2."""
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def _added_tokens(header: Header, tokens: Sequence[str], token_types: Sequence[int]) -> list[AddedToken]:
    """The control and user-defined tokens. Raises `CheckpointError` if there are too many, or one is too long."""
    added = [
        AddedToken(token, special=token_type == _CONTROL, normalized=False)
        for token, token_type in zip(tokens, token_types, strict=True)
        if token and token_type in (_CONTROL, _USER_DEFINED)
    ]
    if len(added) > _MAX_ADDED or any(len(token.content) > _MAX_ADDED_TEXT for token in added):
        raise CheckpointError(
            f"{header.file}: '{_KEY}token_type' calls {len(added)} tokens control or user-defined ones, of up to "
            f"{max(len(token.content) for token in added)} characters; supported: at most {_MAX_ADDED} of up to "
            f"{_MAX_ADDED_TEXT} characters."
        )
    return added


def _tokens(header: Header) -> tuple[list[str], list[int]]:
    """The text and the type of every token. Raises `CheckpointError` if two have one text, or one is too long."""
    tokens = _texts(header, "tokens")
    longest = max(map(len, tokens), default=0)
    if longest > _MAX_TEXT:
        raise CheckpointError(
            f"{header.file}: '{_KEY}tokens' holds a token of {longest} characters; supported: at most {_MAX_TEXT}."
        )
    if len(set(tokens)) != len(tokens):
        duplicate = next(token for token, count in Counter(tokens).items() if count > 1)
        raise CheckpointError(f"{header.file}: '{_KEY}tokens' holds {duplicate[:40]!r} twice; each token has one id.")
    token_types = header.items(f"{_KEY}token_type") or [_NORMAL] * len(tokens)
    if len(token_types) != len(tokens) or not all(isinstance(item, int) for item in token_types):
        raise CheckpointError(
            f"{header.file}: '{_KEY}token_type' has {len(token_types)} items; supported: a whole number for each of "
            f"the {len(tokens)} tokens."
        )
    return tokens, token_types


def _merges(header: Header, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The merges whose parts and results are tokens of `vocab`. Raises `CheckpointError` if one is not two tokens."""
    merges = []
    for merge in _texts(header, "merges"):
        first, _, second = merge.partition(" ")
        if not first or not second or " " in second:
            raise CheckpointError(
                f"{header.file}: '{_KEY}merges' holds {merge[:40]!r}; supported: two tokens with a space between them."
            )
        if first in vocab and second in vocab and first + second in vocab:
            merges.append((first, second))
    return merges


def _texts(header: Header, key: str) -> list[str]:
    """The texts of an array of the tokenizer. Raises `CheckpointError` if it is missing or holds anything else."""
    items = header.items(_KEY + key)
    if items is None or not all(isinstance(item, str) for item in items):
        raise CheckpointError(
            f"{header.file}: the key '{_KEY}{key}' is missing or not an array of texts; supported: texts."
        )
    return items


_TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def byte_tokenizer(vocab_size: int, mask_id: int, stop_ids: Collection[int]) -> Tokenizer:
    """A tokenizer of `vocab_size` ids: those below 256 are bytes, and any other is written as its number, as `<300>`.

    Stop tokens and the mask, if `mask_id` >= 0, are special; those with ids below 256 replace bytes.
    """
    characters = {byte: char for char, byte in printable_bytes().items()}
    special = {token: f"<|stop {token}|>" for token in stop_ids}
    if mask_id >= 0:
        special[mask_id] = "<|mask|>"
    texts = {token: special.get(token) or characters.get(token) or f"<{token}>" for token in range(vocab_size)}
    backend = Backend(models.BPE(vocab={text: token for token, text in texts.items()}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in special.values()])
    return Tokenizer(NativeTokenizer(backend, {}, _TEMPLATE))
