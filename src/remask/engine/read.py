"""From hidden states to tokens and confidences: the head, the scores, and the one host sync of a step."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.running import RunningRequest
from remask.models.transformer import Transformer
from remask.sampling.logprobs import width
from remask.sampling.score import RowGroup, score
from remask.sending import fetch

MAX_LOGIT_ROWS = 512  # rows of logits held at a time: 512 x 152,064 float32 are 0.3 GB


@torch.inference_mode()
def read_rows(model: Transformer, hidden: Tensor, requests: Sequence[RunningRequest]) -> NDArray[np.float32]:
    """Token and confidence of every predicted position, float32 [2 + n, rows], in the order of `requests`.

    The n rows below them are log-probabilities, where any of the requests asks for some (`sampling.score.score`). Rows
    of unconditional canvases are folded into those of the conditional ones. `hidden` [M, D] holds the predicted rows of
    `requests` in order. Logits exist for whole requests only, and for a few requests at a time.
    """
    scores = []
    more = max((width(each.request.top_logprobs, model.config.vocab) for each in requests), default=0)
    for rows, members in _chunks(requests):
        logits = model.head(hidden[rows])
        for running, group in members:
            running.keep_residual(logits, group)
        groups = [group for _, group in members]
        scores.append(score(logits, groups, model.config.mask_id, model.arithmetic.invariant, more))
    if not scores:
        return np.empty((2 + more, 0), dtype=np.float32)
    # float32 holds token ids exactly: vocabularies are far below 2 ** 24.
    return fetch(torch.cat(scores, dim=1))


def _chunks(requests: Sequence[RunningRequest]) -> Iterator[tuple[slice, list[tuple[RunningRequest, RowGroup]]]]:
    """Requests side by side with at most `MAX_LOGIT_ROWS` rows, or one that has more; rows count from the first."""
    start = at = 0
    members: list[tuple[RunningRequest, RowGroup]] = []
    for running in requests:
        group = running.rows(at - start)
        if group is None:
            continue
        rows = (group.rows.stop - group.rows.start) * (1 if group.guide is None else 2)
        if members and at + rows - start > MAX_LOGIT_ROWS:
            yield slice(start, at), members
            start, members = at, []
            group = running.rows(0)
            assert group is not None
        members.append((running, group))
        at += rows
    if members:
        yield slice(start, at), members
