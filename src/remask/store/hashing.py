"""Identity of a shared prefix."""

from collections.abc import Sequence

import numpy as np
import xxhash


def prefix_hash(tokens: Sequence[int], salt: bytes = b"") -> int:
    """xxhash64 (seed 0) of the token ids as little-endian uint32, after `salt`.

    The salt is everything else that K/V depend on: model fingerprint and dtype. Without a salt this is the key of
    the authors (BiCache appendix C).
    """
    return prefix_hashes(tokens, [len(tokens)], salt)[0]


def prefix_hashes(tokens: Sequence[int], lengths: Sequence[int], salt: bytes = b"") -> list[int]:
    """`prefix_hash` of the first `length` tokens, for each of the ascending `lengths`, in one pass over the tokens."""
    ids = np.asarray(tokens, dtype="<u4")
    state = xxhash.xxh64(salt)
    hashes, at = [], 0
    for length in lengths:
        state.update(ids[at:length].tobytes())
        hashes.append(int(state.intdigest()))
        at = length
    return hashes


def salted(salt: bytes, cache_salt: str) -> bytes:
    """`salt` followed by a tenant's salt, unless that is empty. Different tenants' salts give different bytes."""
    own = cache_salt.encode()
    return salt + len(own).to_bytes(8, "little") + own if own else salt
