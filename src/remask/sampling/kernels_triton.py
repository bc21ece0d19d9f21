"""The sampler's kernels: choosing positions, and reading greedy rows, in one launch. Importing this needs Triton."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from remask.sampling.choice import KNOWN, RANKED, RowChoice
from remask.sampling.vocabulary import Vocabulary

LARGEST = 1024  # rows of a request, which one program ranks
AT_ONCE = 16  # rows that all others are compared with at a time


def transfer(choice: RowChoice, scores: Tensor, values: Tensor) -> Tensor:
    """As `RowChoice.transfer`, where no request has more than `LARGEST` rows."""
    answer, count = torch.cat((scores, scores[:1])), scores.shape[1]
    with torch.cuda.device(values.device) if values.is_cuda else nullcontext():
        _transfer[(choice.rules.shape[1],)](
            answer, values, choice.rules, choice.ways, choice.targets, choice.rules.shape[1], count,
            answer.shape[0] - 1, CANVASES=len(choice.targets), **transfer_options(choice.longest),
        )  # fmt: skip
    return answer


def transfer_options(longest: int) -> dict[str, int]:
    """The constants of `_transfer` where no request has more than `longest` rows."""
    rows = max(AT_ONCE, triton.next_power_of_2(longest))
    return {"ROWS": rows, "AT_ONCE": AT_ONCE, "KNOWN": KNOWN, "RANKED": RANKED, "num_warps": max(1, rows // 64)}


# The numbers and the places of arrays change from step to step, and a kernel for each kind of them would be compiled.
@triton.jit(
    do_not_specialize=["requests", "total", "last"], do_not_specialize_on_alignment=["ways", "targets", "rules"]
)
def _transfer(
    answer, values, rules, ways, targets, requests, total, last,
    CANVASES: tl.constexpr, ROWS: tl.constexpr, AT_ONCE: tl.constexpr, KNOWN: tl.constexpr, RANKED: tl.constexpr,
):  # fmt: skip
    """One request. Row `last` of `answer` [last + 1, total] is written; the first two are tokens and confidences."""
    own = rules + tl.program_id(0)
    first, count, least = tl.load(own), tl.load(own + requests), tl.load(own + 2 * requests)
    threshold = tl.load(own + 3 * requests).to(tl.float64, bitcast=True)
    factor = tl.load(own + 4 * requests).to(tl.float64, bitcast=True)
    changes = tl.load(own + 5 * requests)
    row = tl.arange(0, ROWS)
    there = row < count
    at = first + row
    token = tl.load(answer + at, mask=there, other=0.0).to(tl.int64)
    confidence = tl.load(answer + total + at, mask=there, other=0.0)
    confidence = tl.where(confidence == confidence, confidence, float("-inf"))
    way = tl.load(ways + at, mask=there, other=0)
    value = tl.load(values + tl.load(targets + at, mask=there, other=0), mask=there, other=0)
    candidate = (way == RANKED) & ((value & 1) == 1)
    rank = tl.zeros((ROWS,), tl.int32)
    for start in range(0, count, AT_ONCE):
        other = start + tl.arange(0, AT_ONCE)
        known = other < count
        its = tl.load(answer + total + first + other, mask=known, other=0.0)
        its = tl.where(its == its, its, float("-inf"))
        flags = tl.load(values + tl.load(targets + first + other, mask=known, other=0), mask=known, other=0)
        rival = (tl.load(ways + first + other, mask=known, other=0) == RANKED) & ((flags & 1) == 1)
        higher = its[None, :] > confidence[:, None]
        higher = higher | ((its[None, :] == confidence[:, None]) & (other[None, :] < row[:, None]))
        rank += tl.sum((higher & rival[None, :]).to(tl.int32), 1)
    limit = tl.where(factor >= 0, 1 - factor / (rank + 2).to(tl.float64), threshold)
    candidates = tl.sum(candidate.to(tl.int64), 0)
    passed = tl.sum((candidate & (confidence.to(tl.float64) >= limit)).to(tl.int64), 0)
    most = tl.maximum(least, passed)
    most = tl.where((factor >= 0) & (most >= candidates - 1), candidates, most)
    taken = candidate & (rank < most) & ((changes == 0) | ((value >> 1 != token) & (confidence > 0)))
    chosen = there & ((way == KNOWN) | taken)
    tl.store(answer + last * total + at, chosen.to(tl.float32), mask=there)
    tl.debug_barrier()  # all rows have been read before one is written
    for canvas in tl.static_range(CANVASES):
        place = tl.load(targets + canvas * total + at, mask=there, other=0)
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
    """One row: the first of its largest logits but for `barred`, and that one's probability among all tokens."""
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
        shift = tl.where(higher == float("-inf"), 0.0, higher)  # of a row of which only -inf has been seen
        total = total * tl.exp(top - shift) + tl.sum(tl.exp(block - shift), 0)
        top = higher
        block = tl.where(column == barred, float("-inf"), block)
        own = tl.max(block, 0)
        first = tl.min(tl.where(block == own, column, size), 0)
        token = tl.where(own > best, first, token)
        best = tl.maximum(best, own)
    tl.store(out + row, token.to(tl.float32))
    tl.store(out + rows + row, tl.exp(best - (top + tl.log(total))))
