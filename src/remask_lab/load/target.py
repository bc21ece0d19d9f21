"""The server that gets the load, and the facts that it reports."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from remask.errors import ConfigError, RemaskError


class ServerError(RemaskError):
    """A server does not answer, or not as OpenAI's API does."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `info` is the answer of `/get_model_info`, and is empty for other servers than remask's."""

    base_url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    info: Mapping[str, Any] = field(default_factory=dict)


def find_target(base_url: str, model: str | None = None, api_key: str | None = None) -> Target:
    """Returns the server at `base_url`, with or without `/v1` at its end. `model` defaults to the first that it lists.

    Raises `ConfigError` where `base_url` is no URL, and `ServerError` where no server answers.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must begin with http:// or https://, got {base_url!r}")
    base = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=30) as client:
            name = model or _first(client.get("/v1/models"))
            answer = client.get("/get_model_info")
            info = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServerError(f"no server answers at {base_url}: {error}; start one, or name another URL") from error
    return Target(base, name, headers, info if isinstance(info, dict) else {})


def is_healthy(base_url: str) -> bool:
    """Whether the server's health check answers with success."""
    try:
        return httpx.get(f"{base_url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def empty_store(base_url: str) -> None:
    """Drop all prefixes that a remask server has stored. Raises `httpx.HTTPError` where it does not."""
    httpx.delete(f"{base_url}/v1/cache").raise_for_status()


def read_metrics(target: Target) -> str:
    """The metrics of a server, in Prometheus' text format. Raises `httpx.HTTPError` where it reports none."""
    return httpx.get(f"{target.base_url}/metrics", headers=dict(target.headers)).raise_for_status().text


def _first(response: httpx.Response) -> str:
    """The first name that the server lists."""
    if response.status_code != 200:
        raise ServerError(f"GET /v1/models gives status {response.status_code}: {response.text[:200]}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError("GET /v1/models lists no model; name one with --model") from error
