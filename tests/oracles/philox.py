"""Philox 4x32-10 as its paper states it: Salmon et al., SC 2011, section 3.3. In unsigned arithmetic of NumPy."""

import numpy as np
from numpy.typing import NDArray

Words = NDArray[np.uint64]


def block(counter: tuple[Words, ...], key: tuple[int, int]) -> tuple[Words, ...]:
    """Ten rounds of R, L = mulhi(R, M) xor k xor L, mullo(R, M) on both halves; the key is bumped in between."""
    x0, x1, x2, x3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * x0, 2**32)
        high1, low1 = divmod(0xCD9E8D57 * x2, 2**32)
        x0, x1, x2, x3 = high1 ^ x1 ^ k0, low1, high0 ^ x3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return x0, x1, x2, x3


def uniform(seed: int, step: int, rows: list[int], columns: int) -> NDArray[np.float64]:
    """The number of column c in row r: from word c % 4 of counter (c // 4, r, step), its upper 23 bits and a half."""
    c, r = np.meshgrid(np.arange(columns, dtype=np.uint64), np.array(rows, dtype=np.uint64))
    low, high = (np.full_like(c, word) for word in (step % 2**32, step // 2**32 % 2**32))
    words = block((c // 4, r, low, high), (seed % 2**32, seed // 2**32 % 2**32))
    drawn = np.choose((c % 4).astype(np.int64), words)
    return ((drawn // 512).astype(np.float64) + 0.5) / 2**23
