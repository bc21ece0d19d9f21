"""Computes tokens and confidences of predicted rows, on the device."""

from collections.abc import Callable, Sequence
from pkgutil import resolve_name

import numpy as np
import torch
from torch import Tensor

from remask.denoising.select import DRAW_WEIGHT
from remask.machine.transfers import send
from remask.plan.hooks import RowMeasure
from remask.sampling.rows import Measured, RowGroup
from remask.sampling.uniform_score import read_noisy
from remask.sampling.vocabulary import WHOLE, Vocabulary


def weight(group: RowGroup) -> int:
    """The memory that the logits of a group and their copies take, in rows that are read greedily."""
    rows: int = group.rows.stop - group.rows.start
    return rows * (1 if group.guide is None else 2) * (1 if _plain(group) else DRAW_WEIGHT)


def score(
    logits: Tensor,
    groups: Sequence[RowGroup],
    mask_id: int,
    per_group: bool = False,
    more: int = 0,
    vocabulary: Vocabulary = WHOLE,
    keep: Callable[[Tensor, RowGroup], None] | None = None,
) -> Tensor:
    """Return token and confidence of every row of `groups`, float32 [2 + more, rows], in order, without guide rows.

    The next `more` rows hold the numbers of each group's readers, in their order, filled up with zeros; `more` is the
    largest count of any group.

    `logits` [M, V], or a rank's columns of them as `vocabulary` says, may be used as scratch. Positions of `groups`
    that draw are sent to the device in one copy, and stay there. The mask token is chosen in free rows alone, but
    counts in the probabilities, as in the originals. With `per_group` each group is read
    by itself, and otherwise all greedy groups together: the last bits of a reduction may depend on the size of the
    whole tensor. Nothing waits for the device. `keep` is called with the logits [rows, V] of each group that has a
    signal, once the sampler and the readers have changed them.
    """
    if not (per_group or more) and _all_plain(groups, len(logits)):
        return vocabulary.greedy(logits, mask_id)
    logits = logits.float()
    _send_positions(groups, logits.device)
    for group in groups:
        _change(logits, group, vocabulary)
        if keep is not None and group.signal is not None:
            keep(logits[group.rows], group)
    measured = {id(group): _measured(logits[group.rows], group, mask_id, vocabulary) for group in groups}
    own = [group for group in groups if per_group or group.free or not _greedy(group)]
    # Free rows are done before the mask is taken out of all others.
    done = {
        id(group): _completed(_read(logits[group.rows], group, mask_id, vocabulary), group, measured[id(group)], more)
        for group in own
    }
    if len(own) < len(groups):
        greedy = vocabulary.greedy(logits, mask_id)
        rest = [group for group in groups if id(group) not in done]
        done |= {id(each): _completed(greedy[:, each.rows], each, measured[id(each)], more) for each in rest}
    read = [done[id(group)] for group in groups]
    return read[0] if len(read) == 1 else torch.cat(read, dim=1)


def _all_plain(groups: Sequence[RowGroup], rows: int) -> bool:
    """Whether `groups` cover `rows` rows in order, and only greedy tokens are read of each."""
    at = 0
    for group in groups:
        if group.rows.start != at or not _plain(group):
            return False
        at = group.rows.stop
    return at == rows


def _plain(group: RowGroup) -> bool:
    """Whether only the greedy token and its probability are read, of unchanged logits."""
    more = group.reads or group.free or group.signal
    return not more and group.guide is None and group.penalty is None and _greedy(group)


def _greedy(group: RowGroup) -> bool:
    """Whether tokens are the most probable ones, and confidences their plain probabilities."""
    plain = group.temperature == 0 and group.measure is None and group.noisy is None
    filters = group.top_k is not None or group.top_p is not None or any(each.filters for each in group.reads)
    filtered = group.basis == "filtered" and filters
    return plain and not filtered and not (group.reads and any(each.bars for each in group.reads))


def _change(logits: Tensor, group: RowGroup, vocabulary: Vocabulary) -> None:
    """Let the sampler and the readers change the rows of a group among `logits` [M, V], in place."""
    rows, guide = logits[group.rows], None if group.guide is None else logits[group.guide]
    for read in group.reads:
        read.see(rows, guide)
    if group.penalty is not None:
        group.penalty.apply(rows, vocabulary)
    for read in group.reads:
        read.change(rows, guide, vocabulary)


