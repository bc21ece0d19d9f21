"""From hidden states to tokens and confidences: the head and the scores, which are then on their way to the host."""

from collections.abc import Iterator, Sequence
from itertools import pairwise

import torch
from torch import Tensor

from remask.engine.running import Reads, RunningRequest
from remask.engine.token_buffer import TokenBuffer
from remask.machine.transfers import Arrival, send
from remask.model.transformer import Transformer
from remask.sampling.choice import Candidates
from remask.sampling.rows import RowGroup
from remask.sampling.score import score, weight
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
    for rows, members, groups in _chunks(requests, reads, most):
        if token_buffer is not None:
            for running, group in zip(members, groups, strict=True):
                _update(group, running, token_buffer, model.config.mask_id)
        whole = len(groups) > 1 or weight(groups[0]) <= most
        for part, pieces in [(hidden[rows], groups)] if whole else _pieces(hidden[rows], groups[0], most):
            scores.append(model.ranks.everywhere(score_rows, model, part, pieces, more))
    # float32 holds token ids exactly: vocabularies are far below 2 ** 24.
    read = torch.cat(scores, dim=1) if scores else hidden.new_empty((2 + more, 0), dtype=torch.float32)
    if token_buffer is not None:
        read = token_buffer.transfer(read, [_candidates(each) for each in requests])
    return Arrival(read)


def _candidates(running: RunningRequest) -> Candidates:
    """What the device may choose from of a request's predicted positions."""
    places = [branch.places for branch in running.branches]
    return Candidates(running.transfers, running.plan.predicted, running.decoder.block, places)


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
    per_group = model.arithmetic.invariant
    return score(model.head(hidden), groups, model.config.mask_id, per_group, more, _vocabulary(model))


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
) -> Iterator[tuple[slice, list[RunningRequest], list[RowGroup]]]:
    """Requests side by side whose rows weigh `most` at most, or one that has more; rows count from the first.

    Yields their rows of the pass, the requests, and a group of rows for each.
    """
    start = at = weighed = 0
    members, groups = list[RunningRequest](), list[RowGroup]()
    for running, own in zip(requests, reads, strict=True):
        group = running.rows(at - start, own)
        if group is None:
            continue
        more = weight(group)
        if members and weighed + more > most:
            yield slice(start, at), members, groups
            start, members, groups, weighed = at, [], [], 0
            group = running.rows(0, own)
            assert group is not None
        members.append(running)
        groups.append(group)
        at = start + (group.rows if group.guide is None else group.guide).stop
        weighed += more
    if members:
        yield slice(start, at), members, groups


def _pieces(hidden: Tensor, group: RowGroup, most: int) -> Iterator[tuple[Tensor, list[RowGroup]]]:
    """The rows `hidden` [M, D] of a group that weighs more than `most`, a few at a time."""
    count = group.rows.stop - group.rows.start
    # Of equal numbers of rows, as far as that goes, so that what is read depends on the request alone.
    number = min(count, -(-weight(group) // most))
    for start, stop in pairwise(count * piece // number for piece in range(number + 1)):
        part = hidden[start:stop]
        if group.guide is not None:
            part = torch.cat([part, hidden[group.guide][start:stop]])
        yield part, [group.piece(start, stop)]
