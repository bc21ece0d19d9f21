"""Which refreshes are heavy: those that cost more than other passes of their requests."""

from remask.engine.running import RunningRequest


class RefreshWatch:
    """Compares costs only, so it needs to know no policy.

    A refresh is heavy if it computes more row-layers than the cheapest pass of its request so far, and in
    the first pass of a request. Where every pass refreshes, as with one step a block, no refresh is put off.
    """

    def __init__(self) -> None:
        self._least: dict[RunningRequest, int] = {}  # row-layers of the cheapest pass

    def heavy(self, running: RunningRequest, step: RunningRequest | None = None) -> bool:
        """Whether the next pass of `running`, or that of its speculative `step`, is a heavy refresh."""
        following = step or running
        return following.refreshes and following.cost > self._least.get(running, 0)

    def ran(self, running: RunningRequest) -> None:
        """Note the cost of the next pass of `running`, which has run and has not been applied."""
        cost = running.cost
        if cost < self._least.get(running, cost + 1):
            self._least[running] = cost

    def forget(self, running: RunningRequest) -> None:
        """Drop what is known of a request that has ended."""
        self._least.pop(running, None)
