"""Remasking rules: which noisy positions of a block become final in a step, and which stay masked.

Each rule is one entry of `_RULES` and the function that it names. Everything else that depends on the rule of a
request, such as the decoders, the scores, the documentation and the checks of other parameters, reads the entry.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray

from remask.checks import ModelKind
from remask.checks.fields import is_declared
from remask.checks.plugins import Plugin, Registry
from remask.denoising import select
from remask.denoising.indel import IndelBlock, JointThresholdIndel, Levenshtein
from remask.errors import ConfigError, PluginError
from remask.plan.hooks import RowMeasure

MARGIN = RowMeasure("margin", "remask.sampling.measures:margin")
NEGATIVE_ENTROPY = RowMeasure("negative entropy", "remask.sampling.measures:negative_entropy")

ENTROPY_BOUND = 0.35  # JetEngine's default of `eb_threshold`
THRESHOLD = 0.9  # of Nemotron-Labs-Diffusion's published configurations
# The authors' defaults of LLaDA2.1's rule, `joint_threshold`.
JOINT_THRESHOLD, EDIT_THRESHOLD, MAX_POST_STEPS, MIN_TRANSFER = 0.95, 0.9, 16, 1
# Those of LLaDA2.2's, `levenshtein`, which SGLang's `joint_threshold_indel` shares as far as it has the parameters.
INDEL_THRESHOLD, INDEL_EDIT_THRESHOLD, INDEL_STEPS, MAX_STEPS_PER_BLOCK = 0.5, 0.0, 32, 1000


@dataclass(frozen=True, slots=True)
class Step:
    """The facts about one step of a block from which a rule chooses.

    Attributes:
        positions: the block's noisy positions on the canvas, ascending, int64 [n] with n >= 1.
        confidence: the rule's measure at each of them, float32 [n]; larger is more confident.
        number: steps of the block before this one.
        count: positions that the schedule transfers in this step.
        share: under Dream's time schedule, the share of the noisy positions that this step transfers; else None.
        order: the positions that this step transfers, if they are known before the pass; else None.
        draw: draws a given count of uniform numbers from the request's seed and the step, float32.
    """

    positions: NDArray[np.int64]
    confidence: NDArray[np.float32]
    number: int
    count: int
    share: np.float32 | None
    order: NDArray[np.int64] | None
    draw: Callable[[int], NDArray[np.float32]]


Choose: TypeAlias = Callable[[Step], select.Chosen]
"""Chooses positions of a step. Returns indices into `Step.positions`, ascending."""


@dataclass(frozen=True, slots=True)
class Knobs:
    """The sampling parameters that rules read.

    Attributes:
        threshold: least confidence of a transferred position.
        eb_threshold: bound of the summed entropies, in nats.
        min_transfer: least number of masks that a step of an editing rule fills.
        config: the rule's own parameters, an object of its `Remasking.config`; None if it has none.
    """

    threshold: float | None = None
    eb_threshold: float | None = None
    min_transfer: int | None = None
    config: Any = None


@dataclass(frozen=True, slots=True)
class BlockFacts:
    """Facts about a block when it begins.

    Attributes:
        masks: number of its noisy positions.
        steps: number of its scheduled steps.
        knobs: the request's parameters for rules.
        leave_out: a rule may call it with a position when it chooses: the next step leaves out all positions from
            there on. With None the next step leaves out nothing.
    """

    masks: int
    steps: int
    knobs: Knobs
    leave_out: Callable[[int | None], None] = lambda _tail: None


def choose_by_schedule(step: Step) -> select.Chosen:
    """Choose the most confident positions, as many as the schedule says."""
    return select.top(step.confidence, step.count)


def every_block(choose: Choose) -> Callable[[BlockFacts], Choose]:
    """Return a `Remasking.begin` for a rule without state: it uses `choose` in every block."""
    return lambda _: choose


_BEGIN_BY_SCHEDULE = every_block(choose_by_schedule)


@dataclass(frozen=True, slots=True)
class Remasking:
    """A remasking rule.

    Attributes:
        name: the value of the sampling parameter `remasking.rule`.
        meaning: what the rule does, in a sentence or two, for the documentation.
        kinds: kinds of models that it is defined on.
        begin: returns the function that chooses in the steps of one block, which may keep a state. Raises
            `ConfigError` if the rule cannot be applied to the block.
        config: the class of its own parameters, which a request sends as `remasking.config`: a frozen dataclass whose
            fields are all declared (`remask.checks.fields.declare`); None if it has none.
        measure: the confidence; larger is more confident. None: the probability of the token.
        filtered: on masked models, whether confidence is computed after temperature, top-k and top-p.
        order: the origin of positions that are known before a pass: the request's `order`, or a draw.
        timed: when Dream's time schedule decides how many positions a step transfers: "never", "always", or if the
            model family or `eps` selects it ("by_family").
        counts: what decides how many positions a step transfers: the "schedule", a "draw" around the schedule's share,
            or the "rule" itself, which then ends a block as soon as it is complete.
        uses_steps: whether the choice depends on the number of steps; if not, a request that sets `steps` or
            `steps_per_block` is refused.
        thresholds: whether `threshold` and `factor` may replace the schedule, or are parameters of the rule.
        blind: whether it chooses without confidences, so that its positions are known before the pass.
        edits: whether tokens of a block may be replaced until the block is done. The rule chooses among masks alone.
        indel: the class that applies a pass to a block in place of the rule, if the model deletes and inserts tokens.
        settings: fields of the parameter `remasking` that only some rules take, and this one does.
        blockwise: the rule that replaces it under cache policies that recompute a block at a time.
    """

    name: str
    meaning: str
    kinds: tuple[ModelKind, ...] = ("masked",)
    begin: Callable[[BlockFacts], Choose] = _BEGIN_BY_SCHEDULE
    config: type[Any] | None = None
    measure: RowMeasure | None = None
    filtered: bool = False
    order: Literal["given", "drawn"] | None = None
    timed: Literal["never", "by_family", "always"] = "never"
    counts: Literal["schedule", "draw", "rule"] = "schedule"
    uses_steps: bool = True
    thresholds: bool = False
    blind: bool = False
    edits: bool = False
    indel: type[IndelBlock] | None = None
    settings: tuple[str, ...] = ()
    blockwise: str | None = None


def _in_order(step: Step) -> select.Chosen:
    assert step.order is not None
    return np.flatnonzero(np.isin(step.positions, step.order))


def _by_chance(step: Step) -> select.Chosen:
    assert step.share is not None
    return np.flatnonzero(step.draw(len(step.positions)) < step.share)


def _leftmost(step: Step) -> select.Chosen:
    return np.flatnonzero(step.positions < step.positions[0] + step.count)


def _begin_entropy_bounded(block: BlockFacts) -> Choose:
    """Return a choice by entropy: the measure is the negative entropy."""
    bound = ENTROPY_BOUND if block.knobs.eb_threshold is None else block.knobs.eb_threshold
    return lambda step: select.by_entropy(-step.confidence, bound)


def _begin_joint_threshold(block: BlockFacts) -> Choose:
    knobs = block.knobs
    threshold = JOINT_THRESHOLD if knobs.threshold is None else knobs.threshold
    least = MIN_TRANSFER if knobs.min_transfer is None else knobs.min_transfer

    def choose(step: Step) -> select.Chosen:
        above = np.flatnonzero(step.confidence > threshold)
        return above if len(above) >= least else select.top(step.confidence, least)

    return choose


def _begin_bound(block: BlockFacts) -> Choose:
    threshold = THRESHOLD if block.knobs.threshold is None else block.knobs.threshold
    return lambda step: select.by_bound(step.confidence, threshold)


def _begin_cumulative(block: BlockFacts) -> Choose:
    threshold = THRESHOLD if block.knobs.threshold is None else block.knobs.threshold
    return lambda step: select.by_product(step.confidence, threshold)


class _WithinBudget:
    """Fast-dLLM's rule for Dream: a pass considers its share of the masks and the ones that earlier passes left over.

    If the last scheduled pass leaves masks over, one more pass is appended, without a share of its own.
    """

    def __init__(self, block: BlockFacts) -> None:
        assert block.knobs.threshold is not None
        if block.masks % block.steps:
            raise ConfigError(
                f"remasking 'confidence_threshold' shares a block's masks evenly among its steps, and a block of "
                f"{block.masks} masks has {block.steps} steps: leave steps out, so that each mask has one, or set "
                "steps_per_block to a number that divides the masks of every block"
            )
        self._threshold = block.knobs.threshold
        self._budget = block.masks // block.steps
        self._step_count = block.steps
        self._left_over = 0

    def __call__(self, step: Step) -> select.Chosen:
        """Choose within the budget of this pass, and count what it leaves over."""
        count = self._budget + self._left_over
        chosen = select.within_budget(step.confidence, self._threshold, count)
        self._left_over = count - len(chosen)
        if step.number + 1 == self._step_count and self._left_over:
            self._step_count += 1
            self._budget = 0
        return chosen


_RULES = (
    Remasking(
        "low_confidence",
        "The most probable first; probabilities are taken before temperature and filters, on block-causal models as "
        "their family does.",
        kinds=("masked", "block_causal"),
        thresholds=True,
    ),
    Remasking(
        "random",
        "In an order that is drawn when the request begins.",
        begin=every_block(_in_order),
        order="drawn",
        blind=True,
    ),
    Remasking(
        "entropy",
        "The lowest entropy first; distributions are taken after temperature and filters.",
        measure=NEGATIVE_ENTROPY,
        filtered=True,
        timed="by_family",
    ),
    Remasking(
        "topk_margin",
        "The largest margin between the two best tokens first; distributions are taken after temperature and filters.",
        measure=MARGIN,
        filtered=True,
        timed="by_family",
    ),
    Remasking(
        "maskgit_plus",
        "The most probable first; probabilities are taken after temperature and filters.",
        filtered=True,
        timed="by_family",
        thresholds=True,
    ),
    Remasking(
        "origin",
        "Every position with the probability that the time schedule gives to the step.",
        begin=every_block(_by_chance),
        filtered=True,
        timed="always",
        counts="draw",
        blind=True,
    ),
    Remasking("order", "In the request's `order`.", begin=every_block(_in_order), order="given", blind=True),
    Remasking(
        "confidence_threshold",
        "Every position of at least `threshold`, within the step's share of the block (Fast-dLLM's rule for Dream); "
        "under block caches, `maskgit_plus`.",
        begin=_WithinBudget,
        filtered=True,
        counts="rule",
        thresholds=True,
        blockwise="maskgit_plus",
    ),
    Remasking("sequential", "The leftmost first.", kinds=("block_causal",), begin=every_block(_leftmost), blind=True),
    Remasking(
        "entropy_bounded",
        "The lowest entropies, as long as their sum stays below `eb_threshold`.",
        kinds=("block_causal",),
        begin=_begin_entropy_bounded,
        measure=NEGATIVE_ENTROPY,
        counts="rule",
    ),
    Remasking(
        "bound",
        "Those of at least `threshold`; and of at least 0.45, with a factor rule: rank n >= 2 from 1 - 2 / (n + 1) on.",
        kinds=("block_causal",),
        begin=_begin_bound,
        counts="rule",
        thresholds=True,
    ),
    Remasking(
        "cumulative",
        "The most probable first, as long as the product of their probabilities is at least `threshold`.",
        kinds=("block_causal",),
        begin=_begin_cumulative,
        counts="rule",
        thresholds=True,
    ),
    Remasking(
        "joint_threshold",
        "Every mask above `threshold`, and tokens of the block that the model would replace above `edit_threshold` "
        "(LLaDA2.1).",
        kinds=("block_causal",),
        begin=_begin_joint_threshold,
        counts="rule",
        uses_steps=False,
        thresholds=True,
        edits=True,
        settings=("edit_threshold", "max_post_steps", "min_transfer", "penalty_lambda"),
    ),
    Remasking(
        "levenshtein",
        "Every mask above `threshold`, and as many as the schedule says at least; tokens of the block above "
        "`edit_threshold`; and places of the block are deleted and inserted (LLaDA2.2, its default).",
        kinds=("block_causal",),
        thresholds=True,
        edits=True,
        indel=Levenshtein,
        settings=("edit_threshold", "max_post_steps", "max_steps_per_block"),
    ),
    Remasking(
        "joint_threshold_indel",
        "As `levenshtein`, by SGLang's variant of it: one mask at least is filled, and every mask once those that the "
        "block began with are.",
        kinds=("block_causal",),
        counts="rule",
        uses_steps=False,
        thresholds=True,
        edits=True,
        indel=JointThresholdIndel,
        settings=("edit_threshold", "max_post_steps"),
    ),
)
REMASKING: Mapping[str, Remasking] = {rule.name: rule for rule in _RULES}
"""remask's own rules by name, in the order in which errors and documentation list them."""

