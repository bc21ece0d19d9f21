"""Computes tokens and confidences of predicted rows, on the device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.core.remasking import Measure
from remask.sampling.constraint import FILTERED, ClassTable
from remask.sampling.filters import Draws, gumbel
from remask.sampling.logprobs import Normalised
from remask.sampling.uniform_score import NoisyRows, read_noisy
from remask.sampling.vocabulary import WHOLE, Vocabulary
from remask.sending import send

Rows = TypeVar("Rows", NDArray[Any] | None, NDArray[np.int64] | Tensor | None)

Basis: TypeAlias = Literal["logits", "tempered", "filtered"]

Extra: TypeAlias = Literal["argmax", "entropy"]
"""One more number of every row: the most probable token that may stand there, or the entropy in nats of the logits as
they are, the mask counted."""


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
        tokens = send(self.tokens, logits.device)
        losses = torch.where(tokens == self.NONE, 0.0, self.size).to(logits.dtype)
        vocabulary.lower(logits, tokens.clamp_min(0), losses)


@dataclass(frozen=True, slots=True)
class Barred:
    """Tokens that are not chosen in some rows. They count in the probabilities, as the mask token does.

    Attributes:
        tokens: the token ids.
        rows: in which rows, bool [rows].
    """

    tokens: tuple[int, ...]
    rows: NDArray[np.bool_]

    def apply(self, logits: Tensor, vocabulary: Vocabulary = WHOLE) -> None:
        """Set their logits to minus infinity, in place; `logits` are [rows, V]."""
        losses = torch.where(send(self.rows, logits.device), torch.inf, 0.0).to(logits.dtype)
        for token in self.tokens:
            vocabulary.lower(logits, torch.full_like(losses, token, dtype=torch.int64), losses)


@dataclass(eq=False)
class Guidance:
    """The guidance of a pass, conditional logits minus unconditional ones, for steps that run without the latter.

    Attributes:
        logits: [rows, V], once the pass is scored.
    """

    logits: Tensor | None = None

    def of(self, conditional: Tensor, unconditional: Tensor) -> None:
        """Keep the guidance of a pass, or of its next rows. Changes neither argument."""
        new = conditional - unconditional
        self.logits = new if self.logits is None else torch.cat([self.logits, new])


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
        return self.kept.logits[send(self.rows, self.kept.logits.device)]


@dataclass(slots=True)  # not frozen, as one is made for each request of each pass
class RowGroup:
    """The rows of one request among the logits, and how they are turned into tokens and confidences.

    What is drawn in a row depends on the request's `seed`, its `step` and the row's position alone. Without `positions`
    rows are numbered.

    `basis` is the distribution whose `measure` is the confidence: that of the logits as they are, after temperature, or
    after temperature, top-p and top-k. `noisy` rows are those of a uniform model, which have measures of their own.
    A `penalty` lowers logits before all of that. `barred` tokens are never chosen.

    `extra` asks for one more number a row.

    `top_logprobs` asks for the log-probability of each row's token and of so many of the most probable ones. `given`
    tokens [rows] take the place of those that the sampler chooses, but for `NOT_GIVEN` ones; confidences stay those of
    what it chose. With `classes` of tokens, the best token of each class is read too (`constraint.Constraint`). With
    `labels` [rows, n], the log-probabilities of these tokens are read too; the mask token must not be among them.

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
    step: int = 0
    positions: NDArray[np.int64] | Tensor | None = None  # a tensor once they are on the device
    guide: slice | None = None
    residual: Residual | None = None
    keep: Guidance | None = None
    cfg_scale: float = 0.0
    noisy: NoisyRows | None = None
    penalty: Penalty | None = None
    extra: Extra | None = None
    barred: Barred | None = None
    top_logprobs: int | None = None
    classes: ClassTable | None = None
    given: NDArray[np.int64] | None = None
    labels: NDArray[np.int64] | None = None

    NOT_GIVEN: ClassVar[int] = -1

    def piece(self, start: int, stop: int) -> "RowGroup":
        """The rows from the one numbered `start` up to `stop` as a group of their own, read as they would be here.

        They come first among its logits, and their guide rows, if any, after them. All pieces are read, in order.
        """

        def cut(values: Rows) -> Rows:
            return None if values is None else values[start:stop]

        count, noisy, residual = stop - start, self.noisy, self.residual
        return replace(
            self,
            rows=slice(0, count),
            guide=None if self.guide is None else slice(count, 2 * count),
            positions=np.arange(start, stop) if self.positions is None else cut(self.positions),
            residual=None if residual is None else replace(residual, rows=residual.rows[start:stop]),
            noisy=None if noisy is None else noisy.piece(start, stop),
            penalty=None if self.penalty is None else replace(self.penalty, tokens=self.penalty.tokens[start:stop]),
            barred=None if self.barred is None else replace(self.barred, rows=self.barred.rows[start:stop]),
            given=cut(self.given),
            labels=cut(self.labels),
        )

    @property
    def draws(self) -> Draws:
        """What draws in these rows depend on."""
        return Draws(self.seed, self.step, self.positions)

    @property
    def plain(self) -> bool:
        """Whether the argmax and its plain probability are all that is read, of logits as they are."""
        changed = self.guide is not None or self.residual is not None
        changed = changed or self.penalty is not None or self.given is not None
        asked = self.extra is not None or self.top_logprobs is not None
        asked = asked or self.labels is not None or self.classes is not None
        return self.greedy and not (changed or asked)

    @property
    def greedy(self) -> bool:
        """Whether the argmax and its plain probability suffice."""
        plain = self.temperature == 0 and self.measure == "probability" and self.noisy is None
        return (
            plain
            and self.barred is None
            and not (self.basis == "filtered" and (self.top_k is not None or self.top_p is not None))
        )


