"""Layer hooks and measures: what a plan or a rule does on the device, as data.

A hook acts between the layers of a pass. This half of it belongs to the plan: host arrays, and what follows from them.
It names the other one, which runs on the device (`remask.policies.on_device.DeviceHook`), so that planning imports
nothing of it.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import ClassVar, Literal, Self

from remask.plan.cost import OperationCost, Widths
from remask.plan.spans import Mask, Span, Spans


@dataclass(frozen=True, slots=True)
class HookCost:
    """The cost that a hook adds to a pass."""

    selection: OperationCost = field(default_factory=OperationCost)  # of comparing rows with the cache
    watch: OperationCost = field(default_factory=OperationCost)  # of looking at attention
    # The layers of which V or K is projected to compare it, for which their weights are read once a pass
    compares: frozenset[tuple[int, Literal["value", "key"]]] = frozenset()
    looks: int = 0  # how often the queries of a layer are projected again, for which its weights are read


class LayerHook(ABC):
    """The part of a plan that acts between layers. Frozen, as plans are.

    Attributes:
        on_device: the class of its device half, as "module:name".
        layered: the pass runs layer by layer. Without it the hook acts once all layers have run.
        revives: it may make rows live that the plan leaves out, so the inputs of all rows to all layers must be kept.
        adds_outputs: it may make rows add cached outputs of attention and feed-forward.
        releases_inputs: the inputs to layers that the canvas keeps are not needed after the pass.
    """

    on_device: ClassVar[str]
    layered: ClassVar[bool] = True
    revives: ClassVar[bool] = False
    adds_outputs: ClassVar[bool] = False
    releases_inputs: ClassVar[bool] = False

    def changes(self, spans: Spans) -> bool:  # noqa: ARG002
        """Whether a plan over `spans` may become another one while it runs."""
        return False

    @property
    @abstractmethod
    def masks(self) -> tuple[Mask, ...]:
        """All arrays over positions."""

    @abstractmethod
    def check(self, spans: Spans) -> None:
        """Raise `PlanError` where it cannot act between the layers of `spans`."""

    def adding(self, span: Span) -> Mask | None:  # noqa: ARG002
        """Rows of `span` that may add cached outputs, [T]; None: none."""
        return None

    @abstractmethod
    def below(self, lead: Mask) -> Self:
        """The hook without the positions outside of `lead`, [T]."""

    @abstractmethod
    def cost(self, widths: Widths, spans: Spans) -> HookCost:
        """The cost that it adds to a pass over `spans`."""


@dataclass(frozen=True, slots=True)
class RowMeasure:
    """A number of the distribution that a row predicts: a remasking rule's confidence, or what a cache policy reads.

    Attributes:
        name: in documentation and errors.
        on_device: the function that computes it, as "module:name". It gets the log-probabilities of all tokens,
            float32 [rows, V], and their `Vocabulary`, and returns float [rows]. It may neither change its arguments nor
            wait for the device. On a model that runs in several processes the columns are those of one of them, and
            sums over tokens go through the methods of `Vocabulary`.
    """

    name: str
    on_device: str
