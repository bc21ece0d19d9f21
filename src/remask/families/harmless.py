"""Keys of `config.json` that no family reads, because none of them changes what a model computes."""

import re
from collections.abc import Collection, Mapping
from typing import Any

# fmt: off
KEYS = frozenset({
    # Where a file comes from, and how transformers loads it.
    "_name_or_path", "name_or_path", "_commit_hash", "_attn_implementation", "attn_implementation", "architectures",
    "auto_map", "model_type", "tokenizer_class", "transformers_version", "unsloth_version", "unsloth_fixed", "dtype",
    "torch_dtype", "quantization_config", "quantization", "compression_config", "model_name", "license",
    # What it returns beside logits, and how it is run.
    "use_cache", "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "torchscript",
    "use_return_dict", "use_bfloat16", "pretraining_tp", "chunk_size_feed_forward", "gradient_checkpointing",
    "use_flash_attn", "flash_attention", "problem_type", "id2label", "label2id", "num_labels", "finetuning_task",
    "task_specific_params", "is_decoder", "is_encoder_decoder", "prefix", "pruned_heads", "ep_size", "use_liger",
    # Tokens that mean nothing to the model itself.
    "bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "cls_token_id", "unk_token_id",
    "decoder_start_token_id", "image_token_id", "boi_token_id", "eoi_token_id",
    # Decoding of autoregressive models, which transformers 4 wrote there too.
    "max_length", "min_length", "do_sample", "early_stopping", "num_beams", "num_beam_groups", "temperature",
    "diversity_penalty", "top_k", "top_p", "typical_p", "repetition_penalty", "length_penalty", "max_new_tokens",
    "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "num_return_sequences", "bad_words_ids", "output_scores",
    "return_dict_in_generate", "forced_bos_token_id", "forced_eos_token_id", "remove_invalid_values", "suppress_tokens",
    "begin_suppress_tokens", "exponential_decay_length_penalty",
    # Sizes of windows and lengths that are in use only where another key says so, which families read.
    "sliding_window", "max_window_layers", "model_max_length", "max_seq_len", "seq_length",
})
# fmt: on
_TRAINING = re.compile(
    r".*(dropout|_pdrop|_loss_weight|_loss_coef|initializer_range|init_scale|init_std)|init_(device|fn|cutoff_factor)"
)


def unknown_keys(raw: Mapping[str, Any], read: Collection[str], harmless: Collection[str]) -> list[str]:
    """Keys of `raw` that have a value, and that were neither `read` nor `harmless`.

    `null`, `false` and empty values do not count: a newer model switches something on.
    """
    return [
        key
        for key, value in raw.items()
        if key not in read and key not in KEYS and key not in harmless and not _TRAINING.fullmatch(key)
        if not (value is None or value is False or (isinstance(value, str | list | dict) and not value))
    ]