def _cover(groups: Sequence[RowGroup], rows: int) -> bool:
    """Whether `groups` are all of `rows` rows, in their order."""
    at = 0
    for group in groups:
        if group.rows.start != at:
            return False
        at = group.rows.stop
    return at == rows


def score(
    logits: Tensor,
    groups: Sequence[RowGroup],
    mask_id: int,
    apart: bool = False,
    more: int = 0,
    vocabulary: Vocabulary = WHOLE,
) -> Tensor:
    """Return token and confidence of every row of `groups`, float32 [2 + more, rows], in order, without guide rows.

    Below them stand what else groups ask for, in this order: the extra number of each row, log-probabilities
    (`logprobs.Normalised.of`), those of labels, the best tokens of classes. Zeros fill up what a group does not ask
    for; `more` is the largest number that a group needs.

    `logits` [M, V], or a rank's columns of them as `vocabulary` says, may be used as scratch. Positions of `groups`
    that draw are sent to the device in one copy, and stay there. The mask token is never chosen, but counts in the
    probabilities, as in the originals. With `apart` every group is read on its own, else all greedy ones at once: the
    last bits of what is computed over a whole tensor may depend on its size. Nothing waits for the device.
    """
    if not (apart or more) and all(group.plain for group in groups) and _cover(groups, len(logits)):
        return vocabulary.greedy(logits, mask_id)
    logits = logits.float()
    _send_positions(groups, logits.device)
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
    asked = {id(group): _Asked(logits[group.rows], group, mask_id, vocabulary) for group in groups}
    own = [group for group in groups if apart or not group.greedy]
    parts = {id(group): _read(logits[group.rows], group, mask_id, vocabulary) for group in own}
    if len(own) < len(groups):
        greedy = vocabulary.greedy(logits, mask_id)
        parts |= {id(group): greedy[:, group.rows] for group in groups if id(group) not in parts}
    read = [_completed(parts[id(group)], group, asked[id(group)], more) for group in groups]
    return read[0] if len(read) == 1 else torch.cat(read, dim=1)


def _send_positions(groups: Sequence[RowGroup], device: torch.device) -> None:
    """Send what draws depend on in one copy for all `groups` that draw."""
    drawing = [each for each in groups if each.temperature > 0 and isinstance(each.positions, np.ndarray)]
    if drawing:
        counts = [each.rows.stop - each.rows.start for each in drawing]
        sent = send(np.concatenate([each.positions for each in drawing]), device)
        for group, positions in zip(drawing, torch.split(sent, counts), strict=True):
            group.positions = positions


