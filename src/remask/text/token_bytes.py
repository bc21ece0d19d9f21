"""The bytes that each token of a vocabulary stands for, where they do not depend on the tokens around it."""

import json
import random
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

from remask.errors import FormError

_SAMPLES = 200  # pairs of tokens whose text is compared with their bytes


def token_bytes(backend: Any, special: Container[int], vocab: int) -> list[bytes | None]:
    """The bytes of each token id below `vocab`; None for `special` tokens, which are no part of a text.

    `backend` is transformers' tokenizer or a `NativeTokenizer`. Two layouts are known: bytes as printable characters
    (GPT-2's ByteLevel), and texts beside tokens `<0x00>` to `<0xFF>` (ByteFallback), in which one text may stand for
    another (Replace), as Gemma's `▁` does for a space. Raises `FormError` on a tokenizer of another layout, or whose
    text of two tokens is not that of one after that of the other.
    """
    names = backend.convert_ids_to_tokens(list(range(min(vocab, len(backend)))))
    steps = decoder_steps(backend)
    kinds = [step["type"] for step in steps]
    replaced = [_replacement(step) for step in steps[:-2]]
    if kinds == ["ByteLevel"]:
        table = printable_bytes()
        contents = [None if name is None else _from_printable(name, table) for name in names]
    elif kinds[-2:] == ["ByteFallback", "Fuse"] and None not in replaced:
        contents = [None if name is None else _from_fallback(name, replaced) for name in names]
    else:
        raise _unknown(f"its decoder is {', '.join(kinds) or 'none'}")
    contents = [None if token in special else content or None for token, content in enumerate(contents)]
    _check(backend, contents)
    return contents + [None] * (vocab - len(contents))


def decoder_steps(backend: Any) -> list[Mapping[str, Any]]:
    """What decodes the tokens of a tokenizer, step by step, such as [{"type": "ByteLevel", ...}]."""
    if backend.backend_tokenizer.decoder is None:
        return []
    decoder = json.loads(backend.backend_tokenizer.decoder.__getstate__())
    steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def named_bytes(name: str, kinds: Collection[str]) -> bytes | None:
    """The bytes that a token's name spells under decoders of these kinds; None where it is a text as any other."""
    if "ByteLevel" in kinds:
        return _from_printable(name, printable_bytes())
    if "ByteFallback" in kinds and _is_byte(name):
        return _from_fallback(name)
    return None


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """Which text a step of a decoder replaces, by which; None of a step of another kind, or one of a pattern."""
    old = step["pattern"].get("String") if step["type"] == "Replace" else None
    return None if old is None else (old, step["content"])


def printable_bytes() -> dict[str, int]:
    """GPT-2's characters: printable bytes stand for themselves, the others follow from 256 on."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    rest = [byte for byte in range(256) if byte not in set(shown)]
    return {chr(byte): byte for byte in shown} | {chr(256 + place): byte for place, byte in enumerate(rest)}


def _from_printable(name: str, table: Mapping[str, int]) -> bytes | None:
    return bytes(table[char] for char in name) if all(char in table for char in name) else None


def _is_byte(name: str) -> bool:
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def _from_fallback(name: str, replaced: Sequence[tuple[str, str] | None] = ()) -> bytes:
    for pair in replaced:
        name = name if pair is None else name.replace(*pair)
    return bytes([int(name[3:5], 16)]) if _is_byte(name) else name.encode()


def _check(backend: Any, contents: Sequence[bytes | None]) -> None:
    texts = list[tuple[int, str]]()
    for token, content in enumerate(contents):
        with suppress(UnicodeDecodeError):
            texts += [] if content is None else [(token, content.decode())]
    if not texts:
        raise _unknown("none of its tokens is a text")
    rng = random.Random(0)
    pairs = zip(rng.choices(texts, k=_SAMPLES), rng.choices(texts, k=_SAMPLES), strict=True)
    for (one, before), (other, after) in pairs:
        if backend.decode([one, other], clean_up_tokenization_spaces=False) != before + after:
            raise _unknown(f"tokens {one} and {other} together have another text than one after the other")


def _unknown(reason: str) -> FormError:
    return FormError(
        " need a tokenizer whose tokens have texts of their own, and this model's has not: "
        f"{reason}; leave structured_outputs and response_format out"
    )
