"""Reading greedy rows in one launch. Importing this module needs Triton."""

from contextlib import nullcontext

import torch
import triton
import triton.language as tl
from torch import Tensor

from remask.sampling.vocabulary import Vocabulary

BLOCK = 4096  # logits that a program reads at a time


class TritonVocabulary(Vocabulary):
    """All tokens, with greedy rows read by a kernel: logits are read once, as they are, and no copy is made."""

    def greedy(self, logits: Tensor, mask_id: int) -> Tensor:
        """See `Vocabulary`. Does not change `logits`."""
        rows, size = logits.shape
        out = logits.new_empty((2, rows), dtype=torch.float32)
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
