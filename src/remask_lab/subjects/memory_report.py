"""What a policy keeps between passes: bytes by kind. Plain numbers."""

from dataclasses import asdict, dataclass


@dataclass(frozen=True, slots=True)
class Footprint:
    """Bytes that requests of one shape keep from pass to pass, in slots that hold a token.

    Attributes:
        kv: K and V of the requests' own canvases.
        outputs: attention and FFN outputs of the same positions.
        states: hidden states that requests keep themselves, and what they track of attention.
        store: K and V of shared prefixes, each held once.
        boundary: hidden states of shared prefixes.
    """

    kv: int = 0
    outputs: int = 0
    states: int = 0
    store: int = 0
    boundary: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """Bytes by kind."""
        return asdict(self)

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """A policy's memory at its peak, measured and as the formula has it.

    Attributes:
        cache: the policy's name.
        formula: what it should be.
        measured: bytes of the pages in use and of hidden states.
        unused: bytes of `measured` in slots that hold no token, at the ends of pages.
        weights: bytes of the model.
    """

    cache: str
    formula: Footprint
    measured: int
    unused: int
    weights: int

    @property
    def share(self) -> float:
        """What is measured, as a share of the model's bytes."""
        return self.measured / self.weights
