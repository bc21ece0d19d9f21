import math
from dataclasses import fields
from typing import Any

import pytest

from remask.errors import ConfigError, UnknownNameError
from remask.policies import BiCache, Dense, DkvDecode, DkvGreedy, Reuse, parse, policy_names, settings_of
from remask.policies.bicache import DepthLookup
from remask.policies.registry import POLICIES
from tests.policies.views import no_table

TABLE = DepthLookup({50: 3})


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
    with pytest.raises(ConfigError, match="depth must be a number of layers >= 0, 'table' or 'earned', got "):
        parse("bicache", {"depth": depth}, lambda: TABLE)


VALUES: tuple[Any, ...] = (-1, -0.5, 0, 1, 1.5, 10**30, "nothing", "", True, False, None, [], {}, math.nan, math.inf)


@pytest.mark.parametrize("name", POLICIES.built_in)
def test_every_setting_is_declared_and_takes_its_values_alone(name: str) -> None:
    make: Any = POLICIES.built_in[name].make
    for each in fields(make):
        declaration, setting = each.metadata.get("declared"), each.metadata.get("setting", each.name)
        if declaration is None:
            assert setting in ("inner", "depth"), "declare it, and its values are checked"
            continue
        declaration.check(setting, declaration.default)
        for value in VALUES:
            if declaration.values.fits(value) or (value is None and declaration.default is None):
                continue
            with pytest.raises(ConfigError, match=setting):
                parse(name, {setting: value}, lambda: TABLE)
        with pytest.raises(UnknownNameError, match=f"Did you mean '{setting}'"):
            parse(name, {f"{setting}x": 1}, lambda: TABLE)


@pytest.mark.parametrize(
    ("name", "setting", "good", "bad"),
    [
        *(("bicache", "refresh_interval", each, 0) for each in (1, None)),
        *((name, "refresh_interval", each, 0) for name in ("dkv-decode", "dkv-pd", "dkv-greedy") for each in (1, None)),
        ("dkv-greedy", "window", 0, -1),
        ("dllm-cache", "prompt_interval", 1, 0),
        ("dllm-cache", "response_interval", 1, 0),
        ("dllm-cache", "cfg_interval", 1, 0),
        ("dllm-cache", "select_layers", 1, 0),
        *(("dllm-cache", "ratio", good, bad) for good, bad in ((0, -0.01), (1, 1.01))),
        ("exact", "prefill_chunk", 1, 0),
        ("uniform-cache", "refresh_next", 0, -1),
        ("uniform-cache", "drift", 2, 2.01),
    ],
)
def test_where_ranges_end(name: str, setting: str, good: object, bad: object) -> None:
    assert settings_of(parse(name, {setting: good}, lambda: TABLE)).get(setting, good) == good
    with pytest.raises(ConfigError, match=f"^{setting} must be a (whole )?number from"):
        parse(name, {setting: bad}, lambda: TABLE)


@pytest.mark.parametrize("name", [name for name, each in POLICIES.built_in.items() if each.inner is None])
def test_what_wraps_nothing_stands_last_and_what_wraps_stands_before_it(name: str) -> None:
    with pytest.raises(ConfigError, match=f"'{name}' cannot wrap another policy; only bicache"):
        parse(f"{name}+bicache", None, lambda: TABLE)
    with pytest.raises(UnknownNameError, match=f"Unknown cache policy '{name}x'"):
        parse(f"{name}x", None, lambda: TABLE)


def test_a_setting_that_both_take_goes_to_the_outer_policy() -> None:
    assert parse("bicache+dkv-decode", {"depth": 1, "refresh_interval": 2}, no_table) == BiCache(DkvDecode(), 1, 2)
    assert parse("bicache+dkv-greedy", {"depth": 1, "window": 2}, no_table) == BiCache(DkvGreedy(8, 2), 1)


def test_settings_are_not_changed() -> None:
    settings = {"depth": 1, "refresh_interval": 3}
    parse("bicache+none", settings, no_table)
    assert settings == {"depth": 1, "refresh_interval": 3}
