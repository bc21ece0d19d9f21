"""Dense evaluation: LLaDA's low-confidence sampler at temperature 0, and strict-match accuracy per number of hops."""

import random
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from remask.tasks import transit
from remask.tasks.workload import messages
from training.model import MaskedModel
from training.transit_data import RESPONSE_LENGTH, CanvasSource


@torch.no_grad()
def decode(model: MaskedModel, prompts: Tensor, mask_id: int, block_length: int, steps: int) -> Tensor:
    """Returns the responses [batch, RESPONSE_LENGTH] to prompts of equal length, one full forward a step.

    The blocks are decoded from left to right. Each gets an equal share of the steps, and each step settles an equal
    share of the block's masks (the first steps one more where they do not divide), most confident first.
    """
    blocks, steps_per_block = RESPONSE_LENGTH // block_length, steps * block_length // RESPONSE_LENGTH
    assert blocks * block_length == RESPONSE_LENGTH
    assert blocks * steps_per_block == steps
    batch, start = prompts.shape
    canvas = torch.cat([prompts, prompts.new_full((batch, RESPONSE_LENGTH), mask_id)], dim=1)
    for block in range(blocks):
        end = start + (block + 1) * block_length
        for step in range(steps_per_block):
            count = block_length // steps_per_block + (step < block_length % steps_per_block)
            confidence, tokens = model(canvas)[:, start:end].float().softmax(-1).max(-1)
            confidence = confidence.masked_fill(canvas[:, start:end] != mask_id, -torch.inf)
            chosen = confidence.topk(count, dim=-1).indices
            canvas[:, start:end] = canvas[:, start:end].scatter(1, chosen, tokens.gather(1, chosen))
    return canvas[:, start:]


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Right answers and questions, one entry per number of hops from 1 on."""

    right: tuple[int, ...]
    asked: tuple[int, ...]

    @property
    def overall(self) -> float:
        """The share of right answers over all questions."""
        return sum(self.right) / sum(self.asked)

    def __str__(self) -> str:
        parts = [f"{h} hops {r / n:.3f}" for h, (r, n) in enumerate(zip(self.right, self.asked, strict=True), 1) if n]
        return f"{self.overall:.3f} (n = {sum(self.asked)}; {', '.join(parts)})"


def measure(
    model: MaskedModel,
    tokenizer: PreTrainedTokenizerFast,
    questions: int,
    seed: int,
    rows: int = transit.DEFAULT_ROWS,
    block_length: int = 2,
    steps: int = 8,
    with_system: bool = True,
) -> Accuracy:
    """Asks `questions` questions, each about its own freshly drawn line, and counts strict matches."""
    source = CanvasSource(tokenizer, seed)
    rng = random.Random(seed)
    device = model.wte.weight.device
    right, asked = [0] * transit.MAX_HOPS, [0] * transit.MAX_HOPS
    pending = []
    for number in range(questions):
        prompt = transit.draw_prompt(rng, rows)
        pending.append((prompt, transit.draw_question(rng, prompt, 1 + number % transit.MAX_HOPS)))
    for begin in range(0, questions, 32):
        batch = pending[begin : begin + 32]
        conversations = [messages(prompt, question) for prompt, question in batch]
        ids = [source.prompt_ids(turns if with_system else turns[1:]) for turns in conversations]
        responses = decode(model, torch.tensor(ids, device=device), source.mask_id, block_length, steps)
        for (prompt, question), response in zip(batch, responses.tolist(), strict=True):
            kept = response[: response.index(source.eos_id)] if source.eos_id in response else response
            asked[question.hops - 1] += 1
            right[question.hops - 1] += transit.is_correct(
                str(tokenizer.decode(kept, skip_special_tokens=True)), transit.route(prompt, question)[-1]
            )
    return Accuracy(tuple(right), tuple(asked))
