"""The tokens of running canvases on the device, and which of them are noisy."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState
from remask.model.runs import Index
from remask.sampling.choice import Candidates, Choice


class TokenBuffer:
    """Tokens and noisy flags, addressed like K/V slots of the first layer, so shared prefixes are shared here too.

    Changes of the host are sent with the next pass. Tokens that the device chooses are written here at once, and the
    host reads them later.
    """

    def __init__(self, slots: int, device: torch.device) -> None:
        # Twice the token, plus 1 where it is noisy. -2 is no token.
        self.values = torch.full((slots,), -2, dtype=torch.int64, device=device)

    def outgoing(self, branches: Sequence[CanvasState]) -> tuple[Index, Index]:
        """Unsent changes of `branches`: places in the buffer and their values, int64 [n] each."""
        changed = [(branch, branch.unsent()) for branch in branches]
        changed = [(branch, positions) for branch, positions in changed if len(positions)]
        if not changed:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        places = np.concatenate([branch.places[positions] for branch, positions in changed])
        canvases = [(branch.canvas, positions) for branch, positions in changed]
        return places, np.concatenate([2 * canvas.tokens[at] + canvas.noisy[at] for canvas, at in canvases])

    def write(self, places: Tensor, values: Tensor) -> None:
        """Write `values` to `places`, int64 [n] each. A place that is listed twice has the same value twice."""
        if len(places):
            self.values.index_copy_(0, places, values)

    def tokens(self, places: Tensor) -> Tensor:
        """The tokens at `places`, int64 [n]."""
        return self.values[places] >> 1

    @torch.inference_mode()
    def transfer(self, scores: Tensor, requests: Sequence[Candidates]) -> Tensor:
        """Choose the predicted positions that are transferred, and write their tokens to the buffer.

        They are final then, unless a rule may change them again; the host then decides when they are final.

        `scores` [2 + n, R] are those of `read_rows`. Returns them with one more row, which is 1 where a position was
        chosen.
        """
        if not scores.shape[1] or all(each.chosen is None for each in requests):
            return torch.cat((scores, torch.zeros_like(scores[:1])))
        choice = Choice.of(requests, scores.device)
        there, tokens = self.values[choice.place], scores[0].long()
        chosen = choice.choose(scores[1], (there & 1).bool(), there >> 1 != tokens)
        answer = torch.cat((scores, chosen[None].to(scores.dtype)))
        put = 2 * tokens + choice.changes[choice.owner]
        # All targets are written, as counting the chosen ones would make the host wait. Others keep their values.
        rows, stays = choice.rows, self.values[choice.targets]
        self.write(choice.targets, torch.where(chosen[rows], put[rows], stays))
        return answer
