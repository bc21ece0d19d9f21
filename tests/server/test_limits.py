"""Who is let in, how much is taken, and what a browser may do."""

import asyncio
import json
import logging
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from remask.errors import ConfigError
from remask.server.config import ServerConfig
from remask.server.gate import AllowedHosts, Gate
from tests.server.serving import CHATS, LONG, URL, Running, at_once, held, make_llm, serving
from tests.waiting import eventually

KEY = "a-secret-key"


@pytest.fixture(scope="module")
def limited() -> Any:
    """A server with a key, small limits and room for one running and one waiting request."""
    settings: dict[str, Any] = {
        "api_keys": [KEY, "another"],
        "max_queue": 1,
        "max_body_bytes": 20_000,
        "max_messages": 4,
        "allowed_origins": ["https://example.org"],
    }
    with serving(make_llm(max_num_seqs=1), **settings) as running:
        yield running


def test_keys(limited: Running) -> None:
    assert limited.ask().status_code == 200
    told = limited.client.get("/v1/models", headers={"Authorization": f"Basic {KEY}", "X-Api-Key": KEY})
    assert told.status_code == 200, "a proxy may have a scheme of its own"
    for header in ("", "Bearer", "Bearer a-secret-kez", f"Basic {KEY}", f"Bearer {KEY}x", "Bearer \xe9"):
        response = limited.client.get("/v1/models", headers={b"Authorization": header.encode("latin-1")})
        assert response.status_code == 401, header
        assert response.json()["error"]["code"] == "invalid_api_key"
        assert KEY not in response.text
    assert limited.client.get("/v1/models", headers={"Authorization": "bearer another"}).status_code == 200
    for path in ("/metrics", "/v1/cache", "/openapi.json", "/version", "/get_model_info"):
        assert limited.client.get(path, headers={"Authorization": "none"}).status_code == 401
    assert limited.client.get("/health", headers={"Authorization": "none"}).status_code == 200, "probes have no key"
    for path in ("/live", "/ready"):
        answer = limited.client.get(path, headers={"Authorization": "none"})
        assert (answer.status_code, answer.json()["status"]) == (200, "ok")


def test_metrics_may_be_open() -> None:
    """And nothing else is: a scraper of Kubernetes' annotations has no key to send."""
    with serving(api_keys=[KEY], open_metrics=True) as running:
        stranger = {"Authorization": "none"}
        assert "remask:num_requests_running" in running.client.get("/metrics", headers=stranger).text
        for path in ("/v1/models", "/v1/cache", "/openapi.json", "/version", "/get_model_info"):
            assert running.client.get(path, headers=stranger).status_code == 401


