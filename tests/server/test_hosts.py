"""Under which names a server may be called: a page of another site may give its own name this machine's address."""

from collections.abc import Iterator
from typing import Any

import pytest

from remask.errors import ConfigError
from remask.server.config import ServerConfig
from remask.server.gate import AllowedHosts
from tests.server.serving import Running, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    with serving(allowed_hosts=["Models.Example.org"], allowed_origins=["https://app.example.org"]) as running:
        yield running


@pytest.mark.parametrize("method", ["DELETE", "GET"])
def test_a_foreign_name_gets_nothing(server: Running, method: str) -> None:
    answer = server.client.request(method, "/v1/cache", headers={"Host": "evil.example:8000"})
    assert answer.status_code == 403
    message = answer.json()["error"]["message"]
    assert "'evil.example:8000'" in message
    assert "--allowed-hosts evil.example" in message
    assert "an API key" in message


@pytest.mark.parametrize(
    "host",
    [
        "localhost",
        "LOCALHOST:1",
        "app.localhost:3",
        "127.0.0.1:8000",
        "[::1]:8000",
        "192.168.1.9",
        "models.example.org:80",
    ],
)
def test_own_names_and_addresses(server: Running, host: str) -> None:
    assert server.client.get("/v1/models", headers={"Host": host}).status_code == 200


@pytest.mark.parametrize(
    "host", ["localhost.evil.example", "127.0.0.1.evil.example", "1.2.3", "a@localhost", "xlocalhost", "example.org"]
)
def test_names_that_only_look_like_them(server: Running, host: str) -> None:
    assert server.client.get("/v1/models", headers={"Host": host}).status_code == 403


def test_probes_need_no_name(server: Running) -> None:
    for path in ("/health", "/ping"):
        assert server.client.get(path, headers={"Host": "pod.svc.cluster.local"}).status_code == 200


def test_where_there_is_a_key_any_name_is_taken() -> None:
    """A page of another site has none, and browsers add none by themselves."""
    with serving(api_keys=["k"]) as running:
        assert running.client.get("/v1/models", headers={"Host": "evil.example"}).status_code == 200
        told = running.client.get("/v1/models", headers={"Host": "evil.example", "Authorization": ""})
        assert told.status_code == 401


def test_beside_origins_both_rules_hold(server: Running) -> None:
    """A page of an allowed origin still needs an allowed name, and one of an allowed name an allowed origin to read."""
    page, own = {"Origin": "https://app.example.org"}, {"Host": "models.example.org"}
    told = server.client.get("/v1/models", headers={**own, **page})
    before = server.client.options("/v1/models", headers={**own, **page, "Access-Control-Request-Method": "POST"})
    for answer in (told, before):
        assert (answer.status_code, answer.headers["access-control-allow-origin"]) == (200, page["Origin"])
    foreign = server.client.get("/v1/models", headers={"Host": "evil.example", **page})
    assert foreign.status_code == 403
    assert foreign.headers["access-control-allow-origin"] == page["Origin"], "so that the page can read why"
    other = server.client.get("/v1/models", headers={**own, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in other.headers


@pytest.mark.parametrize("header", ["", "name.", "NAME:80", "name:"])
def test_ports_dots_and_case(header: str) -> None:
    assert AllowedHosts(["name"]).admit(header)
    assert AllowedHosts(["*"]).admit("evil.example")


@pytest.mark.parametrize("name", ["http://name", "", 3, "a,b"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts takes names such as"):
        ServerConfig(model_names=["m"], allowed_hosts=[name])
