"""The interface of a cache policy."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, TypeAlias

from remask.checks import ModelKind
from remask.checks.fields import check
from remask.plan import Plan, RowMeasure, View

ALWAYS = 1 << 62  # returned by `CachePolicy.repeats` for a plan that repeats until its block is done

IdlePasses: TypeAlias = Literal["skipped", "within_block", "all"]
Kept: TypeAlias = Literal["outputs", "inputs"]
Sharing: TypeAlias = Literal["prefix", "pages"]


UnreadLabel: TypeAlias = Literal["off", "policy", "nothing", "short", "depth", "budget", "salt", "pages", "blocks"]


@dataclass(frozen=True, slots=True)
class UnreadReason:
    """Why a request reads no shared prefix.

    Attributes:
        label: the one by which requests are counted. "off": sharing is switched off. "policy": the cache policy
            reads no prefix. "nothing": the prompt shares no prefix. "short": the prefix is too short. "depth": the
            policy reads 0 layers of it. "budget": it is larger than the store. "salt": nothing is stored yet for the
            request's `cache_salt`. "pages": pages hold no whole number of blocks. "blocks": the stored beginning of the
            prompt was computed in blocks that end at other tokens.
        note: the reason in words.
    """

    label: UnreadLabel
    note: str


NEVER = UnreadReason("policy", "the cache policy reads no shared prefix")


@dataclass(frozen=True, slots=True)
class RequestFacts:
    """Facts about a request before it begins, for `CachePolicy.check`."""

    layers: int  # the model's layers
    shift: int  # the model family's shift. Row p - shift predicts position p
    ordered: bool  # the sampler knows the positions of a step before its pass
    canvas: int  # positions of the canvas
    response: int  # positions of the canvas that are denoised
    steps: int | None = None  # denoising steps of the whole response; None without a schedule that fixes them


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which passes of a request are run, and how they are counted."""

    # Which scheduled passes run even if they transfer nothing. "skipped" runs none of them. "within_block" runs those
    # of a block that still has noisy positions. "all" runs all of them, because later passes read what they write.
    idle_passes: IdlePasses = "all"
    # Threshold decoding of Dream works block by block (Fast-dLLM with a cache), not on a budget
    blockwise: bool = False
    own_clocks: bool = False  # the two canvases of a guided request have separate counts of steps and forwards


@dataclass(frozen=True, slots=True)
class Traits:
    """How the engine runs requests under a policy, beyond what plans say.

    A policy that only decides which rows to compute can leave all defaults.

    Attributes:
        kinds: kinds of models that the policy is defined for.
        schedule: which passes are run.
        keeps: further tensors that the device keeps. "outputs" keeps the outputs of attention and feed-forward.
            "inputs" keeps the hidden states that enter each layer but the first, as `Span.save` says, until a hook
            releases them (`LayerHook.releases_inputs`) or the request ends.
        copies: stored K/V are copied for the request, because some of their rows are recomputed.
        sharing: how requests share what they computed. "prefix" leases the prefixes that `boundary` asks for. "pages"
            shares committed pages exactly.
        measure: a number of every predicted row that the device returns (`LastPass.measured`), of the distribution
            before temperature and filters; None without one.
        exact: with these plans the model computes what it would without a cache.
        by_clock: plans depend only on step numbers, the block, and an order that is known before the pass. Apart from
            the predicted positions they do not depend on which positions are noisy or settled, or on the last pass.
            The device then chooses positions if it can, and a plan that repeats may be queued while the previous pass
            runs. False is always right.
    """

    kinds: tuple[ModelKind, ...] = ("masked",)
    schedule: Schedule = Schedule()
    keeps: frozenset[Kept] = frozenset()
    sharing: Sharing = "prefix"
    measure: RowMeasure | None = None
    exact: bool = False
    by_clock: bool = False
    copies: bool = False


class CachePolicy(ABC):
    """A frozen set of settings and a pure function from `View` to `Plan`. It holds no tensors and no request state.

    The defaults suit a policy that caches within one request only and works with any model and sampler.
    """

    __slots__ = ()

    def __post_init__(self) -> None:
        """Check the fields that are declared with their values. Raises `ConfigError`."""
        check(self)

    @property
    def traits(self) -> Traits:
        """How requests under this policy are run."""
        return Traits()

    @property
    def without_prefix(self) -> "CachePolicy":
        """The policy for a request that leases no shared prefix."""
        return self

    def within(self, prefix_length: int) -> "CachePolicy":  # noqa: ARG002
        """The policy for a request that shares its first `prefix_length` tokens but leases nothing, as `boundary` is 0.

        By default this is `without_prefix`.
        """
        return self.without_prefix

    def check(self, facts: RequestFacts) -> None:  # noqa: B027 - most policies fit everything
        """Raise `ConfigError` if the policy cannot work on this model or with this sampler."""

    def boundary(self, prefix_length: int, canvas_length: int, layers: int) -> int:  # noqa: ARG002
        """How many leading layers read a shared prefix of `prefix_length` tokens from the store; 0 leases nothing.

        `canvas_length` counts prompt and response, masks included; `layers` is the model's number of layers.
        """
        return 0

    def unread_reason(self, prefix_length: int, canvas_length: int) -> UnreadReason:  # noqa: ARG002
        """Why `boundary` is 0 for a prefix of `prefix_length` tokens on a canvas of `canvas_length` positions."""
        return NEVER

    def leased_layers(self, boundary: int, layers: int) -> int:  # noqa: ARG002
        """How many leading layers read the K/V of a leased prefix from the store, at least `boundary`.

        It is one more than `boundary` if the prefix rows restart from stored states alone, because their K/V in the
        next layer then equal those in the store.
        """
        return boundary

    def guides(self, step: int) -> bool:  # noqa: ARG002
        """Whether the unconditional canvas of a guided request runs in `step`. If not, the last guidance is reused."""
        return True

    def closing(self, view: View) -> Plan | None:  # noqa: ARG002
        """A pass after the last step that makes the K/V of the last block shareable; None if the policy needs none."""
        return None

    def repeats(self, view: View) -> int:  # noqa: ARG002
        """For how many of the block's next steps the plan of `view` repeats, whichever positions are transferred.

        Only the predicted positions may differ. In all of these steps, and in that of `view`, they are the block's
        noisy positions. The engine does not call `plan` for these steps. 0 is always right.
        """
        return 0

    @abstractmethod
    def plan(self, view: View) -> Plan:
        """The next pass of the canvas in `view`. Must not change the view."""


class Around(CachePolicy):
    """A policy around an inner one, to which it delegates what it does not override.

    Attributes:
        inner: the inner policy.
    """

    __slots__ = ()
    inner: CachePolicy

    @property
    def without_prefix(self) -> CachePolicy:
        """The inner policy."""
        return self.inner

    def check(self, facts: RequestFacts) -> None:
        """Raise `ConfigError` if the inner policy cannot work on this model or with this sampler."""
        self.inner.check(facts)

    def guides(self, step: int) -> bool:
        """Whether the unconditional canvas runs in `step` under the inner policy."""
        return self.inner.guides(step)
