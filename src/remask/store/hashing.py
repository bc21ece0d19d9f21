"""Identity of a shared prefix."""

from collections.abc import Sequence

import numpy as np
import xxhash


def prefix_hash(tokens: Sequence[int], salt: bytes = b"") -> int:
    """xxhash64 (seed 0) of the token ids as little-endian uint32, after `salt`.

    The salt carries what else K/V depend on: model fingerprint and dtype. Without one this is the authors' key
    (BiCache appendix C).
    """
    return int(xxhash.xxh64_intdigest(salt + np.asarray(tokens, dtype="<u4").tobytes()))


def salted(salt: bytes, cache_salt: str) -> bytes:
    """`salt` with a tenant's own behind it; as it is for an empty one. No two tenants' salts give the same bytes."""
    own = cache_salt.encode()
    return salt + len(own).to_bytes(8, "little") + own if own else salt
