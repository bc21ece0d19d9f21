"""Layer hooks and measures: what a plan or a rule does on the device, as data.

A hook acts between the layers of a pass. The half in this module belongs to the plan and holds host arrays. It names
the other half, which runs on the device (`remask.policies.on_device.DeviceHook`), so planning need not import it.
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
    # Layers in which V or K is projected to be compared; the weights of that projection are read once a pass
    compares: frozenset[tuple[int, Literal["value", "key"]]] = frozenset()
    looks: int = 0  # layers whose queries are projected again, for which the weights of that projection are read


class LayerHook(ABC):
    """The part of a plan that acts between layers. Frozen, as plans are.

    Attributes:
        on_device: the class of its device half, as "module:name".
        layered: the pass runs layer by layer. If False, the hook acts once all layers have run.
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
        """Raise `PlanError` if it cannot act between the layers of `spans`."""

    def adding(self, span: Span) -> Mask | None:  # noqa: ARG002
        """Rows of `span` that may add cached outputs, [T]; None if there are none."""
        return None

    @abstractmethod
    def below(self, lead: Mask) -> Self:
        """The hook without the positions outside of the mask `lead`, [T]."""

    @abstractmethod
    def cost(self, widths: Widths, spans: Spans) -> HookCost:
        """The cost that it adds to a pass over `spans`."""


@dataclass(frozen=True, slots=True)
class RowMeasure:
    """A number computed from the distribution that a row predicts, as a rule's confidence or for a cache policy.

    Attributes:
        name: its name in documentation and errors.
        on_device: the function that computes it, as "module:name". It gets the log-probabilities of all tokens,
            float32 [rows, V], and their `Vocabulary`, and returns float [rows]. It may neither change its arguments nor
            wait for the device. On a model that runs in several processes the columns are those of one of them, and
            sums over tokens go through the methods of `Vocabulary`.
    """

    name: str
    on_device: str
