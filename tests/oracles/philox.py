"""Philox 4x32-10 as its paper states it: Salmon et al., SC 2011, section 3.3. In unsigned arithmetic of NumPy."""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]
WORD = np.uint64(2**32)


def block(counter: tuple[Words, ...], key: tuple[int, int]) -> tuple[Words, ...]:
    """Ten rounds of R, L = mulhi(R, M) xor k xor L, mullo(R, M) on both halves; the key is bumped in between."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = np.uint64(0xD2511F53) * x0, np.uint64(0xCD9E8D57) * x2
        low0, low1 = product0 % WORD, product1 % WORD
        x0, x2 = product1 // WORD ^ x1 ^ np.uint64(k0), product0 // WORD ^ x3 ^ np.uint64(k1)
        x1, x3 = low1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def uniform(seed: int, step: int, rows: list[int], columns: int) -> NDArray[np.float64]:
    """The number of column c in row r: from word c % 4 of counter (c // 4, r, step), its upper 23 bits and a half."""
    c, r = np.meshgrid(np.arange(columns, dtype=np.uint64), np.array(rows, dtype=np.uint64))
    low, high = (np.full(c.shape, word, dtype=np.uint64) for word in (step % 2**32, step // 2**32 % 2**32))
    words = block((c // np.uint64(4), r, low, high), (seed % 2**32, seed // 2**32 % 2**32))
    drawn = np.choose((c % np.uint64(4)).astype(np.int64), words)
    return ((drawn // 512).astype(np.float64) + 0.5) / 2**23
