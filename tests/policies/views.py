"""Random views for tests of policies."""

import numpy as np
from hypothesis import strategies as st

from remask.core.plan import NEVER, Plan, PrefixHit, View

MAX_LAYERS = 6


@st.composite
def views(draw: st.DrawFn, prefix: bool | None = None) -> View:
    """A view of some request in mid-decoding; `prefix` says whether it leases one, None leaves that open."""
    layers = draw(st.integers(1, MAX_LAYERS))
    block_length, blocks = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    prompt = draw(st.integers(1, 6))
    index = draw(st.integers(0, blocks - 1))
    noisy = np.zeros(prompt + blocks * block_length, dtype=np.bool_)
    start = prompt + index * block_length
    noisy[start + block_length :] = True
    bits = draw(st.lists(st.booleans(), min_size=block_length, max_size=block_length))
    noisy[start : start + block_length] = bits
    leased = draw(st.booleans()) if prefix is None else prefix
    hit = PrefixHit(draw(st.integers(1, prompt)), draw(st.integers(1, layers))) if leased else None
    step = draw(st.integers(0, 40))
    block_step = draw(st.integers(0, step))
    settled = np.where(noisy, NEVER, np.where(np.arange(len(noisy)) < prompt, -1, max(0, step - 1))).astype(np.int32)
    block = range(start, start + block_length)
    return View(layers, step, block_step, block, prompt, noisy, settled, hit)


def same(a: Plan, b: Plan) -> bool:
    """Whether two plans compute the same rows in every layer, freeze the same, and predict the same."""
    if a.layers != b.layers or a.predict.tolist() != b.predict.tolist() or a.commit is not None or b.commit is not None:
        return False
    return all(layer_rows(a, layer) == layer_rows(b, layer) for layer in range(a.layers))


def layer_rows(plan: Plan, layer: int) -> tuple[list[bool], list[bool]]:
    """Live rows of a layer, and those among them that are frozen."""
    span = next(span for span in plan.spans if layer in span.layers)
    frozen = np.zeros_like(span.rows) if span.frozen is None else span.frozen
    return span.rows.tolist(), (span.rows & frozen).tolist()
