"""The fields of OpenAI's and vLLM's bodies that no body here has: each is ignored, or refused for a reason."""

from collections.abc import Mapping

from remask.server.protocol.base import Foreign


def _ignored(reason: str) -> Foreign:
    return Foreign(reason, None)


_NOT_KEPT = "nothing is kept beyond the answer"
_OWN_CACHE = "`cache_salt`, `prefix_length` and `cache_control` say what is shared"
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
    "cache_control": _ignored("the shared part is found by itself; `cache_control` of a message marks its end"),
    "best_of": Foreign("every choice is returned: send `n`", (1,)),
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
    # OpenAI's of /v1/decisions
    "safety_identifier": FOREIGN["safety_identifier"],
    # of /v1/systemone
    "assets": Foreign(_TEXT_ONLY, ({},)),
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
