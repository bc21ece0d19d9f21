"""Computes tokens and confidences of predicted rows, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.remasking import Measure
from remask.sampling.uniform_score import NoisyRows, read_noisy
from remask.sampling.vocabulary import WHOLE, Vocabulary

Basis: TypeAlias = Literal["logits", "tempered", "filtered"]


@dataclass(frozen=True, slots=True)
class Penalty:
    """What one token of each row loses on its logit before the row is read.

    Attributes:
        tokens: a token id of each row, int64 [rows]; `Penalty.NONE` where the row loses nothing.
        size: what the logit loses.
    """

    NONE: ClassVar[int] = -1

    tokens: NDArray[np.int64]
    size: float

    def apply(self, logits: Tensor, vocabulary: Vocabulary = WHOLE) -> None:
        """Lower `logits` [rows, V] in place."""
        tokens = torch.from_numpy(self.tokens).to(logits.device, non_blocking=True)
        losses = torch.where(tokens == self.NONE, 0.0, self.size).to(logits.dtype)
        vocabulary.lower(logits, tokens.clamp_min(0), losses)


@dataclass(eq=False)
class Guidance:
    """The guidance of a pass, conditional logits minus unconditional ones, for steps that run without the latter.

    Attributes:
        logits: [rows, V], once the pass is scored.
    """

    logits: Tensor | None = None

    def of(self, conditional: Tensor, unconditional: Tensor) -> None:
        """Keep the guidance of a pass. Changes neither argument."""
        self.logits = conditional - unconditional


@dataclass(frozen=True, slots=True)
class Residual:
    """Rows of kept guidance.

    Attributes:
        kept: where they are.
        rows: their numbers there, int64 [rows].
    """

    kept: Guidance
    rows: NDArray[np.int64]

    def logits(self) -> Tensor:
        """[rows, V]"""
        assert self.kept.logits is not None
        return self.kept.logits[torch.from_numpy(self.rows).to(self.kept.logits.device, non_blocking=True)]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of one request among the logits, and how they are turned into tokens and confidences.

    `basis` is the distribution whose `measure` is the confidence: that of the logits as they are, after temperature, or
    after temperature, top-p and top-k. `noisy` rows are those of a uniform model, which have measures of their own.
    A `penalty` lowers logits before all of that.

    With classifier-free guidance, `guide` are the rows of the unconditional canvas for the same positions. Where that
    canvas is not computed in this pass, `residual` is the difference between the conditional and the unconditional
    logits when both were last computed. It comes from `keep` of the pass that computed both.
    """

    rows: slice
    measure: Measure
    basis: Basis
    temperature: float
    top_k: int | None
    top_p: float | None
    seed: int
    guide: slice | None = None
    residual: Residual | None = None
    keep: Guidance | None = None
    cfg_scale: float = 0.0
    noisy: NoisyRows | None = None
    penalty: Penalty | None = None

    @property
    def greedy(self) -> bool:
        """Whether the argmax and its plain probability suffice."""
        plain = self.temperature == 0 and self.measure == "probability" and self.noisy is None
        return plain and not (self.basis == "filtered" and (self.top_k is not None or self.top_p is not None))


def step_seed(seed: int, step: int) -> int:
    """Return the seed of one step of one request, so that its draws depend on nothing else in the batch."""
    return int(np.random.SeedSequence([seed, step]).generate_state(1, np.uint64)[0] >> np.uint64(1))


def score(
    logits: Tensor, groups: Sequence[RowGroup], mask_id: int, apart: bool = False, vocabulary: Vocabulary = WHOLE
) -> Tensor:
    """Return token and confidence of every row of `groups`, float32 [2, rows], in their order, without guide rows.

    `logits` [M, V], or a rank's columns of them as `vocabulary` says, is used as scratch. The mask token is never
    chosen, but counts in the probabilities, as in the originals. With `apart` every group is read on its own, else all
    greedy ones at once: the last bits of what is computed over a whole tensor may depend on its size. Nothing waits for
    the device.
    """
    for group in groups:
        if group.keep is not None and group.guide is not None:
            group.keep.of(logits[group.rows], logits[group.guide])
        if group.penalty is not None:
            group.penalty.apply(logits[group.rows], vocabulary)
        if group.residual is not None:
            logits[group.rows].add_(group.residual.logits(), alpha=group.cfg_scale)
        if group.guide is not None:
            conditional, unconditional = logits[group.rows], logits[group.guide]
            torch.lerp(unconditional, conditional, group.cfg_scale + 1, out=conditional)
    own = [group for group in groups if apart or not group.greedy]
    parts = {id(group): _read(logits[group.rows], group, mask_id, vocabulary) for group in own}
    if len(own) < len(groups):
        greedy = _greedy(logits, mask_id, vocabulary)
        parts |= {id(group): greedy[:, group.rows] for group in groups if id(group) not in parts}
    read = [parts[id(group)] for group in groups]
    return read[0] if len(read) == 1 else torch.cat(read, dim=1)


def _read(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of one request's rows, float32 [2, rows]."""
    return _greedy(logits, mask_id, vocabulary) if group.greedy else _sampled(logits, group, mask_id, vocabulary)


def _greedy(logits: Tensor, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of all rows, float32 [2, M]. Removes the mask token from `logits`."""
    total = vocabulary.logsumexp(logits)
    vocabulary.bar(logits, [mask_id])
    best, tokens = vocabulary.best(logits)
    return torch.stack((tokens.float(), (best - total).exp()))


def _sampled(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of one request's rows, float32 [2, rows]. Does not change `logits`."""
    if group.noisy is not None:
        return read_noisy(
            logits, group.noisy, mask_id, group.temperature, group.top_k, group.top_p, group.seed, vocabulary
        )
    top_k, top_p = vocabulary.top_k, vocabulary.top_p
    tempered = logits / group.temperature if group.temperature > 0 else logits
    measured = {"logits": logits, "tempered": tempered, "filtered": tempered}[group.basis]
    if group.basis == "filtered":
        measured = top_k(top_p(measured, group.top_p), group.top_k)
    measured = vocabulary.log_softmax(measured)
    # The mask is taken out before filtering, or it could be all that a filter leaves.
    choice = tempered.clone()
    vocabulary.bar(choice, [mask_id])
    choice = top_k(top_p(choice, group.top_p), group.top_k)
    tokens = vocabulary.draw(choice, group.seed) if group.temperature > 0 else vocabulary.best(choice)[1]
    if group.measure == "entropy":
        probabilities = measured.exp()
        confidence = vocabulary.sum(probabilities * (probabilities + 1e-10).log())
    elif group.measure == "margin":
        first, second = vocabulary.top(measured, 2).exp().unbind(dim=-1)
        confidence = first - second
    else:
        confidence = vocabulary.at(measured, tokens).exp()
    return torch.stack((tokens.float(), confidence))
