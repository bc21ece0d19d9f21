"""Adds the repository's pages outside of docs/ to the documentation's site, and turns their links to pages of the site.

A hook of mkdocs (mkdocs.yml). Files keep one home: nothing is copied into docs/.
"""

import html
import os
import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "lab/README.md": "laboratory.md",
    "caches/README.md": "caches-package.md",
    "training/README.md": "training.md",
    "training/adapt/README.md": "training-adapt.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security-policy.md",
    "MAINTAINERS.md": "maintainers.md",
    "RELEASING.md": "releases.md",
}
# The changes and the notebook hold every word, and a search is seldom for them.
LAST_IN_SEARCH = re.compile(r"changelog\.md|lab/.*")
_pages_in_order: list[Page] = []  # filled by `on_nav`, read by `on_post_build`
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    """Let readers choose between versions if mike builds one of several."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add `PAGES` to the site."""
    for source, site_path in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, site_path, content=relinked(text, source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Relink a page of docs/, and let a search find `LAST_IN_SEARCH` last. `PAGES` are relinked already."""
    if LAST_IN_SEARCH.fullmatch(page.file.src_uri):
        page.meta["search"] = {"boost": 0.1}
    is_relinked = page.file.src_uri in PAGES.values()
    return markdown if is_relinked else relinked(markdown, f"docs/{page.file.src_uri}")


def relinked(text: str, source: str) -> str:
    """Return the `text` of the file `source` with links for the site, which has `PAGES` beside the pages of docs/.

    Raises `PluginError` if a link leads to a file that is not part of the site.
    """
    site_folder = posixpath.dirname(PAGES.get(source, source.removeprefix("docs/"))) or "."

    def site_link(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[1]))
        if target not in PAGES and not target.startswith("docs/"):
            raise PluginError(f"{source} links to {match[1]}, which is no page of the site")
        return posixpath.relpath(PAGES.get(target, target.removeprefix("docs/")), site_folder)

    return LINK.sub(site_link, text)


def on_nav(nav: Navigation, **_: Any) -> None:
    """Store the pages in their order, for `llms.txt`."""
    _pages_in_order[:] = nav.pages


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt`, a list of the pages for programs: a line for each page, with its first sentence.

    Raises `PluginError` if a page has a broken link.
    """
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Manual", ""]
    for page in _pages_in_order:
        blocks = (page.markdown or "").split("\n\n")
        paragraph = next((block for block in blocks if re.match(r"[A-Z`*\[]", block)), "")
        text = re.sub(r"\[([^]]*)\]\([^)]*\)|[*`]", r"\1", " ".join(paragraph.split()))
        lines.append(f"- [{page.title}]({page.url}): {re.split(r'(?<=[.:?]) ', text)[0]}")
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if broken := list(broken_links(site)):
        raise PluginError("\n".join(broken))


def broken_links(site: Path) -> Iterator[str]:
    """Yield a message for each link, picture, script or style that a page in a folder refers to and that is missing.

    mkdocs checks the links of Markdown only; this also checks those of the theme and of HTML in a page.
    """
    pages = {file: file.read_text(encoding="utf-8") for file in sorted(site.rglob("*.html")) if file.name != "404.html"}
    anchors = {file: set(re.findall(r'\s(?:id|name)="?([^"\s>]+)', text)) for file, text in pages.items()}
    for file, text in pages.items():
        for link in sorted(set(re.findall(r'<[^>]*\s(?:href|src)="?([^"\s>]+)', text))):
            address = urlsplit(html.unescape(link))
            if address.scheme or address.netloc:
                continue
            target = Path(os.path.normpath(file.parent / unquote(address.path))) if address.path else file
            if target.is_dir():
                target /= "index.html"
            anchor = unquote(address.fragment)
            if not target.is_file() or (anchor and target in pages and anchor not in anchors[target]):
                yield f"{file.relative_to(site)} refers to {link}, which is not there"
