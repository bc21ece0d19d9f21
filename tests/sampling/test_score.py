"""Tokens and confidences against definitions in float64."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from remask.denoising.noise import Noise
from remask.denoising.rules import MARGIN, NEGATIVE_ENTROPY
from remask.plan import RowMeasure
from remask.readers.decision import Labels
from remask.readers.forced import ForcedRows
from remask.readers.guidance import PassGuidance, Residual, StoredGuidance
from remask.readers.implied import LogitOffsets, MinPFilter, RowMeasureRead, TokenBars, TokenPenalties
from remask.readers.logprobs import Ranking
from remask.sampling import filters
from remask.sampling import score as scoring
from remask.sampling.device_reads import BestTokens
from remask.sampling.rows import DeviceRead, Penalty, RowGroup
from remask.sampling.score import score
from remask.sampling.uniform_score import NoisyRows, Transition

VOCAB, MASK_ID = 13, 12


def group(count: int, **more: Any) -> RowGroup:
    base = RowGroup(slice(0, count), None, "logits", 0.0, None, None, seed=5)
    return replace(base, **more)


def logits(rows: int, seed: int = 0, scale: float = 3.0) -> Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * scale


def softmax(x: Tensor) -> Tensor:
    return x.double().softmax(-1)


def without_mask(x: Tensor) -> Tensor:
    out = x.double().clone()
    out[:, MASK_ID] = -torch.inf
    return out


def run(x: Tensor, *groups: RowGroup, mask_id: int = MASK_ID) -> tuple[list[int], Tensor]:
    tokens, confidence = score(x.clone(), groups, mask_id)
    return tokens.long().tolist(), confidence.double()


def close(a: Tensor, b: Tensor) -> bool:
    return torch.allclose(a, b, atol=2e-6, rtol=1e-5)


@given(st.integers(0, 10_000), st.sampled_from([0.1, 1.0, 10.0, 50.0]))
def test_greedy_is_argmax_and_its_probability(seed: int, scale: float) -> None:
    x = logits(5, seed, scale)
    tokens, confidence = run(x, group(5))
    assert tokens == without_mask(x).argmax(-1).tolist()
    assert close(confidence, softmax(x)[range(5), tokens])


@pytest.mark.parametrize("measure", [None, MARGIN, NEGATIVE_ENTROPY])
@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("basis", ["logits", "tempered", "filtered"])
@pytest.mark.parametrize("narrow", [{}, {"top_k": 1}, {"top_k": 2}, {"top_p": 0.05}, {"top_p": 0.5, "top_k": 3}])
@pytest.mark.parametrize("mask_id", [0, MASK_ID])
def test_the_mask_token_is_never_chosen(
    measure: RowMeasure | None, temperature: float, basis: str, narrow: dict[str, Any], mask_id: int
) -> None:
    x = logits(6)
    x[:, mask_id] = 20.0
    options: dict[str, Any] = {"row_measure": measure, "temperature": temperature, "basis": basis, **narrow}
    tokens, _ = run(x, group(6, **options), mask_id=mask_id)
    assert mask_id not in tokens


def test_the_mask_token_counts_in_the_probabilities() -> None:
    x = logits(3)
    x[:, MASK_ID] = 5.0
    tokens, confidence = run(x, group(3))
    assert close(confidence, softmax(x)[range(3), tokens])
    assert (confidence < softmax(x[:, :MASK_ID])[range(3), tokens]).all()


def test_entropy() -> None:
    x = logits(5)
    p = softmax(x)
    _, confidence = run(x, group(5, row_measure=NEGATIVE_ENTROPY))
    assert close(confidence, (p * (p + 1e-10).log()).sum(-1))


def test_margin() -> None:
    x = logits(5)
    first, second = softmax(x).sort(-1, descending=True).values[:, :2].unbind(-1)
    tokens, confidence = run(x, group(5, row_measure=MARGIN))
    assert close(confidence, first - second)
    assert tokens == without_mask(x).argmax(-1).tolist()


def naive_filter(row: list[float], top_k: int | None, top_p: float | None) -> set[int]:
    """Tokens that stay: top-p (with the one that crosses p), then top-k of those."""
    order = sorted(range(len(row)), key=lambda i: -row[i])
    if top_p is not None and top_p < 1:
        p = torch.tensor(row, dtype=torch.float64).softmax(-1)
        kept, total = [], 0.0
        for token in order:
            kept.append(token)
            total += float(p[token])
            if total > top_p:
                break
        order = kept
    return set(order if top_k is None else order[:top_k])


@given(st.integers(0, 10_000), st.none() | st.integers(1, VOCAB + 3), st.none() | st.floats(0.05, 1.0))
@settings(max_examples=60)
def test_confidence_after_filters(seed: int, top_k: int | None, top_p: float | None) -> None:
    x = logits(4, seed)
    x[:, MASK_ID] = -9.0
    tokens, confidence = run(x, group(4, basis="filtered", top_k=top_k, top_p=top_p))
    for row, (token, value) in enumerate(zip(tokens, confidence.tolist(), strict=True)):
        kept = naive_filter(x[row].tolist(), top_k, top_p)
        narrowed = torch.tensor([float(x[row, t]) if t in kept else -torch.inf for t in range(VOCAB)])
        assert token == int(narrowed.argmax())
        assert value == pytest.approx(float(narrowed.double().softmax(-1)[token]), abs=1e-5)


@pytest.mark.parametrize("filtered", [False, True])
def test_temperature_shapes_confidence_where_dream_says_so(filtered: bool) -> None:
    x = logits(6)
    tokens, confidence = run(x, group(6, temperature=0.5, basis="filtered" if filtered else "logits"))
    assert close(confidence, softmax(x / 0.5 if filtered else x)[range(6), tokens])


@pytest.mark.parametrize(
    "narrow", [{}, {"top_k": 4}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.9}], ids=["all", "k", "p", "kp"]
)
@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_follow_the_softmax(narrow: dict[str, Any], temperature: float) -> None:
    count = 40_000
    row = logits(1, seed=3, scale=1.5)
    row[:, MASK_ID] = -30.0
    tokens, _ = run(row.repeat(count, 1), group(count, temperature=temperature, **narrow))
    kept = naive_filter((row[0] / temperature).tolist(), narrow.get("top_k"), narrow.get("top_p"))
    scaled = (row[0].double() / temperature).tolist()
    p = torch.tensor([scaled[t] if t in kept else -torch.inf for t in range(VOCAB)], dtype=torch.float64).softmax(-1)
    seen = np.bincount(tokens, minlength=VOCAB)
    expected = (p * count).numpy()
    assert seen[expected == 0].sum() == 0
    often = expected >= 5
    chi_square = float((((seen - expected) ** 2)[often] / expected[often]).sum())
    assert chi_square < 2.5 * often.sum() + 15  # the 1 - 1e-5 quantile of chi-square lies below


@pytest.mark.parametrize("temperature", [1e-3, 1e-4, 1e-5])
def test_a_tiny_temperature_is_greedy(temperature: float) -> None:
    x = logits(8)
    tokens, confidence = run(x, group(8, temperature=temperature))
    assert tokens == without_mask(x).argmax(-1).tolist()
    assert confidence.isfinite().all()


def test_guidance() -> None:
    x = logits(6)
    cond, uncond = x[:3].double(), x[3:].double()
    for scale in (0.1, 1.0, 2.5):
        guided = uncond + (scale + 1) * (cond - uncond)
        tokens, confidence = run(x, group(3, guide=slice(3, 6), reads=(PassGuidance(scale, None),)))
        assert tokens == without_mask(guided).argmax(-1).tolist()
        assert close(confidence, guided.softmax(-1)[range(3), tokens])


def test_groups_are_read_apart_and_in_order() -> None:
    x = logits(9)
    groups = [
        group(2),
        group(0, rows=slice(2, 4), guide=slice(4, 6), reads=(PassGuidance(1.0, None),)),
        group(0, rows=slice(6, 7), row_measure=NEGATIVE_ENTROPY),
        group(0, rows=slice(7, 9), temperature=0.8, seed=3),
    ]
    tokens, confidence = run(x, *groups)
    assert len(tokens) == 2 + 2 + 1 + 2
    at = 0
    for own in groups:
        rows = x[own.rows]
        guide = None
        if own.guide is not None:
            rows = torch.cat([rows, x[own.guide]])
            guide = slice(2, 4)
        count = own.rows.stop - own.rows.start
        alone = run(rows, replace(own, rows=slice(0, count), guide=guide))
        assert tokens[at : at + count] == alone[0]
        assert close(confidence[at : at + count], alone[1])
        at += count


def test_a_residual_is_added_to_its_own_rows_only() -> None:
    x = logits(5)
    residual = logits(2, seed=3)
    guided = torch.cat([x[:1], x[1:3] + 2.0 * residual, x[3:]])
    kept = Residual()
    kept.logits = torch.cat([logits(1), residual])
    guide = StoredGuidance(2.0, kept, np.array([1, 2]))
    groups = group(1), group(0, rows=slice(1, 3), reads=(guide,)), group(0, rows=slice(3, 5))
    before = residual.clone()
    tokens, confidence = run(x, *groups)
    assert tokens == without_mask(guided).argmax(-1).tolist()
    assert close(confidence, softmax(guided)[range(5), tokens])
    assert torch.equal(residual, before)


def test_rows_draw_by_their_positions() -> None:
    """A row's draw is that of its position, wherever the row stands and whatever rows are read beside it."""
    x = logits(1).expand(6, -1)
    positions = np.array([3, 4, 9, 70, 71, 2**31])
    tokens, _ = run(x, group(6, temperature=2.0, seed=2**62 + 5, step=2**33, positions=positions))
    for row in range(6):
        alone = group(1, temperature=2.0, seed=2**62 + 5, step=2**33, positions=positions[row : row + 1])
        assert run(x[:1], alone)[0] == tokens[row : row + 1]


