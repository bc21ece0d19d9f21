"""Decoding of block-causal models: every pass recomputes the whole sequence, so no cache can be wrong.

The passes are those of a decoder with cached K/V: one over the prompt's complete blocks, then per block its denoising
passes and a commit pass over its final tokens.
"""

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.oracles.biases import changed
from tests.oracles.canvas import Decode
from tests.oracles.sdar import SdarModel

# Given the step's count, the masked offsets (ascending), confidences and entropies [B]: the offsets to fill.
Rule = Callable[[int, list[int], Tensor, Tensor], list[int]]
BIASES = {"logit_bias", "repetition_penalty", "frequency_penalty", "presence_penalty"}


@dataclass(frozen=True)
class BlockDecode(Decode):
    """A finished decode; `output_ids` is trimmed, the passes and transfers are those of whole blocks."""

    kinds: str = ""  # one letter per pass: p prefill, d denoise, c commit
    confidences: list[list[float]] = field(default_factory=list)  # per transfer
    entropies: list[list[float]] = field(default_factory=list)  # per transfer, in nats
    committed: list[int] = field(default_factory=list)  # prompt and all tokens of the decoded blocks
    edits: list[list[int]] = field(default_factory=list)  # per transfer, positions that held another token before


def transfer_counts(block_length: int, steps: int) -> list[int]:
    """How many positions each step of a full block fills: an even split, the first steps taking the remainder."""
    return [block_length // steps + (step < block_length % steps) for step in range(steps)]


def by_confidence(count: int, masked: list[int], confidence: Tensor, entropy: Tensor) -> list[int]:
    """The `count` most confident."""
    return sorted(masked, key=lambda offset: -float(confidence[offset]))[:count]


def leftmost(count: int, masked: list[int], confidence: Tensor, entropy: Tensor) -> list[int]:
    """The masked positions among the `count` positions that begin with the first masked one."""
    return [offset for offset in masked if offset < masked[0] + count]


def above(threshold: float, fallback: Rule) -> Rule:
    """All strictly above the threshold if they are at least as many as the step's count; else `fallback` alone."""

    def rule(count: int, masked: list[int], confidence: Tensor, entropy: Tensor) -> list[int]:
        high = [offset for offset in masked if confidence[offset] > threshold]
        return high if len(high) >= count else fallback(count, masked, confidence, entropy)

    return rule


def entropy_bounded(bound: float) -> Rule:
    """The least uncertain ones while their entropies, the next one's included, sum up to less than the bound."""

    def rule(count: int, masked: list[int], confidence: Tensor, entropy: Tensor) -> list[int]:
        order = sorted(masked, key=lambda offset: float(entropy[offset]))
        sums = entropy[order].cumsum(0)
        return order[: max(1, int((sums < bound).sum()))]

    return rule


def rule_of(sampling: Mapping[str, Any]) -> Rule:
    """The rule that a request's `sampling` names."""
    match sampling.get("remasking", "low_confidence"):
        case "low_confidence" if sampling.get("threshold") is not None:
            fallback = {"confidence": by_confidence, "leftmost": leftmost}[sampling.get("fallback", "confidence")]
            return above(sampling["threshold"], fallback)
        case "low_confidence":
            return by_confidence
        case "sequential":
            return leftmost
        case "entropy_bounded":
            return entropy_bounded(sampling["eb_threshold"])
    raise ValueError(f"no oracle for remasking {sampling['remasking']!r}")


def uncertainty(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Of each row the probability of its argmax, and the entropy in nats: [B] each."""
    p = logits.softmax(-1)
    return p.amax(-1), -(p * p.clamp_min(1e-12).log()).sum(-1)


def trimmed(tokens: Sequence[int], max_tokens: int, stop_ids: Sequence[int]) -> list[int]:
    """At most `max_tokens`, cut after the first stop id."""
    kept = list(tokens[:max_tokens])
    stops = [place for place, token in enumerate(kept) if token in stop_ids]
    return kept[: stops[0] + 1] if stops else kept


def decode(model: SdarModel, line: Mapping[str, Any]) -> BlockDecode:
    """Decodes a request line at temperature 0; of the stop ids, `stop_token_ids` alone are honoured.

    `cache` may be `exact` or `none`: they differ in what an engine computes, not in tokens. A position is masked until
    it is filled; the originals compare ids instead, which differs only where MASK itself is predicted or given.
    A step beyond the schedule fills one position. `rows` counts the rows that a decoder with cached K/V feeds, commit
    passes included.
    """
    if line["cache"] not in ("exact", "none"):
        raise ValueError(f"no oracle for cache {line['cache']!r}")
    sampling = line["sampling"]
    if sampling.get("temperature", 0.0) != 0:
        raise ValueError("drawn tokens have no oracle: ask for temperature 0")
    length: int = sampling.get("block_length", model.block_length)
    stop_ids = sampling.get("stop_token_ids", [])
    prompt = list(line["prompt_token_ids"])
    counts = transfer_counts(length, sampling.get("steps_per_block", length))
    decoder = _Decoder(model, prompt, length, -(-(len(prompt) + sampling["max_tokens"]) // length))
    first = len(prompt) // length
    if first:
        decoder.passed("p", first * length)
    for block in range(first, decoder.blocks):
        if sampling.get("remasking") == "joint_threshold":
            generated = decoder.edit(block, sampling)
        else:
            early = set(stop_ids) if sampling.get("early_stop") else set[int]()
            generated = decoder.fill(block, counts, rule_of(sampling), early, sampling)
        if set(generated) & set(stop_ids):
            break
    committed = decoder.tokens[: (block + 1) * length].tolist()
    return BlockDecode(
        output_ids=trimmed(committed[len(prompt) :], sampling["max_tokens"], stop_ids),
        transfers=decoder.transfers,
        rows=decoder.rows,
        kinds=decoder.kinds,
        confidences=decoder.confidences,
        entropies=decoder.entropies,
        committed=committed,
        edits=decoder.edits,
    )


class _Decoder:
    def __init__(self, model: SdarModel, prompt: list[int], block_length: int, blocks: int) -> None:
        self.model, self.prompt_length, self.length, self.blocks = model, len(prompt), block_length, blocks
        self.tokens = torch.tensor([*prompt, *[model.mask_id] * (blocks * block_length - len(prompt))])
        self.rows: list[list[int]] = []
        self.kinds = ""
        self.transfers: list[tuple[int, list[int], list[int]]] = []
        self.confidences: list[list[float]] = []
        self.entropies: list[list[float]] = []
        self.edits: list[list[int]] = []

    def passed(self, kind: str, rows: int) -> None:
        """Notes a pass."""
        self.kinds += kind
        self.rows.append([rows] * self.model.layers)

    def edit(self, block: int, sampling: Mapping[str, Any]) -> list[int]:
        """Denoises a block by LLaDA2.1's rule, whose tokens may change until a pass changes none: its tokens.

        A block whose last pass saw the final tokens has no commit pass.
        """
        start, stop = block * self.length, (block + 1) * self.length
        given = max(0, self.prompt_length - start)
        masked, post = set(range(given, self.length)), 0
        while True:
            if not masked:
                post += 1
                if post > sampling.get("max_post_steps", 16):
                    self.passed("c", self.length)
                    break
            logits = self.model.forward(self.tokens[:stop], self.length).logits[start:].clone()
            self.passed("d", self.length)
            for offset in range(1, self.length):
                logits[offset, self.tokens[start + offset - 1]] -= sampling.get("penalty_lambda", 0.0)
            confidence, entropy = uncertainty(logits)
            best = logits.argmax(-1).tolist()
            before = self.tokens[start:stop].tolist()
            sure = [o for o in sorted(masked) if confidence[o] > sampling.get("threshold", 0.95)]
            least = sampling.get("min_transfer", 1)
            filled = sure if len(sure) >= least else by_confidence(least, sorted(masked), confidence, entropy)
            limit = sampling.get("edit_threshold", 0.9)
            replaced = [
                o for o in range(given, self.length)
                if o not in masked and confidence[o] > limit and best[o] != before[o]
            ]  # fmt: skip
            if not masked and not replaced:
                break
            chosen = sorted([*filled, *replaced])
            positions = [start + offset for offset in chosen]
            self.tokens[positions] = torch.tensor([best[offset] for offset in chosen])
            self.transfers.append((len(self.kinds) - 1, positions, [best[offset] for offset in chosen]))
            self.confidences.append(confidence[chosen].tolist())
            self.entropies.append(entropy[chosen].tolist())
            self.edits.append([start + offset for offset in replaced])
            masked -= set(filled)
        return self.tokens[start + given : stop].tolist()

    def fill(
        self,
        block: int,
        counts: Sequence[int],
        rule: Rule,
        early: Set[int] = frozenset(),
        sampling: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Denoises and commits a block: its generated tokens.

        It is left after a pass that wrote a token of `early`, if all up to the first of them is filled by then.
        """
        start, stop = block * self.length, (block + 1) * self.length
        given = max(0, self.prompt_length - start)
        masked = list(range(given, self.length))
        step = 0
        while masked:
            logits = self.model.forward(self.tokens[:stop], self.length).logits[start:]
            self.passed("d", self.length)
            if sampling is not None and BIASES & sampling.keys():
                end = min(stop, self.prompt_length + sampling["max_tokens"])
                places = set(range(self.prompt_length, end)) - {start + offset for offset in masked}
                prompt = self.tokens[: self.prompt_length].tolist()
                logits = changed(logits, prompt, self.tokens[sorted(places)].tolist(), sampling)
            confidence, entropy = uncertainty(logits)
            chosen = sorted(rule(counts[step] if step < len(counts) else 1, masked, confidence, entropy))
            positions = [start + offset for offset in chosen]
            self.tokens[positions] = logits[chosen].argmax(-1)
            self.transfers.append((len(self.kinds) - 1, positions, self.tokens[positions].tolist()))
            self.confidences.append(confidence[chosen].tolist())
            self.entropies.append(entropy[chosen].tolist())
            masked = [offset for offset in masked if offset not in chosen]
            step += 1
            lead = self.tokens[start + given : start + (masked[0] if masked else self.length)].tolist()
            if masked and set(lead) & early and set(self.transfers[-1][2]) & early:
                return lead
        self.passed("c", self.length)
        return self.tokens[start + given : stop].tolist()
