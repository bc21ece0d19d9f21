"""Recorded runs of LLaDA2.2; `README.md` beside this file says what they are."""

from functools import cache
from pathlib import Path
from typing import Any

from tests.goldens import archive
from tests.goldens.archive import read_json

ROOT = Path(__file__).parent
MODELS = ("calm", "wild")
RULES = {"authors": "levenshtein", "sglang": "joint_threshold_indel"}


@cache
def folder(name: str) -> Path:
    """The checkpoint of a model."""
    return archive.folder(ROOT, name, MODELS)


def logits(name: str) -> dict[str, Any]:
    """Logits and routing of some rows of one canvas."""
    return read_json(folder(name) / "logits.json.gz")


def runs(name: str) -> list[dict[str, Any]]:
    """The runs of a model."""
    found: list[dict[str, Any]] = read_json(folder(name) / "runs.json.gz")["runs"]
    return found


def scripted() -> list[dict[str, Any]]:
    """Blocks without a model."""
    found: list[dict[str, Any]] = read_json(ROOT / "scripted.json.gz")["runs"]
    return found


def sampling(run: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that ask for a run."""
    rule = {"rule": RULES[run["rule"]]} | {name: run[name] for name in ("edit_threshold", "max_post_steps")}
    asked = {name: run[name] for name in ("max_tokens", "block_length", "threshold")} | {"remasking": rule}
    return asked | ({"steps_per_block": run["steps"]} if "steps" in run else {})