GROUP = "remask.remasking"
"""The entry-point group by which other packages add rules. Each entry point names an object of type `Remasking`."""


def _validate(plugin: Plugin, value: object) -> Remasking:
    """Return the rule of an entry point. Raises `PluginError` if its `value` is not a rule that packages may add."""
    expected = f"an object of type remask.denoising.rules.Remasking with name={plugin.entry.name!r}"
    if not isinstance(value, Remasking):
        raise plugin.error(f"it provides an object of type {type(value).__name__}", expected)
    if value.name != plugin.entry.name:
        raise plugin.error(f"it provides name={value.name!r}", expected)
    if value.edits or value.order == "given" or not value.kinds or not set(value.kinds) <= {"masked", "block_causal"}:
        raise plugin.error(
            f"it provides a rule with kinds={value.kinds!r}, order={value.order!r}, edits={value.edits!r}",
            "a rule of masked or block-causal models, or both, that edits nothing and takes no order from the request",
        )
    if not isinstance(value.measure, RowMeasure | None):
        raise plugin.error(f"it provides a rule with measure={value.measure!r}", "a remask.plan.RowMeasure, or None")
    if value.config is not None and not is_declared(value.config):
        raise plugin.error(
            f"it provides a rule with config={value.config!r}",
            "a frozen dataclass whose fields are made by remask.checks.fields.declare, or None",
        )
    return value


