"""Forced tokens: a request prescribes what each step writes, and the model's predictions of it are read."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import ConfigError
from remask.machine.transfers import send
from remask.readers.base import Reader, ReadPass, RequestView, Start, Written
from remask.request.result import Transfer
from remask.sampling.decoder import Decoding
from remask.sampling.rows import DeviceRead

_NO_TOKENS: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class ForcedTokens(Reader):
    """Writes the tokens of `transfers` in their steps, in place of those that the model predicts.

    Confidences and log-probabilities are the model's, so the loss of a response that somebody else wrote can be read.

    Args:
        transfers: what each step writes. The positions must be noisy in that step, and in the block that it denoises.
    """

    name = "forced tokens"
    foreseeable = False
    writes = True

    def __init__(self, transfers: Sequence[Transfer]) -> None:
        self.transfers = tuple(transfers)

    def check(self, request: RequestView, decoding: Decoding) -> None:  # noqa: ARG002
        """Raise `ConfigError` on malformed transfers, and if a step writes or sees more than can be known before it."""
        shape = request.shape
        steps = [transfer.step for transfer in self.transfers]
        if len(set(steps)) < len(steps):
            step = next(step for step in steps if steps.count(step) > 1)
            raise ConfigError(f"forced tokens: two transfers are of step {step}; give what it writes as one of them")
        for transfer in self.transfers:
            unknown = [token for token in transfer.token_ids if not 0 <= token < shape.vocab]
            if unknown:
                raise ConfigError(
                    f"forced tokens: step {transfer.step} is to write the token {unknown[0]}; token ids are whole "
                    f"numbers from 0 to {shape.vocab - 1}"
                )
        for name in ("correction_steps", "revision_tokens"):
            if getattr(request.params.uniform, name):
                raise ConfigError(f"forced tokens: what {name} writes depends on what the model predicts; leave it out")
        if shape.self_conditioning:
            raise ConfigError(
                f"forced tokens: what a step of {shape.family} models sees of the step before is no token, so it "
                "cannot be given"
            )
        if shape.edit_tokens is not None:
            raise ConfigError(
                f"forced tokens: {shape.family} models that delete and insert move the tokens of a block, so no "
                "step can be given its positions"
            )

    def start(self, start: Start) -> Reader:
        return _ForcedSteps(self.transfers, start.steps)


class _ForcedSteps(Reader):
    """`ForcedTokens` with the state of one request. Steps after the last transfer and below `steps` write nothing."""

    name = ForcedTokens.name

    def __init__(self, transfers: Sequence[Transfer], steps: int) -> None:
        self._tokens_by_step: dict[int, Written] = {}
        for transfer in transfers:
            positions = np.array(transfer.positions, dtype=np.int64)
            order = np.argsort(positions)
            tokens = np.array(transfer.token_ids, dtype=np.int64)
            self._tokens_by_step[transfer.step] = positions[order], tokens[order]
        self._last_step = max([steps - 1, *self._tokens_by_step])

    def on_device(self, read_pass: ReadPass) -> DeviceRead:
        """The prescribed tokens of the predicted rows. Raises `ConfigError` if a position is not in the block."""
        step, block = read_pass.decoder.step, read_pass.decoder.block
        positions, tokens = self.step_writes(step)
        outside = [position for position in positions.tolist() if position not in block]
        if outside:
            raise ConfigError(
                f"forced tokens: step {step} is to write position {outside[0]}, and denoises {block.start} to "
                f"{block.stop - 1}"
            )
        rows = np.full(len(read_pass.positions), ForcedRows.NONE, dtype=np.int64)
        rows[np.isin(read_pass.positions, positions)] = tokens[np.isin(positions, read_pass.positions)]
        return ForcedRows(rows)

    def step_writes(self, step: int) -> Written:
        """See `Reader`. Raises `ConfigError` after the last step, as an incomplete response would never end."""
        if step > self._last_step:
            raise ConfigError("forced tokens: they end before the response is complete")
        return self._tokens_by_step.get(step, (_NO_TOKENS, _NO_TOKENS))


@dataclass(frozen=True, slots=True)
class ForcedRows(DeviceRead):
    """Tokens that replace those of the sampler, int64 [rows]; the sampler's stay in rows that are `NONE`."""

    NONE: ClassVar[int] = -1

    tokens: NDArray[np.int64]

    def slice_rows(self, start: int, stop: int) -> "ForcedRows":
        return ForcedRows(self.tokens[start:stop])

    def replace(self, tokens: Tensor) -> Tensor:
        forced = send(self.tokens, tokens.device)
        return torch.where(forced == self.NONE, tokens, forced.float())
