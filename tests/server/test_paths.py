"""What is said of paths that are not there, and other names of those that are."""

import pytest

from tests.server.serving import Running


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
    told = server.client.post(path, json={})
    assert told.status_code == 404
    assert f"there is no path {path!r}. Did you mean {near}? " in told.json()["error"]["message"]


def test_other_paths_and_methods(server: Running) -> None:
    far = server.client.get("/zzzzzzzz").json()["error"]["message"]
    assert far == "there is no path '/zzzzzzzz'. GET /openapi.json lists all of them"
    long = server.client.get("/" + "z" * 5000).json()["error"]["message"]
    assert len(long) < 200
    wrong = server.client.get("/v1/chat/completions")
    assert wrong.status_code == 405
    assert wrong.json()["error"]["message"] == "/v1/chat/completions takes POST, and no GET"


def test_infilling_by_the_name_of_other_servers(server: Running) -> None:
    body = {"prompt": "from ivy", "suffix": " birch", "max_tokens": 4, "temperature": 0}
    told = server.client.post("/v1/fim/completions", json=body)
    assert told.status_code == 200
    assert told.json()["object"] == "text_completion"
    assert told.json()["choices"] == server.client.post("/v1/completions", json=body).json()["choices"]
