"""Pairs of a prompt and a response, and passes over whole canvases outside of an engine that score them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.pack import pack_uncached
from remask.errors import ConfigError
from remask.llm import LLM
from remask.model.pool import Pool
from remask.plan.canvas import Canvas
from remask.plan.plan import Reach
from remask.plan.spans import Mask
from remask.text.tokenizer import Tokenizer
from remask_lab.likelihood import MAX_ROWS

HEAD_ROWS = 256  # rows of logits held at a time


@dataclass(frozen=True, slots=True)
class Pair:
    """A prompt and the response after it, as token ids. The prompt may be empty."""

    prompt: Sequence[int]
    response: Sequence[int]

    def __len__(self) -> int:
        return len(self.prompt) + len(self.response)


def encode_pair(llm: LLM, prompt: str, response: str) -> Pair:
    """Encode two texts separately, so that no token spans both. Raises `ConfigError` without a tokenizer.

    White space at the end of the prompt is moved to the response, as most tokens begin with their space.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so there are no texts to score; give a model with one")
    stripped = prompt.rstrip()
    ids = encode_open(llm, llm.tokenizer, stripped) if stripped else []
    return Pair(ids, llm.tokenizer.encode(prompt[len(stripped) :] + response, add_special_tokens=False))


def encode_open(llm: LLM, tokenizer: Tokenizer, text: str) -> list[int]:
    """Encode a text that will be continued, without an end token that the tokenizer adds."""
    ids = tokenizer.encode(text)
    return ids[:-1] if ids and ids[-1] in llm.loaded.config.stop_ids else ids


def encode_reply(llm: LLM, prompt: str, response: str) -> Pair:
    """Encode a user's turn `prompt` by the chat template, and the assistant's answer `response`.

    Raises `ConfigError` without a tokenizer or a chat template.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, so there are no texts to score; give a model with one")
    chat = llm.tokenizer.apply_chat([{"role": "user", "content": prompt}])
    return Pair(chat, llm.tokenizer.encode(response, add_special_tokens=False))


@dataclass(frozen=True, slots=True)
class Job:
    """One canvas to be run once.

    Attributes:
        predict: positions that are predicted, bool [T].
        sees: number of leading positions that each row attends to, int64 [T]; None stands for all.
    """

    canvas: Canvas
    predict: Mask
    sees: Reach | None = None


class UncachedPasses:
    """Runs whole canvases once each without a cache, as many in a pass as `max_rows` rows allow.

    It owns K/V memory for one layer of such a pass, separate from any engine's.
    """

    def __init__(self, llm: LLM, max_rows: int = MAX_ROWS) -> None:
        self.config = llm.model.config
        self._model, self._max_rows = llm.model, max_rows
        self._pool: Pool | None = None

    def check(self, pair: Pair) -> None:
        """Raise `ConfigError` on an empty response, too many tokens, or ids outside of the vocabulary."""
        if not len(pair.response):
            raise ConfigError("the response has no tokens, so there is nothing to score")
        if len(pair) > self.config.max_length:
            raise ConfigError(
                f"prompt and response have {len(pair)} tokens, and the model reads {self.config.max_length}; "
                "shorten one of them"
            )
        if not all(0 <= token < self.config.vocab for token in (*pair.prompt, *pair.response)):
            raise ConfigError(
                f"token ids go from 0 to {self.config.vocab - 1}, and the prompt or response holds others"
            )

    def chunks(self, lengths: Sequence[int]) -> Iterator[slice]:
        """Divide canvases of these `lengths` into passes: slices of `max_rows` rows or fewer, or of one canvas."""
        start = 0
        while start < len(lengths):
            rows, stop = lengths[start], start + 1
            while stop < len(lengths) and rows + lengths[stop] <= self._max_rows:
                rows += lengths[stop]
                stop += 1
            yield slice(start, stop)
            start = stop

    @torch.inference_mode()
    def hidden(self, jobs: Sequence[Job]) -> Tensor:
        """Run `jobs` in one pass, and return the final hidden states of all predicted rows, [M, D]."""
        rows = sum(len(job.canvas) for job in jobs)
        if self._pool is None or self._pool.page_count < rows:
            slots = max(rows, self._max_rows)
            pool = Pool(replace(self.config, layers=1), slots, 1, self._model.dtype, self._model.device)
            # Nothing reads a layer's K/V after the pass has left the layer, so all layers use the same slots.
            pool.k, pool.v = pool.k * self.config.layers, pool.v * self.config.layers
            self._pool = pool
        batch = pack_uncached(
            self._model, [job.canvas for job in jobs], [job.predict for job in jobs], [job.sees for job in jobs]
        )
        return self._model.forward(batch, self._pool)

    def logits(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Yield slices of `HEAD_ROWS` rows, and the float32 logits [rows, V] of these rows of `hidden` [M, D]."""
        for start in range(0, len(hidden), HEAD_ROWS):
            rows = slice(start, start + HEAD_ROWS)
            yield rows, self._model.head(hidden[rows]).float()

    def send(self, index: NDArray[np.int64]) -> Tensor:
        """Copy `index` to the model's device, without waiting."""
        return torch.from_numpy(index.astype(np.int64)).to(self._model.device, non_blocking=True)
