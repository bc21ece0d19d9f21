"""The documentation's site: built without a warning, and without a reference to anything outside of it."""

import re
import runpy
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("site")
    words = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(target)]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.thorough
def test_every_page_of_the_repository_is_there(site: Path) -> None:
    names = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in (ROOT / "docs").rglob("*.md")}
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    assert names | {"index", "benchmarks", "training", "contributing", "changelog"} <= built
    assert "An inference engine" in (site / "index.html").read_text(encoding="utf-8")
    assert 'href="../benchmarks.html"' in (site / "lab" / "methods.html").read_text(encoding="utf-8")


def test_pages_load_nothing_from_elsewhere(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]*?(?:src|href)="(?:https?:)?//([^"]+)"', path.read_text("utf-8"))
        assert loaded == [], path.name


def test_pictures_are_there_and_data_is_not(site: Path) -> None:
    pictures = {path.relative_to(ROOT / "docs") for path in (ROOT / "docs").rglob("*.png")}
    assert pictures <= {path.relative_to(site) for path in site.rglob("*.png")}
    assert not list(site.rglob("*.toml"))


class Quiet(SimpleHTTPRequestHandler):
    """Sends files, and writes no log."""

    def log_message(self, *told: Any) -> None:
        pass


@pytest.fixture(scope="module")
def address(site: Path) -> Iterator[str]:
    """Where the site is served, as a browser searches no files of a folder."""
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(site))) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def searched(browser: Any, address: str) -> Iterator[Any]:
    page = browser.new_page()
    yield page
    page.close()


SOUGHT = {
    "docker": ("deploy", "first-deployment"),
    "kubernetes": ("deploy", "first-deployment"),
    "quickstart": ("quickstart",),
    "gguf": ("models", "your-model"),
    "laptop": ("laptop",),
    "masked sentence": ("infilling",),
    "fourteen hours": ("gsm8k",),
    "bicache": ("caches", "how-bicache", "when-bicache"),
    "options": ("commands",),
}


@pytest.mark.parametrize("words", SOUGHT)
def test_a_search_finds_the_page_of_its_words_first(searched: Any, address: str, words: str) -> None:
    """By the search of the site itself, in a browser."""
    searched.goto(f"{address}/index.html?q={words}")
    first = searched.locator(".md-search-result__link").first.get_attribute("href").partition("?")[0]
    assert first in [f"{address}/{page}.html" for page in SOUGHT[words]]


def test_links_out_of_the_site_are_refused() -> None:
    hook: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "docs_pages.py"))
    relinked = hook["relinked"]
    assert relinked("[a](../benchmarks/README.md#x)", "docs/caches.md") == "[a](benchmarks.md#x)"
    assert relinked("[a](../caches.md) [b](log.md) [c](../../README.md)", "docs/lab/log.md") == (
        "[a](../caches.md) [b](log.md) [c](../index.md)"
    )
    assert relinked("[a](docs/images/a.png) [b](https://x.y) [c](#d)", "README.md") == (
        "[a](images/a.png) [b](https://x.y) [c](#d)"
    )
    with pytest.raises(Exception, match=r"README\.md links to src/x\.py, which is no page of the site"):
        relinked("[a](src/x.py)", "README.md")


def test_every_page_is_found_from_the_index_of_its_door() -> None:
    """In one click, or in two by a page that lists others."""
    nav = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]
    doors = dict(re.findall(r"^  - ([^:\n]+):\n((?:    .*\n)+)", nav, re.MULTILINE))
    for door, index in {
        "Tutorials": "tutorials",
        "How to": "how-to",
        "Reference": "reference",
        "Explanation": "explanation",
    }.items():
        pages = set(re.findall(r"(\S+)\.md$", doors[door], re.MULTILINE))
        assert index in pages
        first = linked(index)
        found = first.union(*map(linked, first & pages))
        assert pages - found <= {index}, door
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert all(f"](docs/{index}.md)" in readme for index in ("tutorials", "how-to", "reference", "explanation"))


def linked(page: str) -> set[str]:
    """The pages of docs/ to which a page leads."""
    return set(re.findall(r"\]\(([\w-]+)\.md", (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")))
