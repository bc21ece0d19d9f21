"""Routing: the choices of a dense model in float64, what each policy computes and leaves out, and the report."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lab.tests.subjects.support import PROMPT, open_model, work

from remask.cli import main
from remask.errors import ConfigError
from remask.llm import LLM
from remask_lab.instruments.watch import UncachedWatcher
from remask_lab.observe import ObservedPass
from remask_lab.records.record import read_record
from remask_lab.subjects.routing import (
    Counts,
    RoutedPass,
    RouteTrace,
    RouteTracer,
    Routing,
    RoutingReport,
    Sets,
    measure_routing,
    reading,
    text,
)
from tests import goldens as dense
from tests.goldens import moe
from tests.oracles.experts import LladaMoeModel, load, routed

MODEL = "llada_moe_dense"
NAN = math.nan


def open_mixture() -> LLM:
    return open_model(moe.model_dir(MODEL))


def oracle_sets(tokens: list[int]) -> Sets:
    """The experts of each row of a canvas, ascending, [layers, T, k]: every row is computed."""
    model = load(moe.model_dir(MODEL), torch.float64)
    assert isinstance(model, LladaMoeModel)
    with routed(model) as seen:
        model.forward(torch.tensor(tokens))
    return np.array([[row.nonzero()[:, 0].tolist() for row in layer] for layer in seen])


def canvases(llm: LLM) -> list[list[int]]:
    """The tokens that each uncached pass of `work` saw."""
    found: list[list[int]] = []

    def keep(seen: ObservedPass) -> None:
        found.append(seen.tokens.tolist())

    UncachedWatcher(llm, "a test").run(work(llm, block_length=6), keep)
    return found


def test_uncached_choices_are_those_of_a_dense_model() -> None:
    llm = open_mixture()
    trace = RouteTracer(llm).trace(work(llm, block_length=6))
    seen = canvases(llm)
    assert [each.step for each in trace.passes] == list(range(len(seen)))
    expected = [oracle_sets(tokens) for tokens in seen]
    for each, sets in zip(trace.passes, expected, strict=True):
        np.testing.assert_array_equal(each.after, sets)
        assert each.computed.all()
    for each, before in zip(trace.passes[1:], expected, strict=False):
        np.testing.assert_array_equal(each.before, before)
    (none,) = measure_routing(llm, [work(llm, block_length=6)], []).policies
    changes = [(new != old).any(axis=-1) for old, new in pairwise(expected)]
    np.testing.assert_allclose(none.between, np.mean(changes, axis=(0, 2)))
    assert (set(none.moved), none.agreement) == ({0.0}, 1.0)
    assert all(math.isnan(share) for share in none.kept), "nothing is left out"


def test_a_reused_prefix_went_where_it_goes_alone() -> None:
    llm = open_mixture()
    tracer, item = RouteTracer(llm), work(llm, "reuse", block_length=6)
    for _ in range(2):  # the second request has an empty store too
        trace = tracer.trace(item)
        alone = oracle_sets(PROMPT[: item.prefix_length])
        for each in trace.passes:
            np.testing.assert_array_equal(each.after[:, : item.prefix_length], alone)
            assert not each.computed[:, : item.prefix_length].any()
            assert each.computed[:, item.prefix_length :].all()
    report = measure_routing(llm, [work(llm, block_length=6)], [("reuse", llm.session.policy("reuse"))])
    together = [oracle_sets(tokens)[:, : item.prefix_length] for tokens in canvases(llm)]
    expected = np.mean([(alone != sets).any(axis=-1) for sets in together], axis=(0, 2))
    np.testing.assert_allclose(report.policies[1].kept, expected)


@pytest.mark.parametrize(
    ("policy", "settings"),
    [
        ("bicache", {"depth": 0, "refresh_interval": 1}),
        ("dkv-decode", {"refresh_interval": 1}),
        ("dllm-cache", {"prompt_interval": 1, "response_interval": 1}),
    ],
)
def test_a_policy_that_renews_everything_moves_nothing(policy: str, settings: dict[str, Any]) -> None:
    llm = open_mixture()
    report = measure_routing(llm, [work(llm, block_length=6)], [(policy, llm.session.policy(policy, settings))])
    none, same = report.policies
    assert same.between == none.between
    assert (set(same.moved), same.agreement) == ({0.0}, 1.0)


@pytest.mark.few(3)
@pytest.mark.parametrize("policy", ["dkv-decode", "block-dual", "dllm-cache", "elastic-cache", "bicache+dllm-cache"])
def test_rows_are_followed_by_position(policy: str) -> None:
    llm = open_mixture()
    settings = {"window": 4, "threshold": 0.9} if policy == "elastic-cache" else {}
    settings |= {"depth": 1} if "bicache" in policy else {}
    item = work(llm, block_length=6).with_policy(llm.session.policy(policy, settings))
    passes: list[ObservedPass] = []
    tracer = RouteTracer(llm)
    trace = tracer.trace(item)
    tracer.watcher.run(item, passes.append)
    assert len(passes) == len(trace.passes)
    left_out = 0
    for seen, each in zip(passes, trace.passes, strict=True):
        np.testing.assert_array_equal(each.before[~each.computed], each.after[~each.computed])
        left_out += int((~each.computed).sum())
        assert int(each.computed.sum()) <= seen.cost
        if "dllm" not in policy:  # rows that it chooses on the device are not in its plan
            for place, layer in enumerate(tracer.layers):
                (span,) = [span for span in seen.plan.spans if layer in span.layers]
                np.testing.assert_array_equal(each.computed[place], span.rows)
    assert left_out > 0


def test_rows_that_are_chosen_on_the_device_are_known() -> None:
    llm = open_mixture()
    settings = {"ratio": 0.25, "response_interval": 100, "prompt_interval": 100}
    item = work(llm, block_length=12, steps=12).with_policy(llm.session.policy("dllm-cache", settings))
    tracer = RouteTracer(llm)
    trace = tracer.trace(item)
    later = [place for place, layer in enumerate(tracer.layers) if layer > 0]
    for each in trace.passes[1:]:
        assert each.computed[later].sum(axis=1).tolist() == [3] * len(later), "a quarter of the response"
        assert not each.computed[later][:, : len(PROMPT)].any()


def test_a_model_without_experts_is_refused() -> None:
    llm = open_model(dense.model_dir("llada"))
    with pytest.raises(ConfigError, match="this model has no experts"):
        measure_routing(llm, [work(llm)], [])


def test_what_is_not_measured_is_refused() -> None:
    llm = open_mixture()
    with pytest.raises(ConfigError, match="give one at least"):
        measure_routing(llm, [], [])
    with pytest.raises(ConfigError, match="cfg_scale=1"):
        measure_routing(llm, [work(llm, cfg_scale=1.0)], [])
    with pytest.raises(ConfigError, match="without a cache"):
        measure_routing(llm, [work(llm, "reuse")], [])


def sets(*rows: tuple[int, int]) -> Sets:
    return np.array([rows])


def test_shares_count_what_is_known() -> None:
    old, new = sets((0, 1), (0, 1), (-1, -1), (2, 3)), sets((0, 1), (0, 2), (1, 2), (-1, -1))
    first = RoutedPass(0, old, old, np.array([[True, True, False, True]]))
    second = RoutedPass(1, old, new, np.array([[True, True, True, False]]))
    uncached = RouteTrace(
        (
            RoutedPass(0, old, sets((0, 1), (0, 1), (1, 3), (2, 3)), first.computed),
            RoutedPass(1, old, sets((0, 3), (0, 2), (1, 3), (2, 3)), first.computed),
        ),
        (5, 6),
    )
    counts = Counts(1)
    counts.add(RouteTrace((first, second), (5, 7)), uncached)
    found = counts.summary("x", {})
    assert found.between == (1 / 2,), "of the two rows that were computed twice one went elsewhere"
    assert found.moved == (2 / 6,)
    assert math.isnan(found.kept[0]), "neither row that was left out had been computed"
    assert found.agreement == 0.5


REPORT = RoutingReport(
    "m",
    8,
    2,
    (2, 3),
    1,
    (
        Routing("none", {}, (0.1, 0.3), (0.0, 0.0), (NAN, NAN), 1.0),
        Routing("reuse", {}, (0.1, 0.1), (0.2, 0.4), (0.5, 0.25), 0.75),
        Routing("x", {}, (0.1, 0.1), (0.0, 0.0), (NAN, NAN), 1.0),
    ),
)


def test_the_reading_says_how_much_and_where() -> None:
    assert reading(REPORT) == (
        "Without a cache 20.0 % of the rows go to another set of 2 of 8 experts than in the step before, most in layer "
        "3. Under reuse 30.0 % of the computed rows go to other experts than without it, and 37.5 % of those left out "
        "were computed by others than they would be now, most in layer 2; 75.0 % of the tokens are the same. "
        "Under x 0.0 % of the computed rows go to other experts than without it; 100.0 % of the tokens are the same."
    )
    lone = RoutingReport("m", 8, 2, (2,), 1, (Routing("none", {}, (NAN,), (0.0,), (NAN,), 1.0),))
    assert reading(lone) == "No request has two passes, so nothing is known of changes between steps."
    lines = text(REPORT).splitlines()
    assert lines[1].split() == ["none", "2", "10.00", "0.00", "-"]
    assert lines[4].split() == ["reuse", "3", "10.00", "40.00", "25.00"]


@pytest.mark.thorough
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "r.json", tmp_path / "plots"
    words = ["--model", "llada-moe-tiny", "--load-format", "dummy", "--dtype", "float32", "--device", "cpu"]
    shape = ["--requests", "2", "--prefixes", "1", "--prefix-tokens", "12", "--prompt-tokens", "4", "--max-tokens", "4"]
    more = ["--caches", "none,reuse,dllm-cache", "--output", str(output), "--plots", str(plots)]
    assert main(["--quiet", "analyze", "routing", *words, *shape, *more]) == 0
    record = read_record(output, "analyze routing")
    assert [each["cache"] for each in record.data["policies"]] == ["none", "reuse", "dllm-cache"]
    assert record.data["layers"] == [2], "the first layer of this preset is dense"
    assert record.about["settings"]["name"] == "random tokens"
    assert (plots / "routing.png").read_bytes().startswith(b"\x89PNG")
    assert record.data["reading"] in capsys.readouterr().out
    assert main(["--quiet", "analyze", "routing", "--model", "llada-tiny", "--load-format", "dummy"]) == 2
    assert "has no experts" in capsys.readouterr().err
