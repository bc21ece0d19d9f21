"""The tokens of running canvases on the device, and which of them are noisy."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState
from remask.model.runs import Index
from remask.sampling.choice import Candidates, Choice


class TokenBuffer:
    """Tokens and noisy flags, addressed like K and V of the first layer: canvases that share a prefix share it here.

    What the host changes it sends with the next pass. What the device chooses it puts here itself, and the host learns
    of it later.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        # Twice the token, and 1 where it is noisy. What nobody has written is no token.
        self.values = torch.full((slots,), -2, dtype=torch.int64, device=device)

    def outgoing(self, branches: Sequence[CanvasState]) -> tuple[Index, Index]:
        """What the host has changed of `branches` since it was sent: places in the buffer and values, int64 [n]."""
        changed = [(branch, branch.unsent()) for branch in branches]
        changed = [(branch, positions) for branch, positions in changed if len(positions)]
        if not changed:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        places = np.concatenate([branch.places[positions] for branch, positions in changed])
        canvases = [(branch.canvas, positions) for branch, positions in changed]
        return places, np.concatenate([2 * canvas.tokens[at] + canvas.noisy[at] for canvas, at in canvases])

    def write(self, places: Tensor, values: Tensor) -> None:
        """Put `values` at `places`, int64 [n] each, without an order: a place that stands there twice has one value."""
        if len(places):
            self.values.index_copy_(0, places, values)

    def tokens(self, places: Tensor) -> Tensor:
        """The tokens at `places`, int64 [n]."""
        return self.values[places] >> 1

    @torch.inference_mode()
    def transfer(self, scores: Tensor, requests: Sequence[Candidates]) -> Tensor:
        """Choose of all predicted positions those that are transferred, and put their tokens into the buffer.

        They are final then, but where a rule may change them again: of these the host says when they are.

        `scores` [2 + n, R] are those of `read_rows`. Returns them with one row more, which is 1 where a position was
        chosen here.
        """
        if not scores.shape[1] or all(each.chosen is None for each in requests):
            return torch.cat((scores, torch.zeros_like(scores[:1])))
        choice = Choice.of(requests, scores.device)
        there, tokens = self.values[choice.place], scores[0].long()
        chosen = choice.choose(scores[1], (there & 1).bool(), there >> 1 != tokens)
        answer = torch.cat((scores, chosen[None].to(scores.dtype)))
        put = 2 * tokens + choice.changes[choice.owner]
        # Every target is written, as their number would be waited for; what was not chosen stays.
        rows, stays = choice.rows, self.values[choice.targets]
        self.write(choice.targets, torch.where(chosen[rows], put[rows], stays))
        return answer
