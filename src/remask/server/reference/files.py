"""The page's files. Their headers are those of the playground's."""

from pathlib import Path

FOLDER = Path(__file__).parent / "page"
FILES = {
    "/docs" if path.name == "index.html" else f"/docs/{path.name}": path
    for path in sorted(FOLDER.iterdir())
    if path.suffix in (".html", ".css", ".js")
}
