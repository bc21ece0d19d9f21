import json
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from training.transit_tokenizer import save_tokenizer
from transformers import PreTrainedTokenizerFast

from remask.checkpoint.loaded import LoadedModel, find_model
from remask.checkpoint.settings import ModelSettings
from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask.model.transformer import Transformer

TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
SMALL = EngineConfig(max_num_seqs=1, max_model_len=64, store_budget_tokens=64)


def open_model(name: str, *, dummy: bool = False, audit: float | None = None, **more: Any) -> LLM:
    return LLM(
        name,
        dtype="float32",
        device="cpu",
        load_format="dummy" if dummy else "auto",
        engine=replace(SMALL, audit=audit),
        **more,
    )


def loaded(name: str, *, dummy: bool = False) -> LoadedModel:
    return find_model(ModelSettings(name, load_format="dummy" if dummy else "auto")).load(
        torch.float32, torch.device("cpu")
    )


def transformer(model: LoadedModel) -> Transformer:
    return Transformer(model.config, model.weights)


def with_transit_tokenizer(source: Path, folder: Path) -> Path:
    """A checkpoint whose tokenizer is the bundled model's."""
    shutil.copytree(source, folder)
    save_tokenizer(folder)
    return folder


def with_ascii_tokenizer(source: Path, folder: Path, template: str | None = TEMPLATE) -> Path:
    """A checkpoint whose tokenizer makes one token of each printable ASCII character."""
    shutil.copytree(source, folder)
    # Characters of the byte-level alphabet that stand for ASCII and for space and line break.
    characters = [c for c in sorted(pre_tokenizers.ByteLevel.alphabet()) if c.isascii() or c in "\u0120\u010a"]
    core = tokenizers.Tokenizer(models.BPE({c: number for number, c in enumerate(characters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    layout: Any = PreTrainedTokenizerFast  # its constructor has no types
    layout(tokenizer_object=core, chat_template=template).save_pretrained(folder)
    return folder


def write_lines(path: Path, lines: Sequence[object]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path
