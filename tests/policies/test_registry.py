import math
from typing import Any

import pytest

from remask.errors import ConfigError, UnknownNameError
from remask.policies import BiCache, Dense, Reuse, parse, policy_names, settings_of
from remask.policies.depth_lookup import DepthLookup
from remask.policies.registry import setting_names

TABLE = DepthLookup({50: 3})


def no_table() -> DepthLookup:
    raise AssertionError("the depth table was asked for")


def test_names() -> None:
    assert {"none", "reuse", "bicache"} <= set(policy_names())


@pytest.mark.parametrize(
    ("spec", "settings", "expected"),
    [
        ("none", None, Dense()),
        ("none", {}, Dense()),
        ("reuse", None, Reuse()),
        ("bicache", {"depth": 2}, BiCache(depth=2)),
        ("bicache+none", {"depth": 0}, BiCache(depth=0)),
        ("bicache", {"depth": 2, "refresh_interval": 4}, BiCache(depth=2, refresh_interval=4)),
        ("bicache", {"depth": 2, "refresh_interval": None}, BiCache(depth=2, refresh_interval=None)),
        ("bicache", {"depth": 2, "boundary": "recomputed"}, BiCache(depth=2, boundary_state="recomputed")),
    ],
)
def test_specs(spec: str, settings: dict[str, Any] | None, expected: object) -> None:
    assert parse(spec, settings, no_table) == expected


@pytest.mark.parametrize("settings", [None, {}, {"depth": "table"}])
def test_the_table_is_read_where_it_is_needed(settings: dict[str, Any] | None) -> None:
    policy = parse("bicache", settings, lambda: TABLE)
    assert isinstance(policy, BiCache)
    assert policy.depth is TABLE
    assert policy.refresh_interval == 16


@pytest.mark.parametrize(
    ("spec", "settings"),
    [
        ("none", {}),
        ("bicache", {"depth": 2, "refresh_interval": None, "boundary": "recomputed"}),
        ("bicache", {"depth": "table", "refresh_interval": 4, "boundary": "stored"}),
        ("dkv-decode", {"refresh_interval": 3, "shift": None}),
        (
            "bicache+dllm-cache",
            {"depth": 1, "refresh_interval": 2, "boundary": "stored", "prompt_interval": 3, "response_interval": 4}
            | {"ratio": 0.5, "select": "key", "select_layers": 2, "cfg_interval": 2, "phase": "down"},
        ),
    ],
)
def test_settings_can_be_read_back(spec: str, settings: dict[str, Any]) -> None:
    assert settings_of(parse(spec, settings, lambda: TABLE)) == settings


@pytest.mark.parametrize("name", policy_names())
def test_defaults_can_be_given_back(name: str) -> None:
    policy = parse(name, None, lambda: TABLE)
    assert parse(name, settings_of(policy), lambda: TABLE) == policy


