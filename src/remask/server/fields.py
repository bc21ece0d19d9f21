"""The fields of OpenAI's and vLLM's bodies, and what becomes of each: honoured, ignored, or refused for a reason.

A field that is ignored may have any value, as none could change an answer. One that is refused is let through with a
value that asks for nothing. Null always asks for nothing.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from remask.checks.values import shown
from remask.errors import ConfigError, UnknownNameError

_SAMPLING = "as [sampling parameter](sampling.md#sampling-parameters)"
_TERM = "as [term](sampling.md#terms)"

HONOURED: Mapping[str, str] = {
    "add_generation_prompt": "chat; false leaves the assistant's turn unopened",
    "cache_salt": _TERM,
    "chat_template_kwargs": "chat; variables of the chat template",
    "frequency_penalty": f"{_SAMPLING}; of block-causal models, and 0 of all",
    "ignore_eos": _SAMPLING,
    "include_stop_str_in_output": _SAMPLING,
    "logit_bias": f"{_SAMPLING}; up to 1024 token ids, each from -100 to 100",
    "logprobs": "of each token in the step that wrote it: true (chat), or 0 to 20 (completions)",
    "max_completion_tokens": "chat; the newer name of `max_tokens`",
    "max_tokens": _SAMPLING,
    "messages": "chat; texts, tool calls and results of tools; `developer` is read as `system`",
    "min_p": _SAMPLING,
    "min_tokens": f"{_SAMPLING}; 0 on every model, more on uniform ones",
    "model": "a served name",
    "n": "choice i has `seed + i`",
    "parallel_tool_calls": "chat; false reads one call from an answer at most",
    "presence_penalty": f"{_SAMPLING}; of block-causal models, and 0 of all",
    "priority": f"{_TERM}; lower numbers begin first, as in vLLM",
    "prompt": "completions; a text, token ids, or a list of either",
    "repetition_penalty": f"{_SAMPLING}; of block-causal models, and 1 of all",
    "response_format": "`text`, `json_object` or `json_schema`: see [structured outputs](structured-outputs.md)",
    "return_token_ids": "`token_ids` of each choice, and `prompt_token_ids`",
    "seed": _SAMPLING,
    "stop": _SAMPLING,
    "stop_token_ids": _SAMPLING,
    "stream": "server-sent events",
    "stream_options": "`include_usage`; `include_obfuscation` is ignored",
    "structured_outputs": "`regex`, `choice`, `json`, `json_object`: see [structured outputs](structured-outputs.md)",
    "suffix": "text after the response: see [infilling](infilling.md)",
    "temperature": _SAMPLING,
    "tool_choice": "chat; `none`, `auto`, `required` or the name of one: see [tools](tools.md)",
    "tools": "chat; functions: see [tools](tools.md)",
    "top_k": f"{_SAMPLING}; -1 and 0 keep all",
    "top_logprobs": "chat; 0 to 20, with `logprobs: true`",
    "top_p": _SAMPLING,
    "user": "goes into the access log",
}
"""Fields of those bodies that are honoured, and how."""


@dataclass(frozen=True, slots=True)
class Foreign:
    """A field that is not honoured.

    Attributes:
        reason: why it is ignored or refused.
        neutral: values that ask for nothing, beside null. None says that every value is ignored.
    """

    reason: str
    neutral: tuple[Any, ...] | None = ()

    @property
    def ignored(self) -> bool:
        """Whether every value is let through."""
        return self.neutral is None

    def check(self, name: str, value: object) -> None:
        """Raise `ConfigError` on a value that asks for something."""
        if self.neutral is None or value is None or any(_same(value, each) for each in self.neutral):
            return
        allowed = " or ".join(repr(good) for good in (None, *self.neutral))
        raise ConfigError(
            f"{name} is not supported: {self.reason}. Leave it out, or send {allowed}; got {shown(value)}"
        )


def _ignored(reason: str) -> Foreign:
    return Foreign(reason, None)


_NOT_KEPT = "nothing is kept beyond the answer"
_OWN_CACHE = "`cache_salt`, `prefix_length`, `segments` and `cache_control` say what is shared"
_SPEED = "it asks for no other answer"
_NO_REASONING = "no served model marks a part of its answer as reasoning"
_NO_VOCABULARY = "which tokens may be chosen cannot be restricted"
_ONE_PASS = "a prompt is never predicted, as its positions hold no masks"
_TEXT_ONLY = "models read and write text alone"
_NO_STRUCTURE = "`structured_outputs` asks for the form of an answer"
_NO_FUNCTIONS = "`tools` and `tool_choice` are their newer names"
_NO_CODE = "a request names no code of the server"
_BY_OPERATOR = "the chat template is the operator's (`--chat-template`), as it is a program"

FOREIGN: Mapping[str, Foreign] = {
    # OpenAI's
    "audio": Foreign(_TEXT_ONLY),
    "best_of": Foreign("every choice is returned: send `n`", (1,)),
    "echo": Foreign("an answer does not repeat its prompt", (False,)),
    "function_call": Foreign(_NO_FUNCTIONS, ("none", "auto")),
    "functions": Foreign(_NO_FUNCTIONS, ([],)),
    "metadata": _ignored(_NOT_KEPT),
    "modalities": Foreign(_TEXT_ONLY, (["text"],)),
    "moderation": Foreign("nothing is screened"),
    "prediction": _ignored(_SPEED),
    "prompt_cache_key": _ignored(_OWN_CACHE),
    "prompt_cache_options": _ignored(_OWN_CACHE),
    "prompt_cache_retention": _ignored(_OWN_CACHE),
    "reasoning_effort": _ignored(_NO_REASONING),
    "safety_identifier": _ignored("it names the user to the provider"),
    "service_tier": _ignored(_SPEED),
    "store": _ignored(_NOT_KEPT),
    "verbosity": _ignored("no served model knows it; say it in the prompt"),
    "web_search_options": Foreign("nothing is searched for"),
    # vLLM's
    "add_special_tokens": Foreign(
        "texts get the tokenizer's special tokens and conversations the template's; send token ids for others"
    ),
    "allowed_token_ids": Foreign(_NO_VOCABULARY),
    "bad_words": Foreign(_NO_VOCABULARY, ([],)),
    "chat_template": Foreign(_BY_OPERATOR),
    "continue_final_message": Foreign("a response begins a turn of its own", (False,)),
    "documents": Foreign("they belong into the prompt", ([],)),
    "guided_choice": Foreign(_NO_STRUCTURE),
    "guided_decoding_backend": _ignored("it says how, and nothing is constrained"),
    "guided_grammar": Foreign(_NO_STRUCTURE),
    "guided_json": Foreign(_NO_STRUCTURE),
    "guided_regex": Foreign(_NO_STRUCTURE),
    "guided_whitespace_pattern": _ignored("it says how, and nothing is constrained"),
    "include_reasoning": _ignored(_NO_REASONING),
    "kv_transfer_params": Foreign("K/V do not leave the process"),
    "length_penalty": Foreign("it is beam search's", (1,)),
    "logits_processors": Foreign(_NO_CODE, ([],)),
    "media_io_kwargs": Foreign(_TEXT_ONLY, ({},)),
    "mm_processor_kwargs": Foreign(_TEXT_ONLY, ({},)),
    "prompt_embeds": Foreign("prompts are texts or token ids"),
    "prompt_logprobs": Foreign(_ONE_PASS),
    "reasoning": _ignored(_NO_REASONING),
    "request_id": _ignored("the header `X-Request-Id` names a request"),
    "return_tokens_as_token_ids": Foreign("`return_token_ids` gives them", (False,)),
    "skip_special_tokens": Foreign("special tokens are no part of a text; `return_token_ids` shows them", (True,)),
    "spaces_between_special_tokens": _ignored("special tokens are no part of a text"),
    "structural_tag": Foreign(_NO_STRUCTURE),
    "thinking_token_budget": Foreign(_NO_REASONING),
    "truncate_prompt_tokens": Foreign("a prompt that is too long is an error, not another prompt"),
    "use_beam_search": Foreign("responses are not written from left to right", (False,)),
    "vllm_xargs": Foreign(_NO_CODE, ({},)),
    # SGLang's, which routers add
    "no_stop_trim": Foreign("`include_stop_str_in_output` keeps a stop text", (False,)),
    "return_hidden_states": Foreign("hidden states do not leave the process", (False,)),
    "separate_reasoning": _ignored(_NO_REASONING),
    "stream_reasoning": _ignored(_NO_REASONING),
}
"""Fields of those bodies that are not honoured."""

_ONE_READ = "a mask has one distribution, so nothing is drawn"
_ONE_YES = "a score is the probability of yes"

FOREIGN_TO_READS: Mapping[str, Foreign] = {
    # of /v1/systemone
    "auto_max": _ignored(_ONE_READ),
    "auto_threshold": _ignored(_ONE_READ),
    "samples": _ignored(_ONE_READ),
    "seed": _ignored(_ONE_READ),
    "steps": Foreign("decisions take one pass", (1,)),
    # vLLM's of /score and /rerank
    "activation": Foreign(_ONE_YES, (True,)),
    "max_tokens_per_doc": Foreign("a document that is too long is an error, not another document", (0,)),
    "mm_processor_kwargs": FOREIGN["mm_processor_kwargs"],
    "request_id": FOREIGN["request_id"],
    "return_documents": _ignored("documents are always returned"),
    "softmax": Foreign(_ONE_YES, (True,)),
    "truncate_prompt_tokens": FOREIGN["truncate_prompt_tokens"],
    "use_activation": Foreign(_ONE_YES, (True,)),
}
"""Fields of others' bodies that ask for decisions, scores or rankings, and are not honoured."""

_NOTHING: Mapping[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "min_p": (0,),
    "min_tokens": (0,),
    "presence_penalty": (0,),
    "repetition_penalty": (1,),
    "top_k": (-1, 0),
}
"""Values of honoured fields that leave them out."""


def read_fields(body: Any, known: Iterable[str], foreign: Mapping[str, Foreign] = FOREIGN) -> Any:
    """Return `body` with those of its fields alone that are `known` and ask for something.

    Anything but an object is returned as it is. Raises `ConfigError` on a field that asks for what is not supported,
    and `UnknownNameError` on unknown names.
    """
    if not isinstance(body, Mapping):
        return body
    names = frozenset(known)
    kept = {}
    for name, value in body.items():
        if value is not None and any(_same(value, each) for each in _NOTHING.get(name, ())):
            continue
        if name in names:
            kept[name] = value
        elif name not in foreign:
            raise UnknownNameError("field", str(name), names | foreign.keys())
        else:
            foreign[name].check(name, value)
    return kept


def _same(value: object, neutral: object) -> bool:
    """Whether `value` is the neutral one: of its type, so that true is no 1."""
    return value == neutral and isinstance(value, bool) == isinstance(neutral, bool)
