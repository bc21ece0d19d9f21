"""Depths that audits earn: the rule, on numbers alone."""

import math
import random

import numpy as np
import pytest

from remask.errors import TableError
from remask.policies.earned import (
    BORROWING,
    BOUND,
    PATIENCE,
    PREFIXES,
    PROOF,
    WINDOW,
    Audit,
    EarnedDepths,
    Estimate,
    Record,
    ladder,
)

LAYERS = 30


def test_depths_that_are_tried() -> None:
    assert ladder(1) == (1,)
    assert ladder(9) == (1, 2, 3, 4, 6, 8, 9)
    assert ladder(30) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 30)


def test_an_interval_covers_the_mean() -> None:
    """Of normal values in 95 of 100 draws, for few and for many."""
    rng = np.random.default_rng(0)
    for count in (2, 5, 16, 64):
        draws = [Estimate.of(values.tolist()) for values in rng.normal(0.3, 0.1, (2000, count))]
        assert np.mean([each.low < 0.3 < each.high for each in draws]) == pytest.approx(0.95, abs=0.015)
    assert Estimate.of([0.2]) == Estimate(1, 0.2, -math.inf, math.inf)


def serve(record: Record, edge: int, rng: random.Random, requests: int, prefixes: int, noise: float = 0.03) -> int:
    """Audit requests of a model whose predictions move beyond depth `edge` in half of the cases. Returns the passes."""
    passes = 0
    for number in range(requests):
        prefix = number % prefixes
        wanted = record.audit_depths(prefix)
        found = []
        for depth in wanted:
            nats = rng.expovariate(1 / noise) if depth <= edge or rng.random() < 0.5 else rng.uniform(0.2, 5)
            found.append(Audit(prefix, depth, nats))
        passes += 1 + len(wanted) if wanted else 0
        if found:
            record.add(found)
    return passes


@pytest.mark.parametrize(("edge", "earned"), [(0, 0), (2, 2), (6, 6), (7, 6), (16, 16), (30, 30)])
def test_the_deepest_depth_that_holds_is_found(edge: int, earned: int) -> None:
    """Whatever the order of requests, over many prefixes and over one."""
    for prefixes in (1, 24):
        found, passes = [], []
        for seed in range(20):
            record = Record(LAYERS, BOUND)
            passes.append(serve(record, edge, random.Random(seed), 96, prefixes))
            found.append(record.depth(0, 0))
        assert max(found) == earned
        assert np.mean([depth == earned for depth in found]) >= 0.9
        assert max(passes) <= 96 * 3


def test_what_is_read_until_audits_have_shown_more() -> None:
    """A table is where it begins, and one audit beyond the bound is enough to read less."""
    record = Record(LAYERS, BOUND)
    assert (record.depth(1, 0), record.depth(1, 8)) == (0, 8)
    record.add([Audit(1, 8, 0.5)])
    assert record.depth(1, 8) == record.depth(2, 8) == 7


def proven(depth: int, prefixes: range, each: int = 4) -> Record:
    record = Record(LAYERS, BOUND)
    for prefix in prefixes:
        for _ in range(each):
            record.add([Audit(prefix, depth, 0.01)])
    return record


def test_few_prefixes_prove_nothing_for_others() -> None:
    assert proven(6, range(PREFIXES - 1)).depth(99, 0) == 0
    assert proven(6, range(PREFIXES)).depth(99, 0) == 6
    assert proven(6, range(1), PROOF - 1).depth(0, 0) == 0
    assert proven(6, range(1), PROOF).depth(0, 0) == 6


def test_an_alarm_ends_what_was_proven() -> None:
    """For its prefix and for all that have proven nothing themselves; and the last audits are what counts."""
    record = proven(30, range(1), PROOF)
    for prefix in range(1, 2 * PREFIXES):
        record.add([Audit(prefix, 30, 0.01)])
    assert (record.depth(0, 0), record.depth(99, 0)) == (30, 30)
    assert record.add([Audit(50, 30, 2.0)])
    assert (record.depth(0, 0), record.depth(99, 0), record.depth(50, 0)) == (30, 0, 0)
    assert record.audit_depths(51) == (6,) or record.audit_depths(51)[0] < 30
    serve(record, 6, random.Random(0), 64, 64)
    assert record.depth(99, 0) == 6
    assert record.add([Audit(0, 30, 2.0)])
    assert record.depth(0, 0) == 6
    assert max(record._audit_count(depth, None) for depth in ladder(LAYERS)) <= WINDOW


def test_audits_end_where_they_prove_nothing() -> None:
    """Values around the bound are never proven, and are given up."""
    record = Record(2, BOUND)
    rng = random.Random(0)
    for number in range(200):
        wanted = record.audit_depths(number % 16)
        if wanted:
            record.add([Audit(number % 16, depth, rng.choice([0.0, 0.19])) for depth in wanted])
    assert record.audit_depths(0) == ()
    assert max(record._audit_count(depth, None) for depth in (1, 2)) <= PATIENCE