def test_groups_that_draw_are_sent_together(monkeypatch: pytest.MonkeyPatch) -> None:
    def groups() -> list[RowGroup]:
        places = [np.array(each, dtype=np.int64) for each in ([3, 7], [7, 9, 11], [2], [1, 4])]
        heat, starts = (0.7, 1.0, 0.0, 0.9), (0, 2, 5, 6)
        return [
            RowGroup(slice(at, at + len(own)), None, "logits", warm, None, None, 5 + at, 2, own)
            for at, own, warm in zip(starts, places, heat, strict=True)
        ]

    x, sent = logits(8), list[int]()
    apart = [
        score(x[each.rows].clone(), [replace(each, rows=slice(0, each.rows.stop - each.rows.start))], MASK_ID)
        for each in groups()
    ]

    def send(array: Any, device: torch.device) -> Tensor:
        sent.append(len(array))
        return torch.from_numpy(array)

    monkeypatch.setattr(scoring, "send", send)
    monkeypatch.setattr(filters, "send", send)
    together = score(x.clone(), groups(), MASK_ID)
    assert sent == [2 + 3 + 2]
    assert torch.equal(together, torch.cat(apart, dim=1))


COUNT = 7
NOISE = Noise(0.0, -9.0, 9.0, VOCAB, MASK_ID)


