"""What the documentation shows with an answer gives that answer: Python, curl, and commands that ask a bundled model.

- A block of Python that prints is followed by a block `text`: what it prints. Blocks of a page share their names, and
  the server that they speak of is the one that the page starts: its first `remask serve bundled...`.
- A block with `curl` is followed by a block `json`: a part of what the server answers.
- A command that asks a bundled model a question of its own ends with `# -> ` and the answer.
- A block of Python that begins with `# NAME.py` is that file, whole: later blocks import it, and commands name it.
"""

import contextlib
import io
import json
import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from remask.cli import main
from remask.llm import LLM
from tests.server.serving import Running, serving

ROOT = Path(__file__).parents[2]
PAGES = sorted([*(ROOT / "docs").rglob("*.md"), ROOT / "README.md"])
BASE = "http://127.0.0.1:8000"
# Python that prints nothing: code to copy, which other tests run as it stands there, and what no machine here can run.
SHOWN = {
    "docs/extending.md": "tests/plugins/test_doors.py and tests/docs",
    "docs/lab/hooks-and-readers.md": "tests/docs and tests/engine/test_readers.py",
    "docs/lab/analysis-subject.md": "tests/docs/test_extending_sampling.py",
    "docs/models.md": "a model of 100 billion parameters on four devices",
}
_FENCE = re.compile(r"^```(\w*)\n(.*?)^```\n", re.MULTILINE | re.DOTALL)
_ASKED = re.compile(r"remask (?:generate|decide) .*--model (?:smollm2|bundled\S*) .*--prompt ")


@dataclass(frozen=True)
class Block:
    """A block of code, and the block of another language that stands right behind it."""

    page: str
    language: str
    code: str
    then: "Block | None"

    @property
    def shell(self) -> bool:
        """Whether it is typed into a shell."""
        return self.language in ("", "bash")

    def answer(self, language: str) -> str:
        """What the block behind it says."""
        assert self.then is not None, f"{self.page}: no answer stands behind\n{self.code}"
        assert self.then.language == language, f"{self.page}: the answer to this is a block {language!r}\n{self.code}"
        return self.then.code


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    found: list[Block] = []
    then: tuple[int, Block] | None = None
    for match in reversed(list(_FENCE.finditer(text))):
        near = then is not None and len(text[match.end() : then[0]].strip().splitlines()) <= 1
        block = Block(page.relative_to(ROOT).as_posix(), match[1], match[2], then[1] if then and near else None)
        then = (match.start(), block)
        found.append(block)
    return found[::-1]


BLOCKS = [block for page in PAGES for block in blocks(page)]


@pytest.fixture(scope="module")
def servers() -> Iterator[Callable[[str], Running]]:
    """The server that a page starts: what its first `remask serve MODEL` would."""
    with contextlib.ExitStack() as stack:
        running: dict[str, Running] = {}

        def server(page: str) -> Running:
            started = re.search(r"^remask serve (bundled[\w-]*)", (ROOT / page).read_text("utf-8"), re.MULTILINE)
            assert started is not None, f"{page} speaks to a server that it does not start"
            name = started[1]
            if name not in running:
                running[name] = stack.enter_context(serving(LLM(name, device="cpu"), model_names=[name], sampling={}))
            return running[name]

        yield server


def python_pages() -> list[str]:
    return sorted({block.page for block in BLOCKS if block.language == "python" and block.page not in SHOWN})


def by_cost(page: str) -> Any:
    """The page as a parameter; `smollm2` takes seconds, so that the README alone asks it among the quick tests."""
    dear = page != "README.md" and 'LLM("smollm2"' in (ROOT / page).read_text("utf-8")
    return pytest.param(page, marks=pytest.mark.thorough) if dear else page


def file_name(block: Block) -> str | None:
    """The name of the file that a block is; None: it is none."""
    found = re.match(r"# (\w+\.py)\n", block.code)
    return None if block.language != "python" or found is None else found[1]


@pytest.mark.parametrize("page", [by_cost(page) for page in python_pages()])
def test_python_prints_what_stands_behind_it(
    page: str, servers: Callable[[str], Running], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("openai")
    monkeypatch.syspath_prepend(tmp_path)
    names: dict[str, Any] = {}
    for block in (block for block in BLOCKS if block.page == page and block.language == "python"):
        if file := file_name(block):
            (tmp_path / file).write_text(block.code, encoding="utf-8")
            continue
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            code = block.code.replace(BASE, servers(page).base) if BASE in block.code else block.code
            exec(compile(code, page, "exec"), names)
        said = [line.strip() for line in printed.getvalue().splitlines()]
        assert said == block.answer("text").splitlines(), f"{page}\n{block.code}"


def test_curl_gets_what_stands_behind_it(servers: Callable[[str], Running]) -> None:
    asked = [block for block in BLOCKS if block.shell and block.code.startswith("curl ")]
    assert asked
    for block in asked:
        _, url, *words = shlex.split(block.code)
        given = dict(zip(words[::2], words[1::2], strict=True))
        assert set(given) == {"-H", "-d"}
        name, _, value = given["-H"].partition(": ")
        answer = servers(block.page).client.post(url.removeprefix(BASE), content=given["-d"], headers={name: value})
        assert answer.status_code == 200, answer.text
        assert_part(json.loads(block.answer("json")), answer.json())


def assert_part(part: object, whole: object) -> None:
    """Objects hold the shown keys, and numbers are the shown ones as far as they are written."""
    if isinstance(part, Mapping):
        assert isinstance(whole, Mapping)
        for key, value in part.items():
            assert_part(value, whole[key])
    elif isinstance(part, list):
        assert isinstance(whole, list)
        for value, item in zip(part, whole, strict=True):
            assert_part(value, item)
    elif isinstance(part, float):
        assert whole == pytest.approx(part, abs=0.05)
    else:
        assert whole == part


def questions() -> list[tuple[str, str]]:
    """Commands that ask a bundled model a question of their own, and the answers that stand behind them."""
    lines = [line for block in BLOCKS if block.shell for line in block.code.replace("\\\n", " ").splitlines()]
    return [line.partition("# -> ")[::2] for line in lines if _ASKED.search(line)]


@pytest.mark.thorough
def test_questions_on_the_command_line_have_their_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert questions()
    for command, answer in questions():
        assert answer, f"no answer stands behind {command}"
        assert main(["--quiet", *shlex.split(command)[1:]]) == 0
        assert capsys.readouterr().out.strip() == answer


@pytest.mark.thorough
def test_commands_take_the_files_of_their_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As both are printed, but for servers, which do not end."""
    files = [block for block in BLOCKS if file_name(block)]
    assert files
    monkeypatch.chdir(tmp_path)
    for file in files:
        name = file_name(file)
        assert name is not None
        (tmp_path / name).write_text(file.code, encoding="utf-8")
        shell = [block.code for block in BLOCKS if block.page == file.page and block.shell]
        commands = [line for code in shell for line in code.splitlines() if name in line and "serve" not in line]
        assert commands
        for command in commands:
            assert main(["--quiet", *shlex.split(command)[1:]]) == 0


def test_blocks_are_found() -> None:
    served = ("serving", "chat", "infilling", "responses-and-messages")
    assert {"README.md", *(f"docs/{name}.md" for name in served)} <= set(python_pages())
    asked = {block.page for block in BLOCKS if block.shell and block.code.startswith("curl ")}
    assert {"docs/decisions.md", "docs/structured-outputs.md"} <= asked
    assert set(SHOWN) <= {block.page for block in BLOCKS if block.language == "python"}
    assert not any("print(" in block.code for block in BLOCKS if block.language == "python" and block.page in SHOWN)
