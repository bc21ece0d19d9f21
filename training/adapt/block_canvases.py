"""Canvases to train a block-causal model on: clean texts, and behind them noisy copies of the blocks of their answers.

Blocks are counted from the end of the prompt. A row of a clean text attends to its own block and to those before it. A
row of a noisy copy attends to its own copy and to the clean blocks before it, as in decoding. So one pass trains on
all blocks of an answer, each under masks of its own (block diffusion, arXiv 2503.09573, section 3.3).
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.adapt.canvases import FILL_WEIGHT, Batch, Bools, Canvases, Source

COPIES: Final = 3  # of an answer at most
DRAWS: Final = 8  # of an exchange for the rest of a canvas, before it is left empty
PROMPT: Final = 160  # tokens of prose before what is predicted, at most
PROSE: Final = 96  # tokens of prose that are predicted

Ints = NDArray[np.int32]


class BlockCanvas(NamedTuple):
    """One canvas of T rows.

    Attributes:
        ids: token ids [T].
        attention: [4, T]: number of the text (-1: empty), of the copy (0: clean), position, and how many positions of
            the clean text are seen.
        rows: those that predict [P].
        gold: what they must say [P].
        weight: how much it counts [P].
    """

    ids: Ints
    attention: Ints
    rows: Ints
    gold: Ints
    weight: NDArray[np.float32]


def visible(attention: Tensor) -> Tensor:
    """Which rows [B, 1, T, T] each row attends to, of `BlockCanvas.attention` [B, 4, T]."""
    text, copy, position, limit = attention.unbind(1)
    clean = (copy == 0)[:, None, :] & (position[:, None, :] < limit[:, :, None])
    own = (copy > 0)[:, :, None] & (copy[:, :, None] == copy[:, None, :])
    return ((text[:, :, None] == text[:, None, :]) & (clean | own))[:, None]


class BlockStream(torch.utils.data.IterableDataset[Batch]):
    """Batches without end, of canvases of `length` and some `tokens` tokens. Every worker draws its own."""

    def __init__(
        self,
        canvases: Canvases,
        mix: Mapping[str, float],
        tokens: int,
        seed: Sequence[int],
        blocks: Sequence[int],
        length: int,
    ) -> None:
        self.canvases, self.tokens, self.seed, self.blocks = canvases, tokens, seed, blocks
        self.mix, self.length = dict(mix), min(length, tokens)

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([*self.seed, worker.id if worker is not None else 0])
        while True:
            drawn = (
                draw_canvas(self.canvases, rng, self.mix, self.blocks, self.length)
                for _ in range(self.tokens // self.length)
            )
            yield stack_blocks(list(drawn))


def draw_canvas(
    canvases: Canvases, rng: np.random.Generator, mix: Mapping[str, float], blocks: Sequence[int], length: int
) -> BlockCanvas:
    """Fill a canvas with exchanges, their kinds drawn from `mix` and the length of their blocks from `blocks`.

    Raises `ValueError` if none of `DRAWS` exchanges fits.
    """
    kinds, shares = list(mix), np.array(list(mix.values()))
    canvas, misses = _Canvas(length, canvases.mask), 0
    while misses < DRAWS:
        kind, block = str(rng.choice(kinds, p=shares / shares.sum())), int(rng.choice(blocks))
        prompt, answer = _exchange(canvases, rng, kind, length)
        weight = np.ones(len(answer), np.float32)
        if answer[-1] == canvases.end:
            fill = -len(answer) % block
            answer, weight = [*answer, *[canvases.end] * fill], np.append(weight, [FILL_WEIGHT] * fill)
        else:
            answer = answer[: max(block, len(answer) // block * block)]
        misses += not canvas.add(rng, prompt, answer, weight[: len(answer)].astype(np.float32), block)
    if not canvas.used:
        raise ValueError(
            f"canvases of {length} tokens leave no room for a text and a copy of its answer: use longer ones"
        )
    return canvas.done()


def stack_blocks(canvases: Sequence[BlockCanvas]) -> Batch:
    """Canvases of one length as a batch."""
    length = len(canvases[0].ids)
    return Batch(
        torch.from_numpy(np.stack([canvas.ids for canvas in canvases])).long(),
        torch.from_numpy(np.concatenate([canvas.rows + at * length for at, canvas in enumerate(canvases)])).long(),
        torch.from_numpy(np.concatenate([canvas.gold for canvas in canvases])),
        torch.from_numpy(np.concatenate([canvas.weight for canvas in canvases])),
        torch.from_numpy(np.stack([canvas.attention for canvas in canvases])).long(),
    )


def _exchange(canvases: Canvases, rng: np.random.Generator, kind: str, length: int) -> tuple[list[int], list[int]]:
    """A prompt and its answer. An answer that is whole ends with the end token."""
    if kind == "document":
        documents = canvases.texts("documents")
        text = documents[int(rng.integers(len(documents)))]
        size = int(rng.integers(8, PROMPT))
        start = int(rng.integers(max(1, len(text) - size - PROSE)))
        return text[start : start + size].tolist(), text[start + size : start + size + PROSE].tolist() or [canvases.end]
    sources = {
        "talk": lambda: canvases.talks(rng),
        "solved": lambda: canvases.solutions(rng),
        "town": lambda: canvases.pages(rng, length * 3 // 4),
    }
    source: Source = sources[kind]()
    names = ("turn", "assistant") if source.chat else ("separator", None)
    between, opened = (canvases.piece(name) if name else [] for name in names)
    prompt = list(source.head)
    while True:
        question, answer = source.draw()
        prompt += [*question, *opened]
        ended = bool(answer) and answer[-1] == canvases.end
        if rng.random() >= source.more or len(prompt) + len(answer) > length // 3:
            return prompt, answer
        if not source.chat and ended:
            answer = answer[:-1]
        elif source.chat and not ended:
            answer = [*answer, canvases.end]
        prompt += [*answer, *between]


class _Canvas:
    """A canvas that is being filled."""

    def __init__(self, length: int, mask: int) -> None:
        self.length, self.mask = length, mask
        self.ids, self.attention = list[Ints](), list[Ints]()
        self.rows, self.gold, self.weight = list[Ints](), list[Ints](), list[NDArray[np.float32]]()
        self.used, self.texts, self.copies = 0, 0, 0

    def add(
        self,
        rng: np.random.Generator,
        prompt: Sequence[int],
        answer: Sequence[int],
        weight: NDArray[np.float32],
        block: int,
    ) -> bool:
        """Add a text and at least one noisy copy of its answer, if there is room. Whether there was."""
        clean = np.array([*prompt, *answer], np.int32)
        copies = min(COPIES, (self.length - self.used - len(clean)) // len(answer))
        if copies < 1 or not prompt:
            return False
        first, start = self.used, len(prompt)
        positions = np.arange(len(clean), dtype=np.int32)
        limits = np.minimum((np.floor_divide(positions - start, block) + 1) * block + start, len(clean))
        self._rows(clean, np.zeros_like(positions), positions, limits)
        places = positions[start:]
        begins = places - (places - start) % block
        gold = clean[start:]
        for _ in range(copies):
            masked = np.concatenate([noise(rng, min(block, len(gold) - at)) for at in range(0, len(gold), block)])
            # Row p - 1 predicts position p. The row before a block is a clean one.
            rows = np.where(places == begins, first + places - 1, self.used + places - start - 1)
            self.rows.append(rows[masked].astype(np.int32))
            self.gold.append(gold[masked])
            self.weight.append(weight[masked])
            copy = self.copies + 1 + (places - start) // block
            self.copies = int(copy[-1])
            self._rows(np.where(masked, self.mask, gold), copy, places, begins)
        self.texts += 1
        return True

    def _rows(self, ids: Ints, copy: Ints, positions: Ints, limits: Ints) -> None:
        self.ids.append(ids)
        self.attention.append(np.stack([np.full_like(ids, self.texts), copy, positions, limits]))
        self.used += len(ids)

    def done(self) -> BlockCanvas:
        """The canvas; what is left of it are masks that attend to one another."""
        rest = self.length - self.used
        ids = np.concatenate([*self.ids, np.full(rest, self.mask)]).astype(np.int32)
        empty = np.array([[-1], [0], [0], [1]]).repeat(rest, axis=1)
        attention = np.concatenate([*self.attention, empty], axis=1).astype(np.int32)
        rows, gold, weight = np.concatenate(self.rows), np.concatenate(self.gold), np.concatenate(self.weight)
        return BlockCanvas(ids, attention, rows, gold, weight)


def noise(rng: np.random.Generator, length: int) -> Bools:
    """Masks of a block as decoding leaves it: all, those from a place on, or at random, and both together."""
    kind = rng.random()
    if kind < 0.3:
        return np.ones(length, np.bool_)
    masked = np.arange(length) >= rng.integers(length) if kind < 0.75 else np.ones(length, np.bool_)
    if kind >= 0.5:
        masked &= rng.random(length) < rng.uniform(0.1, 1)
    if not masked.any():
        masked[rng.integers(length)] = True
    return masked
