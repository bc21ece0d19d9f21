"""Telling passes that refresh from those between them."""

from remask.engine.job import Job


class RefreshWatch:
    """Knows no policy: a pass refreshes if it computes more row-layers than its request's cheapest pass so far.

    A request's first pass fills its caches, so it counts as a refresh wherever the policy has any.
    """

    def __init__(self) -> None:
        self._least: dict[Job, int] = {}  # row-layers of the cheapest pass

    def refreshes(self, job: Job) -> bool:
        """Whether the next pass of `job` refreshes."""
        return job.policy.traits.refreshes and job.cost > self._least.get(job, 0)

    def ran(self, job: Job) -> None:
        """The next pass of `job`, whose cost is known, is run."""
        self._least[job] = min(job.cost, self._least.get(job, job.cost))

    def forget(self, job: Job) -> None:
        """`job` has ended."""
        self._least.pop(job, None)
