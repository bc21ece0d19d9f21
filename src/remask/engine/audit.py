"""Audits: for a share of requests, predictions under a cache policy are compared with those of exact passes.

An audit runs passes of its own, over a copy of a request's canvas as one of its passes saw it. It claims pages for as
long as it runs, reads only K/V of its own and writes none that a request reads, so answers do not depend on it.

There are two kinds. An audit of a shared prefix compares the first step's predictions of the whole canvas with those of
canvases that reuse the prefix in some layers, and says how deep it may be read (`policies.earned`). An audit of a step
compares what a pass of the request predicted, at a step chosen at random, with the exact pass.

With quantized weights rows are rounded in each product, which alone moves predictions by more than a cache may. So
audits of prefixes multiply without rounding, and audits of steps subtract the effect of rounding on the same canvas.
"""

import logging
import random
from collections import Counter, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from remask.engine.audit_passes import AuditPasses, PassInput
from remask.engine.audit_report import AuditReport, DepthReport, Divergence, Findings
from remask.engine.config import EngineConfig
from remask.engine.member import EngineStats, Turn
from remask.engine.memory import Memory
from remask.engine.runner import PassResult
from remask.engine.running import RunningRequest
from remask.machine.device import is_fatal
from remask.model.transformer import Transformer
from remask.policies.base import CachePolicy
from remask.policies.bicache import BiCache, Earned
from remask.policies.dense import Reuse
from remask.policies.earned import MAX_NATS, Audit, EarnedDepths, Record
from remask.policies.registry import name_of

log = logging.getLogger(__name__)

MAX_QUEUE: Final = 8  # audits that wait at most; further ones are skipped
MIN_AUDITS: Final = 8  # audits of a policy before a warning
DEEPER_INTERVAL: Final = 2  # audits of a prefix by the share, of which one also tries a greater depth than is read


Work = Iterator[None]
"""The passes of one audit. Each `next` runs one of them, and the iterator ends with the last one."""


