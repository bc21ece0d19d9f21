"""The server that load is put on, and what it tells of itself."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from remask.errors import ConfigError, RemaskError


class ServerError(RemaskError):
    """A server cannot be reached, or does not answer as OpenAI's API does."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `info` is what `/get_model_info` tells; empty for servers of other makers."""

    base_url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    info: Mapping[str, Any] = field(default_factory=dict)


def find_target(base_url: str, model: str | None = None, api_key: str | None = None) -> Target:
    """The server at `base_url`, with or without `/v1` at its end; `model` is by default the first that it lists.

    Raises `ConfigError` for what is no URL, and `ServerError` where nothing answers there.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must begin with http:// or https://, got {base_url!r}")
    base = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=30) as client:
            name = model or _first(client.get("/v1/models"))
            told = client.get("/get_model_info")
            info = told.json() if told.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServerError(f"no server answers at {base_url}: {error}; start one, or name another URL") from error
    return Target(base, name, headers, info if isinstance(info, dict) else {})


def _first(response: httpx.Response) -> str:
    """The first served name."""
    if response.status_code != 200:
        raise ServerError(f"GET /v1/models gives status {response.status_code}: {response.text[:200]}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError("GET /v1/models lists no model; name one with --model") from error
