"""The canvas of one request while it is decoded, and what a decoder returns."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class Decode:
    """A finished decode. Pass numbers are 0-based and count forward passes, also those that transfer nothing."""

    output_ids: list[int]
    transfers: list[tuple[int, list[int], list[int]]]  # (pass, positions ascending, tokens)
    rows: list[list[int]]  # computed rows per pass and layer
    picks: list[tuple[int, int, list[int]]] = field(default_factory=list)  # dLLM-Cache: (pass, layer, response offsets)

    @property
    def forwards(self) -> int:
        """Forward passes, the prefix-only pass not counted."""
        return len(self.rows)

    @property
    def row_layers(self) -> int:
        """Computed rows summed over layers and passes."""
        return sum(map(sum, self.rows))


class Canvas:
    """Prompt and response tokens, which of them are still noisy, and the record of what happened.

    `template` has a token, or None for one to be found, at each place of the response; without it all are to be found.
    """

    def __init__(
        self, prompt: Sequence[int], max_tokens: int, mask_id: int, template: Sequence[int | None] | None = None
    ) -> None:
        self.prompt_length = len(prompt)
        self.length = len(prompt) + max_tokens
        self.tokens = torch.tensor([*prompt, *[mask_id] * max_tokens])
        self.noisy = torch.arange(self.length) >= len(prompt)
        for place, token in enumerate(template or ()):
            if token is not None:
                self.tokens[len(prompt) + place], self.noisy[len(prompt) + place] = token, False
        self.fixed = ~self.noisy
        self.given = int(self.fixed.sum()) - len(prompt)  # tokens of the response
        self.reachable = torch.ones_like(self.noisy)  # which positions the next step may transfer, if noisy
        self.rows: list[list[int]] = []
        self.transfers: list[tuple[int, list[int], list[int]]] = []
        self.picks: list[tuple[int, int, list[int]]] = []

    @property
    def known(self) -> Tensor:
        """Positions whose token is final."""
        return ~self.noisy

    @property
    def candidates(self) -> Tensor:
        """Noisy positions that the next step may transfer."""
        return self.noisy & self.reachable

    def decided(self, gap: float) -> None:
        """Takes notice of how far a decision was from being another one, where that turns on a comparison."""

    def span(self, start: int, stop: int) -> Tensor:
        """The mask of positions start..stop-1."""
        positions = torch.arange(self.length)
        return (positions >= start) & (positions < stop)

    def ran(self, rows: list[int]) -> None:
        """Notes a forward pass that computed `rows` rows in each layer."""
        self.rows.append(rows)

    def transfer(self, positions: Sequence[int], logits: Tensor) -> None:
        """Makes `positions` final with the argmax of the latest pass' `logits` [length, vocabulary]."""
        chosen = sorted(positions)
        if not chosen:
            return
        if logits[chosen].isnan().any():
            raise ValueError(f"the latest pass has no logits for some of {chosen}")
        self.tokens[chosen] = logits[chosen].argmax(-1)
        self.noisy[chosen] = False
        self.transfers.append((len(self.rows) - 1, chosen, self.tokens[chosen].tolist()))

    def result(self) -> Decode:
        """The decode that led here."""
        return Decode(self.tokens[self.prompt_length :].tolist(), self.transfers, self.rows, self.picks)
