"""The page's files and their HTTP headers."""

from pathlib import Path

FOLDER = Path(__file__).parent / "page"
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
FILES = {
    "/" if path.name == "index.html" else f"/playground/{path.relative_to(FOLDER).as_posix()}": path
    for path in sorted(FOLDER.rglob("*"))
    if path.suffix in KINDS
}
