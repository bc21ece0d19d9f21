"""Computes tokens and confidences of predicted rows, on the device."""

from collections.abc import Callable, Sequence
from pkgutil import resolve_name

import numpy as np
import torch
from torch import Tensor

from remask.denoising.select import DRAW_WEIGHT
from remask.machine.transfers import send
from remask.plan.hooks import RowMeasure
from remask.sampling.rows import NumberFunction, RowGroup
from remask.sampling.uniform_score import read_noisy
from remask.sampling.vocabulary import WHOLE, Vocabulary


def greedy_rows(group: RowGroup) -> int:
    """Return the memory of a group's logits and their copies, in rows that are read greedily."""
    row_count: int = group.rows.stop - group.rows.start
    return row_count * (1 if group.guide is None else 2) * (1 if _is_plain(group) else DRAW_WEIGHT)


def score(
    logits: Tensor,
    groups: Sequence[RowGroup],
    mask_id: int,
    per_group: bool = False,
    width: int = 0,
    vocabulary: Vocabulary = WHOLE,
    store_signal: Callable[[Tensor, RowGroup], None] | None = None,
) -> Tensor:
    """Return token and confidence of every row of `groups`, float32 [2 + width, rows], in order, without guide rows.

    The last `width` numbers of a row are those of its group's readers, in their order, filled up with zeros; `width` is
    the largest count of any group.

    `logits` [M, V], or a rank's columns of them by its `vocabulary`, may be overwritten. The positions of `groups` that
    draw are sent to the device in one copy, and replaced in the groups. The mask token is chosen in free rows alone,
    but counts in the probabilities, as in the original samplers. With `per_group` each group is read separately, else
    all greedy groups together, which may change the last bits of sums. `store_signal` is called with the logits
    [rows, V] of each group that has a signal, as the sampler and the readers have changed them. The host does not wait.
    """
    if not (per_group or width) and _are_all_plain(groups, len(logits)):
        return vocabulary.greedy(logits, mask_id)
    logits = logits.float()
    _send_positions(groups, logits.device)
    for group in groups:
        _apply_changes(logits, group, vocabulary)
        if store_signal is not None and group.signal is not None:
            store_signal(logits[group.rows], group)
    measures = {id(group): _collect_measures(logits[group.rows], group, mask_id, vocabulary) for group in groups}
    results: dict[int, Tensor] = {}
    # Free rows are read before the mask token is excluded from all others.
    for group in groups:
        if per_group or group.free or not _needs_no_sampling(group):
            rows = _read(logits[group.rows], group, mask_id, vocabulary)
            results[id(group)] = _complete_rows(rows, group, measures[id(group)], width)
    if len(results) < len(groups):
        greedy = vocabulary.greedy(logits, mask_id)
        for group in groups:
            if id(group) not in results:
                rows = greedy[:, group.rows]
                results[id(group)] = _complete_rows(rows, group, measures[id(group)], width)
    tensors = [results[id(group)] for group in groups]
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors, dim=1)


def _are_all_plain(groups: Sequence[RowGroup], row_count: int) -> bool:
    """Whether `groups` cover all of `row_count` rows in order, and only greedy tokens are read of each."""
    row = 0
    for group in groups:
        if group.rows.start != row or not _is_plain(group):
            return False
        row = group.rows.stop
    return row == row_count


def _is_plain(group: RowGroup) -> bool:
    """Whether only the greedy token and its probability are read, of unchanged logits."""
    if group.reads or group.free or group.signal is not None:
        return False
    return group.guide is None and group.penalty is None and _needs_no_sampling(group)


def _needs_no_sampling(group: RowGroup) -> bool:
    """Whether tokens are the most probable ones, and confidences their plain probabilities."""
    if group.temperature != 0 or group.row_measure is not None or group.noisy is not None:
        return False
    has_limits = group.top_k is not None or group.top_p is not None
    if group.basis == "filtered" and (has_limits or any(read.filters for read in group.reads)):
        return False
    return not any(read.bars for read in group.reads)


def _apply_changes(logits: Tensor, group: RowGroup, vocabulary: Vocabulary) -> None:
    """Let the sampler and the readers change the rows of a group among `logits` [M, V], in place."""
    rows = logits[group.rows]
    guide = None if group.guide is None else logits[group.guide]
    for read in group.reads:
        read.see(rows, guide)
    if group.penalty is not None:
        group.penalty.apply(rows, vocabulary)
    for read in group.reads:
        read.change(rows, guide, vocabulary)


def _send_positions(groups: Sequence[RowGroup], device: torch.device) -> None:
    """Send the positions of all `groups` that draw to the device in one copy, and replace them in the groups."""
    drawing = [group for group in groups if group.temperature > 0 and isinstance(group.positions, np.ndarray)]
    if drawing:
        counts = [group.rows.stop - group.rows.start for group in drawing]
        positions = send(np.concatenate([group.positions for group in drawing]), device)
        for group, group_positions in zip(drawing, torch.split(positions, counts), strict=True):
            group.positions = group_positions


def _read(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of one request's rows, float32 [2, rows]."""
    if _needs_no_sampling(group):
        return vocabulary.greedy(logits, None if group.free else mask_id)
    return _sample(logits, group, mask_id, vocabulary)


def _collect_measures(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> list[NumberFunction]:
    """Return the readers' functions from tokens to numbers, made before a sampler changes `logits` [rows, V]."""
    measures = (read.measure(logits, group, mask_id, vocabulary) for read in group.reads)
    return [measure for measure in measures if measure is not None]


def _complete_rows(rows: Tensor, group: RowGroup, measures: Sequence[NumberFunction], width: int) -> Tensor:
    """Return token, confidence and the readers' numbers of a group's rows, float32 [2 + width, rows]."""
    sampled = rows[0]
    tokens = sampled
    for read in group.reads:
        tokens = read.replace(tokens)
    if tokens is not sampled:
        rows = torch.stack((tokens, rows[1]))
    if measures:
        token_ids = tokens.long()
        rows = torch.cat([rows, *(measure(token_ids) for measure in measures)])
    missing = 2 + width - len(rows)
    return torch.nn.functional.pad(rows, (0, 0, 0, missing)) if missing else rows


def _sample(logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary) -> Tensor:
    """Return token and confidence of one request's rows, float32 [2, rows]. Does not change `logits`."""
    if group.noisy is not None:
        if any(read.bars for read in group.reads):
            logits = _apply_bars(logits.clone(), group, vocabulary)
        return read_noisy(
            logits,
            group.noisy,
            mask_id,
            temperature=group.temperature,
            top_k=group.top_k,
            top_p=group.top_p,
            draws=group.draws,
            vocabulary=vocabulary,
            apply_filters=lambda tempered: _apply_filters(tempered, group, vocabulary),
        )
    logprobs, _, choice = distributions(logits, group, mask_id, vocabulary)
    tokens = vocabulary.draw(choice, group.draws) if group.temperature > 0 else vocabulary.best(choice)[1]
    return torch.stack((tokens.float(), confidence(logprobs, tokens, group, vocabulary)))


def _apply_bars(choice: Tensor, group: RowGroup, vocabulary: Vocabulary) -> Tensor:
    """Return `choice` [rows, V] after the readers have excluded tokens from it, in place."""
    for read in group.reads:
        read.bar(choice, vocabulary)
    return choice


def _apply_filters(choice: Tensor, group: RowGroup, vocabulary: Vocabulary) -> Tensor:
    """Return `choice` [rows, V] without the tokens that the readers filter out. Changes no argument."""
    for read in group.reads:
        choice = read.keep(choice, vocabulary)
    return choice


def distributions(
    logits: Tensor, group: RowGroup, mask_id: int, vocabulary: Vocabulary
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities for confidences, and logits to choose by, unfiltered and filtered; [rows, V] each.

    In the logits to choose by, barred tokens have -inf, and so has the mask token except in free rows.
    """

    def apply_all_filters(logits: Tensor) -> Tensor:
        remaining = _apply_filters(logits, group, vocabulary)
        return vocabulary.top_k(vocabulary.top_p(remaining, group.top_p), group.top_k)

    tempered = logits / group.temperature if group.temperature > 0 else logits
    basis = logits if group.basis == "logits" else tempered
    if group.basis == "filtered":
        basis = apply_all_filters(basis)
    # The mask is excluded before filtering, or it could be the only token that a filter leaves.
    choice = tempered.clone()
    if not group.free:
        vocabulary.bar(choice, [mask_id])
    _apply_bars(choice, group, vocabulary)
    return vocabulary.log_softmax(basis), choice, apply_all_filters(choice)


def confidence(logprobs: Tensor, tokens: Tensor, group: RowGroup, vocabulary: Vocabulary) -> Tensor:
    """Return the confidence of rows, [rows]: the group's measure of `logprobs` [rows, V], or their probability."""
    if group.row_measure is None:
        return vocabulary.at(logprobs, tokens).exp()
    return apply_measure(logprobs, group.row_measure, vocabulary)


def apply_measure(logprobs: Tensor, measure: RowMeasure, vocabulary: Vocabulary) -> Tensor:
    """Return the `measure` of rows of `logprobs` [rows, V], [rows]."""
    confidences: Tensor = resolve_name(measure.on_device)(logprobs, vocabulary)
    return confidences