def test_a_setting_that_both_policies_take_is_told_apart() -> None:
    given = {"depth": 1, "refresh_interval": 3, "dkv-decode.refresh_interval": 5}
    policy = parse("bicache+dkv-decode", given, no_table)
    assert settings_of(policy).items() >= given.items()
    assert parse("bicache+dkv-decode", settings_of(policy), no_table) == policy
    assert parse("bicache+dkv-decode", {"bicache.depth": 1, "refresh_interval": 3}, no_table) == parse(
        "bicache+dkv-decode", {"depth": 1, "bicache.refresh_interval": 3}, no_table
    )


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"depth": 1, "bicache.depth": 2}, "'bicache.depth' and 'depth' are the same setting here; give one of them"),
        ({"depth": 1, "none.depth": 2}, "Unknown setting .*'none.depth'"),
        ({"depth": 1, "dkv-decode.depth": 2}, "Unknown setting .*'dkv-decode.depth'"),
    ],
)
def test_settings_addressed_to_the_wrong_policy(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse("bicache+dkv-decode", settings, no_table)


def test_a_policy_of_somebody_elses_has_no_settings() -> None:
    class Own(Dense):
        pass

    assert settings_of(Own()) == {}


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("bicahe", r"Unknown cache policy 'bicahe'. Did you mean 'bicache'\? Available: .*none.*"),
        ("non", r"Unknown cache policy 'non'. Did you mean 'none'\?"),
        ("", "Unknown cache policy ''. Available"),
        ("bicache+", "Unknown cache policy ''"),
        ("bicache+rouse", r"Unknown cache policy 'rouse'. Did you mean 'reuse'\?"),
        ("bicache + none", r"Unknown cache policy 'bicache '. Did you mean 'bicache'\?"),
    ],
)
def test_unknown_names_suggest_the_nearest(spec: str, message: str) -> None:
    with pytest.raises(UnknownNameError, match=message):
        parse(spec, {"depth": 1}, no_table)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("none+bicache", "'none' cannot wrap another policy; only bicache, acache can"),
        ("reuse+none", "'reuse' cannot wrap another policy"),
        ("reuse+bicache", "'reuse' cannot wrap another policy"),
        ("bicache+reuse", "would both own the shared prefix"),
        ("bicache+bicache", "name bicache once"),
        ("bicache+bicache+none", "name bicache once"),
    ],
)
def test_compositions_that_cannot_be(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(spec, None, lambda: TABLE)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        ("none", {"depth": 1}, "cache policy 'none' takes no settings, got 'depth'"),
        ("reuse", {"refresh_interval": 1}, "cache policy 'reuse' takes no settings, got 'refresh_interval'"),
        ("bicache", {"dept": 1}, r"Unknown setting of cache policy 'bicache' 'dept'. Did you mean 'depth'\?"),
        ("bicache", {"depth": 1, "refresh": 2}, "Did you mean 'refresh_interval'"),
        ("bicache", {"depth": 1, "boundry": "stored"}, "Did you mean 'boundary'"),
        ("bicache", {"depth": 1, 5: 2}, "Unknown setting"),
    ],
)
def test_unknown_settings(spec: str, settings: dict[Any, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse(spec, settings, no_table)


@pytest.mark.parametrize("depth", [-1, 1.0, "2", "Table", "online", True, None, math.nan, [1]])
def test_bad_depths(depth: Any) -> None:
    with pytest.raises(ConfigError, match="depth must be a number of layers >= 0 or 'table', got "):
        parse("bicache", {"depth": depth}, lambda: TABLE)


def test_settings_have_names_whether_they_are_shown_or_not() -> None:
    for spec, hidden in {
        "none": set(),
        "dkv-greedy": {"extent"},
        "bicache+dkv-decode": {"within_request"},
        "acache+block-dual": {"anchor_interval"},
    }.items():
        policy = parse(spec, {"depth": 2} if "bicache" in spec else {}, no_table)
        assert set(setting_names(spec)) == {*settings_of(policy), *hidden}
        assert len(setting_names(spec)) == len(set(setting_names(spec)))


@pytest.mark.parametrize("interval", [0, -1, 1.5, "16", True, math.nan, math.inf, []])
def test_bad_refresh_intervals(interval: Any) -> None:
    with pytest.raises(ConfigError, match=r"refresh_interval must be a whole number from 1 .*, or null"):
        parse("bicache", {"depth": 1, "refresh_interval": interval}, no_table)


@pytest.mark.parametrize("boundary", ["store", "", 1, True, False, 0, ["stored"]])
def test_bad_boundaries(boundary: Any) -> None:
    with pytest.raises(UnknownNameError, match=r"Unknown boundary .*Available: recomputed, stored"):
        parse("bicache", {"depth": 1, "boundary": boundary}, no_table)


def test_settings_are_not_changed() -> None:
    settings = {"depth": 1, "refresh_interval": 3}
    parse("bicache+none", settings, no_table)
    assert settings == {"depth": 1, "refresh_interval": 3}
