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


def test_every_page_is_two_clicks_from_the_first_one() -> None:
    pages, first = {path.stem for path in (ROOT / "docs").glob("*.md")}, linked("README.md")
    assert {"contents", "symptoms"} <= first
    assert pages - first.union(*(linked(f"docs/{page}.md") for page in first)) == set()


# Titles of public threads, and the page and the words there that answer them.
THREADS = {
    "Inference Speed (LLaDA 44)": ("gsm8k", "some 20 minutes a question"),
    "Empty responses for complex queries when running demo_multiturn_chat.py (Dream 5)": ("empty-answers", "## Empty"),
    "Question: How to use Dream for masked language modeling inference? (Dream 73)": ("infilling", "holes keep their"),
    "Fix DLLM rollout sampling diversity (SGLang 27943, of DARE 20)": ("rollouts", "**Are all of yours the same?**"),
    "Add LLaDA 8b Diffusion model (llama.cpp 14771)": ("coming-from", "## llama.cpp"),
    "[Model] Add DiffusionGemma Support (vLLM 45163)": ("coming-from", "a prompt is never predicted"),
    "Performance differences caused by batch_size (Fast-dLLM 39)": ("rollouts", "## The same answer in every batch"),
    "Any way to deploy this new model? vllm or sgl or ollama ? (Dream-Coder 1)": ("coming-from", "## Ollama"),
    "[Feature]: Canvas-aware structured outputs (vLLM 45572)": ("structured-outputs", "dynamic programming"),
    "Evaluation is too slow (LLaDA 112)": ("gsm8k", "GSM8K's answers are short"),
}


def test_the_answer_to_a_thread_is_two_clicks_from_the_first_page() -> None:
    near = linked("README.md").union(*(linked(f"docs/{index}.md") for index in ("symptoms", "coming-from")))
    for thread, (page, words) in THREADS.items():
        assert page in near, thread
        assert words in (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), thread


def linked(page: str) -> set[str]:
    """The pages of docs/ to which a page leads."""
    return set(re.findall(r"\]\((?:docs/)?([a-z\d-]+)\.md", (ROOT / page).read_text(encoding="utf-8")))
