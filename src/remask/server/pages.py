"""The files of the pages at `/` and `/docs`, and their HTTP headers. Neither page loads anything from other hosts.

All addresses in them are relative, so that they work behind a proxy that adds a prefix.
"""

import re
from collections.abc import Awaitable, Callable
from pathlib import Path

from fastapi import APIRouter, Response

KINDS = {
    ".html": "text/html; charset=utf-8",
    ".css": "text/css; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
# The page loads nothing from other origins, sends them nothing, and has no inline script or style. No text can become
# markup or a script: browsers with trusted types refuse every assignment that would do it.
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; object-src 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


def _files(folder: str, index: str, folder_url: str) -> dict[str, Path]:
    """The files of a folder by URL: its `index.html` has the URL `index`, others are below the URL `folder_url`."""
    root = Path(__file__).parent / folder
    return {
        index if path.name == "index.html" else f"{folder_url}/{path.relative_to(root).as_posix()}": path
        for path in sorted(root.rglob("*"))
        if path.suffix in KINDS
    }


FILES = {**_files("playground/page", "/", "/playground"), **_files("reference", "/docs", "/docs")}
SLASHED = "/docs/"
"""The page of `/docs` under its other spelling; its relative addresses begin with `../`."""
_RELATIVE = re.compile(rb'(href|src)="')


def add_pages(router: APIRouter) -> None:
    """Add a route for each of `FILES` and for `SLASHED`. The files are read here, once."""
    for url, path in FILES.items():
        router.add_api_route(url, _endpoint(path.read_bytes(), path), methods=["GET"], include_in_schema=False)
    page = FILES[SLASHED.rstrip("/")]
    content = _RELATIVE.sub(rb'\1="../', page.read_bytes())
    router.add_api_route(SLASHED, _endpoint(content, page), methods=["GET"], include_in_schema=False)


def _endpoint(content: bytes, path: Path) -> Callable[[], Awaitable[Response]]:
    """An endpoint that answers with `content`, whose media type follows from the suffix of `path`."""
    media_type = KINDS[path.suffix]

    async def get_page() -> Response:
        return Response(content, media_type=media_type, headers=HEADERS)

    return get_page