RULES: Registry[Remasking] = Registry("remasking", GROUP, REMASKING, _validate)
"""Rules by name, other packages' included."""


def names_on(kind: ModelKind) -> tuple[str, ...]:
    """Names of the rules that are defined on models of `kind`. Imports every package that provides one."""
    return tuple(name for name, rule in RULES.usable().items() if kind in rule.kinds)


def check_threshold(rule: Remasking, threshold: float | None) -> None:
    """Raise `ConfigError` if there is a threshold that `rule` does not use."""
    if threshold is not None and not rule.thresholds:
        raise ConfigError(
            f"threshold compares confidences, which remasking {rule.name!r} does not rank by; leave one of them out"
        )


def check_progress(rule: Remasking, chosen: select.Chosen, step: Step, step_count: int) -> select.Chosen:
    """Return `chosen`. Raises `PluginError` if it is empty and the block would never be complete.

    A rule that follows a schedule may choose nothing within the `step_count` steps of the block.
    """
    if not len(chosen) and (rule.counts == "rule" or step.number >= step_count):
        raise PluginError(
            f"remasking {rule.name!r} chose none of {len(step.positions)} open positions in step {step.number} of a "
            f"block of {step_count} steps, so the block would never be complete; correct the rule of "
            f"{RULES.source(rule.name)}, or use another one"
        )
    return chosen
