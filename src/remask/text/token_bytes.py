"""The bytes of each token of a vocabulary, for tokenizers whose tokens decode the same beside any other token."""

import json
import random
from collections.abc import Collection, Container, Mapping, Sequence
from contextlib import suppress
from typing import Any

from remask.errors import FormError

_SAMPLES = 200  # pairs of tokens whose text is compared with their bytes


def token_bytes(backend: Any, special: Container[int], vocab_size: int) -> list[bytes | None]:
    """Return the bytes of each token id below `vocab_size`; None for `special`, unknown and empty tokens.

    `backend` is transformers' tokenizer or a `NativeTokenizer`. Two layouts are supported: bytes as printable
    characters (GPT-2's ByteLevel), and texts with byte tokens `<0x00>` to `<0xFF>` (ByteFallback), in which some
    characters stand for others (Replace), such as Gemma's `▁` for a space. Raises `FormError` on other layouts, and if
    the text of a pair of tokens, of a sample of pairs, is not that of both tokens joined.
    """
    names = backend.convert_ids_to_tokens(list(range(min(vocab_size, len(backend)))))
    steps = decoder_steps(backend)
    step_types = [step["type"] for step in steps]
    replacements = [_replacement(step) for step in steps[:-2]]
    if step_types == ["ByteLevel"]:
        table = printable_bytes()
        contents = [None if name is None else _from_printable(name, table) for name in names]
    elif step_types[-2:] == ["ByteFallback", "Fuse"] and None not in replacements:
        contents = [None if name is None else _from_fallback(name, replacements) for name in names]
    else:
        raise _layout_error(f"its decoder is {', '.join(step_types) or 'none'}")
    contents = [None if token in special else content or None for token, content in enumerate(contents)]
    _check_pairs(backend, contents)
    return contents + [None] * (vocab_size - len(contents))


def decoder_steps(backend: Any) -> list[Mapping[str, Any]]:
    """Return the steps of a tokenizer's decoder, in order, such as `[{"type": "ByteLevel", ...}]`.

    Returns none of a tokenizer without decoder, which joins the names of its tokens.
    """
    if backend.backend_tokenizer.decoder is None:
        return []
    # Decoders have no other way to tell what they hold than the JSON text that they are pickled as.
    decoder = json.loads(backend.backend_tokenizer.decoder.__getstate__())
    steps: list[Mapping[str, Any]] = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    return steps


def named_bytes(name: str, step_types: Collection[str]) -> bytes | None:
    """Return the bytes that a token's name spells under these decoder steps; None if the name is ordinary text."""
    if "ByteLevel" in step_types:
        return _from_printable(name, printable_bytes())
    if "ByteFallback" in step_types and _is_byte(name):
        return _from_fallback(name)
    return None


def _replacement(step: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the old and new text of a Replace step; None for other steps, and for a regular expression."""
    old = step["pattern"].get("String") if step["type"] == "Replace" else None
    return None if old is None else (old, step["content"])


def printable_bytes() -> dict[str, int]:
    """Return the byte of each character of GPT-2's alphabet: printable bytes are themselves, others from 256 on."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(unprintable)}


def _from_printable(name: str, table: Mapping[str, int]) -> bytes | None:
    """Return the bytes that a name spells in GPT-2's alphabet `table`; None if it has other characters."""
    return bytes(table[char] for char in name) if all(char in table for char in name) else None


def _is_byte(name: str) -> bool:
    """Whether a name is that of a byte token, such as `<0x0A>`."""
    return len(name) == 6 and name.startswith("<0x") and name.endswith(">")


def _from_fallback(name: str, replacements: Sequence[tuple[str, str] | None] = ()) -> bytes:
    """Return the byte of a byte token's name, or the UTF-8 bytes of another name after the replacements."""
    for pair in replacements:
        name = name if pair is None else name.replace(*pair)
    return bytes([int(name[3:5], 16)]) if _is_byte(name) else name.encode()


def _check_pairs(backend: Any, contents: Sequence[bytes | None]) -> None:
    """Raise `FormError` if random pairs of tokens do not decode to their joined `contents`, or no token is a text."""
    texts = list[tuple[int, str]]()
    for token, content in enumerate(contents):
        with suppress(UnicodeDecodeError):
            if content is not None:
                texts.append((token, content.decode()))
    if not texts:
        raise _layout_error("none of its tokens is a text")
    rng = random.Random(0)
    pairs = zip(rng.choices(texts, k=_SAMPLES), rng.choices(texts, k=_SAMPLES), strict=True)
    for (first, text), (second, next_text) in pairs:
        if backend.decode([first, second], clean_up_tokenization_spaces=False) != text + next_text:
            raise _layout_error(f"tokens {first} and {second} together have another text than one after the other")


def _layout_error(reason: str) -> FormError:
    return FormError(
        " cannot be met without a tokenizer whose tokens have texts of their own, and this model's has not: "
        f"{reason}; leave structured_outputs and response_format out"
    )
