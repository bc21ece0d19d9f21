"""The page at `/` in a browser: Debian's `chromium`, driven by Playwright, against a real server."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.server.serving import Running

sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test EXTRAS=dev")
DONE = 120_000  # milliseconds
WATCH = """addEventListener("securitypolicyviolation", (event) => console.error("csp: " + event.violatedDirective))"""


@dataclass
class Tab:
    """A page of the browser, what its console said, and where it sent requests."""

    page: Any
    base: str
    said: list[str] = field(default_factory=list)
    asked: list[str] = field(default_factory=list)

    def open(self, name: str) -> None:
        self.page.click(f"#tab-{name}")
        self.shown(f"#{name}:not([hidden])")

    def say(self, text: str) -> None:
        """Send a message in the chat, and wait for the end of its answer."""
        self.page.fill("#message", text)
        self.page.press("#message", "Enter")
        self.idle()

    def idle(self) -> None:
        """Wait until the chat takes another message: its button stops the answer until then."""
        self.shown("#send:not(.stops)")

    def sent(self) -> list[dict[str, Any]]:
        """What the page sends to be answered, from here on."""
        found: list[dict[str, Any]] = []

        def note(request: Any) -> None:
            if "completions" in request.url:
                found.append(request.post_data_json)

        self.page.on("request", note)
        return found

    def fits(self) -> bool:
        """Whether nothing of the page is scrolled sideways to."""
        found: bool = self.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
        return found

    def count(self, selector: str) -> int:
        found: int = self.page.locator(selector).count()
        return found

    def text(self, selector: str) -> str:
        found: str = self.page.inner_text(selector)
        return found

    def shown(self, selector: str) -> None:
        self.page.wait_for_selector(selector, timeout=DONE)

    def says(self, selector: str, words: str) -> None:
        sync_api.expect(self.page.locator(selector)).to_contain_text(words, timeout=DONE)

    def focused(self, selector: str) -> None:
        sync_api.expect(self.page.locator(selector)).to_be_focused(timeout=DONE)

    def tab_key(self) -> str:
        """Press Tab. Returns the id of the element that has the focus then, or its kind if it has no id."""
        self.page.keyboard.press("Tab")
        found: str = self.page.evaluate("document.activeElement.id || document.activeElement.tagName")
        return found

    def watch_focus(self) -> None:
        """Record from here on where the focus goes, a loss of it as `lost`."""
        self.page.evaluate(
            """() => {
                window.focusPath = [];
                addEventListener("focusin", (event) => focusPath.push(event.target.id));
                addEventListener("focusout", (event) => event.relatedTarget || focusPath.push("lost"));
            }"""
        )

    def focus_path(self) -> list[str]:
        """The ids of the elements that had the focus since `watch_focus`."""
        found: list[str] = self.page.evaluate("window.focusPath")
        return found

    def ran(self, policy: str) -> None:
        self.says(f"#run-{policy} .clock", "Done")

    def press(self, name: str, status: str) -> None:
        """Click a button of the allocator and wait for what it tells."""
        self.page.click(f"#{name}")
        self.says("#pages-status", status)

    def forgive(self, status: int) -> None:
        """Forget one line that Chromium itself writes about an answer of this status."""
        line = next(line for line in self.said if f"status of {status}" in line)
        self.said.remove(line)

    def totals(self, place: str = "totals") -> dict[str, str]:
        """A list of numbers by name."""
        names = self.page.locator(f"#{place} dt").all_inner_texts()
        return dict(zip(names, self.page.locator(f"#{place} dd").all_inner_texts(), strict=True))

    def slide(self, policy: str, step: int) -> None:
        """Go to a step of a finished run, counted from 0."""
        self.page.locator(f"#run-{policy} input[type=range]").fill(str(step))

    def ask_for(self, tokens: int, block_length: int, steps: int) -> None:
        """Fill in how a response is made."""
        for name, value in (("max_tokens", tokens), ("block_length", block_length), ("steps", steps)):
            self.page.fill(f"#ask [name={name}]", str(value))

    def letters(self, policy: str) -> str:
        """What the layers did with the prefix, a letter each, of the passes one after the other."""
        cells = self.page.locator(f"#run-{policy} .passes .layer")
        return "".join(cells.nth(i).inner_text()[0] for i in range(cells.count()))


@contextmanager
def opened(browser: Any, base: str, ready: str = "#tabs:not([hidden])", **settings: Any) -> Iterator[Tab]:
    """The page in a fresh tab, whose browser has kept nothing."""
    context = browser.new_context(**settings)
    context.add_init_script(WATCH)
    tab = Tab(context.new_page(), base)
    tab.page.on("console", lambda message: tab.said.append(f"{message.type}: {message.text}"))
    tab.page.on("pageerror", lambda error: tab.said.append(f"error: {error}"))
    tab.page.on("request", lambda request: tab.asked.append(request.url))
    try:
        tab.page.goto(f"{base}/")
        tab.shown(ready)
        yield tab
        assert all(url.startswith(f"{base}/") for url in tab.asked), "a request left the server"
    finally:
        context.close()


def api_text(server: Running, body: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """The same request without a stream: its text and the work it took."""
    kept = {name: value for name, value in body.items() if not name.startswith("stream")}
    told = server.chat(kept).json()
    return told["choices"][0]["message"]["content"], told["remask"]
