"""How far a cache policy moves predictions, by audits of requests: what it costs where nobody knows right answers."""

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
"""Requests that are audited of each policy, over as many prefixes as there are."""


@dataclass(frozen=True, slots=True)
class Audits:
    """How far a policy moves predictions, by audits of some requests, and the depths that these earned it.

    `moved` is None where nothing was audited, as with a policy that is exact. Timed rounds begin with `depths`.
    """

    moved: Divergence | None
    depths: EarnedDepths

    @property
    def result(self) -> dict[str, Any]:
        """As the result of a bench holds it."""
        moved = self.moved
        return {
            "divergence_nats": None if moved is None else moved.mean,
            "divergence_interval": None if moved is None else [moved.low, moved.high],
        }


def audit(llm: LLM, policy: CachePolicy, tasks: Sequence[Task], config: EngineConfig) -> Audits:
    """Audit `AUDITED` of `tasks`, one request at a time and untimed.

    Prefixes are audited at the first step, and what a policy reuses within a request at one chosen at random; of a
    policy that does both the greater divergence counts.
    """
    engine = llm.session.new_engine(replace(config, audit=1.0))
    for task in _spread(tasks)[:AUDITED]:
        list(llm.session.run([task.request.with_policy(policy)], engine=engine, progress=False))
        while engine.auditor.queue or engine.auditor.candidates:
            engine.step()
    moved = max(engine.auditor.report().caches.values(), key=lambda own: own.mean, default=None)
    return Audits(moved, engine.auditor.depths)


def _spread(tasks: Sequence[Task]) -> list[Task]:
    """The first task of each prefix, then the second of each, and so on."""
    turns, order = Counter[int](), list[int]()
    for cluster in prefix_clusters(tasks):
        turns[cluster] += 1
        order.append(turns[cluster])
    return [task for _, task in sorted(zip(order, tasks, strict=True), key=itemgetter(0))]