def _read(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of one request's rows, float32 [2, rows]."""
    return vocabulary.greedy(logits, mask_id) if group.greedy else _sampled(logits, group, mask_id, vocabulary)


class _Asked:
    """What a group asks for beside token and confidence: found before a sampler changes `logits` [rows, V]."""

    def __init__(self, logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> None:
        top, labels = group.top_logprobs, group.labels
        self._extra = None if group.extra is None else _extra(logits, group, mask_id, vocabulary)[None]
        self._logprobs = None if top is None else Normalised(logits, top, mask_id, vocabulary)
        self._labels = None
        if labels is not None:
            self._labels = Normalised(logits, 0, mask_id, vocabulary).each(send(labels, logits.device))
        self._by_class = None if group.classes is None else _by_class(logits, group, mask_id)

    def of(self, tokens: Tensor) -> list[Tensor]:
        """Return the rows that stand below those of `tokens` and confidences, float32 [any, rows] each."""
        logprobs = None if self._logprobs is None else self._logprobs.of(tokens.long())
        return [each for each in (self._extra, logprobs, self._labels, self._by_class) if each is not None]


def _completed(read: Tensor, group: RowGroup, asked: _Asked, more: int) -> Tensor:
    """Return token (or the given one), confidence and what else is asked of a group, float32 [2 + more, rows]."""
    if group.given is not None:
        given = send(group.given, read.device)
        read = torch.stack((torch.where(given == group.NOT_GIVEN, read[0], given.float()), read[1]))
    below = asked.of(read[0])
    if below:
        read = torch.cat([read, *below])
    return read if len(read) == 2 + more else torch.nn.functional.pad(read, (0, 0, 0, 2 + more - len(read)))


def _sampled(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of one request's rows, float32 [2, rows]. Does not change `logits`."""
    if group.noisy is not None:
        if group.barred is not None:
            logits = logits.clone()
            group.barred.apply(logits, vocabulary)
        return read_noisy(
            logits, group.noisy, mask_id, group.temperature, group.top_k, group.top_p, group.draws, vocabulary
        )
    measured, _, choice = _distributions(logits, group, mask_id, vocabulary)
    tokens = vocabulary.draw(choice, group.draws) if group.temperature > 0 else vocabulary.best(choice)[1]
    return torch.stack((tokens.float(), _confidence(measured, tokens, group, vocabulary)))


def _extra(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return the extra number of every row, float32 [rows]. Does not change `logits`."""
    if group.extra == "entropy":
        logs = vocabulary.log_softmax(logits)
        chances = logs.exp()
        return -vocabulary.sum(torch.where(chances > 0, chances * logs, 0.0)).float()
    allowed = logits.clone()
    vocabulary.bar(allowed, [mask_id])
    if group.noisy is not None and group.noisy.banned and group.noisy.banned_rows:
        vocabulary.bar(allowed[: group.noisy.banned_rows], group.noisy.banned)
    return vocabulary.best(allowed)[1].float()


def _by_class(logits: Tensor, group: RowGroup, mask_id: int) -> Tensor:
    """Return score, token, confidence and log-probability of the best token of each class, float32 [4 C, rows]."""
    assert group.classes is not None
    measured, every, kept = _distributions(logits, group, mask_id, WHOLE)
    noise = gumbel(kept, group.draws) if group.temperature > 0 else 0.0
    scores, tokens = group.classes.best(torch.where(kept > -torch.inf, kept, every - FILTERED) + noise)
    if group.measure == "probability":
        confidence = measured.gather(1, tokens).exp()
    else:  # which is of the row as a whole
        confidence = _confidence(measured, tokens[:, 0], group, WHOLE)[:, None].expand_as(scores)
    logprobs = logits.log_softmax(dim=-1).gather(1, tokens)
    return torch.cat([each.T.float() for each in (scores, tokens, confidence, logprobs)])


def _distributions(
    logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is measured (log-probabilities), and logits to choose by: of all tokens, and filtered; [rows, V].

    The mask token is left out of the latter two, and so are barred ones.
    """
    top_k, top_p = vocabulary.top_k, vocabulary.top_p
    tempered = logits / group.temperature if group.temperature > 0 else logits
    measured = {"logits": logits, "tempered": tempered, "filtered": tempered}[group.basis]
    if group.basis == "filtered":
        measured = top_k(top_p(measured, group.top_p), group.top_k)
    # The mask is taken out before filtering, or it could be all that a filter leaves.
    choice = tempered.clone()
    vocabulary.bar(choice, [mask_id])
    if group.barred is not None:
        group.barred.apply(choice, vocabulary)
    return vocabulary.log_softmax(measured), choice, top_k(top_p(choice, group.top_p), group.top_k)


def _confidence(measured: Tensor, tokens: Tensor, group: RowGroup, vocabulary: Vocabulary) -> Tensor:
    """Return how confident rows of log-probabilities are, [rows]: of their `tokens` [rows], or as a whole."""
    if group.measure == "entropy":
        probabilities = measured.exp()
        return vocabulary.sum(probabilities * (probabilities + 1e-10).log())
    if group.measure == "margin":
        first, second = vocabulary.top(measured, 2)[0].exp().unbind(dim=-1)
        return first - second
    return vocabulary.at(measured, tokens).exp()
