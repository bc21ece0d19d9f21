"""Audits: what cache policies approximate is computed as well for a share of requests, and predictions are compared.

An audit is a pass of its own, over a copy of a request's canvas as one of its passes saw it. It claims pages for as
long as it runs, reads no K/V but its own and writes none that a request reads, so requests are answered as without it.
It is of one of two kinds. An audit of a shared prefix compares the first step's predictions between the whole canvas
and canvases that reuse the prefix in some layers, and says how deep it may be read (`policies.earned`). An audit of a
step compares what a pass of the request itself predicted at a step chosen at random, with whatever its policy had
approximated until then.

With quantized weights rows are rounded in each product, which moves predictions alone by more than a cache may. So
audits of prefixes multiply without rounding, and audits of steps subtract what rounding moves on the same canvas.
"""

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Final

from torch import Tensor

from remask.engine.audit_passes import AuditPasses, Seen
from remask.engine.audit_report import AuditReport, DepthReport, Divergence, Findings
from remask.engine.config import EngineConfig
from remask.engine.member import EngineStats, Turn
from remask.engine.memory import Memory
from remask.engine.runner import Ran
from remask.engine.running import RunningRequest
from remask.machine.device import is_fatal
from remask.model.transformer import Transformer
from remask.policies.base import CachePolicy
from remask.policies.bicache import BiCache, Earned
from remask.policies.dense import Reuse
from remask.policies.earned import MAX_NATS, Audit, EarnedDepths, Record
from remask.policies.registry import name_of

log = logging.getLogger(__name__)

WAITING: Final = 8  # audits that wait at most; what comes beyond is not audited
ENOUGH: Final = 8  # audits of a policy before a warning
DEEPER: Final = 2  # audits of a prefix by the share, of which one also tries deeper than is read


Work = Iterator[None]
"""The passes of one audit: one each time that it goes on. It yields where memory has no room, too."""


