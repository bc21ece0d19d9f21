"""What every cache policy answers."""

from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeAlias

from remask.core.plan import Plan, View

IdlePasses: TypeAlias = Literal["skipped", "within_block", "all"]
"""Which passes that transfer nothing are run: none, those of a block that still has noisy positions, or all."""


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a policy must suit, known before a request begins."""

    layers: int
    shift: int  # the family's: position p is predicted by row p - shift
    ordered: bool  # the sampler knows a step's positions before the pass


class CachePolicy(Protocol):
    """A frozen set of knobs and a pure function from `View` to `Plan`; it holds no tensors and no request state."""

    @property
    def idle_passes(self) -> IdlePasses:
        """Which scheduled passes are run although they transfer nothing, because later passes read what they write."""
        ...

    @property
    def blockwise(self) -> bool:
        """Whether threshold decoding of Dream works block by block (Fast-dLLM with a cache), not on a budget."""
        ...

    @property
    def needs_outputs(self) -> bool:
        """Whether attention and FFN outputs are cached, beside K and V."""
        ...

    @property
    def own_clocks(self) -> bool:
        """Whether the two canvases of a guided request count their steps and forwards apart."""
        ...

    def guides(self, step: int) -> bool:
        """Whether a guided request's unconditional canvas runs in `step`; else its share of the guidance is kept."""
        ...

    @property
    def without_prefix(self) -> "CachePolicy":
        """The policy for a request that leases no shared prefix."""
        ...

    def check(self, circumstances: Circumstances) -> None:
        """Raise `ConfigError` where the policy cannot work on this model or with this sampler."""
        ...

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:
        """How many leading layers read a shared prefix of `prefix` tokens from the store; 0 leases nothing.

        `canvas` counts prompt and response, masks included; `layers` is the model's number of layers.
        """
        ...

    def plan(self, view: View) -> Plan:
        """The next pass of the canvas in `view`, which is not changed."""
        ...


@dataclass(frozen=True, slots=True)
class WithinRequest:
    """What policies share that cache within one request only, and fit any model and sampler."""

    @property
    def blockwise(self) -> bool:
        """Threshold decoding of Dream works on a budget."""
        return False

    @property
    def needs_outputs(self) -> bool:
        """K and V alone."""
        return False

    @property
    def own_clocks(self) -> bool:
        """A guided pair is one forward."""
        return False

    def guides(self, step: int) -> bool:  # noqa: ARG002
        """Both canvases run in every pass."""
        return True

    @property
    def without_prefix(self) -> Self:
        """Itself: no prefix is read anyway."""
        return self

    def check(self, circumstances: Circumstances) -> None:
        """Fits everything."""

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:  # noqa: ARG002
        """Reads nothing from the store."""
        return 0
