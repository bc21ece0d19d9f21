"""The recipe pages: their tables are up to date, every published shape has one, and what they tell to type works."""

import json
import re
import runpy
import shlex
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from remask.checkpoint.presets import PRESETS
from remask.cli import main
from remask.cli.main import parse
from remask.llm import LLM
from remask.model.int8_kernels import int8_kernel

ROOT = Path(__file__).parents[2]
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "docs_recipes.py"))
RECIPES: dict[str, tuple[str, ...]] = SCRIPT["RECIPES"]


def commands(page: str) -> list[str]:
    """The commands of a page's blocks."""
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```bash\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    return re.findall(r"^(remask .*?)(?:\s+#.*)?$", "\n".join(blocks), re.MULTILINE)


def check(text: str, expected: str) -> None:
    """Both are the same page, to the last digit where this machine sizes passes and int8 weights as the pages do.

    Without Triton a pass takes other memory, and int8 weights a little more or less by the kernel that computes them.
    """
    if find_spec("triton") is None or int8_kernel().name != "fbgemm":
        text, expected = (re.sub(r"(?s)<!-- generated: room -->.*?<!-- end -->", "", each) for each in (text, expected))
        here, there = ([float(each) for each in re.findall(r"\d+\.\d+", page)] for page in (text, expected))
        assert here == pytest.approx(there, rel=0.05)
        text, expected = (re.sub(r"\d+\.\d+", "#", each) for each in (text, expected))
    assert text == expected, "run: python scripts/docs_recipes.py"


@pytest.mark.parametrize("page", RECIPES)
def test_tables_are_up_to_date(page: str) -> None:
    text = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8")
    check(text, SCRIPT["written"](text, RECIPES[page]))
    assert set(re.findall(r"<!-- generated: (\w+) -->", text)) == {"sizes", "room", "speed"}


def test_the_overview_is_up_to_date() -> None:
    pages: dict[Path, str] = SCRIPT["pages"]()
    page = ROOT / "docs" / "recipes.md"
    check(page.read_text(encoding="utf-8"), pages[page])


def test_every_published_shape_has_a_recipe() -> None:
    ours = re.compile(r"-tiny$|-100m$|-1b$")
    assert {name for names in RECIPES.values() for name in names} == {name for name in PRESETS if not ours.search(name)}


@pytest.mark.few(3)
@pytest.mark.parametrize("page", RECIPES)
def test_settings_are_taken_by_the_family(page: str) -> None:
    """Each command's sampling parameters and cache run on a small model of the family, with shorter responses."""
    family = PRESETS[RECIPES[page][0]].family
    llm = LLM(f"{family}-tiny", load_format="dummy", device="cpu", cache="auto")
    asked = [parse(shlex.split(command)[1:]) for command in commands(page)]
    ran = 0
    for args in asked:
        if args.command not in ("chat", "serve", "generate"):
            continue
        sampling = {**(json.loads(args.sampling) if args.sampling else {}), "max_tokens": 64}
        cache = None if args.cache in (None, "auto") else args.cache
        depth = {"depth": 1} if "bicache" in (cache or llm.cache_name) else {}  # so that nothing is profiled
        prompts = [{"prompt_token_ids": [3, 5, 7, 9]}]
        (output,) = llm.generate(prompts, sampling, cache=cache or llm.cache_name, cache_config=depth)
        assert output.finish_reason in ("stop", "length")
        ran += 1
    assert ran


@pytest.mark.few(4)
@pytest.mark.parametrize("page", RECIPES)
def test_a_rehearsal_runs(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What a page says to try without its model: a bench on a small shape, under the caches that it recommends."""
    found = [each for each in commands(page) if "--load-format dummy" in each]
    assert found
    for command in found:
        assert main(["--quiet", *shlex.split(command)[1:]]) == 0
        assert "| none " in capsys.readouterr().out
