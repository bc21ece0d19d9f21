"""Training canvases of the tariff task: orders drawn afresh, a question, and its response padded with EOS.

Three kinds of canvas: questions that need a plan, look-ups that need none, and orders alone. Of the first two only
response tokens are masked, as in fine-tuning; of the third any token may be, as in pre-training, so that a prefix
computed alone is nothing new to the model.
"""

import random
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from remask.tasks import tariff
from remask.tasks.workload import Message, TaskRequest

RECITE: Final = "Who ordered?"
"""The user message of a recitation."""

RESPONSE_LENGTH: Final = 8
"""Tokens of a response with its EOS padding."""

_FULLY_MASKED: Final = 0.3
_NAME, _ORDER = 1, 3  # place of an order's name, and its length: "rope Anna;"


@dataclass(frozen=True, slots=True)
class Batch:
    """Canvases of one kind and length.

    Attributes:
        noisy, clean: token ids, [batch, length].
        masked: which positions were masked, [batch, length].
        prefix: length of the system prompt.
        names: positions of the orders' names, [orders].
        plans: number of the plan asked about, counted from 0, [batch]; None without a plan.
        prices: what each order costs under it, counted from 0, [batch, orders]; None without a plan.
    """

    noisy: Tensor
    clean: Tensor
    masked: Tensor
    prefix: int
    names: Tensor
    plans: Tensor | None = None
    prices: Tensor | None = None


class CanvasSource:
    """Draws batches from one random stream. The first `shift` positions of a canvas are never masked."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int, shift: int = 0) -> None:
        self._tokenizer, self._shift = tokenizer, shift
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        mask_id, eos_id = tokenizer.mask_token_id, tokenizer.eos_token_id
        assert isinstance(mask_id, int)
        assert isinstance(eos_id, int)
        self.mask_id, self.eos_id = mask_id, eos_id
        self.price_ids = [self._ids(f" {price}")[0] for price in range(1, tariff.PRICES + 1)]
        self.plan_ids = [self._ids(f" {plan}")[0] for plan in tariff.PLANS]

    def questions(self, count: int, settings: tariff.TariffSettings, kind: str) -> Batch:
        """Returns `count` canvases with one question each."""
        requests = []
        for number in range(count):
            prompt = tariff.draw_prompt(self._rng, settings)
            question = tariff.draw_question(self._rng, prompt, kind, settings.asked)
            right = tariff.reference_response(prompt, question)
            requests.append(TaskRequest(number, prompt, question, right))
        return self.batch(requests)

    def batch(self, requests: list[tariff.TariffRequest]) -> Batch:
        """Returns canvases of these requests, which agree in the lengths of prompt and question."""
        clean = torch.tensor([self.prompt_ids(each.messages) + self.response_ids(each.reference) for each in requests])
        first = requests[0]
        prefix = len(self.prompt_ids(first.messages[:1], waiting=False))
        shape = (len(requests), RESPONSE_LENGTH)
        ratio = torch.rand(shape[0], 1, generator=self._generator)
        ratio[torch.rand(ratio.shape, generator=self._generator) < _FULLY_MASKED] = 1.0
        masked = torch.zeros(clean.shape, dtype=torch.bool)
        masked[:, -RESPONSE_LENGTH:] = torch.rand(shape, generator=self._generator) < ratio
        # At least one token, so that every canvas teaches something.
        one = torch.randint(clean.shape[1] - RESPONSE_LENGTH, clean.shape[1], (shape[0],), generator=self._generator)
        masked[torch.arange(shape[0]), one] = True
        names = self._names(prefix, len(first.prompt.orders))
        noisy = clean.masked_fill(masked, self.mask_id)
        if first.question.plan is None:
            return Batch(noisy, clean, masked, prefix, names)
        plans = [str(each.question.plan) for each in requests]
        prices = [
            [tariff.price(plan, title) - 1 for title, _ in each.prompt.orders]
            for plan, each in zip(plans, requests, strict=True)
        ]
        numbers = torch.tensor([tariff.PLANS.index(plan) for plan in plans])
        return Batch(noisy, clean, masked, prefix, names, numbers, torch.tensor(prices))

    def prefixes(self, count: int, settings: tariff.TariffSettings) -> Batch:
        """Returns `count` system prompts without a question, 15 to 50 % of their tokens masked."""
        prompts = [tariff.draw_prompt(self._rng, settings) for _ in range(count)]
        turns = [[{"role": "system", "content": prompt.text}] for prompt in prompts]
        clean = torch.tensor([self.prompt_ids(turn, waiting=False) for turn in turns])
        ratio = 0.15 + 0.35 * torch.rand(count, 1, generator=self._generator)
        masked = torch.rand(clean.shape, generator=self._generator) < ratio
        masked[:, : self._shift] = False
        masked[:, self._shift] = True
        names = self._names(clean.shape[1], settings.orders)
        return Batch(clean.masked_fill(masked, self.mask_id), clean, masked, clean.shape[1], names)

    def recitations(self, count: int, orders: int) -> Batch:
        """Returns `count` canvases that repeat the orders in another sequence, 50 to 100 % of the names masked."""
        rows, prefix = [], 0
        for _ in range(count):
            titles, names = self._rng.sample(tariff.TITLES, orders), self._rng.sample(tariff.NAMES, orders)
            prompt = tariff.TariffPrompt(tuple(zip(titles, names, strict=True)), ())
            system, user = {"role": "system", "content": prompt.text}, {"role": "user", "content": RECITE}
            again = self._rng.sample(prompt.orders, orders)
            response = " ".join(f"{title} {name}" for title, name in again)
            rows.append(self.prompt_ids([system, user]) + self._ids(response))
            prefix = len(self.prompt_ids([system], waiting=False))
        clean = torch.tensor(rows)
        ratio = 0.5 + 0.5 * torch.rand(count, 1, generator=self._generator)
        masked = torch.zeros(clean.shape, dtype=torch.bool)
        recited = masked[:, -2 * orders :]
        recited[:, 1::2] = torch.rand(count, orders, generator=self._generator) < ratio
        recited[:, 1] = True
        return Batch(clean.masked_fill(masked, self.mask_id), clean, masked, prefix, self._names(prefix, orders))

    def prompt_ids(self, messages: list[Message], *, waiting: bool = True) -> list[int]:
        """Returns the tokens of a conversation, which is `waiting` for the assistant or ends here."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=waiting)
        return self._ids(str(text))

    def response_ids(self, text: str) -> list[int]:
        """Returns a response padded with EOS to its fixed length."""
        ids = self._ids(text)
        return ids + [self.eos_id] * (RESPONSE_LENGTH - len(ids))

    def _names(self, prefix: int, orders: int) -> Tensor:
        # The system prompt ends with the last order, its full stop and the end of the turn.
        start = prefix - 1 - _ORDER * orders
        return start + _NAME + _ORDER * torch.arange(orders)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids
