"""From hidden states to tokens and confidences: the head and the scores, which are then on their way to the host."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from remask.engine.capacity import DRAWN
from remask.engine.running import Reads, RunningRequest
from remask.engine.token_buffer import TokenBuffer
from remask.machine.transfers import Arrival, send
from remask.model.transformer import Transformer
from remask.sampling.rows import RowGroup
from remask.sampling.score import score
from remask.sampling.vocabulary import WHOLE, SplitVocabulary, Vocabulary


@torch.inference_mode()
def read_rows(
    model: Transformer,
    hidden: Tensor,
    requests: Sequence[RunningRequest],
    reads: Sequence[Reads],
    most: int,
    token_buffer: TokenBuffer | None = None,
) -> Arrival:
    """Token and confidence of every predicted position, float32 [2 + n, rows], in the order of `requests`.

    The n rows below them are what the `reads` of each request measure (`sampling.score.score`). With a `token_buffer`
    there is one row more, which is 1 where the device has transferred a position: the buffer has its token then. Rows
    of unconditional canvases are folded into those of the conditional ones. `hidden` [M, D] holds the predicted rows of
    `requests` in order. Logits exist for a few requests at a time, of `most` rows together at most, and of one that
    has more for a part of these.
    """
    scores = []
    more = max(sum(read.width for _, read in own) for own in reads) if any(reads) else 0
    for rows, members in _chunks(requests, reads, most):
        groups = [group for _, group in members]
        if token_buffer is not None:
            for running, group in members:
                _update(group, running, token_buffer, model.config.mask_id)
        for part, pieces in _pieces(hidden[rows], groups, most):
            scores.append(model.ranks.everywhere(score_rows, model, part, pieces, more))
    # float32 holds token ids exactly: vocabularies are far below 2 ** 24.
    read = torch.cat(scores, dim=1) if scores else hidden.new_empty((2 + more, 0), dtype=torch.float32)
    if token_buffer is not None:
        read = token_buffer.transfer(read, [each.candidates for each in requests])
    return Arrival(read)


def _update(group: RowGroup, running: RunningRequest, token_buffer: TokenBuffer, mask_id: int) -> None:
    """Put the tokens that stand in the token buffer into `group`, where the host does not know them yet."""
    if group.noisy is not None:
        places = running.branches[0].places[running.plan.predicted]
        group.noisy = group.noisy.on(token_buffer.tokens(send(places, token_buffer.values.device)), mask_id)


@torch.inference_mode()
def score_rows(model: Transformer, hidden: Tensor, groups: Sequence[RowGroup], more: int) -> Tensor:
    """What `score` returns for the rows whose final hidden states are `hidden` [M, D], float32 [2 + more, rows].

    Every rank reads the logits of its own tokens, and what they come to is merged.
    """
    apart = model.arithmetic.invariant
    return score(model.head(hidden), groups, model.config.mask_id, apart, more, _vocabulary(model))


def _vocabulary(model: Transformer) -> Vocabulary:
    """How the columns of the model's logits are read."""
    ranks, total = model.ranks, model.config.vocab
    if ranks.several:
        return SplitVocabulary(ranks.shard.share(total), total, ranks.gather)
    if model.kernels is None:
        return WHOLE
    from remask.sampling.vocabulary_triton import TritonVocabulary

    return TritonVocabulary()


def _chunks(
    requests: Sequence[RunningRequest], reads: Sequence[Reads], most: int
) -> Iterator[tuple[slice, list[tuple[RunningRequest, RowGroup]]]]:
    """Requests side by side whose rows weigh `most` at most, or one that has more; rows count from the first."""
    start = at = weight = 0
    members: list[tuple[RunningRequest, RowGroup]] = []
    for running, own in zip(requests, reads, strict=True):
        group = running.rows(at - start, own)
        if group is None:
            continue
        rows, more = _rows(group), _weight(group)
        if members and weight + more > most:
            yield slice(start, at), members
            start, members, weight = at, [], 0
            group = running.rows(0, own)
            assert group is not None
        members.append((running, group))
        at, weight = at + rows, weight + more
    if members:
        yield slice(start, at), members


def _pieces(hidden: Tensor, groups: Sequence[RowGroup], most: int) -> Iterator[tuple[Tensor, Sequence[RowGroup]]]:
    """The rows `hidden` [M, D] of `groups`; those of a single group that weighs more than `most` a few at a time."""
    group = groups[0]
    weight, count = _weight(group), group.rows.stop - group.rows.start
    if len(groups) > 1 or weight <= most:
        yield hidden, groups
        return
    # Of equal numbers of rows, as far as that goes, so that what is read depends on the request alone.
    number = min(count, -(-weight // most))
    for start, stop in pairwise(count * piece // number for piece in range(number + 1)):
        part = hidden[start:stop]
        if group.guide is not None:
            part = torch.cat([part, hidden[group.guide][start:stop]])
        yield part, [group.piece(start, stop)]


def _rows(group: RowGroup) -> int:
    """Rows of the logits that it reads."""
    rows: int = group.rows.stop - group.rows.start
    return rows * (1 if group.guide is None else 2)


def _weight(group: RowGroup) -> int:
    """As how many rows its logits count: those that are not read greedily take more memory."""
    return _rows(group) * (1 if group.plain else DRAWN)
