"""Which refreshes are heavy: those that cost more than other passes of their requests."""

from remask.engine.member import Member


class RefreshWatch:
    """Compares costs only, so it needs to know no policy.

    A refresh is heavy if it computes more row-layers than the cheapest pass of its request so far, and in
    the first pass of a request. Where every pass refreshes, as with one step a block, no refresh is put off.
    """

    def __init__(self) -> None:
        self._least: dict[Member, int] = {}  # row-layers of the cheapest pass

    def heavy(self, member: Member, step: Member) -> bool:
        """Whether the next pass of `member` is a heavy refresh: that of `step`, its speculative step or itself."""
        return step.tally.refreshes and step.tally.cost > self._least.get(member, 0)

    def ran(self, member: Member) -> None:
        """Note the cost of the next pass of `member`, which has run and has not been applied."""
        cost = member.tally.cost
        if cost < self._least.get(member, cost + 1):
            self._least[member] = cost

    def forget(self, member: Member) -> None:
        """Drop what is known of a member that has ended."""
        self._least.pop(member, None)
