"""Exact speculation of masked models (FreeDave, arXiv 2510.00294), dense: every draft is a forward pass of its own.

A draft is accepted where it is the state that the static rule comes to, so the states are those of the static rule.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from tests.oracles.dense import DenseModel
from tests.oracles.sampling import dream_confidence, ranked, schedule, share, take_factor, take_threshold, timesteps

Take = Callable[[Tensor, Tensor, int], Sequence[int]]
"""From logits [length, vocabulary], candidates bool [length] and the step within the block to what is filled."""


@dataclass
class Speculated:
    """A finished decode.

    Attributes:
        transfers: of each static step that filled something, its positions, ascending, and their tokens.
        drafts: states that each pass computed, the true one among them.
        accepted: static steps that took no pass of their own.
        narrowest: least difference of two confidences of which one was filled and the other was not.
    """

    tokens: Tensor
    noisy: Tensor
    transfers: list[tuple[list[int], list[int]]] = field(default_factory=list)
    drafts: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    accepted: int = 0
    narrowest: float = 1.0


State = tuple[Tensor, Tensor]
"""Tokens and noisy flags, [length] each."""


def counted(masks: int, steps: int) -> Take:
    """LLaDA's schedule: `masks` shared evenly among `steps`; the last one takes what is left."""
    counts = schedule(masks, steps)

    def take(logits: Tensor, candidates: Tensor, step: int) -> list[int]:
        ranks = ranked(logits.softmax(-1).amax(-1), candidates)
        return ranks if step >= steps - 1 else ranks[: counts[step]]

    return take


def timed(steps: int) -> Take:
    """Dream's schedule by entropy, over a block of `steps`."""
    times = timesteps(steps, 1e-3)

    def take(logits: Tensor, candidates: Tensor, step: int) -> list[int]:
        masks = int(candidates.sum())
        count = masks if step >= steps - 1 else share(masks, times, step)
        return ranked(dream_confidence(logits, "entropy"), candidates)[:count]

    return take


def above(threshold: float) -> Take:
    """Whatever is at least so confident, and the best in any case."""
    return lambda logits, candidates, _: _by_value(take_threshold, logits, candidates, threshold)


def by_factor(factor: float) -> Take:
    """Fast-dLLM's factor rule."""
    return lambda logits, candidates, _: _by_value(take_factor, logits, candidates, factor)


def _by_value(
    rule: Callable[[Tensor, Sequence[int], float], list[int]], logits: Tensor, candidates: Tensor, value: float
) -> list[int]:
    confidence = logits.softmax(-1).amax(-1)
    return rule(confidence, ranked(confidence, candidates), value)


def speculate(
    model: DenseModel,
    prompt: Sequence[int],
    max_tokens: int,
    block_length: int,
    rule: Callable[[int], Take],
    cache: str,
    drafts: int,
) -> Speculated:
    """Decode in blocks with at most `drafts` states a pass, under `cache`: none, block-prefix or block-dual.

    `rule` is asked for each block, given its masks. A model whose rows predict the next position opens a block under a
    cache with its first token alone, and predicts nothing else in that pass.
    """
    length = len(prompt) + max_tokens
    found = Speculated(torch.tensor([*prompt, *[model.mask_id] * max_tokens]), torch.arange(length) >= len(prompt))
    for start in range(len(prompt), length, block_length):
        place = torch.arange(length)
        block = (place >= start) & (place < start + block_length)
        take, step = rule(int((found.noisy & block).sum())), 0
        rows = {"none": place >= 0, "block-prefix": place >= start, "block-dual": block}[cache]
        out = model.forward(found.tokens)
        cached = None if cache == "none" else out.kv.only(~rows)
        found.drafts.append(1)
        found.rows.append(length)
        logits, opens = model.predictions(out.logits), model.dream and cache != "none"
        state = _filled(
            found, (found.tokens, found.noisy), logits, [start] if opens else take(logits, block & found.noisy, 0)
        )
        while (state[1] & block).any():
            step += 1
            chain, after = [state], step
            while len(chain) < drafts and not opens:
                chosen = take(logits, block & chain[-1][1], after)
                draft = _advanced(chain[-1], logits, chosen)
                if not len(chosen) or not (draft[1] & block).any():
                    break
                chain.append(draft)
                after += 1
            opens = False
            verified = [
                model.predictions((model.forward(t) if cached is None else model.forward(t, rows, cached)).logits)
                for t, _ in chain
            ]
            found.drafts.append(len(chain))
            found.rows.append(int(rows.sum()) * len(chain))
            best: int | None = 0
            while best is not None:
                logits = verified[best]
                state = _filled(found, state, logits, take(logits, block & state[1], step))
                best = next((j for j in range(len(chain)) if _same(chain[j], state) and j > best), None)
                if best is not None:
                    found.accepted += 1
                    step += 1
        found.tokens, found.noisy = state
    return found


def _advanced(state: State, logits: Tensor, chosen: Sequence[int]) -> State:
    tokens, noisy = state[0].clone(), state[1].clone()
    tokens[list(chosen)] = logits[list(chosen)].argmax(-1)
    noisy[list(chosen)] = False
    return tokens, noisy


def _filled(found: Speculated, state: State, logits: Tensor, chosen: Sequence[int]) -> State:
    """The state after a static step, which is noted."""
    after = _advanced(state, logits, chosen)
    if len(chosen):
        best = logits.softmax(-1).amax(-1)
        gaps = (best[list(chosen)][:, None] - best[after[1]]).abs()
        gaps = gaps[~gaps.isnan()]
        found.narrowest = min(found.narrowest, float(gaps.min()) if len(gaps) else 1.0)
        positions = sorted(chosen)
        found.transfers.append((positions, after[0][positions].tolist()))
    return after


def _same(one: State, other: State) -> bool:
    return torch.equal(one[0], other[0]) and torch.equal(one[1], other[1])
