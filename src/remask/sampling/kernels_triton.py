"""The sampler's kernels: choosing positions, and reading greedy rows, in one launch. Importing this needs Triton."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from remask.sampling.choice import KNOWN, RANKED, RowChoice
from remask.sampling.vocabulary import Vocabulary

MAX_ROWS = 1024  # rows of a request, which one program ranks
RIVALS = 16  # rows that all rows are compared with at a time


def transfer(choice: RowChoice, scores: Tensor, values: Tensor) -> Tensor:
    """Do what `RowChoice.transfer` does, in one launch. No request may have more than `MAX_ROWS` rows."""
    answer = torch.cat((scores, scores[:1]))
    count = scores.shape[1]
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        _transfer[(choice.rules.shape[1],)](
            answer, values, choice.rules, choice.kinds, choice.targets, choice.rules.shape[1], count,
            answer.shape[0] - 1, CANVASES=len(choice.targets), **transfer_options(choice.max_rows),
        )  # fmt: skip
    return answer


def transfer_options(max_rows: int) -> dict[str, int]:
    """The constants of `_transfer` for requests of at most `max_rows` rows."""
    rows = max(RIVALS, triton.next_power_of_2(max_rows))
    return {"ROWS": rows, "RIVALS": RIVALS, "KNOWN": KNOWN, "RANKED": RANKED, "num_warps": max(1, rows // 64)}


# Sizes and alignments of arrays change from step to step, and Triton would compile a kernel for each kind of them.
@triton.jit(
    do_not_specialize=["requests", "total", "last"], do_not_specialize_on_alignment=["kinds", "targets", "rules"]
)
def _transfer(
    answer, values, rules, kinds, targets, requests, total, last,
    CANVASES: tl.constexpr, ROWS: tl.constexpr, RIVALS: tl.constexpr, KNOWN: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """One request. Row `last` of `answer` [last + 1, total] is written; the first two are tokens and confidences."""
    rule = rules + tl.program_id(0)
    first = tl.load(rule)
    count = tl.load(rule + requests)
    least = tl.load(rule + 2 * requests)
    threshold = tl.load(rule + 3 * requests).to(tl.float64, bitcast=True)
    factor = tl.load(rule + 4 * requests).to(tl.float64, bitcast=True)
    changes = tl.load(rule + 5 * requests)
    row = tl.arange(0, ROWS)
    valid = row < count
    index = first + row
    token = tl.load(answer + index, mask=valid, other=0.0).to(tl.int64)
    confidence = tl.load(answer + total + index, mask=valid, other=0.0)
    confidence = tl.where(confidence == confidence, confidence, float("-inf"))
    kind = tl.load(kinds + index, mask=valid, other=0)
    value = tl.load(values + tl.load(targets + index, mask=valid, other=0), mask=valid, other=0)
    candidate = (kind == RANKED) & ((value & 1) == 1)
    rank = tl.zeros((ROWS,), tl.int32)
    for start in range(0, count, RIVALS):
        other = start + tl.arange(0, RIVALS)
        rival_valid = other < count
        rival_confidence = tl.load(answer + total + first + other, mask=rival_valid, other=0.0)
        rival_confidence = tl.where(rival_confidence == rival_confidence, rival_confidence, float("-inf"))
        flags = tl.load(values + tl.load(targets + first + other, mask=rival_valid, other=0), mask=rival_valid, other=0)
        rival = (tl.load(kinds + first + other, mask=rival_valid, other=0) == RANKED) & ((flags & 1) == 1)
        higher = rival_confidence[None, :] > confidence[:, None]
        higher = higher | ((rival_confidence[None, :] == confidence[:, None]) & (other[None, :] < row[:, None]))
        rank += tl.sum((higher & rival[None, :]).to(tl.int32), 1)
    limit = tl.where(factor >= 0, 1 - factor / (rank + 2).to(tl.float64), threshold)
    candidates = tl.sum(candidate.to(tl.int64), 0)
    passed = tl.sum((candidate & (confidence.to(tl.float64) >= limit)).to(tl.int64), 0)
    chosen_count = tl.maximum(least, passed)
    chosen_count = tl.where((factor >= 0) & (chosen_count >= candidates - 1), candidates, chosen_count)
    ranked = candidate & (rank < chosen_count) & ((changes == 0) | ((value >> 1 != token) & (confidence > 0)))
    chosen = valid & ((kind == KNOWN) | ranked)
    tl.store(answer + last * total + index, chosen.to(tl.float32), mask=valid)
    tl.debug_barrier()  # all rows have been read before one is written
    for canvas in tl.static_range(CANVASES):
        place = tl.load(targets + canvas * total + index, mask=valid, other=0)
        tl.store(values + place, 2 * token + changes, mask=chosen)


BLOCK = 4096  # logits that a program reads at a time


class TritonVocabulary(Vocabulary):
    """All tokens, with greedy rows read by a kernel: logits are read once, as they are, and no copy is made."""

    def greedy(self, logits: Tensor, mask_id: int | None) -> Tensor:
        """See `Vocabulary`. Does not change `logits`."""
        rows, size = logits.shape
        out = logits.new_empty((2, rows), dtype=torch.float32)
        mask_id = -1 if mask_id is None else mask_id
        if rows:
            with torch.cuda.device(logits.device) if logits.is_cuda else nullcontext():
                _greedy[(rows,)](logits, out, rows, size, mask_id, logits.stride(0), BLOCK=BLOCK, enable_fp_fusion=True)
        return out


@triton.jit
def _greedy(logits, out, rows, size, barred, stride, BLOCK: tl.constexpr):
    """One row: its token of the largest logit, `barred` excluded, and that token's probability among all tokens."""
    row = tl.program_id(0)
    x = logits + row.to(tl.int64) * stride
    top = tl.full((), float("-inf"), tl.float32)
    best = tl.full((), float("-inf"), tl.float32)
    total = tl.zeros((), tl.float32)
    token = tl.zeros((), tl.int32)
    for start in range(0, size, BLOCK):
        column = start + tl.arange(0, BLOCK)
        block = tl.load(x + column, mask=column < size, other=float("-inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(block, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # if all logits so far are -inf
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(block - shift), 0)
        top = higher
        block = tl.where(column == barred, float("-inf"), block)
        block_best = tl.max(block, 0)
        first = tl.min(tl.where(block == block_best, column, size), 0)
        token = tl.where(block_best > best, first, token)
        best = tl.maximum(best, block_best)
    tl.store(out + row, token.to(tl.float32))
    tl.store(out + rows + row, tl.exp(best - (top + tl.log(total))))
