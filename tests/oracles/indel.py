"""Decoding that deletes and inserts (LLaDA2.2), by lists of places: every pass recomputes the whole sequence.

A place is a list of its token and whether the block began with it as a mask. Escapes take the least sure place.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.oracles.block_causal import trimmed
from tests.oracles.experts import Llada2Model

DELETE, INSERT = 125, 126
Probabilities = Callable[[list[int]], Tensor]
"""Of the tokens of a block behind the prompt: the probabilities of each place, [n, V]."""


@dataclass
class Pass:
    """What a pass wrote, place by place within the block, and the block behind the prompt after it."""

    fills: dict[int, int]
    edits: dict[int, int]
    after: list[int]


@dataclass
class Run:
    """The answer, and the passes of each block."""

    tokens: list[int]
    blocks: list[list[Pass]] = field(default_factory=list)


def best(row: Tensor, *barred: int) -> int:
    """The first of the most probable tokens that are not `barred`."""
    left = row.clone()
    left[list(barred)] = -1
    return int(left.argmax())


def carried_out(new: Sequence[int], old: Sequence[list[Any]], mask: int) -> list[list[Any]]:
    """The places once DELETE and INSERT have been consumed in one scan."""
    out: list[list[Any]] = []
    for token, (before, began) in zip(new, old, strict=True):
        if token == INSERT:
            out += [[mask, False], [before, began]]
        elif token != DELETE:
            out.append([token, began])
    return (out + [[mask, False] for _ in new])[: len(new)]


def decode_block(places: int, mask: int, sampling: Mapping[str, Any], probabilities: Probabilities) -> list[Pass]:
    """The passes of a block of `places` masks. Ends where it is stable, or its budget is spent."""
    authors = sampling["rule"] == "levenshtein"
    block: list[list[Any]] = [[mask, True] for _ in range(places)]
    steps, most = sampling["steps"], sampling["max_post_steps"]
    post, seen, passes = 0, list[list[int]](), list[Pass]()
    ever: list[set[int]] = [set() for _ in block]
    while True:
        old = [token for token, _ in block]
        masked = [i for i in range(places) if old[i] == mask]
        own = [i for i in masked if block[i][1]]
        if authors:
            post = 0 if own else post + 1
            if not masked and post > most:
                return passes
        elif not own:
            post += 1
        table = probabilities(old)
        x = {i: best(table[i], mask) for i in range(places)}
        p = {i: float(table[i, x[i]]) for i in range(places)}
        fresh, number = len(masked) - len(own), len(passes)
        if authors and number < steps:
            need: int | None = places // steps + (number < places % steps) + fresh
        else:
            need = 1 + fresh if own and not authors else None
        sure = [i for i in masked if p[i] > sampling["threshold"]]
        if need is None:
            fill = masked
        elif len(sure) >= need:
            fill = sure
        else:
            fill = sorted(masked, key=lambda i: (-p[i], i))[:need]
        edit = [i for i in range(places) if i not in masked and p[i] > sampling["edit_threshold"] and x[i] != old[i]]
        all_own = set(own) <= set(fill)
        if authors:
            final = post >= most if most else bool(own) and all_own
            final = final or number + 1 == sampling["max_steps"]
        else:
            final = (post >= most if most else all_own) or number > places + most
        if final:
            fill = masked
            x |= {i: best(table[i], mask, DELETE, INSERT) for i in (*fill, *edit) if x[i] in (DELETE, INSERT)}
        written = sorted({*fill, *edit})
        new = [x[i] if i in written else old[i] for i in range(places)]
        if authors and not final and written:
            for _ in range(5):
                moved = [i for i in range(places) if new[i] != old[i]]
                if new not in seen or not moved:
                    break
                i = min(moved, key=lambda i: (p[i], i))
                new[i] = best(table[i], mask, new[i])
        if not authors and not final and written and old in seen:
            i = min(written, key=lambda i: (p[i], i))
            new[i] = best(table[i], mask, *ever[i])
        seen.append(list(new) if authors else old)
        for i in written:
            ever[i].add(new[i])
        block = carried_out(new, block, mask)
        after = [token for token, _ in block]
        passes.append(Pass({i: new[i] for i in fill}, {i: new[i] for i in edit}, after))
        if (after == old and mask not in after) or (not authors and (final or not written)):
            return passes
        if authors and number + 1 == sampling["max_steps"]:
            return passes


def decode(model: Llada2Model, prompt: Sequence[int], sampling: Mapping[str, Any], stops: Sequence[int]) -> Run:
    """Block after block up to the one with the last token, or with a stop."""
    length, mask, run = sampling["block_length"], model.mask_id, Run([])
    tokens, first = list(prompt), len(prompt) // length
    for number in range(first, -(-(len(prompt) + sampling["max_tokens"]) // length)):
        given = max(len(prompt), number * length)

        def probabilities(block: list[int], before: list[int] = tokens[:given], start: int = given) -> Tensor:
            return model.forward(torch.tensor([*before, *block]), length).logits[start:].softmax(-1)

        run.blocks.append(decode_block((number + 1) * length - given, mask, sampling, probabilities))
        tokens = tokens[:given] + run.blocks[-1][-1].after
        run.tokens = trimmed(tokens[len(prompt) :], sampling["max_tokens"], stops)
        if set(run.tokens) & set(stops):
            break
    return run
