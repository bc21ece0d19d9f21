"""One pass over a canvas with masks, whose distributions are read and which stays as it is (masked models)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from remask.core.canvas import Canvas
from remask.core.reading import Reading
from remask.policies.base import IdlePasses
from remask.sampling.decoder import Confidence, Positions, Tokens, Uncorrected
from remask.sampling.score import RowGroup


@dataclass(frozen=True, slots=True)
class ReadingDecoding:
    """One step over one block, the answer. What is no mask there is as final as the prompt."""

    prompt: Sequence[int]
    reading: Reading
    mask_id: int
    seed: int

    @property
    def length(self) -> int:
        """Prompt and answer."""
        return len(self.prompt) + self.block

    @property
    def block(self) -> int:
        """Positions of the answer."""
        return len(self.reading.token_ids)

    @property
    def block_ranges(self) -> list[range]:
        """The answer."""
        return [range(len(self.prompt), self.length)]

    @property
    def total_steps(self) -> int:
        """One."""
        return 1

    @property
    def scheduled_steps(self) -> int:
        """One."""
        return 1

    def passes(self, *, skips: bool) -> int:  # noqa: ARG002
        """One: what it transfers is not the point of it."""
        return 1

    @property
    def ordered(self) -> bool:
        """False: nothing is transferred."""
        return False

    def ends_within(self, *, stop_written: bool) -> bool:  # noqa: ARG002
        """False: nothing is written, so no stop token is."""
        return False

    def canvas(self) -> Canvas:
        """The prompt and the answer with its masks, which alone are noisy."""
        tokens = np.asarray(self.reading.token_ids, dtype=np.int64)
        tokens[list(self.reading.masks)] = self.mask_id
        canvas = Canvas(self.prompt, tokens, len(tokens))
        given = np.delete(np.arange(canvas.prompt, canvas.end), self.reading.masks)
        canvas.noisy[given] = False
        canvas.settled[given] = -1
        return canvas

    def decoder(self, canvas: Canvas, idle: IdlePasses) -> "ReadingDecoder":  # noqa: ARG002
        """A decoder at the only step."""
        return ReadingDecoder(self.reading, canvas, self.seed)


class ReadingDecoder(Uncorrected):
    """Reads the slots and writes nothing."""

    def __init__(self, reading: Reading, canvas: Canvas, seed: int) -> None:
        self.reading, self.canvas, self.seed = reading, canvas, seed
        self.block = range(canvas.prompt, canvas.end)
        self.step = 0
        self.block_step = 0

    @property
    def finished(self) -> bool:
        """Whether the pass is done."""
        return self.step > 0

    @property
    def order(self) -> None:
        """None: nothing is transferred."""
        return

    @property
    def sees(self) -> None:
        """None: attention is fully bidirectional."""
        return

    def group(self, rows: slice, positions: Positions) -> RowGroup:
        """Rows are read as they are; of those of slots the tokens asked for, of others token 0 in their place."""
        labels = np.zeros((len(positions), self.reading.width), dtype=np.int64)
        for place, tokens in self.reading.slots.items():
            labels[np.searchsorted(positions, self.block.start + place), : len(tokens)] = tokens
        return RowGroup(rows, "probability", "logits", 0.0, None, None, self.seed, self.step, positions, labels=labels)

    def choose(self, positions: Positions, tokens: Tokens, confidence: Confidence) -> Positions:  # noqa: ARG002
        """None of them."""
        return positions[:0]

    def final(self, written: Positions) -> Positions:
        """None of them."""
        return written

    def advance(self) -> None:
        """Be done."""
        self.step += 1
        self.block_step += 1
