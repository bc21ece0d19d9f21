"""The forms of a prompt, and their conversion to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from remask.checks.values import shown
from remask.errors import ConfigError
from remask.text.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
_FIELDS = ("prompt", "prompt_token_ids")  # of a prompt that is an object, as in vLLM


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list. A list of ints is one prompt, and so is a list of messages.

    Raises `ConfigError` on what is neither a prompt nor a list of them.
    """
    if isinstance(prompts, str | Mapping):
        return [prompts]
    if not _is_list(prompts):
        raise _prompt_error(prompts)
    if prompts and isinstance(prompts[0], int | Mapping) and not _is_prompt_object(prompts[0]):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or many as a list. Raises `ConfigError` on anything else."""
    chats: Any = messages if isinstance(messages, Sequence) and not isinstance(messages, str) else [messages]
    chats = [chats] if chats and isinstance(chats[0], Mapping) else chats
    for chat in chats:
        if isinstance(chat, str) or not isinstance(chat, Sequence) or not chat or not isinstance(chat[0], Mapping):
            raise ConfigError(
                f"messages: a conversation is a list of objects with role and content, got {shown(chat)}; texts are "
                "prompts of generate"
            )
    return list(chats)


def _is_prompt_object(item: Any) -> bool:
    """Whether an item of a list is a prompt, and not a message of a conversation."""
    return isinstance(item, Mapping) and any(name in item for name in _FIELDS)


def _object_content(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """The text or token ids of a prompt that is an object. Raises `ConfigError` if it is malformed."""
    if len(prompt) != 1 or not _is_prompt_object(prompt):
        raise ConfigError(
            "a prompt that is an object has one field, 'prompt' or 'prompt_token_ids', got "
            f"{shown(sorted(map(str, prompt)))}; models read text alone, and other settings are arguments"
        )
    ((name, value),) = prompt.items()
    if name == "prompt":
        if not isinstance(value, str):
            raise ConfigError(f"prompt must be text, got {shown(value)}; token ids are prompt_token_ids")
        return value
    if not _are_ids(value):
        raise ConfigError(f"prompt_token_ids must be a list of token ids, got {shown(value)}")
    return value


def _prompt_error(value: object) -> ConfigError:
    """The error for a value that is no prompt."""
    return ConfigError(
        "a prompt must be a text, a list of token ids, a list of messages, or an object of one field 'prompt' or "
        f"'prompt_token_ids', got {shown(value)}"
    )


def _is_list(value: object) -> TypeGuard[Sequence[Any]]:
    """Whether `value` is a sequence of values, and not of characters or bytes."""
    return isinstance(value, Sequence) and not isinstance(value, str | bytes | bytearray)


def _are_ids(value: Any) -> TypeGuard[Sequence[int]]:
    if not _is_list(value):
        return False
    return all(isinstance(token, int) and not isinstance(token, bool) for token in value)


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    control_tokens: bool | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> tuple[list[int], int]:
    """The token ids of a prompt, and how many leading ones are its shared prefix by default.

    Of messages, everything before the last user turn is shared; of a text or of token ids, nothing. `control_tokens` is
    the term of that name, `variables` are those of the chat template, and the last two say how messages end, as in
    `Tokenizer.render_chat`. Raises `ConfigError` on text without a tokenizer, on what is not a prompt, and on
    `continue_final_message` without messages.
    """
    if isinstance(prompt, Mapping):
        prompt = _object_content(prompt)
    elif not isinstance(prompt, str) and not _is_list(prompt):
        raise _prompt_error(prompt)
    if continue_final_message and (_are_ids(prompt) or isinstance(prompt, str)):
        raise ConfigError("continue_final_message is of conversations; a text or token ids are gone on with anyway")
    if _are_ids(prompt):
        return list(map(int, prompt)), 0
    if tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so prompts must be token ids (prompt_token_ids)")
    if isinstance(prompt, str):
        return text_tokens(prompt, tokenizer, control_tokens), 0
    chat: list[Any] = list(prompt)
    control = control_tokens is True
    tokens = tokenizer.apply_chat(
        chat,
        add_generation_prompt=add_generation_prompt,
        variables=variables,
        continue_final_message=continue_final_message,
        control_tokens=control,
    )
    return tokens, tokenizer.shared_prefix(chat, tokens, variables, control_tokens=control)


def text_tokens(prompt: str, tokenizer: Tokenizer, control_tokens: bool | None) -> list[int]:
    """Token ids of a plain prompt. Names of special tokens become these tokens unless `control_tokens` is false."""
    return tokenizer.encode_literally(prompt) if control_tokens is False else tokenizer.encode(prompt)
