"""Runs one pass over many requests, such that a failure ends only the requests that cause it."""

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import repeat
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.faults import exhausts, poisons
from remask.engine.member import Batch, Member
from remask.engine.runner import Items, Runner
from remask.engine.running import NO_SCORES, Reads, RunningRequest, Scores, Share
from remask.machine.transfers import Arrival

log = logging.getLogger(__name__)

Fail: TypeAlias = Callable[[Member, Exception], None]


@dataclass(frozen=True, slots=True)
class Ran:
    """A pass that has run.

    Attributes:
        batch: the members that took part.
        items: their canvases with the plans that ran.
        hidden: final hidden states of the predicted rows, [M, D].
    """

    batch: Batch
    items: Items
    hidden: Tensor


def run_isolated(runner: Runner, batch: Batch, fail: Fail) -> Iterator[Ran]:
    """Run a pass over `batch`. Where it fails, run smaller passes over the members that can run.

    `fail` is called for each member that cannot run. Raises errors that no single member causes: those of the device
    and of memory.

    The ledgers hold the plans of the pass already. A member that runs again uses the plan that `Runner.run` leaves,
    which writes the same rows. A member that failed leaves the engine, and its ledger with it.
    """
    members: Sequence[Member] = (*batch.passes, *batch.requests)
    if not members:
        return
    items: Items = []
    for member in members:
        items += member.items()
    try:
        hidden, ran = runner.run(items, batch.passes)
    except Exception as error:
        if poisons(error) or exhausts(error):
            raise
        if len(members) == 1:
            fail(members[0], error)
            return
        log.warning("a pass over %s failed and is run in parts: %s", batch.ids, error)
        batch.enter(items)
        parts = _parts(runner, members, fail)
    else:
        if ran is not items:
            batch.enter(ran)
        yield Ran(batch, ran, hidden)
        return
    for part in parts:
        yield from run_isolated(runner, Batch.of(part), fail)


@dataclass(frozen=True, slots=True)
class Scored:
    """Predictions of some requests of a pass, on their way to the host.

    Attributes:
        requests: the requests, as they were when the pass was launched.
        reads: the readers of each, with their device parts.
        arrival: the numbers, in the order of `read_rows`.
        chooses: whether the device also chose positions.
    """

    requests: tuple[RunningRequest, ...]
    reads: tuple[Reads, ...]
    arrival: Arrival
    chooses: bool

    def read(self) -> list[tuple[RunningRequest, Scores]]:
        """The numbers of each request. Waits for the device."""
        numbers = self.arrival.wait()
        rows = numbers[:-1] if self.chooses else numbers
        tokens, confidence, more = rows[0].astype(np.int64), rows[1], rows[2:]
        read, at = list[tuple[RunningRequest, Scores]](), 0
        for running, asked in zip(self.requests, self.reads, strict=True):
            own = slice(at, at + len(running.positions))
            at = own.stop
            chosen = numbers[-1, own] > 0 if self.chooses and running.transfers is not None else None
            read.append(
                (running, Scores(tokens[own], confidence[own], _shares(asked, more[:, own]) if asked else (), chosen))
            )
        return read


Read: TypeAlias = list[tuple[Member, Scores]]
"""Members of a pass with their scores."""


@dataclass(slots=True)
class LaunchedPass:
    """A pass that was launched and not read yet. If it failed as a whole, it has several parts.

    Attributes:
        parts: the passes that ran, with their predictions.
        trouble: an error that no request causes; it is raised once the parts are read.
    """

    parts: list[tuple[Ran, list[Scored]]] = field(default_factory=list)
    trouble: Exception | None = None

    @property
    def passes(self) -> bool:
        """Whether prefix-only passes take part."""
        return any(ran.batch.passes for ran, _ in self.parts)

    def requests(self) -> list[RunningRequest]:
        """The requests that took part and have not ended."""
        found = [self.running(member) for ran, _ in self.parts for member in ran.batch.requests]
        return [running for running in found if running is not None]

    def read(self) -> Iterator[tuple[Ran, Read]]:
        """Each part with its members that have not ended, and their scores. Waits for the device."""
        for ran, scored in self.parts:
            read: Read = list(zip(ran.batch.passes, repeat(NO_SCORES), strict=False))
            for each in scored:
                self._take(each, read)
            yield ran, read

    def _take(self, scored: Scored, read: Read) -> None:
        """Add the requests of `scored` that have not ended to `read`, with their scores."""
        for running, scores in scored.read():
            if not running.released:
                read.append((running, scores))

    def running(self, member: RunningRequest) -> RunningRequest | None:
        """The request of a member of the pass; None where it has ended."""
        return None if member.released else member


def _shares(reads: Reads, more: NDArray[np.float32]) -> tuple[Share, ...]:
    """Each reader with its rows of `more`, [n, predicted]."""
    shares, at = list[Share](), 0
    for reader, read in reads:
        shares.append((reader, more[at : at + read.width]))
        at += read.width
    return tuple(shares)


def score_isolated(runner: Runner, ran: Ran, fail: Fail) -> list[Scored]:
    """Compute tokens, confidences and readers' numbers of each request of a pass.

    `fail` is called for requests whose logits cannot be read, and they are left out.
    """
    requests = ran.batch.requests
    if not requests:
        return []
    try:
        reads = tuple(map(RunningRequest.reads, requests))
        return [
            Scored(tuple(requests), reads, runner.read(ran.hidden, requests, reads), runner.token_buffer is not None)
        ]
    except Exception as error:
        if poisons(error) or exhausts(error):
            raise
        if len(requests) == 1:
            fail(requests[0], error)
            return []
    scored, at = list[Scored](), 0
    for running in requests:
        rows = sum(len(plan.predicted) for _, plan in running.items())
        scored += score_isolated(runner, Ran(Batch([running]), [], ran.hidden[at : at + rows]), fail)
        at += rows
    return scored


def _parts(runner: Runner, members: Sequence[Member], fail: Fail) -> list[list[Member]]:
    """The members to run again after a failed pass: without those that cannot be packed, or else in two halves."""
    unpacked = {member: error for member in members if (error := _packing_error(runner, member)) is not None}
    if unpacked:  # then the pass was not packed either, and nothing ran on the device
        for member, error in unpacked.items():
            fail(member, error)
        return [[member for member in members if member not in unpacked]]
    half = len(members) // 2
    return [list(members[:half]), list(members[half:])]


def _packing_error(runner: Runner, member: Member) -> Exception | None:
    batch = Batch.of([member])
    try:
        runner.pack(list(member.items()), batch.passes)
    except Exception as error:
        if poisons(error) or exhausts(error):
            raise
        return error
    return None
