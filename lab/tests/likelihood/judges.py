"""A tiny judge with random weights, saved as `transformers` saves it."""

import math
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast


def save_judge(folder: Path, *, begin: bool = True, positions: int = 128) -> Path:
    """A GPT-2 whose tokenizer makes one token of each byte; `begin` gives it a begin token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = tokenizers.Tokenizer(models.BPE({c: number for number, c in enumerate(alphabet)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    layout: Any = PreTrainedTokenizerFast
    special = {"bos_token": "<|begin|>"} if begin else {}
    tokenizer = layout(tokenizer_object=core, **special)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(1)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=positions, n_embd=16, n_layer=2, n_head=2, initializer_range=0.5
    )
    GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


def nll_by_hand(folder: Path, prompt: str, response: str) -> float:
    """One token at a time, each predicted from what stands before it alone."""
    layout: Any = PreTrainedTokenizerFast
    gpt2: Any = GPT2LMHeadModel
    tokenizer, model = layout.from_pretrained(folder), gpt2.from_pretrained(folder).eval()
    begin = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    ids = begin + tokenizer.encode(prompt)
    total = 0.0
    for token in tokenizer.encode(response):
        if ids:
            with torch.no_grad():
                scores = model(torch.tensor([ids])).logits[0, -1].double().tolist()
            total -= scores[token] - math.log(sum(map(math.exp, scores)))
        ids.append(token)
    return total
