"""What every cache policy answers."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

from remask.core.kinds import ModelKind
from remask.core.plan import Plan, View

IdlePasses: TypeAlias = Literal["skipped", "within_block", "all"]


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a policy must suit, known before a request begins."""

    layers: int
    shift: int  # the family's: position p is predicted by row p - shift
    ordered: bool  # the sampler knows a step's positions before the pass
    canvas: int  # positions of the canvas
    response: int  # those of them that are denoised


@dataclass(frozen=True, slots=True)
class Traits:
    """How requests under a policy are run, beside what their plans say.

    Attributes:
        idle_passes: which scheduled passes are run although they transfer nothing: none of them ("skipped"), those of
            a block that still has noisy positions ("within_block"), or all, because later passes read what they write.
        blockwise: threshold decoding of Dream works block by block (Fast-dLLM with a cache), not on a budget.
        needs_outputs: attention and FFN outputs are cached, beside K and V.
        own_clocks: the two canvases of a guided request count their steps and forwards apart.
        kinds: kinds of models that the policy is defined for.
        watches: plans may watch attention: the hidden states of all rows are kept, beside K and V. Such a policy reads
            no shared prefix.
        pages: what is committed is shared with other requests page by page, exactly.
    """

    idle_passes: IdlePasses = "all"
    blockwise: bool = False
    needs_outputs: bool = False
    own_clocks: bool = False
    kinds: tuple[ModelKind, ...] = ("masked",)
    watches: bool = False
    pages: bool = False


class CachePolicy(ABC):
    """A frozen set of knobs and a pure function from `View` to `Plan`; it holds no tensors and no request state.

    The defaults are those of a policy that caches within one request only, and fits any model and sampler.
    """

    __slots__ = ()

    @property
    def traits(self) -> Traits:
        """How requests under this policy are run."""
        return Traits()

    @property
    def without_prefix(self) -> "CachePolicy":
        """The policy for a request that leases no shared prefix."""
        return self

    def check(self, circumstances: Circumstances) -> None:  # noqa: B027 - most policies fit everything
        """Raise `ConfigError` where the policy cannot work on this model or with this sampler."""

    def boundary(self, prefix: int, canvas: int, layers: int) -> int:  # noqa: ARG002
        """How many leading layers read a shared prefix of `prefix` tokens from the store; 0 leases nothing.

        `canvas` counts prompt and response, masks included; `layers` is the model's number of layers.
        """
        return 0

    def guides(self, step: int) -> bool:  # noqa: ARG002
        """Whether a guided request's unconditional canvas runs in `step`; else its share of the guidance is kept."""
        return True

    def closing(self, view: View) -> Plan | None:  # noqa: ARG002
        """A pass after the last step that makes the last block's K/V fit to be shared; None where there is none."""
        return None

    @abstractmethod
    def plan(self, view: View) -> Plan:
        """The next pass of the canvas in `view`, which is not changed."""
