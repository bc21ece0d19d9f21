"""What a step tells of a request."""

from dataclasses import dataclass

from remask.core.request import Draft, Result, Transfer


@dataclass(slots=True)  # not frozen, as one is made for each step of each request
class Event:
    """What a step did to one request.

    `queued_s` is given when the request first begins: the seconds that it waited. `settled` holds the response tokens
    that have become final with no gap before them, so that they can be shown in order. They may reach beyond a stop;
    the tokens of the result do not.
    """

    id: str
    queued_s: float | None = None
    draft: Draft | None = None
    transfer: Transfer | None = None
    settled: tuple[int, ...] = ()
    result: Result | None = None