class Auditor:
    """Chooses what is audited, and records the results.

    Attributes:
        depths: the depths that audits have earned.
        listener: called with the policy's name and the divergence in nats of each audit; None calls nothing.
    """

    def __init__(
        self, model: Transformer, memory: Memory, stats: EngineStats, config: EngineConfig, depths: EarnedDepths
    ) -> None:
        self.passes = AuditPasses(model, memory)
        self.stats = stats
        self.depths = depths
        self.share = config.audit_share
        self.findings: dict[str, Findings] = {}  # by policy
        self.skipped = 0  # audits that were due, for which the queue or memory had no room
        self.listener: Callable[[str, float], None] | None = None
        self.queue: deque[Work] = deque()  # audits that wait for their next pass
        self.candidates: dict[RunningRequest, _StepAudit] = {}  # requests that are audited at a step once they end
        self._max_work = config.audit_work  # share of the row-layers of requests; None does not limit it
        self._requests_since = Counter[str]()  # since the last audit that the share made due, by what it audits
        self._prefix_audits = 0  # audits of a prefix that were due by the share
        self._audit_work = 0  # row-layers of audits that were due by the share
        self._first_row_layers: int | None = None  # row-layers of requests before the share first decided
        self._draws = random.Random(0)

    def on_launch(self, result: PassResult) -> None:
        """Copy the hidden states of turns that may be audited, for `on_write`: a speculative turn may be discarded."""
        row = 0
        for turn in result.batch:
            count = sum(len(plan.predicted) for _, plan in turn.items)
            if count and self._may_audit(turn):
                turn.hidden = result.hidden[row : row + count].clone()
            row += count

    def _may_audit(self, turn: Turn) -> bool:
        """Whether an audit may compare the predictions of `turn`, before it is known whether one does."""
        running = turn.member
        if not isinstance(running, RunningRequest) or turn.plan.fills or len(running.canvases) > 1:
            return False
        is_first = turn.decoder is not None and turn.decoder.step == running.opening_step
        return running in self.candidates or (is_first and self._is_reference(running))

    def on_write(self, turn: Turn) -> None:
        """Draw whether the step of `turn` is the one that its request is audited at, and copy its input if it is.

        At the first step, choose the request's audits instead. Each step that is launched after that and written is
        audited with the same probability. With `overlap` the second step may be launched before; then it never is.
        """
        running = turn.member
        if not isinstance(running, RunningRequest):
            return
        candidate = self.candidates.get(running)
        if candidate is not None and turn.hidden is not None:
            candidate.steps += 1
            # Reservoir sampling: of n steps each is chosen last with a probability of 1 / n.
            if self._draws.random() * candidate.steps < 1:
                candidate.pass_input = PassInput.of(turn)
                candidate.hidden = turn.hidden
        if turn.decoder is not None and turn.decoder.step == running.opening_step and not turn.plan.fills:
            self._choose_audits(turn, running)

    def run(self) -> None:
        """Run one pass of the audit that has waited longest, if there is one.

        An audit that fails is counted and dropped. Raises errors of the device.
        """
        for running in [running for running in self.candidates if running.ended]:
            candidate = self.candidates.pop(running)
            if candidate.pass_input is not None and candidate.hidden is not None:
                self._enqueue(self._audit_step(candidate.pass_input, candidate.hidden, candidate.policy_name))
        if not self.queue:
            return
        work = self.queue[0]
        try:
            next(work)
        except StopIteration:
            self.queue.popleft()
        except Exception as error:
            self.queue.popleft()
            if is_fatal(error):
                raise
            self.stats.failed_audits += 1
            log.warning("an audit failed, and nothing is learned from it: %s", error, exc_info=error)

    def report(self) -> AuditReport:
        """The results of all audits so far, and their cost."""
        stats = self.stats
        return AuditReport(
            audits=stats.audits,
            failed=stats.failed_audits,
            skipped=self.skipped,
            row_layers=stats.audit_row_layers,
            bound=self.depths.bound,
            caches={name: Divergence.of(findings.estimate) for name, findings in self.findings.items()},
            depths=tuple(
                DepthReport(
                    adapter=adapter,
                    ratio=ratio,
                    depth=record.common,
                    prefixes=record.prefix_count,
                    nats={depth: Divergence.of(estimate) for depth, estimate in record.estimates().items()},
                )
                for (adapter, ratio), record in sorted(self.depths.records.items())
            ),
        )

    def drop_audits(self) -> None:
        """Drop all audits that wait, after memory was emptied."""
        self.queue.clear()
        self.candidates.clear()

    def _choose_audits(self, turn: Turn, running: RunningRequest) -> None:
        """Choose the audits of a request at its first step: queue one of its prefix, and add it to the candidates."""
        policy, config = running.request.policy, self.passes.model.config
        if not self.share or config.kind == "block_causal" or config.self_conditioning:
            return
        if len(running.canvases) > 1 or not len(turn.predicted) or running.decoder.context.drafts:
            return
        prefix_length = running.record.prefix_length
        if prefix_length and isinstance(policy, BiCache | Reuse):
            self._choose_prefix_audit(turn, running, prefix_length)
        inner = running.policy.inner if isinstance(running.policy, BiCache) else running.policy
        if inner.traits.exact or isinstance(running.policy, Reuse):
            return
        name = name_of(running.policy)
        if self._admit_audit(name, len(running.canvases[0].canvas), 1 + self.passes.model.quantized):
            self.candidates[running] = _StepAudit(name)

    def _choose_prefix_audit(self, turn: Turn, running: RunningRequest, prefix_length: int) -> None:
        """Queue an audit of a request's prefix, at the depths that are informative or, by the share, at those read."""
        policy, length = running.request.policy, len(running.canvases[0].canvas)
        record = self.depths.record(running.request.adapter or "", prefix_length, length)
        key = self.passes.memory.store.key(running.request.prompt_token_ids[:prefix_length], running.request.salt)
        hit = running.canvases[0].prefix
        read_depth = 0
        if hit is not None:
            read_depth = hit.boundary
            record.unaudited += 1
        name = name_of(policy).partition("+")[0]  # the depth does not depend on the inner policy
        earns = _has_earned_depth(policy)
        depths = record.audit_depths(key) if earns else ()
        if not depths or record.depth(key, 0):  # nothing is left to prove, or a depth is earned: the share decides
            next_depths = depths or ((record.next_depth(read_depth),) if earns else ())
            depths = self._due_depths(read_depth, next_depths)
            if not depths or not self._admit_audit(f"{name} prefix", length, 1 + len(depths)):
                return
            self._prefix_audits += 1
        audit = self._audit_prefix(
            PassInput.of(turn),
            turn.hidden if self._is_reference(running) else None,
            prefix_length=prefix_length,
            key=key,
            record=record,
            depths=depths,
            read_depth=read_depth,
            name=name,
        )
        self._enqueue(audit)

    def _due_depths(self, read_depth: int, next_depths: tuple[int, ...]) -> tuple[int, ...]:
        """The depths of an audit that the share makes due: `read_depth`, unless it is 0, and at times `next_depths`.

        The next depths are tried because traffic may have changed so that they would be allowed.
        """
        tries_next = not read_depth or self._prefix_audits % DEEPER_INTERVAL == DEEPER_INTERVAL - 1
        depths = ((read_depth,) if read_depth else ()) + (next_depths if tries_next else ())
        return tuple(dict.fromkeys(depths))

    def _is_reference(self, running: RunningRequest) -> bool:
        """Whether the first pass of a request is the exact pass with which an audit of its prefix compares."""
        is_exact = running.policy.traits.exact and not self.passes.model.quantized
        has_prefix = running.record.prefix_length > 0
        return self.share > 0 and is_exact and has_prefix and _has_earned_depth(running.request.policy)

    def _admit_audit(self, subject: str, row_count: int, pass_count: int) -> bool:
        """Count a request, and admit its audit if the share makes one due. Returns whether it is admitted.

        `subject` is what would be audited, by `pass_count` passes over `row_count` rows each. Their work is counted. An
        audit that would exceed the limit of work is due again at the next request.
        """
        self._requests_since[subject] += 1
        if self._first_row_layers is None:
            self._first_row_layers = self.stats.row_layers
        if self._requests_since[subject] * self.share < 1:
            return False
        audit_work = self._audit_work + self._row_layers(row_count, pass_count)
        row_layers = self.stats.row_layers - self._first_row_layers
        if self._max_work is not None and audit_work > self._max_work * row_layers:
            return False
        self._requests_since[subject] = 0
        self._audit_work = audit_work
        return True

    def _row_layers(self, row_count: int, pass_count: int) -> int:
        return pass_count * row_count * self.passes.model.config.layers

    def _enqueue(self, audit: Work) -> None:
        if len(self.queue) < MAX_QUEUE:
            self.queue.append(audit)
        else:
            self.skipped += 1

    def _audit_prefix(
        self,
        pass_input: PassInput,
        reference: Tensor | None,
        *,
        prefix_length: int,
        key: int,
        record: Record,
        depths: tuple[int, ...],
        read_depth: int,
        name: str,
    ) -> Work:
        """Compare passes at each of `depths` with the exact pass, and record the audits. Yields between two passes.

        `reference` are the hidden states of the exact pass if that has run; None runs it first. `key` identifies the
        prefix, and `name` the policy. The audit ends without a result if memory has no room for a pass.
        """
        passes = self.passes
        audits = list[Audit]()
        if reference is None:
            reference = self._count_pass(pass_input, passes.run_exact(pass_input, rounded=False))
            if reference is None:
                return
            yield
        for depth in depths:
            predicted = self._count_pass(pass_input, passes.run_reusing(pass_input, prefix_length, depth))
            if predicted is None:
                return
            audits.append(Audit(key, depth, passes.max_divergence(reference, predicted)))
            if depth < depths[-1]:
                yield
        self.stats.audits += 1
        old_depth = record.depth(key, 0)
        unaudited = record.unaudited
        if self.depths.add(record, audits):
            nats = max(audit.nats for audit in audits if audit.depth <= old_depth)
            log.warning(
                "an audit moved first predictions by %.2f nats where %d layers read the prefix: %d do from now on; %d "
                "requests since the audit before had read as many",
                *(nats, old_depth, record.depth(key, 0), unaudited),
            )
        for audit in audits:
            if audit.depth == read_depth:
                self._record(name, audit.nats)

    def _audit_step(self, pass_input: PassInput, hidden: Tensor, name: str) -> Work:
        """Compare the hidden states of a pass with those of the exact pass, and record the divergence.

        With quantized weights both are compared with an exact pass without rounding, and the difference of the two
        divergences is recorded. Yields between its two passes.
        """
        passes = self.passes
        exact = self._count_pass(pass_input, passes.run_exact(pass_input))
        reference = exact
        rounding = 0.0
        if exact is not None and passes.model.quantized:
            yield
            reference = self._count_pass(pass_input, passes.run_exact(pass_input, rounded=False))
            if reference is not None:
                rounding = min(passes.max_divergence(reference, exact), MAX_NATS)
        if reference is None:
            return
        self.stats.audits += 1
        self._record(name, min(passes.max_divergence(reference, hidden), MAX_NATS) - rounding)

    def _count_pass(self, pass_input: PassInput, predicted: Tensor | None) -> Tensor | None:
        """Count a pass, which had no room if `predicted` is None. Returns `predicted`."""
        if predicted is None:
            self.skipped += 1
        else:
            self.stats.audit_row_layers += self._row_layers(len(pass_input.canvas), 1)
        return predicted

    def _record(self, name: str, nats: float) -> None:
        """Record a divergence of the policy `name`, and warn once if it exceeds the bound."""
        findings = self.findings.setdefault(name, Findings())
        findings.recent.append(nats)
        findings.count += 1
        if self.listener is not None:
            self.listener(name, nats)
        estimate = findings.estimate
        if not findings.warned and estimate.count >= MIN_AUDITS and estimate.low > self.depths.bound:
            findings.warned = True
            log.warning(
                "the cache %s moves predictions by %.2f nats here (%.2f to %.2f where they move most, %d audits), "
                "which none would not",
                *(name, estimate.mean, estimate.low, estimate.high, estimate.count),
            )


@dataclass(slots=True)
class _StepAudit:
    """The step of a running request that is audited once the request has ended, as chosen so far."""

    policy_name: str
    steps: int = 0  # steps that could have been chosen, so far
    hidden: Tensor | None = None  # hidden states of its predicted rows, [predicted, D]
    pass_input: PassInput | None = None


def _has_earned_depth(policy: CachePolicy) -> bool:
    return isinstance(policy, BiCache) and isinstance(policy.depth, Earned)
