"""The forms in which a prompt may be given, and their conversion to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from remask.errors import ConfigError
from remask.text.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, str]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message]


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """Return one prompt or many as a list. A list of ints is one prompt, and so is a list of messages."""
    if isinstance(prompts, str) or (prompts and isinstance(prompts[0], int | Mapping)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def encode(prompt: Prompt, tokenizer: Tokenizer | None, control_tokens: bool | None = None) -> tuple[list[int], int]:
    """Return the token ids, and how many leading ones are the shared prefix by default.

    Of messages, everything before the last user turn is shared; of a text or of token ids, nothing. `control_tokens` is
    the term of that name. Raises `ConfigError` if text is given and the model folder has no tokenizer.
    """
    if not isinstance(prompt, str) and all(isinstance(item, int) for item in prompt):
        return [int(item) for item in prompt], 0  # type: ignore[arg-type]
    if tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so prompts must be token ids (prompt_token_ids)")
    if isinstance(prompt, str):
        return text_tokens(prompt, tokenizer, control_tokens), 0
    messages: list[Any] = list(prompt)
    control = control_tokens is True
    tokens = tokenizer.apply_chat(messages, control_tokens=control)
    return tokens, tokenizer.shared_prefix(messages, tokens, control_tokens=control)


def text_tokens(prompt: str, tokenizer: Tokenizer, control_tokens: bool | None) -> list[int]:
    """Token ids of a plain prompt, in the model's own format: names in it are tokens, unless that is refused."""
    return tokenizer.encode_literally(prompt) if control_tokens is False else tokenizer.encode(prompt)
