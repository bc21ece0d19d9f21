"""Refreshes and row-layers are counted under every policy, by its own schedule."""

from typing import Any

import pytest

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.policies import BlockDual, parse
from remask.policies.bicache import DepthLookup
from remask.policies.registry import policy_names
from tests.engine.kinds import checkpoint
from tests.engine.support import LAYERS, make_engine, poisoned_engine, prompt_of, request
from tests.sampling_fields import flat_params

PROMPT, RESPONSE, PREFIX = 8, 8, 6
FOUR: dict[str, Any] = {"block_length": 4}  # two blocks of four steps, a token each
SHARED = {"depth": 2, "refresh_interval": 3}

# The cache, its settings, sampling, passes that refresh, passes in which rows of the shared prefix are computed.
MASKED: list[tuple[str, dict[str, Any], dict[str, Any], int, int]] = [
    ("none", {}, FOUR, 0, 0),
    ("reuse", {}, FOUR, 0, 0),
    ("bicache", SHARED, FOUR, 3, 3),  # steps 0, 3 and 6
    ("bicache", {"depth": 2, "refresh_interval": None}, FOUR, 1, 1),
    ("bicache", {**SHARED, "depth": LAYERS}, FOUR, 0, 0),
    ("bicache", {**SHARED, "depth": 0}, FOUR, 0, 0),
    ("bicache", {**SHARED, "depth": 0, "within_request": True}, FOUR, 3, 0),  # nothing of it is the store's
    ("block-prefix", {}, FOUR, 2, 0),  # the first pass of each block
    ("block-prefix", {}, {"block_length": 1}, 8, 0),
    ("block-dual", {}, FOUR, 2, 0),
    ("block-dual", {"fill_pass": "separate"}, FOUR, 2, 0),
    ("dkv-decode", {"refresh_interval": 3}, FOUR, 6, 0),  # steps 0, 1 and 3 of each block
    ("dkv-decode", {"refresh_interval": None}, FOUR, 4, 0),
    ("dkv-prefill", {}, FOUR, 1, 0),
    ("dkv-pd", {"refresh_interval": 3}, FOUR, 6, 0),
    ("dkv-greedy", {"refresh_interval": 3}, {**FOUR, "remasking": "random"}, 4, 0),
    ("dllm-cache", {"prompt_interval": 5, "response_interval": 3}, FOUR, 4, 0),  # steps 0, 3, 5 and 6
    ("dllm-cache", {"prompt_interval": 5, "response_interval": 3}, {**FOUR, "cfg_scale": 1.0}, 4, 0),
    ("elastic-cache", {"window": 4, "threshold": 0.0}, FOUR, 1, 0),
    ("elastic-cache", {"window": 4, "threshold": 1.0}, FOUR, 8, 0),
    ("entropy-cache", {"threshold": 0.0}, FOUR, 8, 0),  # each step decodes a token, which is less than certain
    ("entropy-cache", {"threshold": 20.0}, FOUR, 1, 0),
    ("acache", {"ratio": 0.2}, FOUR, 3, 2),  # the pass that tells the anchors, and the first one of each block
    ("acache", {"ratio": 0.0}, FOUR, 0, 0),
    ("bicache+block-dual", SHARED, FOUR, 4, 3),  # steps 0, 3 and 6, and 4, where the second block begins
    ("bicache+block-dual", {**SHARED, "fill_pass": "separate"}, FOUR, 4, 3),
]
UNIFORM: list[tuple[str, dict[str, Any], int]] = [
    ("none", {}, 0),
    ("block-prefix", {}, 2),
    ("uniform-cache", {"refresh_next": 0}, 2),
    ("uniform-cache", {"refresh_next": 2}, 4),  # two more in the first block; after the second there is none
]


def served(engine: Engine, cache: str, settings: dict[str, Any], prompt: list[int], prefix: int, **how: Any) -> None:
    """Run one request, and hold its row-layers against the engine's counters."""
    params = flat_params(**{"max_tokens": RESPONSE, "ignore_eos": True, "seed": 0, **how})
    engine.add(Request("r", prompt, params, prefix, policy=parse(cache, settings, lambda: DepthLookup({}))))
    engine.step()
    (running,) = engine._lifecycle.unfinished()
    usage, length, canvases = running.record.usage, running.pending.decoding.length, running.pending.canvases
    while engine.busy:
        engine.step()  # a pass for others may follow the result, so the usage is read at the end
    stats = engine.stats
    assert stats.row_layers == usage.row_layers + stats.prefix_row_layers
    canvases = usage.forwards * (1 if running.policy.traits.schedule.own_clocks else canvases)
    whole = canvases * length * engine.model.config.layers
    assert stats.row_layers_saved == whole - usage.row_layers


@pytest.mark.parametrize(("cache", "settings", "sampling", "refreshes", "of_the_prefix"), MASKED)
def test_masked(
    cache: str, settings: dict[str, Any], sampling: dict[str, Any], refreshes: int, of_the_prefix: int
) -> None:
    engine = make_engine()
    served(engine, cache, settings, prompt_of(PROMPT), PREFIX, **sampling)
    assert (engine.stats.refreshes, engine.stats.prefix_refreshes) == (refreshes, of_the_prefix)


@pytest.mark.parametrize(("cache", "settings", "refreshes"), UNIFORM)
def test_uniform(cache: str, settings: dict[str, Any], refreshes: int) -> None:
    engine = poisoned_engine(checkpoint("gidd").model)
    how = {"block_length": 4, "steps_per_block": 4, "min_tokens": RESPONSE}
    served(engine, cache, settings, list(range(PROMPT)), 0, **how)
    assert engine.stats.refreshes == refreshes


@pytest.mark.parametrize("cache", ["none", "exact"])
def test_block_causal(cache: str) -> None:
    engine = poisoned_engine(checkpoint("sdar").model)
    served(engine, cache, {}, list(range(PROMPT)), 0)
    assert engine.stats.refreshes == 0, "what is committed is final"


def test_no_refresh_is_put_off_where_every_pass_is_one() -> None:
    """With one step a block, all passes of `block-dual` cost the same: only the first one waits for another's."""
    steps = {}
    for limit in (None, 1):
        engine = make_engine(max_refreshes=limit)
        for name in "ab":
            engine.add(request(name, block_length=1).with_policy(BlockDual()))
        while engine.busy:
            engine.step()
        steps[limit] = engine.stats.steps
    assert steps == {None: 8, 1: 9}


def test_every_policy_is_counted_here() -> None:
    specs = ["exact", *(case[0] for case in MASKED), *(case[0] for case in UNIFORM)]
    assert {name for spec in specs for name in spec.split("+")} == set(policy_names())
