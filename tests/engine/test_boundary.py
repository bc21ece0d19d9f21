"""With a stored boundary, K/V of the layer above it are those of the prefix alone, and are read from the store."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from remask.engine.engine import Engine
from remask.policies import BiCache, Dense
from remask.policies.bicache import DepthLookup
from remask.policies.block import BlockDual
from remask.policies.dkv import DkvDecode
from remask.policies.dllm import DllmCache
from tests.engine.support import (
    LAYERS,
    CheckedTransformer,
    Work,
    alone,
    lively_weights,
    make_engine,
    outcome,
    poisoned_engine,
    prompt_of,
    request,
    run,
    small_config,
)

PREFIX = 6
FAMILIES = pytest.mark.parametrize("family", ["llada", "dream"])
DEPTHS = pytest.mark.parametrize("depth", range(1, LAYERS))


@dataclass(frozen=True, slots=True)
class Projecting(BiCache):
    """Projects K and V of the layer above the boundary on every refresh, into slots of the request's own."""

    def leased_layers(self, boundary: int, layers: int) -> int:  # noqa: ARG002
        return boundary


def exact_engine(family: str) -> Engine:
    """In float32, and so that the bits of a row do not depend on what else is in the pass."""
    config = small_config(family)
    model = CheckedTransformer(config, lively_weights(config, torch.float32))
    return poisoned_engine(model, batch_invariant=True)


def prefix_kv(engine: Engine, policy: BiCache, passes: int) -> list[tuple[Tensor, Tensor]]:
    """K and V of the prefix in each layer, [2, P, heads, Dh]: those that the request reads after `passes`, and stored.

    The request is cancelled then.
    """
    engine.add(request("r", 12, PREFIX).with_policy(policy))
    for _ in range(1 + passes):  # the prefix-only pass comes first
        engine.step()
    (running,) = engine._lifecycle.unfinished()
    (branch,) = running.canvases
    assert branch.lease is not None
    assert branch.ledger.step == passes - 1
    stored, found = branch.lease.entry.extent.slots(), []
    for layer, (k, v) in enumerate(zip(engine.pool.k, engine.pool.v, strict=True)):
        own = next(table.slots[:PREFIX] for table in branch.tables if layer in table.layers)
        found.append((torch.stack([k[own], v[own]]), torch.stack([k[stored], v[stored]])))
    engine.cancel("r")
    run(engine, [])
    return found


@FAMILIES
@DEPTHS
@pytest.mark.parametrize("passes", [1, 4])
def test_what_a_refresh_would_project_there_is_what_the_store_holds(family: str, depth: int, passes: int) -> None:
    policy = Projecting(depth=depth, refresh_interval=1)
    pairs = prefix_kv(exact_engine(family), policy, passes)
    same = [torch.equal(own, stored) for own, stored in pairs]
    assert same == [layer <= depth for layer in range(LAYERS)]


@FAMILIES
def test_states_that_have_seen_the_suffix_give_other_keys(family: str) -> None:
    policy = BiCache(depth=1, refresh_interval=1, boundary_state="recomputed")
    same = [torch.equal(own, stored) for own, stored in prefix_kv(exact_engine(family), policy, 1)]
    assert same == [True, False, False, False]


@pytest.mark.few(5)
@FAMILIES
@DEPTHS
@pytest.mark.parametrize("interval", [None, 1, 3])
@pytest.mark.parametrize("inner", [None, BlockDual(), DkvDecode(2)], ids=str)
def test_reading_them_changes_no_token_and_no_count(family: str, depth: int, interval: int | None, inner: Any) -> None:
    chosen = {} if inner is None else {"inner": inner}
    results = [
        alone(
            Work(request("r", 12, PREFIX, block_length=4), make(depth=depth, refresh_interval=interval, **chosen)),
            family,
        )
        for make in (BiCache, Projecting)
    ]
    assert outcome(results[0]) == outcome(results[1])


@FAMILIES
def test_requests_read_them_in_place(family: str) -> None:
    engine = make_engine(family, page_size=2, max_model_len=64)
    for i in range(3):
        engine.add(request(f"r{i}", [*prompt_of(PREFIX), 1, i], PREFIX).with_policy(BiCache(depth=2)))
    engine.step()
    shared, whole = engine.allocator.pages_for(PREFIX), engine.allocator.pages_for(PREFIX + 2 + 8)
    own = engine.allocator.pages_for(2 + 8)
    assert engine.allocator.used == LAYERS * shared + 3 * (3 * own + whole)
    run(engine, [])


@pytest.mark.parametrize(
    ("policy", "layers"),
    [
        (BiCache(depth=2), 3),
        (BiCache(depth=LAYERS - 1), LAYERS),
        (BiCache(depth=LAYERS), LAYERS),
        (BiCache(depth=2, boundary_state="recomputed"), 2),
        # What a row adds where it is not computed is kept in the slots of its K and V, so those are the request's own.
        (BiCache(DllmCache(), depth=2), 2),
    ],
    ids=str,
)
def test_layers_that_are_leased(policy: BiCache, layers: int) -> None:
    depth = policy.boundary(8, 16, LAYERS)
    assert policy.leased_layers(depth, LAYERS) == layers


@FAMILIES
def test_at_depth_0_the_prefix_is_refreshed_within_the_request_where_that_is_asked_for(family: str) -> None:
    """And the store is left alone; a table or number alone that says 0 runs the inner policy."""
    engine, table = make_engine(family), DepthLookup({90: 2})
    asked: dict[str, BiCache] = {
        "table": BiCache(depth=table, refresh_interval=3, within_request=True),
        "number": BiCache(depth=0, refresh_interval=3, within_request=True),
        "without": BiCache(depth=table, refresh_interval=3),
        "always": BiCache(depth=table, refresh_interval=1, within_request=True),
        "none": BiCache(depth=0),
    }
    results = run(engine, [Work(request(name, 12, PREFIX, seed=1), policy) for name, policy in asked.items()])
    found = {name: outcome(result) for name, result in results.items()}
    assert found["table"] == found["number"] != found["none"]
    assert found["without"] == found["none"]
    assert results["always"].token_ids == results["none"].token_ids
    told = {name: result.usage.approximation for name, result in results.items()}
    refreshed = dict.fromkeys(("table", "number", "always"), "bicache (within_request)")
    assert told == {**refreshed, "without": None, "none": None}
    steps, canvas = results["table"].usage.steps, 12 + results["table"].usage.completion_tokens
    left_out = (steps - len(range(0, steps, 3))) * PREFIX
    assert results["table"].usage.row_layers == (steps * canvas - left_out) * LAYERS
    assert {results[name].usage.prefix_depth for name in asked} == {0}
    assert not engine.store.entries
    assert engine.stats.prefix_passes == 0


def test_both_canvases_of_a_guided_request_refresh_the_prefix() -> None:
    engine = make_engine("llada")
    policy = BiCache(depth=0, refresh_interval=4, within_request=True)
    guided: dict[str, Any] = {"seed": 1, "cfg_scale": 1.0}
    results = run(engine, [Work(request("r", 12, PREFIX, **guided), policy), Work(request("n", 12, **guided), Dense())])
    steps, whole = results["r"].usage.steps, results["n"].usage.row_layers
    left_out = (steps - len(range(0, steps, 4))) * 2 * PREFIX * LAYERS
    assert results["r"].usage.row_layers == whole - left_out