def serve_ratios(depths: EarnedDepths, edges: dict[int, int], rng: random.Random, requests: int) -> int:
    """Audit requests whose prefix ratio is drawn from `edges`, each of a prefix of its own. Returns the passes."""
    passes = 0
    for number in range(requests):
        ratio = rng.choice(list(edges))
        record = depths.record("", ratio, 100)
        wanted = record.audit_depths(number)
        if wanted:
            nats = {
                depth: 0.01 if depth <= edges[ratio] or rng.random() < 0.45 else rng.uniform(0.2, 1) for depth in wanted
            }
            depths.add(record, [Audit(number, depth, value) for depth, value in nats.items()])
            passes += 1 + len(wanted)
    return passes


def test_ratios_that_agree_are_learned_together() -> None:
    """Requests at three ratios next to each other take fewer audits than those at two far apart."""
    passes = dict[str, list[int]]()
    for name, ratios in {"one": [85], "three": [75, 85, 95], "far": [55, 85]}.items():
        for seed in range(20):
            depths = EarnedDepths(LAYERS)
            edges = dict.fromkeys(ratios, 30)
            passes.setdefault(name, []).append(serve_ratios(depths, edges, random.Random(seed), 96))
            assert [depths.record("", ratio, 100).common for ratio in ratios] == [30] * len(ratios)
    one, three, far = (np.mean(passes[name]) for name in ("one", "three", "far"))
    assert one < three < 1.8 * one < far, "alone, three would take three times as many"


def test_a_ratio_that_differs_from_the_next_one_is_not_read_as_that() -> None:
    """Six audits of its own are asked first; here 45 % of them agree by chance at any depth."""
    common: list[tuple[int, int]] = []
    for seed in range(200):
        depths = EarnedDepths(LAYERS)
        serve_ratios(depths, {85: 30}, random.Random(seed), 32)
        serve_ratios(depths, {75: 6, 85: 30}, random.Random(seed), 64)
        common.append((depths.record("", 75, 100).common, depths.record("", 85, 100).common))
    assert {deep for _, deep in common} == {30}
    assert np.mean([depth <= 6 for depth, _ in common]) >= 0.95
    assert np.mean([depth == 6 for depth, _ in common]) >= 0.9


def test_a_ratio_that_borrows_loses_what_its_neighbor_loses() -> None:
    depths = EarnedDepths(LAYERS)
    changes: list[int] = []
    first, second = depths.record("", 85, 100), depths.record("", 75, 100)
    for prefix in range(PROOF):
        depths.add(first, [Audit(prefix, 6, 0.01)])
    assert second.audit_depths(99) == (6,), "begins with what its neighbor has proven"
    for prefix in range(BORROWING):
        assert (first.common, second.common) == (6, 0)
        depths.add(second, [Audit(100 + prefix, 6, 0.01)])
    assert second.depth(999, 0) == second.common == 6
    assert EarnedDepths.from_json(depths.to_json(), LAYERS).record("", 75, 100).common == 6
    depths.changed = lambda: changes.append(second.common)
    assert depths.add(first, [Audit(200, 6, 2.0)])
    assert (first.common, second.common, changes) == (0, 0, [0])


def test_kept_and_read_again() -> None:
    depths = EarnedDepths(LAYERS)
    changes: list[int] = []
    depths.changed = lambda: changes.append(1)
    record = depths.record("", 82, 100)
    for prefix in range(2 * PREFIXES):
        depths.add(record, [Audit(prefix, 6, 0.02), Audit(prefix, 8, 0.7)])
    assert record is depths.record("", 89, 100) is not depths.record("a", 82, 100)
    assert changes == [1]
    assert dict(depths.lookup.entries) == {80: 6}
    depths.records["", 60] = proven(30, range(2 * PREFIXES))
    assert dict(depths.lookup.entries) == {60: 6, 80: 6}, "what a higher ratio contradicts is left out"
    again = EarnedDepths.from_json(depths.to_json(), LAYERS)
    assert again.to_json() == depths.to_json()
    assert again.record("", 82, 100).depth(77, 0) == 6
    for raw in ({}, {"layers": 9, "records": []}, {"layers": 30, "records": [{"adapter": "", "ratio": 80}]}):
        with pytest.raises(TableError, match="no earned depths"):
            EarnedDepths.from_json(raw, LAYERS)
    raw = {"layers": 30, "records": [{"adapter": "", "ratio": 80, "audits": [["1", 31, 0.1]]}]}
    with pytest.raises(TableError, match="an audit at depth 31 of 30"):
        EarnedDepths.from_json(raw, LAYERS)
    for ratio in (500, 13, -10, math.inf, "80"):
        with pytest.raises(TableError, match="no multiple of 10 up to 100"):
            EarnedDepths.from_json({"layers": 30, "records": [{"adapter": "", "ratio": ratio, "audits": []}]}, LAYERS)


def test_what_is_read_again_revokes_nothing() -> None:
    """An audit that came before a depth was proven did not revoke it, whatever is left of those before it."""
    depths = EarnedDepths(LAYERS)
    record = depths.record("", 82, 100)
    for nats in (*[0.9] * 20, *[0.0] * 20, 0.9, *[0.0] * (WINDOW - 21)):
        depths.add(record, [Audit(len(record.audits) % 10, 6, nats)])
    assert (record.common, len(record.audits)) == (6, WINDOW)
    again = EarnedDepths.from_json(depths.to_json(), LAYERS)
    assert again.to_json() == depths.to_json()
    assert again.record("", 82, 100).common == 6
