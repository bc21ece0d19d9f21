"""Telling passes whose refreshes are heavy from those that cost what their requests' others do."""

from remask.engine.job import Job


class RefreshWatch:
    """Knows no policy: a refresh is heavy if it computes more row-layers than its request's cheapest pass so far.

    So is one in a request's first pass. Where every pass refreshes, as with one step a block, none is put off for that.
    """

    def __init__(self) -> None:
        self._least: dict[Job, int] = {}  # row-layers of the cheapest pass

    def heavy(self, job: Job) -> bool:
        """Whether the next pass of `job` is a heavy refresh."""
        return job.refreshes and job.cost > self._least.get(job, 0)

    def ran(self, job: Job) -> None:
        """The next pass of `job`, whose cost is known, is run."""
        self._least[job] = min(job.cost, self._least.get(job, job.cost))

    def forget(self, job: Job) -> None:
        """`job` has ended."""
        self._least.pop(job, None)
