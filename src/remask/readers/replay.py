"""Replays: a run that repeats the transfers of an earlier run, step by step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.errors import ConfigError
from remask.machine.transfers import send
from remask.model.config import ModelConfig
from remask.readers.base import Asked, Reader, ReadPass, Start, Written
from remask.request.result import Transfer
from remask.sampling.decoder import Decoding
from remask.sampling.rows import DeviceRead

_NOTHING: NDArray[np.int64] = np.empty(0, dtype=np.int64)


class Replay(Reader):
    """Repeats an earlier run: writes the same tokens at the same positions in the same steps.

    The model still predicts, and confidences and log-probabilities are those of this run.

    Args:
        transfers: those of the earlier run, in the order of their steps.
        formed: the earlier run's response had a form, so this one is whole wherever it ends.
    """

    name = "replay"
    foreseeable = False
    writes = True

    def __init__(self, transfers: Sequence[Transfer], *, formed: bool = False) -> None:
        self.transfers, self._formed = tuple(transfers), formed

    @property
    def formed(self) -> bool:
        return self._formed

    def check(self, asked: Asked, decoding: Decoding) -> None:
        if asked.params.uniform.correction_steps:
            raise ConfigError("replay: a correction chooses by what the model proposes; leave correction_steps out")
        if asked.params.uniform.revision_tokens:
            raise ConfigError("replay: steps write to their own block alone; leave revision_tokens out")
        check_replay(self.transfers, decoding, asked)

    def start(self, start: Start) -> Reader:
        return ReplaySteps(self.transfers, start.steps)


class ReplaySteps(Reader):
    """What each step of a replay writes. The request may take `steps` steps if no transfer says otherwise."""

    name = Replay.name

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

    def on_device(self, step: ReadPass) -> DeviceRead:
        return Given.at(self.written(step.decoder.step), step.positions)

    def written(self, step: int) -> Written:
        """Return the positions that `step` writes, ascending, and their tokens.

        Raises `ConfigError` after the last transfer, because no later step would write anything.
        """
        if step > self._last:
            raise ConfigError("replay: its events end before the response is complete")
        return self._written.get(step, (_NOTHING, _NOTHING))


@dataclass(frozen=True, slots=True)
class Given(DeviceRead):
    """Tokens that replace those of the sampler, int64 [rows]; `NONE` keeps the sampler's."""

    NONE: ClassVar[int] = -1

    tokens: NDArray[np.int64]

    @classmethod
    def at(cls, written: Written, positions: NDArray[np.int64]) -> "Given":
        """What is `written` of the predicted `positions`."""
        places, tokens = written
        given = np.full(len(positions), cls.NONE, dtype=np.int64)
        given[np.isin(positions, places)] = tokens[np.isin(places, positions)]
        return cls(given)

    def piece(self, start: int, stop: int) -> "Given":
        return Given(self.tokens[start:stop])

    def replace(self, tokens: Tensor) -> Tensor:
        given = send(self.tokens, tokens.device)
        return torch.where(given == self.NONE, tokens, given.float())


def check_replay(transfers: Sequence[Transfer], decoding: Decoding, asked: Asked) -> None:
    """Raise `ConfigError` on transfers that no run of this request could have made.

    Their tokens are written on a canvas step by step, as a run would, without the model. Stops end the response from
    its last hole on. Under a `blockwise` cache policy, where a row predicts the next position, only the first step of a
    block can predict the first token of it.
    """
    shape, stops, schedule = asked.shape, asked.stops, asked.schedule
    if shape.self_conditioning:
        raise ConfigError(
            f"replay: what a step of {shape.family} models sees of the step before is no token, so a trace cannot be "
            "written again; run the request with its seed"
        )
    idle, tail, blockwise = schedule.idle_passes, asked.response.tail, schedule.blockwise
    _check_form(transfers, shape)
    replay, canvas, scan = ReplaySteps(transfers, decoding.total_steps), decoding.canvas(), stops.scan()
    decoder, left, scanned = decoding.decoder(canvas, idle), ReplaySteps(transfers, 0).steps, tail
    while not decoder.finished or decoding.grows:
        if decoder.finished:
            decoding = decoding.grown([canvas], decoder.step)
            decoder = decoding.decoder(canvas, idle)
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
        canvas.settle(decoder.final(positions), step - decoder.first_step)
        decoder.advance()
        lead = max(scanned, canvas.settled_lead)
        scan.push(canvas.response[scanned:lead].tolist())
        scanned = lead
        if not left and (scan.end is not None or canvas.settled_lead == len(asked.response)):
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
