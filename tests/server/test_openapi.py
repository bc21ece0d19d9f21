"""Whatever the OpenAPI document allows, and some of what it does not, is answered without a 5xx, as it says."""

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from fastapi.routing import APIRoute
from hypothesis import HealthCheck, Phase, given, settings
from schemathesis import GenerationMode

from remask.server.app import create_app, router
from remask.server.config import ServerConfig
from tests.server.browser import DONE, WATCH, sync_api
from tests.server.serving import Running, make_llm, serving

EXAMPLES = 15
ROUTES = [route for route in router().routes if isinstance(route, APIRoute) and route.include_in_schema]
PATHS = {route.path_format for route in ROUTES}


def test_the_document_holds_every_endpoint(server: Running) -> None:
    document = server.client.get("/openapi.json").json()
    assert set(document["paths"]) == PATHS
    body = document["components"]["schemas"]["ChatBody"]
    assert body["additionalProperties"] is False
    assert {"messages", "stream_drafts", "cache_salt", "threshold"} <= set(body["properties"])


def test_the_document_is_the_kept_one_and_the_changelog_says_which() -> None:
    """A change of the API is told to those who upgrade."""
    root = Path(__file__).parents[2]
    spec = spec_from_file_location("openapi", root / "scripts" / "openapi.py")
    assert spec is not None
    assert spec.loader is not None
    written = module_from_spec(spec)
    spec.loader.exec_module(written)
    made, again = written.document(), "write it anew with scripts/openapi.py, and say in CHANGELOG.md what changed"
    assert json.loads(made) == json.loads(written.FILE.read_text(encoding="utf-8")), again
    assert f"`docs/openapi.json` ({written.digest(made)})" in (root / "CHANGELOG.md").read_text(encoding="utf-8"), again


def test_no_request_waits_for_the_routes() -> None:
    """They are made with the application, and not at the first request, as those of included routers are."""
    app = create_app(make_llm(), ServerConfig(model_names=["a"]))
    assert {route.path_format for route in app.routes if isinstance(route, APIRoute)} >= PATHS


CASES = [(path, GenerationMode.POSITIVE) for path in sorted(PATHS)]
# Where there is no body, nothing can be wrong but the path.
CASES += [(path, GenerationMode.NEGATIVE) for path in sorted(each.path_format for each in ROUTES if each.body_field)]


def ask_at_random(server: Running, path: str, mode: GenerationMode, examples: int) -> None:
    """So many requests for every method of `path`, none of which may be answered with a 5xx."""
    schema = schemathesis.openapi.from_dict(server.client.get("/openapi.json").json())
    for method in schema[path]:
        operation = schema[path][method]

        @settings(
            max_examples=examples, deadline=None, phases=[Phase.generate], suppress_health_check=list(HealthCheck)
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def ask(case: Any) -> None:
            response = case.call(base_url=server.base)
            in_time = response.status_code != 504 or "deadline_s" not in (case.body or ())  # any deadline may be drawn
            assert response.status_code < 500 or not in_time, response.text
            kind = ",".join(response.headers.get("content-type", []))
            server.document.judge(case.method, path, response.status_code, kind, response.text)

        ask()


@pytest.mark.parametrize(
    "times", [pytest.param(1, marks=pytest.mark.few(17)), pytest.param(10, marks=pytest.mark.soak)]
)
@pytest.mark.parametrize(("path", "mode"), CASES)
def test_random_requests_are_no_5xx(server: Running, path: str, mode: GenerationMode, times: int) -> None:
    ask_at_random(server, path, mode, times * EXAMPLES)


def test_the_page_shows_the_document(browser: Any) -> None:
    """Of a server with a key, which the page asks for."""
    with serving(api_keys=["s3cret"]) as running:
        page = browser.new_page(viewport={"width": 390, "height": 800})
        said: list[str] = []
        asked: list[str] = []
        page.add_init_script(WATCH)
        page.on("console", lambda message: said.append(message.text))
        page.on("request", lambda request: asked.append(request.url))
        page.goto(f"{running.base}/docs")
        sync_api.expect(page.locator("#status")).to_contain_text("asks for a key", timeout=DONE)
        page.fill("#key", "s3cret")
        page.click("#key-form button")
        sync_api.expect(page.locator("#status")).to_contain_text("endpoints", timeout=DONE)
        paths = set(page.locator("summary code").all_inner_texts())
        assert paths == PATHS
        page.fill("#find", "stop_sequences")
        assert page.locator("summary code:visible").all_inner_texts() == ["/v1/messages"]
        page.click("summary:visible")
        shown = page.inner_text("main")
        assert "Body of `/v1/messages`." in shown
        assert "Answer: MessageAnswer" in shown
        assert "Event: BlockDelta" in shown
        wide = page.evaluate("document.documentElement.scrollWidth - innerWidth")
        page.close()
    assert wide <= 0
    assert all(url.startswith(running.base) for url in asked)
    assert not [text for text in said if "csp" in text]
