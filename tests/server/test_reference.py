"""The page at `/docs` in a browser: every endpoint and its fields, from this server alone."""

from typing import Any

from tests.server.browser import DONE, WATCH, sync_api
from tests.server.serving import serving
from tests.server.test_openapi import PATHS


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
