"""Recorded runs of Nemotron-Labs-Diffusion; `README.md` beside this file says what they are."""

import shutil
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file

from tests.goldens.archive import read_json
from tests.leftovers import lasting_folder

ROOT = Path(__file__).parent
MODELS = ("plain", "peaky")


@cache
def folder(name: str) -> Path:
    """The checkpoint of a model."""
    if name == "plain":
        return ROOT
    made = lasting_folder() / name
    shutil.copytree(ROOT / "linear_spec_lora", made / "linear_spec_lora")
    shutil.copy(ROOT / "config.json", made)
    save_file(
        load_file(ROOT / "model.safetensors") | load_file(ROOT / "peaky_head.safetensors"), made / "model.safetensors"
    )
    return made


def runs(name: str) -> list[dict[str, Any]]:
    """Its runs."""
    found: list[dict[str, Any]] = read_json(ROOT / "runs.json.gz")[name]
    return found


def sampling(run: dict[str, Any]) -> dict[str, Any]:
    """The sampling parameters that ask for a run."""
    asked = {"max_tokens": run["max_tokens"], "mode": run["mode"]}
    if run["mode"] == "diffusion":
        rule = {} if run["rule"] == "threshold" else {"remasking": run["rule"]}
        # The recording denoises a block to its end even where an end token stands at its beginning.
        whole = {"blocks": {"early_stop": False}}
        return asked | rule | whole | {"threshold": run["threshold"], "steps_per_block": run["steps"]}
    if run["mode"] == "linear_speculation":
        return asked | {"speculation": {"draft_window": 4, "max_draft_window": 8, "lora": run["lora"]}}
    return asked
