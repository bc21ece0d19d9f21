"""What the documentation's site shows beside docs/: the repository's other pages, their links led to pages of the site.

A hook of mkdocs (mkdocs.yml). Files keep one home: nothing is copied into docs/.
"""

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
PAGES = {
    "README.md": "index.md",
    "benchmarks/README.md": "benchmarks.md",
    "training/README.md": "training.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
}
# They hold every word, and a search is seldom for them.
LAST_FOUND = ("log.md", "changelog.md", "results.md", "gallery.md", "caches.md")
LINK = re.compile(r"(?<=\]\()(?![a-z]+:|#)([^)#\s]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages from outside docs/."""
    for source, place in PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=relinked(text, source)))
    return files


def on_page_markdown(markdown: str, page: Page, **_: Any) -> str:
    """Lead links of pages in docs/ that leave it to pages of the site, and let a search find some pages last."""
    if page.file.src_uri in LAST_FOUND:
        page.meta["search"] = {"boost": 0.1}
    outside = page.file.src_uri in PAGES.values()
    return markdown if outside else relinked(markdown, f"docs/{page.file.src_uri}")


def relinked(text: str, source: str) -> str:
    """`text` of the file `source`, with links for the site, all of whose pages stand in one folder.

    Raises `PluginError` where a link leads to a file that is none of the site's.
    """

    def place(found: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), found.group(1)))
        if target in PAGES:
            return PAGES[target]
        if target.startswith("docs/"):
            return target.removeprefix("docs/")
        raise PluginError(f"{source} links to {found.group(1)}, which is no page of the site")

    return LINK.sub(place, text)
