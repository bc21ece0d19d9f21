"""From hidden states to tokens and confidences: computes logits and scores, and starts their copy to the host."""

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

    The next n rows hold what the `reads` of each request measure (`sampling.score.score`). With a `token_buffer` there
    is one more row: 1 where the device has transferred a position and put its token into the buffer. Rows of
    unconditional canvases are merged into those of the conditional ones. `hidden` [M, D] holds the predicted rows of
    `requests` in order. Logits exist for at most `most` rows at a time: for a few requests, or a part of a large one.
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
    """A request's predicted positions, from which the device chooses."""
    places = [branch.places for branch in running.branches]
    return Candidates(running.transfers, running.positions, running.decoder.block, places)


def _update(group: RowGroup, running: RunningRequest, token_buffer: TokenBuffer, mask_id: int) -> None:
    """Replace tokens in `group` that the host does not know yet by those of the token buffer."""
    if group.noisy is not None:
        places = running.branches[0].places[running.positions]
        group.noisy = group.noisy.on(token_buffer.tokens(send(places, token_buffer.values.device)), mask_id)


@torch.inference_mode()
def score_rows(model: Transformer, hidden: Tensor, groups: Sequence[RowGroup], more: int) -> Tensor:
    """Scores of the rows with final hidden states `hidden` [M, D], float32 [2 + more, rows]; see `score`.

    Every rank computes the logits of its own tokens, and the results are merged.
    """
    per_group = model.arithmetic.invariant
    return score(model.head(hidden), groups, model.config.mask_id, per_group, more, _vocabulary(model))


def _vocabulary(model: Transformer) -> Vocabulary:
    """How to reduce over the columns of the model's logits."""
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
    """Cut `requests` into chunks of at most `most` rows by weight; a chunk of one request may have more.

    Yields the chunk's rows of the pass, its requests, and a group for each, whose rows count from the chunk's first.
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
    """Cut the rows `hidden` [M, D] of a group that weighs more than `most` into pieces."""
    count = group.rows.stop - group.rows.start
    # Pieces of equal size, so that the result depends on the request alone.
    number = min(count, -(-weight(group) // most))
    for start, stop in pairwise(count * piece // number for piece in range(number + 1)):
        part = hidden[start:stop]
        if group.guide is not None:
            part = torch.cat([part, hidden[group.guide][start:stop]])
        yield part, [group.piece(start, stop)]
