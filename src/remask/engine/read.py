"""From hidden states to tokens and confidences: the head, the scores, and the one host sync of a step."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.job import Job
from remask.models.transformer import Transformer
from remask.sampling.score import RowGroup, score

MAX_LOGIT_ROWS = 512  # rows of logits held at a time: 512 x 152,064 float32 are 0.3 GB


@torch.inference_mode()
def read_rows(model: Transformer, hidden: Tensor, jobs: Sequence[Job]) -> NDArray[np.float32]:
    """Token and confidence of every predicted position, float32 [2, rows], job after job; guide rows are folded in.

    `hidden` [M, D] holds the predicted rows of `jobs` in order. Logits exist for whole requests only, a few at a time.
    """
    scores = []
    for rows, members in _chunks(jobs):
        logits = model.head(hidden[rows])
        for job, group in members:
            job.keep_residual(logits, group)
        scores.append(score(logits, [group for _, group in members], model.config.mask_id))
    if not scores:
        return np.empty((2, 0), dtype=np.float32)
    # float32 holds token ids exactly: vocabularies are far below 2 ** 24.
    return torch.cat(scores, dim=1).cpu().numpy()


def _chunks(jobs: Sequence[Job]) -> Iterator[tuple[slice, list[tuple[Job, RowGroup]]]]:
    """Runs of jobs with at most `MAX_LOGIT_ROWS` rows, or one job that has more, rows counted from the run's first."""
    start = at = 0
    members: list[tuple[Job, RowGroup]] = []
    for job in jobs:
        group = job.rows(at - start)
        if group is None:
            continue
        rows = (group.rows.stop - group.rows.start) * (1 if group.guide is None else 2)
        if members and at + rows - start > MAX_LOGIT_ROWS:
            yield slice(start, at), members
            start, members = at, []
            group = job.rows(0)
            assert group is not None
        members.append((job, group))
        at += rows
    if members:
        yield slice(start, at), members
