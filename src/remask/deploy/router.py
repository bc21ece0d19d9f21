"""Request routers for Ray Serve. They apply `remask.deploy.routing` to Ray's replicas and their loads."""

import itertools
import random
from typing import Any

from ray.serve.request_router import RequestRouter

from remask.deploy.asgi import REPLICA_HEADER, Call
from remask.deploy.routing import Spill


class PrefixRouter(RequestRouter):
    """Sends a request to the replica that holds its prefix, or to the next in rank if that one is overloaded.

    The first argument of a request is its prefix identity, or None. The second is the call; a header of it may name a
    replica by Ray's unique id.
    """

    def initialize_state(self, slots: int, balance: float) -> None:
        """Ray calls this once, with the deployment's `request_router_kwargs`."""
        self._spill = Spill(slots, balance)

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replicas in order of preference. Ray takes the first that accepts the request.

        Without a request, which Ray's interface allows, all of them are equal.
        """
        if pending_request is None:
            return [list(candidate_replicas)]
        _enable_backoff(pending_request)
        identity, call = pending_request.args
        replica = _named_replica(call, candidate_replicas)
        if replica is not None:
            return [[replica]]
        # A request without a prefix may go to any of the replicas with equal loads.
        shuffled = random.sample(candidate_replicas, len(candidate_replicas))
        by_name = {replica.replica_id.unique_id: replica for replica in shuffled}
        loads = {name: self._load(replica.replica_id) for name, replica in by_name.items()}
        return [[by_name[name]] for name in self._spill.order(identity, loads)]

    def _load(self, replica_id: Any) -> int:
        """Return the number of open requests that the replica reported last, those of other routers included."""
        return self.replica_queue_len_cache.get(replica_id) or 0


class RoundRobinRouter(RequestRouter):
    """Sends requests to the replicas in turn. A request that names a replica goes to that one."""

    def initialize_state(self) -> None:
        """Ray calls this once."""
        self._turns = itertools.count()

    async def choose_replicas(self, candidate_replicas: list[Any], pending_request: Any = None) -> list[list[Any]]:
        """Return the replicas in turn, the next one first."""
        if pending_request is not None:
            _enable_backoff(pending_request)
            _, call = pending_request.args
            replica = _named_replica(call, candidate_replicas)
            if replica is not None:
                return [[replica]]
        ordered = sorted(candidate_replicas, key=lambda replica: str(replica.replica_id.unique_id))
        first = next(self._turns) % max(len(ordered), 1)
        return [[replica] for replica in ordered[first:] + ordered[:first]]


def _enable_backoff(pending_request: Any) -> None:
    """Make Ray wait before it offers a request again that no replica has accepted. It would ask them in a busy loop."""
    pending_request.routing_context.should_backoff = True


def _named_replica(call: Call, replicas: list[Any]) -> Any:
    """Return the replica that a call names in its header. Returns None if it names none of `replicas`."""
    name = call.header(REPLICA_HEADER)
    return next((replica for replica in replicas if replica.replica_id.unique_id == name), None)
