"""Forced tokens: what a run writes is given step by step, and the model's predictions are read beside it."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import ConfigError
from remask.machine.transfers import send
from remask.readers.base import Asked, Reader, ReadPass, Start, Written
from remask.request.result import Transfer
from remask.sampling.decoder import Decoding
from remask.sampling.rows import DeviceRead

_NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class ForcedTokens(Reader):
    """Writes given tokens at given positions in given steps, in place of those that the model predicts.

    Confidences and log-probabilities are the model's, so the loss of a response that somebody else wrote can be read.

    Args:
        transfers: what is written, in the order of the steps. Positions that a step writes must be noisy then, and of
            its block.
    """

    name = "forced tokens"
    foreseeable = False
    writes = True

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.transfers = tuple(transfers)

    def check(self, asked: Asked, decoding: Decoding) -> None:  # noqa: ARG002
        for name in ("correction_steps", "revision_tokens"):
            if getattr(asked.params.uniform, name):
                raise ConfigError(f"forced tokens: what {name} writes depends on what the model predicts; leave it out")
        if asked.shape.self_conditioning:
            raise ConfigError(
                f"forced tokens: what a step of {asked.shape.family} models sees of the step before is no token, so it "
                "cannot be given"
            )
        if asked.shape.edit_tokens is not None:
            raise ConfigError(
                f"forced tokens: {asked.shape.family} models that delete and insert move the tokens of a block, so no "
                "step can be given its positions"
            )

    def start(self, start: Start) -> Reader:
        return _ForcedSteps(self.transfers, start.steps)


class _ForcedSteps(Reader):
    """What each step writes. The request may take `steps` steps if no transfer says otherwise."""

    name = ForcedTokens.name

    def __init__(self, transfers: Sequence[Transfer], steps: int) -> None:
        self._written = {
            transfer.step: (np.array(transfer.positions, dtype=np.int64), np.array(transfer.token_ids, dtype=np.int64))
            for transfer in transfers
        }
        self._last = max([steps - 1, *self._written])

    def on_device(self, step: ReadPass) -> DeviceRead:
        number, block = step.decoder.step, step.decoder.block
        positions, tokens = self.written(number)
        outside = [position for position in positions.tolist() if position not in block]
        if outside:
            raise ConfigError(
                f"forced tokens: step {number} is to write position {outside[0]}, and denoises {block.start} to "
                f"{block.stop - 1}"
            )
        rows = np.full(len(step.positions), Given.NONE, dtype=np.int64)
        rows[np.isin(step.positions, positions)] = tokens[np.isin(positions, step.positions)]
        return Given(rows)

    def written(self, step: int) -> Written:
        """See `Reader`. Raises `ConfigError` after the last transfer, because no later step would write anything."""
        if step > self._last:
            raise ConfigError("forced tokens: they end before the response is complete")
        return self._written.get(step, (_NOTHING, _NOTHING))


@dataclass(frozen=True, slots=True)
class Given(DeviceRead):
    """Tokens that replace those of the sampler, int64 [rows]; `NONE` keeps the sampler's."""

    NONE: ClassVar[int] = -1

    tokens: NDArray[np.int64]

    def piece(self, start: int, stop: int) -> "Given":
        return Given(self.tokens[start:stop])

    def replace(self, tokens: Tensor) -> Tensor:
        forced = send(self.tokens, tokens.device)
        return torch.where(forced == self.NONE, tokens, forced.float())
