"""One server for most tests of this folder; those that need other settings start their own."""

import shutil
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.server.serving import TEMPLATE, Running, bundled, serving

if TYPE_CHECKING:
    import openai

    from tests.server.browser import Tab

CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="session")
def _shared() -> Iterator[Running]:
    with serving(model_names=["bundled-transit", "another-name"]) as running:
        yield running


@pytest.fixture
def server(_shared: Running) -> Iterator[Running]:
    """A server with nothing running, before and after; its store may hold prefixes."""
    _shared.settle()
    yield _shared
    _shared.settle()


@pytest.fixture
def client(server: Running) -> "Iterator[openai.OpenAI]":
    """OpenAI's own client of that server."""
    with server.openai() as made:
        yield made


@pytest.fixture(scope="session")
def taught() -> Iterator[Running]:
    """The bundled model whose bytes spell everything, under a template that tells of tools."""
    with serving(bundled("tariff", template=TEMPLATE), model_names=["bundled-tariff"], sampling={}) as running:
        yield running


@pytest.fixture(scope="module")
def tariff() -> Iterator[Running]:
    """A masked model whose tokenizer spells every text and whose template trims messages."""
    with serving(bundled("tariff", "bicache"), model_names=["bundled-tariff"], sampling={}) as running:
        yield running


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """A browser for the tests of one file: where it lives longer, its event loop is in the way of other tests'."""
    if CHROMIUM is None:
        pytest.skip("needs a browser: apt-get install chromium")
    sync_api = pytest.importorskip("playwright.sync_api", reason="needs Playwright: make test EXTRAS=dev")
    with sync_api.sync_playwright() as driver:
        # Test machines run as root, where Chromium's sandbox cannot be.
        made = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield made
        made.close()


@pytest.fixture
def tab(browser: Any, server: Running) -> "Iterator[Tab]":
    """The page; nothing may be said on the console, by the content security policy least of all."""
    from tests.server.browser import opened

    server.client.delete("/v1/cache")
    with opened(browser, server.base, viewport={"width": 1400, "height": 900}) as made:
        yield made
        assert made.said == []