class Auditor:
    """Chooses what is audited, and takes in what audits find.

    Attributes:
        depths: the depths that audits have earned.
        found: is called with each finding: a policy and nats; None: nobody.
    """

    def __init__(
        self, model: Transformer, memory: Memory, stats: EngineStats, config: EngineConfig, depths: EarnedDepths
    ) -> None:
        self.passes, self.stats, self.depths = AuditPasses(model, memory), stats, depths
        self.share, self._most = config.audit_share, config.audit_work
        self.findings: dict[str, Findings] = {}  # by policy
        self.skipped = 0  # audits that were due and for which nothing was free
        self.found: Callable[[str, float], None] | None = None
        self._due = Counter[str]()  # requests since the last audit that was due by the share, by kind
        self._guards = 0  # audits of a prefix that were due by the share
        self._spent = 0  # row-layers of audits of requests that a cache approximated
        self._began: int | None = None  # row-layers of requests before the first of them that could be audited so
        self.waiting: deque[Work] = deque()  # audits that wait for their next pass
        self.open: dict[RunningRequest, _Open] = {}  # requests of which a step is audited once they have ended
        self._draws = random.Random(0)

    def launched(self, ran: Ran) -> None:
        """Keep what a pass predicts of requests that may be audited at their first step, and at a step by chance."""
        at = 0
        for turn in ran.batch:
            count, running = sum(len(plan.predicted) for _, plan in turn.items), turn.member
            if isinstance(running, RunningRequest) and count and not turn.plan.fills:
                chosen = self.open.get(running)
                keeps = turn.decoder is not None and turn.decoder.step == 0 and self._own(running)
                if chosen is not None:
                    chosen.steps += 1
                    # Of n steps each is the last that was chosen with a chance of 1 in n.
                    if self._draws.random() * chosen.steps < 1:
                        chosen.turn, keeps = turn, True
                if keeps:
                    turn.hidden = ran.hidden[at : at + count].clone()
            at += count

    def writing(self, turn: Turn) -> None:
        """Note what the first pass of a request saw, and the pass that was chosen, before its tokens change."""
        running = turn.member
        if not isinstance(running, RunningRequest):
            return
        chosen = self.open.get(running)
        if chosen is not None and chosen.turn is turn:
            chosen.turn, chosen.seen, chosen.hidden = None, Seen.of(turn), turn.hidden
        if turn.decoder is not None and turn.decoder.step == 0 and not turn.plan.fills:
            self._begin(turn, running)

    def run(self) -> None:
        """Run one pass of the audit that has waited longest, if there is one. Raises what no audit causes."""
        for running in [running for running in self.open if running.ended]:
            chosen = self.open.pop(running)
            if chosen.seen is not None and chosen.hidden is not None:
                self._queue(partial(self._audit_step, chosen.seen, chosen.hidden, chosen.policy))
        if not self.waiting:
            return
        work = self.waiting[0]
        try:
            next(work)
        except StopIteration:
            self.waiting.popleft()
        # Whatever one audit fails with is learned nothing from, and ends no request.
        except Exception as error:
            self.waiting.popleft()
            if is_fatal(error):
                raise
            self.stats.failed_audits += 1
            log.warning("an audit failed, and nothing is learned from it: %s", error, exc_info=error)

    def report(self) -> AuditReport:
        """What audits have found so far."""
        stats = self.stats
        return AuditReport(
            stats.audits,
            stats.failed_audits,
            self.skipped,
            stats.audit_row_layers,
            self.depths.bound,
            {name: Divergence.of(finding.estimate) for name, finding in self.findings.items()},
            tuple(
                DepthReport(
                    adapter,
                    ratio,
                    record.common,
                    record.prefixes,
                    {depth: Divergence.of(estimate) for depth, estimate in record.estimates().items()},
                )
                for (adapter, ratio), record in sorted(self.depths.records.items())
            ),
        )

    def forget(self) -> None:
        """Drop all audits that wait: memory was emptied."""
        self.waiting.clear()
        self.open.clear()

    def _begin(self, turn: Turn, running: RunningRequest) -> None:
        """Decide what is audited of a request, at its first step."""
        policy, shape = running.request.policy, self.passes.model.config
        if not self.share or shape.kind == "block_causal" or shape.self_conditioning:
            return
        if len(running.canvases) > 1 or not len(turn.predicted) or running.decoder.context.drafts:
            return
        prefix = running.record.prefix
        if prefix and isinstance(policy, BiCache | Reuse):
            self._begin_prefix(turn, running, prefix)
        if running.policy.traits.exact or isinstance(running.policy, Reuse):
            return
        inner = running.policy.inner if isinstance(running.policy, BiCache) else running.policy
        if not inner.traits.exact and self._is_due(
            name_of(running.policy), len(running.canvases[0].canvas), 1 + self.passes.model.quantised
        ):
            self.open[running] = _Open(name_of(running.policy))

    def _begin_prefix(self, turn: Turn, running: RunningRequest, prefix: int) -> None:
        policy, length = running.request.policy, len(running.canvases[0].canvas)
        record = self.depths.record(running.request.adapter or "", prefix, length)
        key, read = self.passes.memory.store.key(running.request.prompt_token_ids[:prefix], running.request.salt), 0
        hit = running.canvases[0].prefix
        if hit is not None:
            read = hit.boundary
            record.unaudited += 1
        name = name_of(policy).partition("+")[0]  # an inner policy has no part in it
        depths = record.audit_depths(key) if _earns(policy) else ()
        if not depths or record.depth(key, 0):
            # Nothing is to be proven before anything is saved, so the share decides. An audit is then of the depth that
            # is read; of some also of what might be read instead, as traffic may have changed to what would allow it.
            deeper = depths or ((record.next_depth(read),) if _earns(policy) else ())
            depths = ((read,) if read else ()) + (deeper if not read or self._guards % DEEPER == DEEPER - 1 else ())
            depths = tuple(dict.fromkeys(depths))
            if not depths or not self._is_due(f"{name} prefix", length, 1 + len(depths)):
                return
            self._guards += 1
        seen, hidden = Seen.of(turn), turn.hidden if self._own(running) else None
        self._queue(partial(self._audit_prefix, seen, hidden, prefix, key, record, depths, read, name))

    def _own(self, running: RunningRequest) -> bool:
        """Whether the first pass of a request is the exact one that an audit of its prefix compares with."""
        exact = running.policy.traits.exact and not self.passes.model.quantised
        return self.share > 0 and exact and running.record.prefix > 0 and _earns(running.request.policy)

    def _is_due(self, kind: str, rows: int, passes: int) -> bool:
        """Whether the share says that a request of this kind is audited, by so many passes over `rows` rows.

        What the work done since requests could be audited does not allow yet is due at the next one.
        """
        self._due[kind] += 1
        if self._began is None:
            self._began = self.stats.row_layers
        work = self._work(rows, passes)
        if self._due[kind] * self.share < 1:
            return False
        if self._most is not None and self._spent + work > self._most * (self.stats.row_layers - self._began):
            return False
        self._due[kind] = 0
        self._spent += work
        return True

    def _work(self, rows: int, passes: int) -> int:
        return passes * rows * self.passes.model.config.layers

    def _queue(self, begin: Callable[[], Work]) -> None:
        if len(self.waiting) < WAITING:
            self.waiting.append(begin())
        else:
            self.skipped += 1

    def _audit_prefix(
        self,
        seen: Seen,
        hidden: Tensor | None,
        prefix: int,
        key: int,
        record: Record,
        depths: tuple[int, ...],
        read: int,
        name: str,
    ) -> Work:
        """One exact pass, unless the request's `hidden` was one, and one at each of `depths`."""
        passes, audits, reference = self.passes, list[Audit](), hidden
        if reference is None:
            reference = self._counted(seen, passes.exact(seen, rounded=False))
            if reference is None:
                return
            yield
        for depth in depths:
            predicted = self._counted(seen, passes.reusing(seen, prefix, depth))
            if predicted is None:
                return
            audits.append(Audit(key, depth, passes.moved(reference, predicted)))
            if depth < depths[-1]:
                yield
        self.stats.audits += 1
        before, suffered = record.depth(key, 0), record.unaudited
        if self.depths.add(record, audits):
            log.warning(
                "an audit moved first predictions by %.2f nats where %d layers read the prefix: %d do from now on; %d "
                "requests since the audit before had read as many",
                max(audit.nats for audit in audits if audit.depth <= before),
                before,
                record.depth(key, 0),
                suffered,
            )
        at_work = next((audit.nats for audit in audits if audit.depth == read), None)
        if at_work is not None:
            self._take(name, at_work)

    def _audit_step(self, seen: Seen, hidden: Tensor, name: str) -> Work:
        """The exact pass, and with quantized weights one without rounding, to which both are compared."""
        passes, moved = self.passes, 0.0
        reference = exact = self._counted(seen, passes.exact(seen))
        if exact is not None and passes.model.quantised:
            yield
            reference = self._counted(seen, passes.exact(seen, rounded=False))
            moved = 0.0 if reference is None else min(passes.moved(reference, exact), MAX_NATS)
        if reference is None:
            return
        self.stats.audits += 1
        self._take(name, min(passes.moved(reference, hidden), MAX_NATS) - moved)

    def _counted(self, seen: Seen, predicted: Tensor | None) -> Tensor | None:
        """What a pass over `seen` predicted, which is counted; None: there was no room for it."""
        if predicted is None:
            self.skipped += 1
        else:
            self.stats.audit_row_layers += self._work(len(seen.canvas), 1)
        return predicted

    def _take(self, name: str, nats: float) -> None:
        findings = self.findings.setdefault(name, Findings())
        findings.recent.append(nats)
        findings.count += 1
        if self.found is not None:
            self.found(name, nats)
        estimate = findings.estimate
        if not findings.warned and estimate.count >= ENOUGH and estimate.low > self.depths.bound:
            findings.warned = True
            log.warning(
                "the cache %s moves predictions by %.2f nats here (%.2f to %.2f where they move most, %d audits), "
                "which none would not",
                name,
                estimate.mean,
                estimate.low,
                estimate.high,
                estimate.count,
            )


@dataclass(slots=True)
class _Open:
    """A request whose step is audited once it has ended: the last step that was chosen."""

    policy: str  # its name
    steps: int = 0  # those that it has taken
    turn: Turn | None = None  # the chosen one, until it is written
    hidden: Tensor | None = None  # what it predicted, [predicted, D]
    seen: Seen | None = None  # what it saw


def _earns(policy: CachePolicy) -> bool:
    return isinstance(policy, BiCache) and isinstance(policy.depth, Earned)
