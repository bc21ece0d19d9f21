"""Random views for tests of policies."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from hypothesis import strategies as st

from remask.plan.plan import NEVER, Plan, PrefixHit, StepFacts, View
from remask.plan.spans import Mask
from remask.policies.bicache import DepthLookup

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
    if a.layers != b.layers or a.predict.tolist() != b.predict.tolist() or not a.transfer is b.transfer is None:
        return False
    return all(layer_rows(a, layer) == layer_rows(b, layer) for layer in range(a.layers))


def layer_rows(plan: Plan, layer: int) -> tuple[list[bool], list[bool]]:
    """Live rows of a layer, and those among them that are frozen."""
    span = next(span for span in plan.spans if layer in span.layers)
    frozen = np.zeros_like(span.rows) if span.frozen is None else span.frozen
    return span.rows.tolist(), (span.rows & frozen).tolist()


@dataclass
class Walk:
    """A request on its way: views step after step, while positions are transferred at random."""

    layers: int = 3
    prompt: int = 4
    block_length: int = 4
    blocks: int = 2
    per_step: int = 1
    shift: int = 0
    ordered: bool = False
    seed: int = 0
    idle: tuple[int, ...] = ()  # steps that transfer nothing

    def __post_init__(self) -> None:
        self.known: list[set[int]] = []  # what was final at the end of each step
        self.moved: list[list[int]] = []  # what each step transferred, in order

    @property
    def length(self) -> int:
        return self.prompt + self.block_length * self.blocks

    def views(self) -> Iterator[View]:
        """The view of every step; the step's transfers happen when the next one is asked for."""
        rng = random.Random(self.seed)
        noisy = np.arange(self.length) >= self.prompt
        settled = np.where(noisy, NEVER, -1).astype(np.int32)
        step = 0
        for start in range(self.prompt, self.length, self.block_length):
            block, block_step = range(start, start + self.block_length), 0
            while noisy[block.start : block.stop].any():
                left = [p for p in block if noisy[p]]
                now = [] if step in self.idle else rng.sample(left, min(self.per_step, len(left)))
                yield View(
                    layers=self.layers,
                    step=step,
                    block_step=block_step,
                    block=block,
                    prompt=self.prompt,
                    noisy=noisy.copy(),
                    settled=settled.copy(),
                    prefix=None,
                    shift=self.shift,
                    decoding=StepFacts(np.array(now, dtype=np.int64) if self.ordered else None),
                )
                noisy[now], settled[now] = False, step
                self.moved.append(now)
                self.known.append({p for p in range(self.length) if not noisy[p]})
                step, block_step = step + 1, block_step + 1


def walks(shift: int = 0, **more: st.SearchStrategy[Any]) -> st.SearchStrategy[Walk]:
    """Requests of any shape; one block on a model with shift, as its own sampler has it."""
    return st.builds(
        Walk,
        prompt=st.integers(1, 5),
        block_length=st.integers(1, 6),
        blocks=st.just(1) if shift else st.integers(1, 3),
        per_step=st.integers(1, 3),
        shift=st.just(shift),
        seed=st.integers(0, 99),
        idle=st.sampled_from([(), (0,), (1, 2), (2, 4)]),
        **more,
    )


def no_table() -> DepthLookup:
    """The depth table of a policy that must not ask for it."""
    raise AssertionError("the depth table was asked for")


def rows_of(plan: Plan) -> set[int]:
    """The rows of a plan that has the same in all layers, none of them frozen, picked or held."""
    (span,) = plan.spans
    assert (span.frozen, span.save, span.pick, span.held) == (None, None, None, None)
    return positions(span.rows)


def positions(mask: Mask) -> set[int]:
    return set(np.flatnonzero(mask).tolist())
