"""How far a cache policy changes predictions, by audits of requests. It needs no right answers."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from remask.engine.audit_report import Divergence
from remask.engine.config import EngineConfig
from remask.llm import LLM
from remask.policies.base import CachePolicy
from remask.policies.earned import EarnedDepths
from remask_lab.bench.workload import Task, prefix_clusters

AUDITED = 24
"""The largest number of requests of a policy that are audited, spread over all prefixes."""


@dataclass(frozen=True, slots=True)
class Audits:
    """The results of a policy's audits.

    Attributes:
        divergence: of the policy's predictions from exact ones, in nats; None if the policy is exact.
        depths: those that the audits earned, with which timed rounds begin.
    """

    divergence: Divergence | None
    depths: EarnedDepths

    @property
    def result(self) -> dict[str, Any]:
        """The fields of a bench's result about the divergence."""
        divergence = self.divergence
        return {
            "divergence_nats": None if divergence is None else divergence.mean,
            "divergence_interval": None if divergence is None else [divergence.low, divergence.high],
        }


def audit(llm: LLM, policy: CachePolicy, tasks: Sequence[Task], config: EngineConfig) -> Audits:
    """Audit at most `AUDITED` of `tasks`, one request after another.

    Reuse of prefixes is audited at the first step of a request, and reuse within a request at a random step. For a
    policy with both the divergence is the larger one.
    """
    engine = llm.session.new_engine(replace(config, audit=1.0))
    for task in _spread(tasks)[:AUDITED]:
        list(llm.session.run([task.request.with_policy(policy)], engine=engine, progress=False))
        while engine.auditor.queue or engine.auditor.candidates:
            engine.step()
    divergences = engine.auditor.report().caches.values()
    divergence = max(divergences, key=lambda divergence: divergence.mean, default=None)
    return Audits(divergence, engine.auditor.depths)


def _spread(tasks: Sequence[Task]) -> list[Task]:
    """The first task of each prefix, then the second of each, and so on."""
    counts, numbers = Counter[int](), list[int]()  # tasks of a prefix so far; number of each task within its prefix
    for cluster in prefix_clusters(tasks):
        counts[cluster] += 1
        numbers.append(counts[cluster])
    return [task for _, task in sorted(zip(numbers, tasks, strict=True), key=itemgetter(0))]