def _send_positions(groups: Sequence[RowGroup], device: torch.device) -> None:
    """Send the positions of all `groups` that draw in one copy."""
    drawing = [each for each in groups if each.temperature > 0 and isinstance(each.positions, np.ndarray)]
    if drawing:
        counts = [each.rows.stop - each.rows.start for each in drawing]
        sent = send(np.concatenate([each.positions for each in drawing]), device)
        for group, positions in zip(drawing, torch.split(sent, counts), strict=True):
            group.positions = positions


def _read(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of one request's rows, float32 [2, rows]."""
    if _greedy(group):
        return vocabulary.greedy(logits, None if group.free else mask_id)
    return _sampled(logits, group, mask_id, vocabulary)


def _measured(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> list[Measured]:
    """The measurements of a group's readers, made before a sampler changes `logits` [rows, V]."""
    measures = (read.measure(logits, group, mask_id, vocabulary) for read in group.reads)
    return [measure for measure in measures if measure is not None]


def _completed(read: Tensor, group: RowGroup, measured: Sequence[Measured], more: int) -> Tensor:
    """Return token, confidence and the `measured` numbers of a group, float32 [2 + more, rows]."""
    tokens = chosen = read[0]
    for each in group.reads:
        tokens = each.replace(tokens)
    if tokens is not chosen:
        read = torch.stack((tokens, read[1]))
    if measured:
        ids = tokens.long()
        read = torch.cat([read, *(each(ids) for each in measured)])
    return read if len(read) == 2 + more else torch.nn.functional.pad(read, (0, 0, 0, 2 + more - len(read)))


def _sampled(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of one request's rows, float32 [2, rows]. Does not change `logits`."""
    if group.noisy is not None:
        if any(each.bars for each in group.reads):
            logits = _bar(logits.clone(), group, vocabulary)
        return read_noisy(
            logits,
            group.noisy,
            mask_id,
            group.temperature,
            group.top_k,
            group.top_p,
            group.draws,
            vocabulary,
            lambda tempered: _keep(tempered, group, vocabulary),
        )
    log_probs, _, choice = distributions(logits, group, mask_id, vocabulary)
    tokens = vocabulary.draw(choice, group.draws) if group.temperature > 0 else vocabulary.best(choice)[1]
    return torch.stack((tokens.float(), confidence(log_probs, tokens, group, vocabulary)))


def _bar(choice: Tensor, group: RowGroup, vocabulary: Vocabulary) -> Tensor:
    """`choice` [rows, V] after the readers have excluded tokens."""
    for read in group.reads:
        read.bar(choice, vocabulary)
    return choice


def _keep(choice: Tensor, group: RowGroup, vocabulary: Vocabulary) -> Tensor:
    """`choice` [rows, V] without tokens that the readers find too improbable. Changes no argument."""
    for read in group.reads:
        choice = read.keep(choice, vocabulary)
    return choice


def distributions(
    logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Return what is measured (log-probabilities), and logits to choose by: of all tokens, and filtered; [rows, V].

    The mask token is left out of the latter two but in free rows, and so are barred ones.
    """

    def filtered(logits: Tensor) -> Tensor:
        kept = _keep(logits, group, vocabulary)
        return vocabulary.top_k(vocabulary.top_p(kept, group.top_p), group.top_k)

    tempered = logits / group.temperature if group.temperature > 0 else logits
    measured = {"logits": logits, "tempered": tempered, "filtered": tempered}[group.basis]
    if group.basis == "filtered":
        measured = filtered(measured)
    # The mask is taken out before filtering, or it could be all that a filter leaves.
    choice = tempered.clone()
    if not group.free:
        vocabulary.bar(choice, [mask_id])
    _bar(choice, group, vocabulary)
    return vocabulary.log_softmax(measured), choice, filtered(choice)


def confidence(logprobs: Tensor, tokens: Tensor, group: RowGroup, vocabulary: Vocabulary) -> Tensor:
    """Return how confident rows of log-probabilities are, [rows]: of their `tokens` [rows], or as a whole."""
    if group.measure is None:
        return vocabulary.at(logprobs, tokens).exp()
    return measured(logprobs, group.measure, vocabulary)


def measured(logprobs: Tensor, measure: RowMeasure, vocabulary: Vocabulary) -> Tensor:
    """Return the measure of rows of log-probabilities [rows, V], [rows]."""
    numbers: Tensor = resolve_name(measure.on_device)(logprobs, vocabulary)
    return numbers
