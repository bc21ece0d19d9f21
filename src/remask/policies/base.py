"""What every cache policy answers."""

from typing import Protocol

from remask.core.plan import Plan, View


class CachePolicy(Protocol):
    """A frozen set of knobs and a pure function from `View` to `Plan`; it holds no tensors and no request state."""

    @property
    def idle_passes(self) -> bool:
        """Whether a pass that transfers nothing still matters, because it renews what later passes read."""
        ...

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:
        """How many leading layers read a shared prefix of `prefix` tokens from the store; 0 leases nothing.

        `canvas` counts prompt and response, masks included; `layers` is the model's number of layers.
        """
        ...

    def plan(self, view: View) -> Plan:
        """The next step of the canvas in `view`, which is not changed."""
        ...
