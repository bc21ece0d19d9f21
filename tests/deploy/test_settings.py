"""Settings of a fleet, and what `remask deploy` refuses before anything starts."""

from typing import Any

import pytest

from remask.cli import main
from remask.cli.main import parse
from remask.deploy.settings import FleetSettings, from_words
from remask.errors import ConfigError


def test_what_replicas_are_made_of() -> None:
    told = FleetSettings.from_mapping(
        {"engine": {"max_num_seqs": 4}, "server": {"max_queue": 6, "drain_timeout": 2.5}, "max_replicas": 3}
    )
    assert told.spill.slots == 4
    assert list(told.server_config.model_names) == ["bundled"]
    assert told.cache == parse(["deploy"]).cache, "Serve's own tools and the command begin alike"
    assert told.scaling == {
        "autoscaling_config": {
            "min_replicas": 1,
            "max_replicas": 3,
            "target_ongoing_requests": 4.0,
            "upscale_delay_s": 30.0,
            "downscale_delay_s": 600.0,
        }
    }
    assert FleetSettings(min_replicas=2, max_replicas=2).scaling == {"num_replicas": 2}
    assert (
        FleetSettings(max_replicas=2, target_ongoing_requests=1.5).scaling["autoscaling_config"][
            "target_ongoing_requests"
        ]
        == 1.5
    )
    assert told.max_open_requests > 4 + 6, "a replica's own 429 comes first"
    assert told.shutdown_s > 2.5
    assert "secret" not in repr(FleetSettings(server={"api_keys": ["secret"]}))


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"modle": "x"}, "Did you mean 'model'"),
        ({"engine": {"max_num_seq": 1}}, "Did you mean 'max_num_seqs'"),
        ({"server": {"max_que": 1}}, "Did you mean 'max_queue'"),
        ({"server": {"max_connections": 1}}, "Unknown setting of 'server' 'max_connections'"),
        ({"llm": {"dtpye": "x"}}, "Did you mean 'dtype'"),
        ({"min_replicas": 0}, "min_replicas"),
        ({"min_replicas": 3}, "max_replicas must be at least min_replicas"),
        ({"routing": "random"}, "Available: prefix, round-robin"),
        ({"balance": 1.0}, "balance"),
        ({"target_ongoing_requests": 0}, "target_ongoing_requests"),
        ({"upscale_delay_s": -1}, "upscale_delay_s"),
        ({"downscale_delay_s": float("inf")}, "downscale_delay_s"),
        ({"num_gpus": -1}, "num_gpus"),
        ({"llm": None}, "llm must be an object of settings by name, got None"),
        ({"engine": "abc"}, "engine must be an object of settings by name, got 'abc'"),
        ({"server": ["max_queue"]}, "server must be an object of settings by name"),
    ],
)
def test_bad_settings(values: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        FleetSettings.from_mapping(values)


def test_the_words_of_a_command_line_of_ray_serve() -> None:
    words = {"model": "bundled", "max_replicas": "4", "balance": "1.5", "routing": "prefix", "engine": '{"audit": 0}'}
    fleet = FleetSettings.from_mapping(from_words(words))
    assert (fleet.max_replicas, fleet.balance, fleet.routing, fleet.engine) == (4, 1.5, "prefix", {"audit": 0})
    with pytest.raises(ConfigError, match=r"max_replicas must be a whole number .*, got 'four'"):
        FleetSettings.from_mapping(from_words({"max_replicas": "four"}))
    with pytest.raises(ConfigError, match="llm is not JSON that can be read"):
        from_words({"llm": "{"})


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--port", "0"], "--port 0 is not possible here"),
        (["--port", "70000"], "--port must be a whole number from 0 to 65535"),
        (["--min-replicas", "2", "--max-replicas", "1"], "max_replicas"),
        (["--max-num-seqs", "0"], "max_num_seqs"),
        (["--max-queue", "-1"], "max_queue"),
        (["--chat-template", "/nowhere.jinja"], "--chat-template"),
    ],
)
def test_bad_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str], text: str
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    assert main(["--quiet", "deploy", *words]) == 2
    assert text in capsys.readouterr().err


def test_an_unknown_routing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["deploy", "--routing", "random"])
    assert "Unknown --routing 'random'. Available: prefix, round-robin" in capsys.readouterr().err


def test_ray_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "ray" else object())
    assert main(["deploy"]) == 2
    said = capsys.readouterr().err
    assert "this needs ray: pip install " in said
    assert "'ray[serve]>=" in said
    assert "remask[" not in said, "pip would install a checkout anew"


def test_every_process_of_a_replica_has_a_gpu() -> None:
    assert FleetSettings(llm={"tensor_parallel": 2}).num_gpus == 0
    assert FleetSettings(llm={"tensor_parallel": 2}, num_gpus=2).llm["tensor_parallel"] == 2
    with pytest.raises(ConfigError, match=r"num_gpus=1 is too few for a replica of tensor_parallel=2.* use num_gpus=2"):
        FleetSettings(llm={"tensor_parallel": 2}, num_gpus=1)
    with pytest.raises(ConfigError, match="tensor_parallel"):
        FleetSettings(llm={"tensor_parallel": 0})
