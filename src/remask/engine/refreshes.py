"""Which refreshes are heavy: those that cost more than other passes of their requests."""

from remask.engine.member import Member


class RefreshWatch:
    """Tells heavy refreshes by their costs, for any policy.

    A refresh is heavy if it computes more row-layers than the cheapest pass of its request so far, or is the first
    pass of a request. If every pass refreshes, as with one step a block, none is put off.
    """

    def __init__(self) -> None:
        self._least: dict[Member, int] = {}  # row-layers of the cheapest pass

    def heavy(self, member: Member, step: Member) -> bool:
        """Whether the next pass of `member` is a heavy refresh. `step` is what runs: itself or a speculative step."""
        return step.tally.refreshes and step.tally.cost > self._least.get(member, 0)

    def ran(self, member: Member) -> None:
        """Note the cost of the pass of `member` that has just run."""
        cost = member.tally.cost
        if cost < self._least.get(member, cost + 1):
            self._least[member] = cost

    def forget(self, member: Member) -> None:
        """Forget a member that has ended."""
        self._least.pop(member, None)
