"""Print how much there is to read: lines, lines of code (without blanks, comments and docstrings) and files by package.

Run as `python scripts/size.py` in the root of a checkout. Documents are counted in words. The last table draws the
rooms, the folders of packages and the modules beside them, by floor: a room stands above all that it imports. Of a
circle of rooms the imports of fewest files are named as running up, and do not count.
"""

import ast
import io
import tokenize
from collections import Counter
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

THIN = 60  # lines under which a file counts as thin
PACKAGES = [Path("src/remask"), Path("lab/src/remask_lab"), Path("caches/src/remask_caches")]
TESTS = [Path("tests"), Path("lab/tests"), Path("caches/tests")]
LAYOUT = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(text: str) -> int:
    """Count the lines of `text` that hold a token other than a comment or a part of a docstring."""
    numbers: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in LAYOUT:
            numbers.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            numbers.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(numbers)


def row(name: str, files: list[Path]) -> str:
    """Return the line of the table about `files`: their lines, lines of code, number, and how many are thin."""
    texts = {file: file.read_text() for file in files}
    lines = {file: text.count("\n") for file, text in texts.items()}
    thin = sum(lines[file] < THIN for file in files if file.name != "__init__.py")
    return f"{name:28}{sum(lines.values()):>8}{sum(map(code_lines, texts.values())):>8}{len(files):>7}{thin:>6}"


def imports() -> Counter[tuple[str, str]]:
    """Count the files of a room that import another room, by (importing room, imported room)."""
    rooms = {f"remask.{path.stem}" for path in Path("src/remask").iterdir()} | {"remask_lab", "remask_caches"}

    def room(name: str) -> str:
        """Return the room of a module or of a name in it; of other packages the top-level name."""
        child = ".".join(name.split(".")[:2])
        return child if child in rooms else name.partition(".")[0]

    counted: Counter[tuple[str, str]] = Counter()
    for file, source in ((file, package.parent) for package in PACKAGES for file in package.rglob("*.py")):
        imported: set[str] = set()
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported.update(room(alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                imported.update(room(f"{node.module}.{alias.name}") for alias in node.names)
        file_room = room(".".join(file.relative_to(source).with_suffix("").parts))
        counted.update((file_room, other) for other in (imported & rooms) - {file_room, "remask"})
    return counted


def from_the_ground(edges: Counter[tuple[str, str]]) -> list[str]:
    """Return the rooms in an order in which each follows all that it imports. Raises `CycleError` if there is none."""
    graph: dict[str, set[str]] = {}
    for room, other in edges:
        graph.setdefault(room, set()).add(other)
    return list(TopologicalSorter(graph).static_order())


def floors() -> tuple[list[list[str]], Counter[tuple[str, str]]]:
    """Return the rooms of each floor, from the ground up, and the imports that run up."""
    edges, up = imports(), Counter[tuple[str, str]]()
    while True:
        try:
            from_the_ground(edges)
            break
        except CycleError as error:
            lightest = min(((room, other) for other, room in pairwise(error.args[1])), key=lambda pair: edges[pair])
            up[lightest] = edges.pop(lightest)
    for pair in list(up):  # a removed import is restored if it closes no circle with those that are left
        try:
            from_the_ground(edges | Counter({pair: 1}))
            edges[pair] = up.pop(pair)
        except CycleError:
            continue
    height: dict[str, int] = {}
    for room in from_the_ground(edges):
        height[room] = 1 + max((height[other] for one, other in edges if one == room), default=0)
    levels = range(1, 1 + max(height.values()))
    return [sorted(room for room in height if height[room] == level) for level in levels], up


def main() -> None:
    """Print the tables."""
    print(f"{'package':28}{'lines':>8}{'code':>8}{'files':>7}{'thin':>6}")
    for root in (*PACKAGES, *TESTS):
        print(row(str(root), sorted(root.rglob("*.py"))))
        for room in sorted(path for path in root.iterdir() if path.is_dir()):
            if files := sorted(room.rglob("*.py")):
                print(row(f"  {room.name}", files))
    print(f"\n{'documents':28}{'words':>8}{'pages':>8}")
    pages = sorted(Path("docs").rglob("*.md"))
    notebook = [page for page in pages if page.is_relative_to("docs/lab")]
    for name, chosen in (("docs", [page for page in pages if page not in notebook]), ("docs/lab", notebook)):
        print(f"{name:28}{sum(len(page.read_text().split()) for page in chosen):>8}{len(chosen):>8}")
    levels, up = floors()
    print(f"\n{sum(map(len, levels))} rooms on {len(levels)} floors")
    for number, rooms in reversed(list(enumerate(levels, 1))):
        print(f"{number:>3}  {', '.join(rooms)}")
    for (importing, imported), count in up.items():
        print(f" up  {importing} to {imported}, files: {count}")


if __name__ == "__main__":
    main()
