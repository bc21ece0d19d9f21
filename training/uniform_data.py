"""Training canvases of the bundled uniform model: a timetable, clean up to a window, noise from there on.

A canvas is what the engine shows the model at some step of some block. The prompt and the blocks before the window are
clean, and clean rows see clean rows only. A third of the windows begin where every response does. What stands after the
window is uniform noise. In the window, tokens are replaced by uniform noise in one of two ways, each in half of the
canvases: every token with the same probability t, uniform in [0, 1], which is the forward process; or all tokens from
some position on, which is what a block decoded from left to right looks like.

In three canvases of four the rule names one start, drawn by lot, and the list begins at another: 140 timetables are few
enough to learn by heart, and a rule that may be wrong leaves nothing to go by but the departures before.

Where completed blocks may be revised, they may hold mistakes: in half of the canvases every departure between the
prompt and the window is replaced by uniform noise with the same probability, uniform in [0, 0.3]. These departures are
learned from too, wrong or not.

For the variational bound every window is noise of the forward process, at one step of a chain that is drawn for each
canvas.
"""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from remask.tasks.timetable import GIVEN, MINUTES, timetables
from remask_lab.likelihood.noise_bound import Levels

LONGEST_WINDOW: Final = 32
LAST_START: Final = 64
"""Departures before the window, at most."""
MOST_MISTAKES: Final = 0.3
"""Share of the completed departures that are wrong, at most."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Canvases [batch, length]: what the model sees, what is right, which rows are noisy, which are learned from.

    `steps` [batch] are the steps of the chain; None where the windows follow none.
    """

    tokens: Tensor
    clean: Tensor
    noisy: Tensor
    window: Tensor
    steps: Tensor | None = None


class TimetableSource:
    """Draws batches of canvases, from one random stream."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerFast, seed: int, *, mistakes: bool = False, chain: Levels | None = None
    ) -> None:
        """`mistakes`: completed blocks hold some, and are learned from. `chain`: levels that windows are noised to."""
        self._random, self._mistakes, self._chain = torch.Generator().manual_seed(seed), mistakes, chain
        self._tables = timetables(held_out=False)
        mask_id, first_minute = tokenizer.mask_token_id, tokenizer.convert_tokens_to_ids("0")
        assert isinstance(mask_id, int)
        assert isinstance(first_minute, int)
        self._mask_id, self._first_minute, self._vocab = mask_id, first_minute, len(tokenizer)
        self._prompts = torch.tensor([tokenizer(table.rule)["input_ids"] for table in self._tables])
        self._intervals = torch.tensor([table.interval for table in self._tables])
        self._starts = torch.tensor([table.start for table in self._tables])

    def draw(self, count: int, length: int) -> Batch:
        """Returns `count` canvases of `length` tokens."""
        chosen = self._integers(len(self._tables), count)
        prompt = self._prompts.shape[1]
        places = torch.arange(length)[None]
        named, wrong = self._starts[chosen], self._integers(4, count) > 0
        starts = torch.where(wrong, self._integers(MINUTES, count), named)
        minutes = (starts[:, None] + (places - prompt) * self._intervals[chosen, None]) % MINUTES
        clean = minutes + self._first_minute
        clean[:, :prompt] = self._prompts[chosen]

        size = 1 + self._integers(LONGEST_WINDOW, count)
        latest = min(LAST_START, length - prompt - LONGEST_WINDOW)
        later = self._integers(latest - GIVEN + 1, count) * (self._integers(3, count) > 0)
        start = prompt + GIVEN + later
        noisy = places >= start[:, None]
        window = noisy & (places < (start + size)[:, None])
        level, steps = torch.rand(count, 1, generator=self._random), None
        if self._chain is not None:
            steps = 1 + self._integers(len(self._chain.clean) - 1, count)
            level = 1 - self._chain.clean[steps][:, None].float()
        scattered = torch.rand(count, length, generator=self._random) < level
        suffix = places >= (start + (size * level[:, 0]).long())[:, None]
        # Tokens of a suffix are no draws from the forward process.
        scatters = (self._integers(2, count)[:, None] == 0) | (steps is not None)
        replaced = noisy & ~window | window & torch.where(scatters, scattered, suffix)
        if self._mistakes:
            completed = (places >= prompt + GIVEN) & ~noisy
            share = (
                MOST_MISTAKES * torch.rand(count, 1, generator=self._random) * (self._integers(2, count)[:, None] > 0)
            )
            replaced = replaced | completed & (torch.rand(count, length, generator=self._random) < share)
            window = window | completed
        tokens = torch.where(replaced, self._noise(count, length), clean)
        return Batch(tokens, clean, noisy, window, steps)

    @property
    def state(self) -> Tensor:
        """Where the random stream stands."""
        return self._random.get_state()

    @state.setter
    def state(self, state: Tensor) -> None:
        self._random.set_state(state)

    def _noise(self, count: int, length: int) -> Tensor:
        """Uniform over the vocabulary without the mask."""
        drawn = self._integers(self._vocab - 1, count, length)
        return drawn + (drawn >= self._mask_id)

    def _integers(self, end: int, *shape: int) -> Tensor:
        return torch.randint(end, shape, generator=self._random)
