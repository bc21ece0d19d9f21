"""Golden vectors of mixtures of experts: `README.md` beside this file says what the data are.

Everything returned is to be treated as read-only: parsed files are cached.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.goldens.archive import folder, read_json, read_tensors
from tests.goldens.block_causal.requests import Run

__all__ = ["Run"]

ROOT = Path(__file__).parent
MASKED = "llada_moe_dense"
BLOCK_CAUSAL = ("llada2_flash", "sdar_moe_b8")
MODELS = (MASKED, *BLOCK_CAUSAL)
_PROMPTS = {"llada_moe_dense": "llada_moe", "llada2_flash": "llada2", "sdar_moe_b8": "sdar_moe"}


def model_dir(name: str) -> Path:
    """The checkpoint folder of a toy model."""
    return folder(ROOT, name, MODELS)


def logits(model: str) -> dict[str, Tensor]:
    """Logits, hidden states, K, V and routing of whole sequences in one pass."""
    return read_tensors(model_dir(model) / "logits.safetensors.gz")


def masked_runs() -> list[dict[str, Any]]:
    """All decodes of the masked model, as `tests.goldens.runs` gives those of others."""
    return [
        run | {"file": file, "index": index, "model": MASKED, "prompt_id": None, "prompt_ids": prompt}
        for file in (f"{MASKED}_baseline", f"{MASKED}_fast_dllm")
        for index, run in enumerate(_runs_file(file))
        for prompt in [_prompts(MASKED)[run["prompt_id"]]]
    ]


def runs(model: str) -> list[Run]:
    """All decodes of a block-causal model: every strategy, with stop ids, and with edits."""
    files = sorted(path.name.removesuffix(".json.gz") for path in (ROOT / "runs").glob(f"{model}*.json.gz"))
    return [Run(run, _prompts(model)[run["prompt_id"]]) for file in files for run in _runs_file(file)]


@cache
def _prompts(model: str) -> dict[str, list[int]]:
    data = json.loads((ROOT / "prompts.json").read_text(encoding="utf-8"))
    ids: dict[str, list[int]] = data[_PROMPTS[model]]
    return ids


def _runs_file(name: str) -> list[dict[str, Any]]:
    recorded: list[dict[str, Any]] = read_json(ROOT / "runs" / f"{name}.json.gz")["runs"]
    return recorded
