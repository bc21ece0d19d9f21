"""Training canvases of the relay task: destinations drawn afresh, a question, and its route.

Three kinds of canvas: questions, recitations, and goods alone. Of the first two only response tokens are masked, as in
fine-tuning; of the third any token may be, as in pre-training. Every row of every canvas attends to all others: no
cache's mask takes part in training.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from remask.tasks import relay
from remask.tasks.workload import Message, TaskRequest

RECITE: Final = "Where to?"
"""The user message of a recitation."""

START: Final = -7
"""From the first token of a response to the question's start."""

_SUFFIX_SHARE: Final = 0.7
_TOWN, _ROW = 1, 3  # place of a row's destination, and a row's length: "figs Lima;"


@dataclass(frozen=True, slots=True)
class Batch:
    """Canvases of one kind and length.

    Attributes:
        noisy, clean: token ids, [batch, length].
        masked: which positions were masked, [batch, length].
        prefix: length of the system prompt.
        towns: positions of the rows' destinations, [rows].
        known: which masked positions follow from a town that is not masked, [batch, length]; None without a route.
        seasons: number of the season asked about, counted from 0, [batch]; None without one.
        shippers: number of the town that ships each good in it, [batch, rows]; None without a season.
        origins: number of the town that each response token follows from, [batch, HOPS]; None without a season.
    """

    noisy: Tensor
    clean: Tensor
    masked: Tensor
    prefix: int
    towns: Tensor
    known: Tensor | None = None
    seasons: Tensor | None = None
    shippers: Tensor | None = None
    origins: Tensor | None = None


class CanvasSource:
    """Draws batches from one random stream."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        self._generator = torch.Generator().manual_seed(seed)
        mask_id = tokenizer.mask_token_id
        assert isinstance(mask_id, int)
        self.mask_id = mask_id
        self.season_ids = [self._ids(f" {season}")[0] for season in relay.SEASONS]

    def questions(self, count: int, settings: relay.RelaySettings, hop: int = 0) -> Batch:
        """Returns `count` canvases with one question each, as `batch` makes them."""
        requests = []
        for number in range(count):
            prompt = relay.draw_prompt(self._rng, settings)
            question = relay.draw_question(self._rng, prompt, settings.legs)
            right = relay.reference_response(prompt, question)
            requests.append(TaskRequest(number, prompt, question, right))
        return self.batch(requests, hop)

    def batch(self, requests: Sequence[relay.RelayRequest], hop: int = 0) -> Batch:
        """Returns canvases of these requests, whose system prompts have equally many rows.

        Seasons and shippers are those of the hop `hop`, counted from 0.

        Of most responses all towns from some place on are masked, of the others each with a probability uniform in
        [0, 1], and at least one.
        """
        clean = torch.tensor([self.prompt_ids(each.messages) + self._ids(each.reference) for each in requests])
        prefix = len(self.prompt_ids(requests[0].messages[:1], waiting=False))
        count, hops = len(requests), torch.arange(relay.HOPS)
        one = torch.randint(relay.HOPS, (count, 1), generator=self._generator)
        scattered = torch.rand(count, relay.HOPS, generator=self._generator) < self._uniform(count)
        suffix = self._uniform(count) < _SUFFIX_SHARE
        response = torch.where(suffix, hops >= one, scattered | (hops == one))
        masked = torch.zeros(clean.shape, dtype=torch.bool)
        masked[:, -relay.HOPS :] = response
        known = masked.clone()
        known[:, -relay.HOPS + 1 :] &= ~response[:, :-1]
        number = {town: place for place, town in enumerate(relay.TOWNS)}
        seasons = [each.question.season_of(hop) for each in requests]
        return Batch(
            noisy=clean.masked_fill(masked, self.mask_id),
            clean=clean,
            masked=masked,
            prefix=prefix,
            towns=self._towns(prefix, len(requests[0].prompt.rows)),
            known=known,
            seasons=torch.tensor([relay.SEASONS.index(season) for season in seasons]),
            shippers=torch.tensor(
                [
                    [number[relay.shipper(season, good)] for good, _ in each.prompt.rows]
                    for season, each in zip(seasons, requests, strict=True)
                ]
            ),
            origins=torch.tensor(
                [[number[town] for town in [each.question.start, *each.reference.split()[:-1]]] for each in requests]
            ),
        )

    def prefixes(self, count: int, settings: relay.RelaySettings) -> Batch:
        """Returns `count` system prompts without a question, 15 to 50 % of their tokens masked."""
        prompts = [relay.draw_prompt(self._rng, settings) for _ in range(count)]
        turns = [[{"role": "system", "content": prompt.text}] for prompt in prompts]
        clean = torch.tensor([self.prompt_ids(turn, waiting=False) for turn in turns])
        masked = torch.rand(clean.shape, generator=self._generator) < 0.15 + 0.35 * self._uniform(count)
        masked[:, 0] = True
        towns = self._towns(clean.shape[1], settings.rows)
        return Batch(clean.masked_fill(masked, self.mask_id), clean, masked, clean.shape[1], towns)

    def recitations(self, count: int, rows: int) -> Batch:
        """Returns `count` canvases that repeat the rows in another sequence, 50 to 100 % of the towns masked."""
        canvases, prefix = [], 0
        for _ in range(count):
            goods, towns = self._rng.sample(relay.GOODS, rows), self._rng.sample(relay.TOWNS, rows)
            prompt = relay.RelayPrompt(tuple(zip(goods, towns, strict=True)), ())
            system, user = {"role": "system", "content": prompt.text}, {"role": "user", "content": RECITE}
            again = self._rng.sample(prompt.rows, rows)
            response = " ".join(f"{good} {town}" for good, town in again)
            canvases.append(self.prompt_ids([system, user]) + self._ids(response))
            prefix = len(self.prompt_ids([system], waiting=False))
        clean = torch.tensor(canvases)
        masked = torch.zeros(clean.shape, dtype=torch.bool)
        recited = masked[:, -2 * rows :]
        recited[:, 1::2] = torch.rand(count, rows, generator=self._generator) < 0.5 + 0.5 * self._uniform(count)
        recited[:, 1] = True
        return Batch(clean.masked_fill(masked, self.mask_id), clean, masked, prefix, self._towns(prefix, rows))

    def prompt_ids(self, messages: Sequence[Message], *, waiting: bool = True) -> list[int]:
        """Returns the tokens of a conversation, which is `waiting` for the assistant or ends here."""
        text = self._tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=waiting)
        return self._ids(str(text))

    def _towns(self, prefix: int, rows: int) -> Tensor:
        # The system prompt ends with the last row, its full stop and the end of the turn.
        return prefix - 1 - _ROW * rows + _TOWN + _ROW * torch.arange(rows)

    def _uniform(self, count: int) -> Tensor:
        return torch.rand(count, 1, generator=self._generator)

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids
