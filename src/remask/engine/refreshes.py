"""Telling passes that refresh from those between them."""

from remask.engine.job import Job


class RefreshWatch:
    """Knows no policy: a pass refreshes if it computes more row-layers than its request's cheapest pass so far.

    A request's first pass fills its caches, so it counts as a refresh wherever the policy has any.
    """

    def __init__(self) -> None:
        self._least: dict[str, int] = {}  # request id -> row-layers of its cheapest pass

    def refreshes(self, job: Job) -> bool:
        """Whether the next pass of `job` refreshes."""
        return job.policy.traits.refreshes and job.cost > self._least.get(job.request.id, 0)

    def ran(self, job: Job) -> None:
        """The next pass of `job`, whose cost is known, is run."""
        self._least[job.request.id] = min(job.cost, self._least.get(job.request.id, job.cost))

    def forget(self, job: Job) -> None:
        """`job` has ended."""
        self._least.pop(job.request.id, None)
