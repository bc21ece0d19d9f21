"""Ray Serve's request routers of a fleet: the tested routing, fed with Ray's replicas and their loads."""

import itertools
import random
from typing import Any

from ray.serve.request_router import RequestRouter

from remask.deploy.asgi import REPLICA_HEADER
from remask.deploy.routing import Spill


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that holds its prefix; to the next in rank where that one is loaded.

    A request's first argument is the identity of its prefix, or None; its second is the call, whose header may ask for
    one replica. Replicas are known by Ray's unique ids.
    """

    def initialize_state(self, slots: int, balance: float) -> None:
        """Called by Ray once, with the deployment's `request_router_kwargs`."""
        self._spill = Spill(slots, balance)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """One rank for each replica; Ray takes the first that lets the request in."""
        if pending_request is None:
            return [list(candidate_replicas)]
        pending_request.routing_context.should_backoff = True
        asked = _asked_for(pending_request, candidate_replicas)
        if asked is not None:
            return [[asked]]
        # Of replicas with equal loads, any may get a request that no prefix binds.
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        named = {replica.replica_id.unique_id: replica for replica in shuffled}
        loads = {name: self._load(replica.replica_id) for name, replica in named.items()}
        return [[named[name]] for name in self._spill.order(pending_request.args[0], loads)]

    def _load(self, replica_id: Any) -> int:
        """Open requests as Ray counts them: told by the replica with each request, those of other routers included."""
        return self.replica_queue_len_cache.get(replica_id) or 0


class RoundRobinRouter(RequestRouter):
    """Sends requests to one replica after the other, whatever they hold; those that ask for one, to that."""

    def initialize_state(self) -> None:
        """Called by Ray once."""
        self._turns = itertools.count()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """One rank for each replica, beginning with the one whose turn it is."""
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True
            asked = _asked_for(pending_request, candidate_replicas)
            if asked is not None:
                return [[asked]]
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id.unique_id))
        first = next(self._turns) % max(len(ordered), 1)
        return [[replica] for replica in ordered[first:] + ordered[:first]]


def _asked_for(pending_request: Any, replicas: list[Any]) -> Any:
    """The replica that a request names; None where it names none that is here."""
    name = pending_request.args[1].header(REPLICA_HEADER)
    return next((replica for replica in replicas if replica.replica_id.unique_id == name), None)