def of_rows(high: int) -> Any:
    return st.lists(st.integers(0, high), min_size=COUNT, max_size=COUNT).map(lambda values: np.array(values, np.int64))


noisy_rows = st.builds(
    NoisyRows,
    current=of_rows(VOCAB - 1),
    weights=st.none() | of_rows(9).map(lambda values: values.astype(np.float32)),
    transition=st.none() | st.just(Transition(NOISE, -1.0, 2.0)),
    banned=st.just((3,)),
    banned_rows=st.integers(0, COUNT),
)


@given(
    more=st.fixed_dictionaries(
        {"temperature": st.sampled_from([0.0, 0.8]), "top_p": st.sampled_from([None, 0.7])},
        optional={
            "positions": of_rows(99),
            "noisy": noisy_rows,
            "penalty": st.builds(Penalty, tokens=of_rows(VOCAB - 1).map(lambda tokens: tokens - 1), size=st.just(2.0)),
        },
    ),
    reads=st.tuples(
        st.builds(TokenBars, tokens=st.just(np.array([1, 2])), rows=of_rows(1).map(lambda rows: rows > 0)),
        of_rows(VOCAB - 1).map(lambda tokens: ForcedRows(tokens - 1)),
        of_rows(MASK_ID - 1).map(lambda tokens: Labels(np.stack([tokens, tokens // 2], axis=1))),
        st.sampled_from([BestTokens(), RowMeasureRead(MARGIN)]),
        st.integers(0, 3).map(lambda top: Ranking(top, VOCAB)),
        st.just(LogitOffsets(np.array([1, 4]), np.array([2.0, -9.0], np.float32))),
        st.just(TokenPenalties(np.array([0, 2, 4]), 1.5, np.array([2, 4]), np.array([0.5, -0.25], np.float32))),
        st.sampled_from([MinPFilter(0.3), MinPFilter(1.0)]),
    ),
    asked=st.sets(st.integers(0, 7)),
    guidance=st.sampled_from([None, "guide", "residual"]),
    cuts=st.sets(st.integers(1, COUNT - 1)),
)
def test_pieces_are_read_as_the_whole(
    more: dict[str, Any], reads: Sequence[DeviceRead], asked: set[int], guidance: str | None, cuts: set[int]
) -> None:
    own = [reads[number] for number in asked]
    if "noisy" in more:
        own = [read for read in own if not isinstance(read, Ranking)]
    x, kept, keep = logits(2 * COUNT), Residual(), Residual() if guidance == "guide" else None
    kept.logits = logits(2 * COUNT, 1)
    if guidance == "guide":
        own.append(PassGuidance(1.5, keep))
    elif guidance == "residual":
        own.append(StoredGuidance(1.5, kept, np.arange(COUNT)[::-1] * 2))
    every = group(COUNT, guide=slice(COUNT, 2 * COUNT) if keep is not None else None, reads=tuple(own), **more)
    width = sum(read.width for read in own)
    rows = 2 * COUNT if guidance == "guide" else COUNT
    whole = score(x[:rows].clone(), [replace(every)], MASK_ID, width=width)
    before = None if keep is None else keep.logits
    if keep is not None:
        keep.logits = None
    parts = []
    for start, stop in pairwise([0, *sorted(cuts), COUNT]):
        rows_of = x[start:stop] if keep is None else torch.cat([x[start:stop], x[COUNT + start : COUNT + stop]])
        parts.append(score(rows_of.clone(), [every.slice_rows(start, stop)], MASK_ID, width=width))
    torch.testing.assert_close(torch.cat(parts, dim=1), whole)
    if keep is not None and before is not None:
        torch.testing.assert_close(keep.logits, before)
