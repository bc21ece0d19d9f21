"""A client of chat completions, of the standard library alone, so that a conversation starts at once."""

import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from remask.errors import ConfigError, RemaskError

TIMEOUT_S = 600.0  # without a byte


class ChatClient:
    """A server with OpenAI's API.

    Every method raises `RemaskError` where no server answers, where it refuses, and where it answers in another form.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url` ends in `/v1` as a rule. Raises `ConfigError` where it is no URL of HTTP."""
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://, got {base_url!r}")
        self.base_url = base_url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self, timeout: float = TIMEOUT_S) -> list[Mapping[str, Any]]:
        """What the server serves, as it lists it."""
        with self._answer("/models", None, timeout) as response:
            listed = _object(response.read()).get("data")
        if not isinstance(listed, list) or not all(isinstance(each, dict) and "id" in each for each in listed):
            raise RemaskError(f"{self.base_url}/models lists no models; is this the URL of an API that ends in /v1?")
        return listed

    def first_model(self) -> str:
        """The name of the first model that the server lists."""
        listed = self.models()
        if not listed:
            raise RemaskError(f"{self.base_url}/models lists no model; name one with --model")
        return str(listed[0]["id"])

    def stream(self, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the text of the answer to a chat, piece by piece."""
        with self._answer("/chat/completions", {**body, "stream": True}, TIMEOUT_S) as response:
            for line in response:
                field, _, value = line.strip().partition(b":")
                if field != b"data" or value.strip() == b"[DONE]":
                    continue
                chunk = _object(value)
                if "error" in chunk:
                    raise RemaskError(_message(chunk, "the server ends the answer"))
                for choice in chunk.get("choices") or ():
                    yield choice.get("delta", {}).get("content") or ""

    @contextmanager
    def _answer(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Iterator[http.client.HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url.rstrip("/") + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise RemaskError(_refusal(text, f"the server answers with status {error.code}")) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            raise RemaskError(
                f"the connection to {self.base_url} failed: {cause}; is a server running there?"
            ) from error


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RemaskError(f"the server's answer is not JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise RemaskError(f"the server's answer is not a JSON object: {text[:200]!r}")
    return found


def _refusal(text: str, what: str) -> str:
    try:
        return _message(json.loads(text), what)
    except ValueError:
        return f"{what}: {text[:200].strip()}" if text.strip() else what


def _message(body: Any, what: str) -> str:
    """What an error of OpenAI's form says; else that there is one."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f"{what}: {message}" if message else what
