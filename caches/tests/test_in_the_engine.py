"""What holds of remask's own caches in an engine holds of these: the same tests, under these policies."""

import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from remask.engine.engine import Engine
from remask.errors import ConfigError, PlanError
from remask.plan.pass_cost import ExecutedPlan, pass_cost
from remask.plan.plan import Plan
from remask.plan.spans import Span
from remask.policies import (
    BiCache,
    BlockDual,
    BlockPrefix,
    CachePolicy,
    Dense,
    DkvDecode,
    Reuse,
    parse,
    settings_of,
)
from remask.policies.registry import POLICIES
from remask.readers.logprobs import Logprobs
from remask_caches.acache import ACache
from remask_caches.elastic import ElasticCache, Watch
from remask_caches.entropy import EntropyCache
from tests.engine import test_adapters as adapters
from tests.engine import test_isolation as isolation
from tests.engine import test_no_waits as no_waits
from tests.engine import test_overlap as overlap
from tests.engine import test_pass_memory as pass_memory
from tests.engine import test_prefix_pass as prefix_pass
from tests.engine import test_unread as unread
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
    work_of,
)
from tests.engine.test_no_waits import no_data
from tests.plan import test_cost as cost
from tests.policies.views import no_table

__all__ = ["no_data"]  # a fixture
NAMES = ("acache", "elastic-cache", "entropy-cache")
FOUR = prefix_pass.FOUR
POLICIES_BESIDE: tuple[CachePolicy, ...] = (
    ElasticCache(4, 0.9),
    ElasticCache(4, 1.0),
    EntropyCache(3.0, 2),
    ACache(ratio=0.4),
    ACache(BlockDual(), 0.4),
)


def works() -> list[Work]:
    """A request under each policy, with a prefix that all share, and one with guidance."""
    found = []
    for number, policy in enumerate(POLICIES_BESIDE):
        found.append(Work(request(f"plain {number}", prompt_of(9 + number), 6, max_tokens=12), policy))
        found.append(Work(request(f"guided {number}", prompt_of(12), 6, cfg_scale=1.0), policy))
    return [*found, Work(request("slow", remasking="slowfast"), Dense())]


@pytest.mark.few(23)
@pytest.mark.parametrize("joins", [0, 1, 4])
@pytest.mark.parametrize(
    ("operation", "layer"),
    [(name, layer) for name in ("attend", "_feed_forward") for layer in range(LAYERS)] + [("head_input", 0)],
)
def test_a_pass_that_failed_halfway_is_repeated_as_it_was(
    operation: str, layer: int, joins: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(isolation, "comparing", works)
    isolation.test_a_pass_that_failed_halfway_is_repeated_as_it_was(operation, layer, joins, monkeypatch, caplog)


def test_a_batch_of_many_is_many_of_one_whatever_is_queued() -> None:
    """Memory is full of NaN before; without overlap, and with it."""
    expected = {item.request.id: outcome(alone(item)) for item in works()}
    for queued in (False, True):
        results = run(make_engine(overlap=queued, max_num_seqs=16), works())
        assert {name: outcome(result) for name, result in results.items()} == expected


def test_batch_invariance_holds_to_the_last_bit() -> None:
    config = small_config("llada")
    model = CheckedTransformer(config, lively_weights(config, torch.float32))

    def engine() -> Engine:
        return poisoned_engine(model, batch_invariant=True, max_num_seqs=16)

    asked = [replace(item, request=item.request.with_readers(Logprobs(2))) for item in works()]
    together = run(engine(), asked)
    for item in asked:
        assert outcome(together[item.request.id]) == outcome(run(engine(), [item])[item.request.id])


def test_while_attention_is_watched_nothing_is_queued() -> None:
    overlap.test_steps_that_cannot_be_foreseen_are_counted(ElasticCache(window=4))


@pytest.mark.parametrize(
    ("cache", "settings", "sampling", "refreshes", "of_the_prefix"),
    [
        ("elastic-cache", {"window": 4, "threshold": 0.0}, FOUR, 1, 0),
        ("elastic-cache", {"window": 4, "threshold": 1.0}, FOUR, 8, 0),
        ("entropy-cache", {"threshold": 0.0}, FOUR, 8, 0),  # each step decodes a token, which is less than certain
        ("entropy-cache", {"threshold": 20.0}, FOUR, 1, 0),
        ("acache", {"ratio": 0.2}, FOUR, 3, 2),  # the pass that finds the anchors, and the first one of each block
        ("acache", {"ratio": 0.0}, FOUR, 0, 0),
    ],
)
def test_refreshes_are_counted(
    cache: str, settings: dict[str, Any], sampling: dict[str, Any], refreshes: int, of_the_prefix: int
) -> None:
    prefix_pass.test_masked(cache, settings, sampling, refreshes, of_the_prefix)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("name", "policy"), [("llada", "elastic-cache"), ("llada", "acache"), ("dream", "entropy-cache")]
)
def test_adapters(name: str, policy: str, invariant: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"window": 8} if policy == "elastic-cache" else {}
    monkeypatch.setattr(adapters, "parse", lambda spec, _, table: parse(spec, settings, table))
    adapters.test_answers_are_those_of_merged_models(name, policy, invariant)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("cache", NAMES)
