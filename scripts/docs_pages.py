"""What the documentation's site shows beside docs/: the repository's other pages, their links led to pages of the site.

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
LAST_FOUND = re.compile(r"changelog\.md|lab/.*")
_ORDER: list[Page] = []
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_config(config: MkDocsConfig) -> None:
    """Let readers choose between versions, where mike builds one of several."""
    if "MIKE_DOCS_VERSION" in os.environ:
        config.extra["version"] = {"provider": "mike"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for source, place in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=relinked(text, source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links of pages in docs/ that leave it to pages of the site, and let a search find some pages last."""
    if LAST_FOUND.fullmatch(page.file.src_uri):
        page.meta["search"] = {"boost": 0.1}
    outside = page.file.src_uri in PAGES.values()
    return markdown if outside else relinked(markdown, f"docs/{page.file.src_uri}")


def relinked(text: str, source: str) -> str:
    """`text` of the file `source`, with links for the site, where each of `PAGES` stands beside the pages of docs/.

    Raises `PluginError` where a link leads to a file that is none of the site's.
    """

    folder = posixpath.dirname(PAGES.get(source, source.removeprefix("docs/"))) or "."

    def place(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found.group(1)))
        if target not in PAGES and not target.startswith("docs/"):
            raise PluginError(f"{source} links to {found.group(1)}, which is no page of the site")
        return posixpath.relpath(PAGES.get(target, target.removeprefix("docs/")), folder)

    return LINK.sub(place, text)


def on_nav(nav: Navigation, **_: Any) -> None:
    """Keep the order of the pages, for `llms.txt`."""
    _ORDER[:] = nav.pages


def on_post_build(config: MkDocsConfig) -> None:
    """Write `llms.txt`, which lists the pages for programs that read them: a line a page, with its first sentence.

    Raises `PluginError` where anything of the site refers to what the site does not have.
    """
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", "", "## Manual", ""]
    for page in _ORDER:
        paragraphs = (each for each in (page.markdown or "").split("\n\n") if re.match(r"[A-Z`*\[]", each))
        said = re.sub(r"\[([^]]*)\]\([^)]*\)|[*`]", r"\1", " ".join(next(paragraphs, "").split()))
        lines.append(f"- [{page.title}]({page.url}): {re.split(r'(?<=[.:?]) ', said)[0]}")
    site = Path(config.site_dir)
    (site / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    if broken := list(broken_links(site)):
        raise PluginError("\n".join(broken))


def broken_links(site: Path) -> Iterator[str]:
    """What the pages in a folder refer to, as links, pictures, scripts and styles, and the folder does not have.

    Markdown's links are known to mkdocs; this sees the theme's and those of HTML in a page as well.
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
