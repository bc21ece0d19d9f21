"""Training canvases: a system prompt with a table drawn afresh, then turns with some of their tokens masked.

Two kinds of canvas:

- A *recitation*: the assistant repeats the table in another random order. In the cloze form only the looked-up values
  are masked; in the full form any token of the canvas may be, as in the pre-training of masked diffusion models.
- A *ride*: questions, each with a response of fixed length padded with EOS. Only response tokens are masked, as in
  fine-tuning: either each with the same probability t, t uniform, or everything from some position on. The second shows
  the model the canvases that small blocks decoded from left to right produce.
"""

import random
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from remask.tasks import transit
from remask.tasks.workload import Message, messages
from training.transit_tokenizer import RECITE

RESPONSE_LENGTH: Final = 16
"""Tokens of a response with its EOS padding."""


@dataclass(slots=True)
class Canvas:
    """Token ids of one canvas, and for each whether it is masked."""

    tokens: list[int]
    masked: list[bool]

    def extend(self, tokens: list[int], masked: list[bool] | None = None) -> None:
        """Appends tokens, visible ones unless `masked` says otherwise."""
        self.tokens += tokens
        self.masked += [False] * len(tokens) if masked is None else masked


class CanvasSource:
    """Draws batches of canvases of equal length, from one random stream."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
        self._tokenizer = tokenizer
        self._rng = random.Random(seed)
        mask_id, eos_id = tokenizer.mask_token_id, tokenizer.eos_token_id
        assert isinstance(mask_id, int)
        assert isinstance(eos_id, int)
        self.mask_id, self.eos_id = mask_id, eos_id

    def recitations(self, count: int, rows: int, full: bool) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `count` recitations of tables of `rows` rows: noisy tokens, clean tokens, mask."""
        return self._batch([self._recitation(rows, full) for _ in range(count)])

    def rides(self, count: int, rows: int, turns: int) -> tuple[Tensor, Tensor, Tensor]:
        """Returns `count` rides of `turns` questions each: noisy tokens, clean tokens, mask."""
        return self._batch([self._ride(rows, turns) for _ in range(count)])

    def prompt_ids(self, messages: list[Message]) -> list[int]:
        """Returns the tokens of a conversation that waits for the assistant."""
        text = self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        return self._ids(str(text))

    def response_ids(self, text: str) -> list[int]:
        """Returns a response padded with EOS to its fixed length."""
        ids = self._ids(text)
        return ids + [self.eos_id] * (RESPONSE_LENGTH - len(ids))

    def _ids(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def _recitation(self, rows: int, full: bool) -> Canvas:
        rng = self._rng
        prompt = transit.draw_prompt(rng, rows)
        canvas = Canvas([], [])
        system, user = {"role": "system", "content": prompt.text}, {"role": "user", "content": RECITE}
        canvas.extend(self.prompt_ids([system, user]))
        recited = rng.sample(prompt.rows, len(prompt.rows))
        # A row is four tokens, `x > y ;`, of which the third is the value.
        share = rng.uniform(0.5, 1.0)
        hidden = [place % 4 == 2 and rng.random() < share for place in range(4 * rows)]
        canvas.extend(self._ids(transit.format_rows(recited)), hidden)
        if full:
            ratio = rng.random()
            canvas.masked = [rng.random() < ratio for _ in canvas.tokens]
        return canvas

    def _ride(self, rows: int, turns: int) -> Canvas:
        rng = self._rng
        prompt = transit.draw_prompt(rng, rows)
        canvas = Canvas([], [])
        for turn in range(turns):
            question = transit.draw_question(rng, prompt)
            asked = messages(prompt, question)
            # The chat template opens every conversation with one BOS token, which later turns must not repeat.
            canvas.extend(self.prompt_ids(asked) if turn == 0 else self.prompt_ids(asked[1:])[1:])
            response = self.response_ids(transit.reference_response(prompt, question))
            canvas.extend(response, self._response_mask())
        return canvas

    def _response_mask(self) -> list[bool]:
        rng = self._rng
        if rng.random() < 0.5:
            # Responses have at most 9 tokens before EOS; what lies beyond has nothing to teach.
            start = rng.randint(0, 9)
            return [place >= start for place in range(RESPONSE_LENGTH)]
        ratio = rng.random()
        return [rng.random() < ratio for _ in range(RESPONSE_LENGTH)]

    def _batch(self, canvases: list[Canvas]) -> tuple[Tensor, Tensor, Tensor]:
        clean = torch.tensor([canvas.tokens for canvas in canvases])
        masked = torch.tensor([canvas.masked for canvas in canvases])
        return clean.masked_fill(masked, self.mask_id), clean, masked
