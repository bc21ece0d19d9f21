"""The package rests on what remask documents for authors of policies and rules, and on nothing else of remask."""

import ast
import json
import re
import runpy
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import remask
from remask.checks.fields import declared
from remask.policies import CachePolicy, settings_of
from remask.request.sampling_params import SamplingParams
from remask_caches.acache import ACache
from remask_caches.elastic import ElasticCache
from remask_caches.entropy import EntropyCache
from remask_caches.slowfast import SlowFastConfig

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "caches" / "src" / "remask_caches"
PAGE = (ROOT / "caches" / "README.md").read_text(encoding="utf-8")
PROJECT = tomllib.loads((ROOT / "caches" / "pyproject.toml").read_text(encoding="utf-8"))["project"]
MODULES = {
    "remask.checks.fields",
    "remask.checks.values",
    "remask.errors",
    "remask.machine.transfers",
    "remask.model.stage",
    "remask.plan",
    "remask.policies",
    "remask.policies.on_device",
    "remask.denoising.rules",
    "remask.denoising.select",
    "remask.sampling.vocabulary",
}
"""All that the package may import of remask. Each of them is documented for authors of packages."""
NO_TENSORS = {"acache", "elastic", "entropy", "slowfast"}  # what plans and chooses


def imported(path: Path) -> set[str]:
    """The modules that a file imports."""
    found = set[str]()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.module is not None
            assert not any(alias.name.startswith("_") for alias in node.names), path
            found.add(node.module)
    return found


def test_it_imports_what_is_public() -> None:
    used = {name for path in SOURCE.glob("*.py") for name in imported(path) if name.split(".")[0] == "remask"}
    assert used == MODULES
    pages = "".join(
        (ROOT / "docs" / page).read_text(encoding="utf-8")
        for page in ("extending.md", "lab/policy-reference.md", "lab/hooks-and-readers.md")
    )
    assert [name for name in sorted(MODULES) if name not in pages] == []


def test_what_plans_imports_no_tensors() -> None:
    for name in NO_TENSORS:
        assert "torch" not in imported(SOURCE / f"{name}.py"), name


def test_every_entry_point_is_there_and_on_the_page() -> None:
    assert PROJECT["version"] == remask.__version__
    assert PROJECT["dependencies"] == [f"remask=={remask.__version__}"]
    for entries in PROJECT["entry-points"].values():
        for name, place in entries.items():
            module, _, item = place.partition(":")
            assert hasattr(import_module(module), item)
            assert re.search(rf"^\| \[`{name}`\]", PAGE, re.MULTILINE), name


@pytest.mark.parametrize(
    ("title", "policy"), [("Elastic-Cache", ElasticCache()), ("EntropyCache", EntropyCache()), ("ACache", ACache())]
)
def test_the_page_has_every_setting_and_its_default(title: str, policy: CachePolicy) -> None:
    section = PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| `(.*?)` \|", section, re.MULTILINE)
    shown = {name: json.loads(default) for name, default in rows}
    unset = {"anchor_interval": None} if isinstance(policy, ACache) else {}
    assert shown == settings_of(policy) | unset


def test_the_page_has_every_parameter_of_the_rule() -> None:
    section = PAGE.split("\n## SlowFast\n")[1].split("\n## ")[0]
    rows = re.findall(r"^\| `(\w+)` \| .*? \| (?:`(.*?)`)? ?\| (.*) \|$", section, re.MULTILINE)
    assert rows == [
        (name, "" if each.default is None else json.dumps(each.default), each.meaning)
        for name, each in declared(SlowFastConfig).items()
    ]
    (example,) = re.findall(r"```json\n(.*?)```", section, re.DOTALL)
    assert SamplingParams.from_mapping(json.loads(example)).knobs.config == SlowFastConfig(slow_steps=4, threshold=0.9)


DRAWN: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "docs_pictures.py"))


@pytest.mark.parametrize("name", DRAWN["PACKAGE_SCENES"])
def test_pictures_are_up_to_date(name: str) -> None:
    scene = DRAWN["PACKAGE_SCENES"][name]
    text = (ROOT / "docs" / "images" / f"{name}.svg").read_text(encoding="utf-8")
    assert text == DRAWN["svg"](scene, DRAWN["panels"](scene)), "run: python scripts/docs_pictures.py"
    assert f"](../docs/images/{name}.svg)" in PAGE
