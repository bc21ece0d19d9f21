"""Golden runs of A2D, ModernBERT and Stable-DiffCoder: `README.md` beside this file says what the data are.

Everything returned is to be treated as read-only: parsed files are cached.
"""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

from tests.goldens.archive import unpacked
from tests.leftovers import lasting_folder

ROOT = Path(__file__).parent
MODELS = ("a2d-llama", "a2d-qwen2", "a2d-qwen3", "stable-diffcoder", "modernbert")
Run: TypeAlias = Mapping[str, Any]
Asked: TypeAlias = tuple[str | None, bool]
"""What the configuration must say for a run: the sampler of the model, and whether its rows are shifted."""


@cache
def model_dir(model: str) -> Path:
    """The checkpoint folder of a toy model, its files unpacked."""
    folder = lasting_folder() / model
    folder.mkdir()
    for name in ("config.json", "model.safetensors"):
        (folder / name).write_bytes(unpacked(ROOT / model / name))
    return folder


@cache
def logits(model: str) -> Mapping[str, Any]:
    """Token ids, rows, and their logits."""
    found: Mapping[str, Any] = json.loads(unpacked(ROOT / model / "logits.json"))
    return found


@cache
def runs(model: str) -> Mapping[Asked, Mapping[str, Run]]:
    """Every run by a name, those that one loaded model can answer together."""
    found: dict[Asked, dict[str, Run]] = {}
    for number, run in enumerate(json.loads(unpacked(ROOT / model / "runs.json"))):
        asked = run.get("sampler"), run.get("right_shift_logits", False)
        found.setdefault(asked, {})[f"{model}.{number}"] = run
    return found


def overrides(asked: Asked) -> dict[str, Any]:
    """What is laid over `config.json`. Requests name their blocks, so that the model's own decides nothing."""
    sampler, shifted = asked
    blocks: dict[str, Any] = {"block_size": 4} if sampler == "bd3lm" else {}
    return blocks | ({"right_shift_logits": True} if shifted else {})


def request_line(name: str, run: Run, cache: str) -> dict[str, Any]:
    """The request that reproduces a run."""
    length, block = run["max_new_tokens"], run["block_size"]
    sampling = {"max_tokens": length, "block_length": block}
    if run.get("sampler") == "mdlm":
        sampling |= {"steps": run["steps"], "cfg_scale": run.get("cfg_scale", 0.0)}
    else:
        sampling["steps_per_block"] = -(-run["steps"] // -(-length // block))
        sampling |= {"threshold": run["threshold"]} if "threshold" in run else {}
        sampling |= {"stop_token_ids": [run["stop"]]} if "stop" in run else {}
    return {"id": name, "prompt_token_ids": run["prompt"], "cache": cache, "sampling": sampling}


def trace(run: Run, answer: Mapping[str, Any]) -> list[list[list[int]]]:
    """What each step of an answer settled, as a run's `trace` has it."""
    first = len(run["prompt"])
    return [
        [[position - first, token] for position, token in zip(event["positions"], event["token_ids"], strict=True)]
        for event in answer["trace"]
    ]
