"""Runs one pass over many members, such that a failure ends only the members that cause it.

Which errors no member causes, and the message of a request that ends with one.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.member import NO_SCORES, Reads, Scores, Share, Turn
from remask.engine.request import Request
from remask.engine.runner import Items, Runner
from remask.errors import IntegrityError, RankLostError
from remask.machine.device import exhausts
from remask.machine.transfers import Arrival
from remask.plan.spans import Mask

log = logging.getLogger(__name__)

Batch: TypeAlias = Sequence[Turn]
"""The turns of one pass, in the order of their rows."""


@dataclass(frozen=True, slots=True)
class Ran:
    """A pass that has run.

    Attributes:
        batch: the turns that took part.
        items: their canvases with the plans that ran.
        hidden: final hidden states of the predicted rows, [M, D].
    """

    batch: Batch
    items: Items
    hidden: Tensor


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Predictions of some turns of a pass, on their way to the host.

    Attributes:
        turns: the turns, with how many positions each predicts and whether the device chooses some of them.
        arrival: the numbers, in the order of `Runner.launch_scores`; None of prefix passes alone.
        buffered: the last row of the numbers says what the device has chosen.
    """

    turns: list[tuple[Turn, int, bool]]
    arrival: Arrival | None
    buffered: bool

    def wait(self) -> list[tuple[Turn, Scores]]:
        """The numbers of each turn. Waits for the device."""
        if self.arrival is None:
            return [(turn, NO_SCORES) for turn, *_ in self.turns]
        numbers = self.arrival.wait()
        rows = numbers[:-1] if self.buffered else numbers
        tokens, confidence, more = rows[0].astype(np.int64), rows[1], rows[2:]
        read, at = list[tuple[Turn, Scores]](), 0
        for turn, count, chooses in self.turns:
            span = slice(at, at + count)
            at = span.stop
            chosen = numbers[-1, span] > 0 if chooses else None
            shares = _shares(turn.reads, more[:, span]) if turn.reads else ()
            read.append((turn, Scores(tokens[span], confidence[span], shares, chosen)))
        return read


@dataclass(slots=True)
class LaunchedPass:
    """A pass that was launched and not read yet. If it failed as a whole, it has several parts.

    Attributes:
        batch: the turns that it was launched with.
        parts: the passes that ran, with their predictions.
        failed: turns that could not run.
        queued: it was queued before the pass before it was read.
        speculative: turns that were planned then, and are not confirmed; nothing is written of them.
        still_noisy: of each confirmed one, the predicted positions that the pass before left noisy, bool [predicted].
        batch_error: an error that no request causes; it is raised once the parts are read.
    """

    batch: Batch = ()
    parts: list[tuple[Ran, list[PendingScores]]] = field(default_factory=list)
    failed: list[Turn] = field(default_factory=list)
    queued: bool = False
    speculative: set[Turn] = field(default_factory=set)
    still_noisy: dict[Turn, Mask] = field(default_factory=dict)
    batch_error: Exception | None = None

    def turns(self) -> list[Turn]:
        """The turns that ran and still count."""
        return [turn for ran, _ in self.parts for turn in ran.batch if self.counts(turn)]

    def counts(self, turn: Turn) -> bool:
        """Whether what is read of a turn is written."""
        return not (turn in self.speculative or turn.member.ended)


def run_isolated(runner: Runner, batch: Batch, failed: list[Turn]) -> Iterator[Ran]:
    """Run a pass over `batch`. Where it fails, run smaller passes over the turns that can run.

    Turns that cannot run get their `error`, and are added to `failed`. Raises errors that no single member causes:
    those of the device and of memory.

    The ledgers hold the plans of the pass already. A turn that runs again uses the plan that `Runner.run` leaves,
    which writes the same rows. A member that failed leaves the engine, and its ledger with it.
    """
    if not batch:
        return
    items: Items = []
    for turn in batch:
        items += turn.items
    try:
        hidden, ran = runner.run(items)
    except Exception as error:
        if not _blames(batch, error, failed):
            return
        names = tuple(turn.member.id for turn in batch)
        log.warning("a pass over %s failed and is run in parts: %s", names, error)
        _revise(batch, items)
        parts = _parts(runner, batch, failed)
    else:
        if ran is not items:
            _revise(batch, ran)
        yield Ran(batch, ran, hidden)
        return
    for part in parts:
        yield from run_isolated(runner, part, failed)


def score_isolated(runner: Runner, ran: Ran, failed: list[Turn]) -> list[PendingScores]:
    """Compute tokens, confidences and readers' numbers of each turn of a pass.

    Turns whose logits cannot be read get their `error`, are added to `failed`, and left out.
    """
    batch, buffered = ran.batch, runner.token_buffer is not None
    try:
        # Prefix passes stand first, and nothing is read of them.
        arrival = None if batch[-1].decoder is None else runner.launch_scores(ran.hidden, batch)
    except Exception as error:
        if not _blames(batch, error, failed):
            return []
    else:
        chooses = buffered and arrival is not None
        turns = list[tuple[Turn, int, bool]]()
        for turn in batch:
            turns.append((turn, len(turn.predicted), chooses and turn.transfers is not None))
        return [PendingScores(turns, arrival, buffered)]
    scored, at = list[PendingScores](), 0
    for turn in batch:
        rows = sum(len(plan.predicted) for _, plan in turn.items)
        scored += score_isolated(runner, Ran([turn], [], ran.hidden[at : at + rows]), failed)
        at += rows
    return scored


def _blames(batch: Batch, error: Exception, failed: list[Turn]) -> bool:
    """Whether one of several turns causes `error`. A turn alone fails with it. Raises what no turn causes."""
    if is_fatal(error) or exhausts(error):
        raise error
    if len(batch) > 1:
        return True
    batch[0].error = error
    failed.append(batch[0])
    return False


def _revise(batch: Batch, items: Items) -> None:
    """Give the turns the plans that their pass runs with; `items` are in the order of `batch`."""
    left = iter(items)
    for turn in batch:
        turn.revise([next(left) for _ in turn.items])


def _shares(reads: Reads, more: NDArray[np.float32]) -> tuple[Share, ...]:
    """Each reader with its rows of `more`, [n, predicted]."""
    shares, at = list[Share](), 0
    for reader, read in reads:
        shares.append((reader, more[at : at + read.width]))
        at += read.width
    return tuple(shares)


def _parts(runner: Runner, batch: Batch, failed: list[Turn]) -> list[Batch]:
    """The turns to run again after a failed pass: without those that cannot be packed, or else in two halves."""
    packed = []
    for turn in batch:
        try:
            runner.pack(list(turn.items))
        except Exception as error:
            _blames([turn], error, failed)
        else:
            packed.append(turn)
    if len(packed) < len(batch):  # then the pass was not packed either, and nothing ran on the device
        return [packed]
    half = len(batch) // 2
    return [batch[:half], batch[half:]]


# How PyTorch's errors begin or what they contain where the device itself failed, and not one kernel's arguments.
_DEVICE = ("CUDA error", "HIP error", "CUBLAS_STATUS", "CUDNN_STATUS", "NCCL error", "device-side assert")


def is_fatal(error: Exception) -> bool:
    """Whether the device or the engine's memory cannot be trusted after `error`."""
    if isinstance(error, IntegrityError | RankLostError | torch.AcceleratorError):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in _DEVICE)


def failure(request: Request, error: Exception, what: str) -> str:
    """Log that `what` failed with `error` for `request`. Returns the message of the request's result."""
    log.error("request %s: %s: %s", request.id, what, error, exc_info=error)
    return f"{what}: {error}"
