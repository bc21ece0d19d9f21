"""Writes the document of the HTTP API into `docs/openapi.json`: `python scripts/openapi.py`.

Its digest stands in CHANGELOG.md, beside a line that says what changed; a test compares all three.
"""

import hashlib
import json
from pathlib import Path

from fastapi import FastAPI

from remask.server.app import DescribedApp, router

FILE = Path(__file__).parents[1] / "docs" / "openapi.json"


def document() -> str:
    """Return the document of a server without a proxy's prefix, as JSON."""
    app: FastAPI = DescribedApp(title="remask", version="0", docs_url=None, redoc_url=None)
    app.router.routes.extend(router().routes)
    return json.dumps(app.openapi(), indent=1, sort_keys=True) + "\n"


def digest(text: str) -> str:
    """Return the twelve hexadecimal digits by which the changelog names a document."""
    return hashlib.sha256(text.encode()).hexdigest()[:12]


if __name__ == "__main__":
    FILE.write_text(document(), encoding="utf-8")
    print(f"{FILE}: {digest(document())}; say in CHANGELOG.md what changed, beside this digest")
