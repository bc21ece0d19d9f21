"""The forms in which a prompt may be given, and their conversion to token ids."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias, TypeGuard

from remask.checks.values import shown
from remask.errors import ConfigError
from remask.text.tokenizer import Tokenizer

Message: TypeAlias = Mapping[str, Any]
Prompt: TypeAlias = str | Sequence[int] | Sequence[Message] | Mapping[str, Any]
_FORMS = ("prompt", "prompt_token_ids")  # of a prompt that is an object, as vLLM takes it


def as_prompts(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or many as a list. A list of ints is one prompt, and so is a list of messages."""
    if isinstance(prompts, str | Mapping) or (prompts and isinstance(prompts[0], int | Mapping)):
        several = not isinstance(prompts, str | Mapping) and _is_form(prompts[0])
        return list(prompts) if several else [prompts]  # type: ignore[list-item, arg-type]
    return list(prompts)  # type: ignore[arg-type]


def conversations(messages: Sequence[Message] | Sequence[Sequence[Message]]) -> list[Sequence[Message]]:
    """One conversation or many as a list. Raises `ConfigError` where something else is given."""
    several: Any = messages if isinstance(messages, Sequence) and not isinstance(messages, str) else [messages]
    several = [several] if several and isinstance(several[0], Mapping) else several
    for chat in several:
        if isinstance(chat, str) or not isinstance(chat, Sequence) or not chat or not isinstance(chat[0], Mapping):
            raise ConfigError(
                f"messages: a conversation is a list of objects with role and content, got {shown(chat)}; texts are "
                "prompts of generate"
            )
    return list(several)


def _is_form(prompt: Any) -> bool:
    """Whether a prompt is an object, and not a message of a conversation."""
    return isinstance(prompt, Mapping) and any(name in prompt for name in _FORMS)


def _of_form(prompt: Mapping[str, Any]) -> str | Sequence[int]:
    """What an object holds. Raises `ConfigError` where that is not one prompt."""
    if len(prompt) != 1 or not _is_form(prompt):
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


def _are_ids(value: Any) -> TypeGuard[Sequence[int]]:
    items = value if isinstance(value, Sequence) and not isinstance(value, str) else (None,)
    return all(isinstance(token, int) and not isinstance(token, bool) for token in items)


def encode(
    prompt: Prompt,
    tokenizer: Tokenizer | None,
    control_tokens: bool | None = None,
    variables: Mapping[str, Any] | None = None,
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> tuple[list[int], int]:
    """The token ids, and how many leading ones are the shared prefix by default.

    Of messages, everything before the last user turn is shared; of a text or of token ids, nothing. `control_tokens` is
    the term of that name, `variables` are those of the chat template, and the last two say how messages end, as in
    `Tokenizer.render_chat`. Raises `ConfigError` if text is given and the model folder has no tokenizer, and on an
    object that is no prompt.
    """
    if isinstance(prompt, Mapping):
        prompt = _of_form(prompt)
    if continue_final_message and (_are_ids(prompt) or isinstance(prompt, str)):
        raise ConfigError("continue_final_message is of conversations; a text or token ids are gone on with anyway")
    if _are_ids(prompt):
        return list(map(int, prompt)), 0
    if tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so prompts must be token ids (prompt_token_ids)")
    if isinstance(prompt, str):
        return text_tokens(prompt, tokenizer, control_tokens), 0
    messages: list[Any] = list(prompt)
    control, open_end = control_tokens is True, continue_final_message
    tokens = tokenizer.apply_chat(
        messages, add_generation_prompt, variables, continue_final_message=open_end, control_tokens=control
    )
    return tokens, tokenizer.shared_prefix(messages, tokens, variables, control_tokens=control)


def text_tokens(prompt: str, tokenizer: Tokenizer, control_tokens: bool | None) -> list[int]:
    """Token ids of a plain prompt, in the model's own format: names in it are tokens, unless that is refused."""
    return tokenizer.encode_literally(prompt) if control_tokens is False else tokenizer.encode(prompt)
