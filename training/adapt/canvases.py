"""Canvases to train on: token ids in which some are masked, what stood there, and how much each counts.

Documents are masked anywhere at all rates, as LLaDA was pretrained, so that every row learns to look at what follows
it. Conversations keep their questions, and of each answer nothing, all, or some is masked: at random, or from a place
on, as decoding by blocks leaves it. `training.adapt.block_canvases` draws from the same texts for block-causal models.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from training.adapt.corpus import PIECES, TOWN_QUESTIONS
from training.adapt.ragged import Ragged

LENGTHS: Final = {256: 0.35, 512: 0.35, 1024: 0.3}
FILL_WEIGHT: Final = 0.1  # of end tokens behind the first: there are many, and they are easy
NEAR: Final = 32  # of these, at most so many are masked like the answer; those behind are all masked or all there,
FAR_SHARE: Final = 0.1  # and so many of them are predicted

Bools = NDArray[np.bool_]


class Canvas(NamedTuple):
    """One canvas [T]. Where `weight` is 0 nothing is predicted."""

    ids: NDArray[np.int32]
    gold: NDArray[np.int32]
    weight: NDArray[np.float32]


class Batch(NamedTuple):
    """Canvases of one length, and their predictions: rows of the flat batch, what each must say, how much it counts.

    `attention` [B, 4, T] says what rows of a block-causal batch attend to (`block_canvases.visible`); None: to all.
    """

    ids: Tensor
    rows: Tensor
    gold: Tensor
    weight: Tensor
    attention: Tensor | None = None

    def to(self, device: torch.device) -> "Batch":
        """The batch on `device`."""
        return Batch(*(None if part is None else part.to(device, non_blocking=True) for part in self))  # type: ignore[arg-type]


class Source(NamedTuple):
    """Exchanges of one kind: the token ids of a question and its answer at a time.

    `head` opens the conversation, and another exchange follows with probability `more`. Where `chat` is false, the text
    is plain: no tokens of the chat template stand between questions and answers.
    """

    head: list[int]
    draw: Callable[[], tuple[list[int], list[int]]]
    more: float
    chat: bool = True


@dataclass(frozen=True, slots=True)
class Canvases:
    """Draws canvases from a corpus (`training.adapt.corpus`) and from conversations that the base has written.

    Attributes:
        corpus: token ids by name.
        conversations: questions and answers in turn. An answer that was cut off has no end token; others end with it.
        held: draw from what is held out.
    """

    corpus: Mapping[str, Ragged]
    conversations: Ragged
    held: bool = False

    @property
    def mask(self) -> int:
        """The mask token."""
        return self.piece("mask")[0]

    @property
    def end(self) -> int:
        """What ends an answer. It also fills what an answer leaves of its canvas."""
        return self.piece("end")[0]

    def document(self, rng: np.random.Generator, length: int) -> Canvas:
        """A stretch of prose with masks of one rate anywhere."""
        parts: list[int] = []
        documents = self.texts("documents")
        while len(parts) < length:
            each = documents[int(rng.integers(len(documents)))]
            start = rng.integers(max(1, len(each) - length))
            parts += each[start : start + length - len(parts)].tolist()
        gold = np.array(parts, np.int32)
        return self._canvas(gold, anywhere(rng, length), np.ones(length, np.float32))

    def talk(self, rng: np.random.Generator, length: int) -> Canvas:
        """Turns that the base has written."""
        return self._turns(rng, length, self.talks(rng))

    def solved(self, rng: np.random.Generator, length: int) -> Canvas:
        """Solved questions of GSM8K, as a chat or as plain text."""
        return self._turns(rng, length, self.solutions(rng))

    def town(self, rng: np.random.Generator, length: int) -> Canvas:
        """Questions about a page."""
        return self._turns(rng, length, self.pages(rng, length))

    def talks(self, rng: np.random.Generator) -> Source:
        """Conversations that the base has written."""
        talks = self.conversations
        count = len(talks) // 2
        held = min(max(count // 50, 1), 400)

        def draw() -> tuple[list[int], list[int]]:
            number = 2 * int(rng.integers(count - held, count) if self.held else rng.integers(count - held))
            return talks[number].tolist(), talks[number + 1].tolist()

        return Source(self.piece("first" if rng.random() < 0.7 else "empty_system"), draw, more=0.35)

    def solutions(self, rng: np.random.Generator) -> Source:
        """Solved questions of GSM8K."""
        chat = rng.random() < 0.4
        pairs = self.texts("solved" if chat else "plain")

        def draw() -> tuple[list[int], list[int]]:
            number = 2 * int(rng.integers(len(pairs) // 2))
            return pairs[number].tolist(), [*pairs[number + 1].tolist(), self.end]

        if chat:
            return Source(self.piece("empty_system" if rng.random() < 0.5 else "first"), draw, more=0.8)
        return Source([], draw, more=0.9, chat=False)

    def pages(self, rng: np.random.Generator, length: int) -> Source:
        """Questions about a page that leaves room for 80 tokens of `length`."""
        towns = self.texts("towns")
        size = 1 + 2 * TOWN_QUESTIONS
        while True:
            first = size * int(rng.integers(len(towns) // size))
            head = [*self.piece("system"), *towns[first].tolist(), *self.piece("user")]
            if len(head) + 80 < length:
                break

        def draw() -> tuple[list[int], list[int]]:
            number = first + 1 + 2 * int(rng.integers(TOWN_QUESTIONS))
            return towns[number].tolist(), [*towns[number + 1].tolist(), self.end]

        return Source(head, draw, more=0.5)

    def texts(self, name: str) -> Ragged:
        """The texts of that name, or those held out."""
        return self.corpus[f"{name}_held" if self.held else name]

    def piece(self, name: str) -> list[int]:
        """The token ids of one of `PIECES`."""
        return list(self.corpus["pieces"][PIECES.index(name)].tolist())

    def _turns(self, rng: np.random.Generator, length: int, source: Source) -> Canvas:
        """Questions and answers of `source`, while there is room.

        All but the last answer are masked in half of the cases. The last one is filled up with end tokens.
        """
        head, draw, more, chat = source
        between, opened = (self.piece("turn"), self.piece("assistant")) if chat else (self.piece("separator"), [])
        gold, masked, weight, end = list(head), [False] * len(head), [0.0] * len(head), self.end
        last = False
        while not last:
            question, answer = draw()
            for _ in range(20):
                if len(gold) + len(question) + len(opened) + min(len(answer), 48) < length:
                    break
                question, answer = draw()
            else:
                question = question[-max(0, length - len(gold) - len(opened) - 48) :]
            asked = [*question, *opened]
            room = length - len(gold) - len(asked)
            last = len(answer) + 200 > room or rng.random() >= more
            ended = bool(answer) and answer[-1] == end
            if last:
                answer = answer[:room]
                tail = [end] * (room - len(answer)) if ended else []
            else:
                # In a chat the end token is the answer's own; plain text ends with a separator.
                answer, tail = (answer if chat or not ended else answer[:-1]), []
                if chat and not ended:
                    answer = [*answer, end]
            response, near = [*answer, *tail], len(answer) + int(rng.integers(min(len(tail), NEAR) + 1))
            hidden = np.zeros(len(response), np.bool_)
            if last or rng.random() < 0.5:
                hidden[:near] = noise(rng, near)
                hidden[near:] = rng.random() < 0.7
            gold += [*asked, *response]
            masked += [*([False] * len(asked)), *hidden.tolist()]
            weight += [*([0.0] * len(asked)), *([1.0] * len(answer)), *([FILL_WEIGHT] * (near - len(answer)))]
            weight += (FILL_WEIGHT * (rng.random(len(response) - near) < FAR_SHARE)).tolist()
            if not last:
                gold += between
                masked += [False] * len(between)
                weight += [0.0] * len(between)
            elif len(gold) < length:  # an answer that was cut off before the canvas was full
                rest = length - len(gold)
                gold, masked, weight = gold + [end] * rest, masked + [False] * rest, weight + [0.0] * rest
        return self._canvas(
            np.array(gold[:length], np.int32), np.array(masked[:length]), np.array(weight[:length], np.float32)
        )

    def _canvas(self, gold: NDArray[np.int32], masked: Bools, weight: NDArray[np.float32]) -> Canvas:
        # Row p - 1 predicts position p, so nothing predicts the first one.
        masked = masked.copy()
        masked[0] = False
        ids = np.where(masked, self.mask, gold).astype(np.int32)
        return Canvas(ids, gold, np.where(masked, weight, 0).astype(np.float32))


def anywhere(rng: np.random.Generator, length: int) -> Bools:
    """Masks of one rate, drawn evenly from 2 % to all."""
    masked = rng.random(length) < rng.uniform(0.02, 1)
    masked[rng.integers(1, length)] = True
    return masked


def noise(rng: np.random.Generator, length: int) -> Bools:
    """Masks of an answer: anywhere, or from a place on, where some of the next 8 to 64 tokens are already there."""
    rate = rng.uniform(0.02, 1)
    places = np.arange(length)
    if rng.random() < 0.5:
        masked = rng.random(length) < rate
    else:
        start, width = rng.integers(length), int(rng.choice([8, 16, 32, 64]))
        masked = (places >= start) & ((places >= start + width) | (rng.random(length) < max(rate, 0.3)))
    if not masked.any():
        masked[rng.integers(length)] = True
    return masked


class Stream(torch.utils.data.IterableDataset[Batch]):
    """Batches without end, each of one length and some `tokens` tokens. Every worker draws its own."""

    def __init__(self, canvases: Canvases, mix: Mapping[str, float], tokens: int, seed: Sequence[int]) -> None:
        self.canvases, self.tokens, self.seed = canvases, tokens, seed
        self.mix = dict(mix)

    def __iter__(self) -> Iterator[Batch]:
        worker = torch.utils.data.get_worker_info()
        rng = np.random.default_rng([*self.seed, worker.id if worker is not None else 0])
        kinds, shares = list(self.mix), np.array(list(self.mix.values()))
        while True:
            length = int(rng.choice(list(LENGTHS), p=list(LENGTHS.values())))
            length = min(length, self.tokens)
            drawn = rng.choice(kinds, self.tokens // length, p=shares / shares.sum())
            yield stack([getattr(self.canvases, kind)(rng, length) for kind in drawn])


def stack(canvases: Sequence[Canvas]) -> Batch:
    """Canvases of one length as a batch."""
    ids, gold, weight = (np.stack(part) for part in zip(*canvases, strict=True))
    number, place = np.nonzero(weight[:, 1:] > 0)  # of the rows that predict
    rows = number * ids.shape[1] + place
    told = gold[number, place + 1], weight[number, place + 1]
    return Batch(torch.from_numpy(ids).long(), torch.from_numpy(rows), *map(torch.from_numpy, told))