def test_keys_are_never_logged(limited: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        limited.ask()
        limited.client.get("/v1/models", headers={"Authorization": "Bearer wrong-key"})
    told = [record.getMessage() for record in caplog.records if record.name.startswith(("remask", "uvicorn"))]
    assert told
    assert not any(KEY in line or "wrong-key" in line for line in told)
    assert KEY not in repr(limited.service.config)


def test_large_bodies(limited: Running) -> None:
    body = json.dumps({"messages": CHATS[0], "user": "x" * 20_000}).encode()
    response = limited.client.post(URL, content=body)
    assert response.status_code == 413
    assert response.json()["error"]["code"] == "request_too_large"
    chunked = limited.client.post(URL, content=(body[i : i + 999] for i in range(0, len(body), 999)))
    assert chunked.status_code == 413


def test_long_conversations(limited: Running) -> None:
    assert "at most 4" in limited.refusal(URL, {"messages": [{"role": "user", "content": "x"}] * 5})["message"]


def test_a_full_queue_is_a_429_and_no_more(limited: Running) -> None:
    statuses: list[int] = []

    def ask() -> None:
        statuses.append(limited.ask(**LONG).status_code)

    threads = [threading.Thread(target=ask) for _ in range(8)]
    with held(limited):
        for thread in threads:
            thread.start()
        eventually(lambda: len(statuses) == 6)
    for thread in threads:
        thread.join()
    limited.settle()
    assert statuses == [429] * 6 + [200] * 2
    refused = limited.ask(n=3)
    assert refused.status_code == 429
    assert refused.headers["Retry-After"] == "1"
    assert refused.json()["error"]["type"] == "rate_limit_error"
    assert limited.ask().status_code == 200


def test_browsers_of_listed_origins_only(limited: Running, server: Running) -> None:
    ask = {"Access-Control-Request-Method": "POST", "Authorization": ""}
    good = limited.client.options(URL, headers={**ask, "Origin": "https://example.org"})
    assert good.status_code == 200
    assert good.headers["access-control-allow-origin"] == "https://example.org"
    bad = limited.client.options(URL, headers={**ask, "Origin": "https://evil.example"})
    assert "access-control-allow-origin" not in bad.headers
    sent = "authorization,anthropic-version,x-api-key,x-stainless-os"  # by official clients in a browser
    asked = {**ask, "Origin": "https://example.org", "Access-Control-Request-Headers": sent}
    told = limited.client.options(URL, headers=asked).headers["access-control-allow-headers"]
    assert set(sent.split(",")) <= set(told.replace(" ", "").split(","))
    refused = limited.client.get("/v1/models", headers={"Origin": "https://example.org", "Authorization": "Bearer no"})
    assert refused.status_code == 401
    assert refused.headers["access-control-allow-origin"] == "https://example.org", "so that a page can read why"
    closed = server.client.get("/v1/models", headers={"Origin": "https://example.org"})
    assert "access-control-allow-origin" not in closed.headers


def test_request_ids_come_back(server: Running) -> None:
    given = server.client.get("/version", headers={"X-Request-Id": "trace-42"})
    assert given.headers["X-Request-Id"] == "trace-42"
    made = [server.client.get("/version", headers={"X-Request-Id": bad}).headers["X-Request-Id"] for bad in ("", "a b")]
    assert all(len(name) == 32 for name in made)
    assert len(set(made)) == 2
    chat = server.client.post(URL, json={"messages": CHATS[0]}, headers={"X-Request-Id": "trace-43"})
    assert chat.json()["id"] == "chatcmpl-trace-43"


def test_two_requests_of_one_id_are_both_answered(server: Running) -> None:
    def ask() -> int:
        return server.client.post(URL, json={"messages": CHATS[0]}, headers={"X-Request-Id": "same"}).status_code

    assert at_once(*[ask] * 4) == [200] * 4


def logged(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "remask.server.gate"]


def test_the_access_log_has_a_line_a_request(server: Running, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "remask.server.gate"):
        server.client.post(URL, json={"messages": CHATS[0], "user": "tester\n"}, headers={"X-Request-Id": "logged"})
        server.stream({"messages": CHATS[0]})
        server.client.get("/nowhere")
        eventually(lambda: len(logged(caplog)) == 3)
    # A stream's line is written once the client has all of it, and so may come late.
    lines = sorted(logged(caplog), key=lambda line: (line["status"], line["id"] != "logged"))
    assert [line["status"] for line in lines] == [200, 200, 404]
    assert lines[0]["id"] == "logged"
    assert lines[0]["user"] == "tester\n"
    for line in lines[:2]:
        assert line["prompt_tokens"] > line["cached_tokens"] >= 0
        assert line["completion_tokens"] > 0
        assert line["finish"] == "stop"
        assert line["total_ms"] >= line["first_settled_ms"] > 0
        assert line["queued_ms"] >= 0


def test_a_defect_is_a_500_in_the_same_shape(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("a secret detail")

    monkeypatch.setattr(server.service.intake, "check_model", broken)
    response = server.ask()
    assert response.status_code == 500
    assert response.json()["error"]["type"] == "server_error"
    assert "secret" not in response.text
    assert response.headers["X-Request-Id"]


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"model_names": []}, "served_model_name"),
        ({"api_keys": [""]}, "api_key"),
        ({"api_keys": "s3cret"}, "api_keys must be a list"),
        ({"priority_keys": "s3cret"}, "priority_keys must be a list"),
        ({"allowed_origins": "https://example.org"}, "allowed_origins must be a list"),
        ({"api_keys": ["k\u00e9y"]}, "api_key"),
        ({"max_queue": -1}, "max_queue"),
        ({"drain_timeout": float("nan")}, "drain_timeout"),
        ({"max_body_bytes": 0}, "max_body_bytes"),
        ({"allowed_origins": ["*"]}, "allowed_origins"),
        ({"allowed_origins": [5]}, r"allowed_origins takes origins such as https://example\.org, got 5"),
        ({"allowed_origins": ["example.org"]}, "allowed_origins"),
        ({"allowed_origins": ["https://example.org/"]}, r"example\.org/'; write it as browsers send it"),
        ({"allowed_origins": ["https://Example.org"]}, "in lower case"),
        ({"seed": -1}, "seed"),
        ({"max_prompt_chars": 0}, "max_prompt_chars"),
        ({"max_request_chars": 0}, "max_request_chars"),
        ({"max_choices": 8193}, "max_choices"),
        ({"max_messages": 8193}, "max_messages"),
        ({"text_workers": 1}, "text_workers"),
        ({"header_timeout": 0}, "header_timeout"),
        ({"body_timeout": float("inf")}, "body_timeout"),
        ({"keep_alive_timeout": -1}, "keep_alive_timeout"),
        ({"max_connections": 0}, "max_connections"),
        ({"max_priority": -1}, "max_priority"),
        ({"priority_keys": [" "]}, "priority_key"),
    ],
)
def test_bad_settings(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        ServerConfig(**{"model_names": ["m"], **settings})


@pytest.mark.parametrize(
    ("path", "near"),
    [
        ("/chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/v1/chat/completion", "/v1/chat/completions"),
        ("/v1/messages/count", "/v1/messages/count_tokens"),
        ("/healthz", "/health"),
    ],
)
def test_an_unknown_path_names_the_nearest(server: Running, path: str, near: str) -> None:
    assert f"there is no path {path!r}. Did you mean {near}? " in server.refusal(path, {}, 404)["message"]


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/moderations", "/v1/files", "/v1/batches"])
def test_an_endpoint_that_is_not_served_is_not_taken_for_another(server: Running, path: str) -> None:
    assert server.refusal(path, {}, 404)["message"].startswith(f"there is no path {path!r}. GET /openapi.json")


def test_other_paths_and_methods(server: Running) -> None:
    far = server.client.get("/zzzzzzzz")
    assert (far.status_code, far.json()["error"]["code"]) == (404, "not_found")
    assert far.json()["error"]["message"] == "there is no path '/zzzzzzzz'. GET /openapi.json lists all of them"
    long = server.client.get("/" + "z" * 5000).json()["error"]["message"]
    assert len(long) < 200
    wrong = server.client.get("/v1/chat/completions")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.json()["error"]["message"] == "/v1/chat/completions takes POST, and no GET"
    assert wrong.headers["Allow"] == "POST"


def test_infilling_by_the_name_of_other_servers(server: Running) -> None:
    body = {"prompt": "from ivy", "suffix": " birch", "max_tokens": 4, "temperature": 0}
    told = server.answer("/v1/fim/completions", body)
    assert told["object"] == "text_completion"
    assert told["choices"] == server.client.post("/v1/completions", json=body).json()["choices"]


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


OWN = ("", "localhost", "LOCALHOST:1", "app.localhost:3", "127.0.0.1:8000", "[::1]:8000", "192.168.1.9", "name.")
LIKE = ("localhost.evil.example", "127.0.0.1.evil.example", "1.2.3", "a@localhost", "xlocalhost", "xname")


def test_own_names_and_addresses_and_what_only_looks_like_them() -> None:
    hosts = AllowedHosts(["Name"])
    assert [host for host in (*OWN, "name:", "NAME:80") if not hosts.admit(host)] == []
    assert [host for host in LIKE if hosts.admit(host)] == []
    assert all(map(AllowedHosts(["*"]).admit, LIKE))


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


@pytest.mark.parametrize("name", ["http://name", "", 3, "a,b"])
def test_what_is_no_name_is_refused(name: Any) -> None:
    with pytest.raises(ConfigError, match="allowed_hosts takes names such as"):
        ServerConfig(model_names=["m"], allowed_hosts=[name])


def test_lengths_that_are_no_numbers_are_a_400_and_large_ones_a_413() -> None:
    """Behind a server that hands such headers on; uvicorn refuses them itself."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        await Response()(scope, receive, send)

    async def statuses(lengths: Iterable[str]) -> dict[str, tuple[int, bool]]:
        transport = httpx.ASGITransport(Gate(answer, ServerConfig(model_names=["m"], max_body_bytes=9)))
        told = {}
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for length in lengths:
                headers = {b"Content-Length": length.encode("latin-1")}
                response = await client.post("/v1/completions", content=b"123456789", headers=headers)
                told[length] = response.status_code, "Content-Length" in response.text
        return told

    expected = dict.fromkeys(("abc", "", "-1", "1.5", "\xb2"), (400, True))
    expected |= {"10": (413, False), "9" * 19: (413, False), "9": (200, False)}
    assert asyncio.run(statuses(expected)) == expected