def test_the_estimate_of_memory_holds_their_passes(
    cache: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    pass_memory.test_the_estimate_holds_the_passes_of_every_policy("llada", cache, dtype, monkeypatch)


@pytest.mark.parametrize(
    ("policy", "prefix", "name"),
    [
        (ElasticCache(window=8), 0, "elastic-cache"),
        (EntropyCache(), 0, "entropy-cache"),
        (ACache(), 8, "acache"),
        (ACache(BlockDual()), 8, "acache+block-dual"),
        (ACache(), 0, None),
    ],
    ids=repr,
)
def test_what_approximates_is_told(policy: CachePolicy, prefix: int, name: str | None) -> None:
    unread.test_what_approximates_is_told(policy, prefix, name)


@pytest.mark.parametrize(
    ("name", "setting", "good", "bad"),
    [
        ("acache", "ratio", 0, -0.01),
        ("acache", "ratio", 1, 1.01),
        ("acache", "anchor_interval", 1, 0),
        ("elastic-cache", "window", 1, 0),
        ("elastic-cache", "track_num", 1, 0),
        ("elastic-cache", "threshold", 0, -0.01),
        ("elastic-cache", "threshold", 1, 1.01),
        ("entropy-cache", "threshold", 0, -0.01),
        ("entropy-cache", "recent", 0, -1),
    ],
)
def test_where_ranges_end(name: str, setting: str, good: object, bad: object) -> None:
    assert settings_of(parse(name, {setting: good}, no_table)).get(setting, good) == good
    with pytest.raises(ConfigError, match=f"^{setting} must be a (whole )?number from"):
        parse(name, {setting: bad}, no_table)


def test_other_packages_and_remask_know_them_by_name() -> None:
    for name in NAMES:
        assert POLICIES.get(name).make.__module__.startswith("remask_caches.")
    spec = parse("bicache+entropy-cache", {"depth": 2, "recent": 3}, no_table)
    assert spec == BiCache(EntropyCache(recent=3), 2)


@pytest.mark.parametrize("family", ["llada", "dream", "llada-moe"])
def test_without_anchors_acache_is_reuse(family: str) -> None:
    """Its prefix is copied, in memory that holds NaN before."""
    asked = request("r", prompt_of(13), 8)
    plain, reused = (run(make_engine(family), [Work(asked, each)])["r"] for each in (ACache(ratio=0.0), Reuse()))
    assert outcome(plain)[:3] == outcome(reused)[:3]
    assert work_of(plain.usage) == work_of(reused.usage)


def test_other_requests_read_the_prefix_as_it_was() -> None:
    engine, prompt = make_engine("llada"), prompt_of(13)
    before = run(engine, [Work(request("r", prompt, 8), Reuse())])["r"]
    run(engine, [Work(request("anchored", prompt, 8), ACache(ratio=0.5))])
    after = run(engine, [Work(request("r", prompt, 8), Reuse())])["r"]
    assert outcome(before)[:3] == outcome(after)[:3]
    assert after.usage.cached_tokens == 8


@pytest.mark.parametrize("guided", [False, True])
def test_acache_keeps_inputs_for_one_pass_only(guided: bool) -> None:
    """And of the canvas that reads the prefix alone."""
    engine = make_engine("llada")
    sampling: dict[str, Any] = {"cfg_scale": 1.0} if guided else {}
    engine.add(request("r", prompt_of(11), 7, **sampling).with_policy(ACache()))
    engine.step()  # the pass over the prefix
    assert engine.memory.extra_bytes == (LAYERS - 1) * 19 * 32 * 8
    engine.step()
    assert engine.memory.extra_bytes == 0
    (running,) = engine._lifecycle.unfinished()
    branch = running.canvases[0]
    assert branch.hook_output is not None
    assert branch.hook_output[:7].sum() == pytest.approx(8 * 4 * LAYERS), "8 masks, 4 heads, all layers"
    assert not branch.hook_output[7:].any()
    run(engine, [])


@pytest.mark.parametrize("family", ["llada", "dream"])
@pytest.mark.parametrize("inner", [Dense(), BlockPrefix(), BlockDual(), DkvDecode()], ids=str)
def test_guidance_beside_the_pass_that_finds_the_anchors(family: str, inner: CachePolicy) -> None:
    """Only the canvas that reads the prefix has anchors, so the other one takes no part in the pass that finds them."""
    sampling: dict[str, Any] = {"cfg_scale": 1.0, "block_length": 4, "steps": 4}
    found, known = (Work(request("r", prompt_of(11), 7, **sampling), ACache(inner, ratio)) for ratio in (0.2, 1.0))
    result, whole = alone(found, family), alone(known, family)
    assert (result.finish_reason, result.error) == ("length", None)
    assert outcome(run(make_engine(family), [found, Work(request("other"), Dense())])["r"]) == outcome(result)
    stored = result.usage.prefix_tokens
    canvas, anchors = 19, -(-stored // 5)
    asking, left_out = canvas - stored, stored - anchors
    assert result.usage.forwards == whole.usage.forwards + 1
    begun = 2  # blocks, in each of which one pass computes the anchors; the others compute no stored row in either run
    assert result.usage.row_layers == whole.usage.row_layers + LAYERS * (asking - begun * left_out)


@pytest.mark.usefixtures("no_data")
def test_watched_attention_is_read_once_a_layer_for_all_canvases(monkeypatch: pytest.MonkeyPatch) -> None:
    config = no_waits.shape_of("llada")
    engine, rng = no_waits.fake_engine(config), random.Random(0)
    drifts, tracked = list[int](), list[int]()

    def drifted(tensor: torch.Tensor) -> NDArray[Any]:
        if not tensor.is_floating_point():
            tracked.append(len(tensor))
            return np.full(len(tensor), 3)
        drifts.append(len(tensor))
        return np.full(len(tensor), rng.choice([0.0, 0.5]))

    monkeypatch.setattr("remask_caches.elastic_on_device.fetch", drifted)
    policy = ElasticCache(window=4)
    requests = [no_waits.asked(str(n), policy, rng, max_tokens=4, temperature=0.7 * n) for n in range(3)]
    reads, passes = no_waits.finish(engine, requests, monkeypatch)
    assert len(reads.shapes) == passes
    assert len(tracked) == passes, "once a pass, after the last layer"
    assert 0 < len(drifts) <= passes * (config.layers - 1)
    assert (max(drifts), max(tracked)) == (len(requests), len(requests) * config.layers)


@pytest.mark.usefixtures("no_data")
def test_anchors_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, read = random.Random(0), list[int]()
    rules: list[dict[str, Any]] = [{}, {"temperature": 0.7}, {"cfg_scale": 1.5}]
    policy = ACache(BlockDual(), 0.3)
    requests = [no_waits.asked(str(n), policy, rng, max_tokens=4, **more) for n, more in enumerate(rules)]

    def weighed(tensor: torch.Tensor) -> NDArray[Any]:
        read.append(tensor.numel())
        return np.arange(tensor.numel(), dtype=np.float32)

    monkeypatch.setattr("remask_caches.acache_on_device.fetch", weighed)
    engine = no_waits.fake_engine(no_waits.shape_of("llada"))
    reads, passes = no_waits.finish(engine, requests, monkeypatch)
    assert 0 < len(reads.shapes) <= passes
    assert read == [36], "of all three requests, whose prefix is of 12 tokens"


@pytest.mark.thorough
@pytest.mark.usefixtures("no_data")
@pytest.mark.parametrize("family", ["llada", "dream"])
def test_a_pass_reads_once(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    no_waits.test_a_pass_reads_once(family, EntropyCache(0.5, 2), monkeypatch)


@pytest.mark.usefixtures("no_data")
def test_the_rule_reads_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [no_waits.asked("r", Dense(), random.Random(0), remasking="slowfast")]
    reads, passes = no_waits.finish(
        no_waits.fake_engine(no_waits.shape_of("llada"), overlap=True), requests, monkeypatch
    )
    assert len(reads.shapes) == passes


def test_watching_projects_queries_and_scores_again() -> None:
    rows, item, hidden, queries = cost.rows, cost.ITEM, cost.D, cost.Q
    spans = [Span(range(i, i + 1), rows(4, 5), save=rows(4, 5) if i else None) for i in range(3)]
    widths, score = replace(cost.WIDTHS, feeds=(cost.FEED,) * 3), 2 * queries * (hidden + cost.T)
    watch = Watch(window=rows(4, 5), among=cost.ALL, threshold=0.9, tracked=rows())
    first = Plan(tuple(spans), predict=rows(4), hook=watch)
    later = Plan(tuple(spans), predict=rows(4), hook=replace(watch, tracked=rows(0, 2, 3)))
    assert isinstance(later.hook, Watch)
    refreshed = later.hook.refresh(later, 1)
    costs = [pass_cost(widths, [ExecutedPlan(plan)]).operations["watch"] for plan in (first, later, refreshed)]
    assert costs[0].flops == 3 * 2 * score, "three layers, and the window"
    assert costs[1].flops == (3 * 2 + 2 * 2 * 3) * score, "and what is tracked, before and after all but the last"
    assert costs[2].flops == (3 * 2 + 2 * 1 * 3) * score, "nothing is compared where all is computed anew"
    assert [each.weights for each in costs] == [layers * item * hidden * queries for layers in (3, 5, 4)]
    assert [each.kv_read for each in costs] == [layers * item * cost.T * cost.K for layers in (3, 5, 4)]


def test_what_cannot_be_watched_is_refused() -> None:
    def mask(*positions: int) -> NDArray[np.bool_]:
        return np.isin(np.arange(6), positions)

    def plan(hook: Watch, layers: int = 1) -> Plan:
        spans = [Span(range(i, i + layers), mask(4), save=mask(4) if i else None) for i in range(0, 2, layers)]
        return Plan(spans, predict=mask(4), hook=hook)

    watch = Watch(window=mask(4, 5), among=mask(0, 1), threshold=0.5, tracked=mask(0))
    plan(watch).check(6)
    assert plan(watch).cost == watch.refresh(plan(watch), 1).cost - 5
    with pytest.raises(PlanError, match="a span for each layer"):
        plan(watch, layers=2).check(6)
    for bad in (replace(watch, window=mask()), replace(watch, among=mask())):
        with pytest.raises(PlanError, match="watched of no row, or to no position"):
            plan(bad).check(6)
