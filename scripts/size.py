"""Print how much there is to read: lines, lines of code (without blanks, comments and docstrings) and files by package.

Run as `python scripts/size.py` in the root of a checkout. Documents are counted in words.
"""

import ast
import io
import tokenize
from pathlib import Path

THIN = 60  # lines under which a file counts as thin
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Count the lines of `text` that hold a token other than a comment or a part of a docstring."""
    held: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            held.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            held.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(held)


def row(name: str, files: list[Path]) -> str:
    """Sum up `files` as one line of the table."""
    texts = {file: file.read_text() for file in files}
    lines = {file: text.count("\n") for file, text in texts.items()}
    thin = sum(lines[file] < THIN for file in files if file.name != "__init__.py")
    return f"{name:28}{sum(lines.values()):>8}{sum(map(code_lines, texts.values())):>8}{len(files):>7}{thin:>6}"


def main() -> None:
    """Print the tables."""
    print(f"{'package':28}{'lines':>8}{'code':>8}{'files':>7}{'thin':>6}")
    for root in (Path("src/remask"), Path("src/remask_lab"), Path("tests")):
        print(row(str(root), sorted(root.rglob("*.py"))))
        for room in sorted(path for path in root.iterdir() if path.is_dir()):
            if files := sorted(room.rglob("*.py")):
                print(row(f"  {room.name}", files))
    print(f"\n{'documents':28}{'words':>8}{'pages':>8}")
    pages = sorted(Path("docs").rglob("*.md"))
    notebook = [page for page in pages if page.is_relative_to("docs/lab")]
    for name, chosen in (("docs", [page for page in pages if page not in notebook]), ("docs/lab", notebook)):
        print(f"{name:28}{sum(len(page.read_text().split()) for page in chosen):>8}{len(chosen):>8}")


if __name__ == "__main__":
    main()
