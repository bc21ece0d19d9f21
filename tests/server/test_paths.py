"""Paths as load balancers, browsers and proxies ask for them: HEAD, a slash behind, a prefix before."""

import re
from collections.abc import Iterator
from urllib.parse import urljoin

import pytest

from remask.errors import ConfigError
from remask.server.config import ServerConfig
from tests.server.serving import CHATS, URL, Running, serving

READ = ("/health", "/ping", "/", "/metrics", "/v1/models", "/docs", "/version", "/openapi.json")


@pytest.fixture(scope="module")
def behind() -> Iterator[Running]:
    with serving(root_path="/ai", api_keys=["k"]) as running:
        yield running


def test_head_is_answered_as_get_without_a_body(server: Running) -> None:
    for path in READ:
        told, whole = server.client.head(path), server.client.get(path)
        assert (told.status_code, told.content) == (200, b""), path
        assert told.headers["content-type"] == whole.headers["content-type"]
        if path != "/metrics":
            assert told.headers["content-length"] == whole.headers["content-length"]
    assert server.client.head(URL).status_code == 405
    assert server.client.head("/nowhere").status_code == 404


def test_both_spellings_and_a_prefix_lead_to_the_same(server: Running, behind: Running) -> None:
    for path in READ[1:]:
        if path not in ("/", "/docs", "/metrics"):
            assert server.client.get(f"{path}/").content == server.client.get(path).content, path
        for running, prefix in ((server, ""), (behind, ""), (behind, "/ai")):
            assert running.client.get(f"{prefix}{path}".rstrip("/") + "/").status_code == 200, (prefix, path)
    body = {"messages": CHATS[0], "max_tokens": 7}
    for running, url in ((server, f"{URL}/"), (behind, f"/ai{URL}"), (behind, f"/ai{URL}/"), (behind, URL)):
        assert running.client.post(url, json=body).status_code == 200
    assert behind.client.get("/ai").headers["Location"] == "/ai/"  # as relative addresses begin there
    assert behind.client.get("/aim/health").status_code == 404
    assert behind.client.get("/ai/health", headers={"Authorization": ""}).status_code == 200
    assert behind.client.get("/ai/v1/models", headers={"Authorization": ""}).status_code == 401
    assert behind.client.get("/openapi.json").json()["servers"] == [{"url": "/ai"}]
    with pytest.raises(ConfigError, match="root_path must be a prefix"):
        ServerConfig(model_names=["m"], root_path="ai/")


@pytest.mark.parametrize("page", ["/", "/docs", "/docs/"])
@pytest.mark.parametrize("prefix", ["", "/ai"])
def test_pages_ask_for_nothing_beyond_the_prefix(server: Running, prefix: str, page: str) -> None:
    """As a browser resolves their addresses, and those of their modules."""
    shown = server.client.get(page).text
    for address in re.findall(r'(?:href|src)="([^"#]*)"', shown):
        if not re.match(r"\w+:", address):
            asked = urljoin(f"{prefix}{page}", address)
            assert asked.startswith(f"{prefix}/"), address
            assert server.client.get(asked.removeprefix(prefix)).status_code == 200, address
    code = server.client.get("/docs/reference.js").text
    assert 'new URL("../openapi.json", import.meta.url)' in code
