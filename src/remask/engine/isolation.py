"""One pass over many requests, of which a failure ends those alone that it is due to."""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
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
        batch: what took part.
        items: its canvases with the plans that were run.
        hidden: final hidden states of the predicted rows, [M, D].
    """

    batch: Batch
    items: Items
    hidden: Tensor


def run_isolated(runner: Runner, batch: Batch, fail: Fail) -> Iterator[Ran]:
    """Run a pass over `batch`. Where it fails, run passes over those of its members that can run.

    `fail` is called for a member that cannot run. Raises what no single member is to blame for: errors of the device,
    and of memory.

    The ledgers hold the plans of the pass already. A member whose pass is repeated runs the plan that `Runner.run`
    leaves, which writes the same rows; any other one leaves the engine, and its ledger with it.
    """
    members = batch.members
    if not members:
        return
    items = batch.items()
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
    """What some requests of a pass predicted, on its way to the host.

    Attributes:
        requests: the requests, as they were when the pass was launched.
        reads: what the readers of each read.
        arrival: the numbers, as `read_rows` orders them.
        chooses: whether the device chose positions too.
    """

    requests: tuple[RunningRequest, ...]
    reads: tuple[Reads, ...]
    arrival: Arrival
    chooses: bool

    def read(self) -> list[tuple[RunningRequest, Scores]]:
        """The numbers of each request, once the device has computed them."""
        numbers = self.arrival.wait()
        rows = numbers[:-1] if self.chooses else numbers
        tokens, confidence, more = rows[0].astype(np.int64), rows[1], rows[2:]
        read, at = list[tuple[RunningRequest, Scores]](), 0
        for running, asked in zip(self.requests, self.reads, strict=True):
            own = slice(at, at + running.predicted)
            at = own.stop
            chosen = numbers[-1, own] > 0 if self.chooses and running.transfers is not None else None
            read.append(
                (running, Scores(tokens[own], confidence[own], _shares(asked, more[:, own]) if asked else (), chosen))
            )
        return read


Read: TypeAlias = list[tuple[Member, Scores]]
"""Members of a pass, with what was read of each."""


@dataclass(slots=True)
class LaunchedPass:
    """A pass that was launched and is still to be read, or the parts that ran of one that failed.

    Attributes:
        parts: what ran, with what it predicted.
        trouble: what no request is to blame for, and is raised once the pass is read.
    """

    parts: list[tuple[Ran, list[Scored]]] = field(default_factory=list)
    trouble: Exception | None = None

    @property
    def passes(self) -> bool:
        """Whether it runs passes beside those of requests."""
        return any(ran.batch.passes for ran, _ in self.parts)

    def requests(self) -> list[RunningRequest]:
        """The requests that it still runs."""
        found = [self.running(member) for ran, _ in self.parts for member in ran.batch.requests]
        return [running for running in found if running is not None]

    def read(self) -> Iterator[tuple[Ran, Read]]:
        """Each part with the members that it still runs, and what was read of them. Waits for the device."""
        for ran, scored in self.parts:
            read: Read = [(work, NO_SCORES) for work in ran.batch.passes]
            for each in scored:
                self._take(each, read)
            yield ran, read

    def _take(self, scored: Scored, read: Read) -> None:
        """Add the requests of `scored` that still run to `read`, with what was read of them."""
        for running, scores in scored.read():
            if not running.released:
                read.append((running, scores))

    def running(self, member: RunningRequest) -> RunningRequest | None:
        """The request that a member of the pass is; None where it has ended."""
        return None if member.released else member


def _shares(reads: Reads, more: NDArray[np.float32]) -> tuple[Share, ...]:
    """Each reader with its rows of `more` [n, predicted]."""
    shares, at = list[Share](), 0
    for reader, read in reads:
        shares.append((reader, more[at : at + read.width]))
        at += read.width
    return tuple(shares)


def score_isolated(runner: Runner, ran: Ran, fail: Fail) -> list[Scored]:
    """Compute tokens and confidences of what each request of a pass predicted, and what its readers ask for.

    Requests whose logits cannot be read are left out, and `fail` is called for them.
    """
    requests = ran.batch.requests
    if not requests:
        return []
    try:
        reads = tuple(running.reads() for running in requests)
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


def _parts(runner: Runner, members: list[Member], fail: Fail) -> list[list[Member]]:
    """What is left of the `members` of a pass that failed, cut so that those that are not to blame can run."""
    unpacked = {member: error for member in members if (error := _packing_error(runner, member)) is not None}
    if unpacked:  # then the whole was not packed either, and nothing has run on the device
        for member, error in unpacked.items():
            fail(member, error)
        return [[member for member in members if member not in unpacked]]
    half = len(members) // 2
    return [members[:half], members[half:]]


def _packing_error(runner: Runner, member: Member) -> Exception | None:
    batch = Batch.of([member])
    try:
        runner.pack(batch.items(), batch.passes)
    except Exception as error:
        if poisons(error) or exhausts(error):
            raise
        return error
    return None
