"""The tokenizer in a GGUF file: byte-level BPE, its pre-tokenizer by name, special tokens and chat template."""

from collections.abc import Mapping
from typing import Any

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from remask.errors import CheckpointError
from remask.families.fields import Fields
from remask.gguf.header import Header

_KEY = "tokenizer.ggml."
_NORMAL, _CONTROL, _OWN, _UNUSED = 1, 3, 4, 5  # kinds of tokens; others are texts that BPE does not make
# Longest texts of tokens, and of those that are no part of the BPE, and how many of the latter: several times what
# published files have. An expression that nests with each of their characters finds these in texts.
_LONGEST, _ADDED_LONGEST, _ADDED = 2**9, 2**7, 2**13
# Where a text is cut before BPE, as the tokenizers of these models say it themselves.
_QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_LLAMA = _QWEN.replace(r"\p{N}|", r"\p{N}{1,3}|", 1)
_BAILING = _QWEN.replace("(?i:'s|'t|'re|'ve|'m|'ll|'d)", "'(?i:[sdmt]|ll|ve|re)", 1)
PATTERNS: Mapping[str, str | None] = {
    "gpt-2": None,
    "qwen2": _QWEN,
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


def read_backend(header: Header) -> Any | None:
    """The tokenizer of the transformers library that a file describes; None where the file has none.

    A merge whose result is no token is left out: it could settle nothing. Tokens that the file calls unused are too.

    Raises:
        CheckpointError: a key is missing or has a value that cannot be used. The message names file, key and value.
    """
    fields, values = Fields(str(header.file), header.values), header.values
    if values.get(f"{_KEY}model", "none") in ("none", "no_vocab"):
        return None
    fields.only(f"{_KEY}model", "gpt2")
    pre = values.get(f"{_KEY}pre")
    if not isinstance(pre, str) or pre not in PATTERNS:
        raise fields.unfit(f"{_KEY}pre", ", ".join(PATTERNS))
    tokens, kinds = _tokens(header)
    vocab = {token: number for number, token in enumerate(tokens) if kinds[number] != _UNUSED}
    backend = Backend(models.BPE(vocab=vocab, merges=_merges(header, vocab), ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    pattern = PATTERNS[pre]
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern is not None:
        backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(pattern), behavior="isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )
    backend.decoder = decoders.ByteLevel()
    added = [
        AddedToken(tokens[number], special=kind == _CONTROL, normalized=False)
        for number, kind in enumerate(kinds)
        if kind in (_CONTROL, _OWN) and tokens[number]
    ]
    if len(added) > _ADDED or any(len(token.content) > _ADDED_LONGEST for token in added):
        raise CheckpointError(
            f"{header.file}: '{_KEY}token_type' calls {len(added)} tokens control or user-defined ones, of up to "
            f"{max(len(token.content) for token in added)} characters; supported: at most {_ADDED} of up to "
            f"{_ADDED_LONGEST} characters."
        )
    backend.add_tokens(added)
    ids = {role: fields.token(f"{_KEY}{role}_token_id", len(tokens), 0) for role in _ROLES}
    # A token of the text stays one, also where a key names it: its name in a prompt is no command.
    special = {
        _ROLES[role]: tokens[number]
        for role, number in ids.items()
        if values.get(f"{_KEY}{role}_token_id") is not None and kinds[number] == _CONTROL
    }
    bos = fields.flag(f"{_KEY}add_bos_token", False) and values.get("general.architecture") not in _NO_BOS
    eos = fields.flag(f"{_KEY}add_eos_token", False)
    _put_around(backend, special.get("bos_token") if bos else None, special.get("eos_token") if eos else None, vocab)
    made: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, clean_up_tokenization_spaces=False, **special
    )
    template = values.get("tokenizer.chat_template")
    if template is not None and not isinstance(template, str):
        raise fields.unfit("tokenizer.chat_template", "a text")
    made.chat_template = template
    return made


def _put_around(backend: Any, before: str | None, after: str | None, vocab: Mapping[str, int]) -> None:
    """Make the tokenizer put a token before each text, and one after it; None: none."""
    names = [(name, vocab[name]) for name in (before, after) if name is not None]
    if names:
        parts = [part for part in (before, "$A", after) if part is not None]
        backend.post_processor = processors.TemplateProcessing(single=parts, special_tokens=names)


def _tokens(header: Header) -> tuple[list[str], list[int]]:
    """Every token's text, and its kind."""
    tokens = _texts(header, "tokens")
    longest = max(map(len, tokens), default=0)
    if longest > _LONGEST:
        raise CheckpointError(
            f"{header.file}: '{_KEY}tokens' holds a token of {longest} characters; supported: at most {_LONGEST}."
        )
    if len(set(tokens)) != len(tokens):
        seen: set[str] = set()
        twice = next(token for token in tokens if token in seen or seen.add(token))  # type: ignore[func-returns-value]
        raise CheckpointError(f"{header.file}: '{_KEY}tokens' holds {twice[:40]!r} twice; each token has one id.")
    kinds = header.items(f"{_KEY}token_type") or [_NORMAL] * len(tokens)
    if len(kinds) != len(tokens) or not all(isinstance(kind, int) for kind in kinds):
        raise CheckpointError(
            f"{header.file}: '{_KEY}token_type' has {len(kinds)} items; supported: a whole number for each of the "
            f"{len(tokens)} tokens."
        )
    return tokens, kinds


def _merges(header: Header, vocab: Mapping[str, int]) -> list[tuple[str, str]]:
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
    items = header.items(_KEY + key)
    if items is None or not all(isinstance(item, str) for item in items):
        raise CheckpointError(
            f"{header.file}: the key '{_KEY}{key}' is missing or no array of texts; supported: texts."
        )
    return items
