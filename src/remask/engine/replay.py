"""Replays: a run that writes what the transfers of an earlier run wrote, in the same steps."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from remask.core.request import Transfer
from remask.engine.stops import StopRule
from remask.errors import ConfigError
from remask.models.config import ModelConfig
from remask.policies.base import IdlePasses
from remask.sampling.decoder import Decoding
from remask.sampling.score import RowGroup

_NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class Replay:
    """What each step writes. `steps` is how many steps the request may take if no transfer says otherwise."""

    def __init__(self, transfers: Sequence[Transfer], steps: int) -> None:
        self._written = {
            each.step: (np.asarray(each.positions, dtype=np.int64), np.asarray(each.token_ids, dtype=np.int64))
            for each in transfers
        }
        self._last = max([steps - 1, *self._written])

    @property
    def steps(self) -> set[int]:
        """The steps that write something."""
        return set(self._written)

    def written(self, step: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the positions that `step` writes, ascending, and their tokens.

        Raises `ConfigError` where the transfers have come to their end, as no step would ever write anything again.
        """
        if step > self._last:
            raise ConfigError("replay: its events end before the response is complete")
        return self._written.get(step, (_NOTHING, _NOTHING))

    def given(self, step: int, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the token that `step` writes at each of `positions`, `RowGroup.NOT_GIVEN` where it writes none."""
        written, tokens = self.written(step)
        given = np.full(len(positions), RowGroup.NOT_GIVEN, dtype=np.int64)
        given[np.isin(positions, written)] = tokens[np.isin(written, positions)]
        return given


def check_replay(
    transfers: Sequence[Transfer],
    decoding: Decoding,
    stops: StopRule,
    shape: ModelConfig,
    idle: IdlePasses,
    tail: int = 0,
    *,
    blockwise: bool = False,
) -> None:
    """Raise `ConfigError` on transfers that no run of this request could have made.

    Their tokens are written on a canvas step by step, as a run would, without the model. Stops end the response from
    its place `tail` on. `blockwise` is that trait of the cache policy: where a row predicts the next position, only the
    first step of a block can then predict the first token of it.
    """
    _check_form(transfers, shape)
    replay, canvas, scan = Replay(transfers, decoding.total_steps), decoding.canvas(), stops.scan()
    decoder, left, scanned = decoding.decoder(canvas, idle), Replay(transfers, 0).steps, tail
    while not decoder.finished:
        step, block = decoder.step, decoder.block
        positions, tokens = replay.written(step)
        left.discard(step)
        foreign = [p for p in positions.tolist() if p not in block or not canvas.noisy[p]]
        if foreign:
            raise ConfigError(
                f"replay: in step {step} it writes position {foreign[0] - canvas.prompt} of the response, which is not "
                f"open then; open are noisy ones from {block.start - canvas.prompt} to {block.stop - canvas.prompt - 1}"
            )
        opened = decoder.block_step or not canvas.noisy[block.start] or block.start in positions
        if blockwise and shape.shift and not opened:
            raise ConfigError(
                f"replay: step {step} begins a block and leaves its first position open, which later steps under this "
                "cache policy cannot fill; replay it with a cache policy of the run that made it"
            )
        decoder.edited(positions)
        canvas.write(positions, tokens)
        canvas.settle(decoder.final(positions), step)
        decoder.advance()
        lead = max(scanned, canvas.settled_lead)
        scan.push(canvas.response[scanned:lead].tolist())
        scanned = lead
        if not left and (scan.end is not None or canvas.settled_lead == len(canvas.response)):
            break
    if left:
        raise ConfigError(
            f"replay: step {min(left)} of its events is no step of this request, which has ended before or passes over "
            "it; replay it with the prompt, the sampling parameters and a cache policy of the run that made it"
        )


def _check_form(transfers: Sequence[Transfer], shape: ModelConfig) -> None:
    steps = [each.step for each in transfers]
    if steps != sorted(set(steps)):
        raise ConfigError("replay: the steps of its events must ascend")
    barred = None if shape.kind == "uniform" else shape.mask_id
    for each in transfers:
        if list(each.positions) != sorted(set(each.positions)):
            raise ConfigError(f"replay: the positions of step {each.step} must ascend")
        bad = [token for token in each.token_ids if token >= shape.vocab or token == barred]
        if bad:
            raise ConfigError(f"replay: step {each.step} holds the token id {bad[0]}, which this model does not write")
