"""Golden vectors of block-causal models (SDAR): `README.md` beside this file says what the data are.

Everything returned is to be treated as read-only: parsed files are cached.
"""

import json
from functools import cache
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.goldens.archive import folder, read_json, read_tensors
from tests.goldens.block_causal.requests import Family, Run, Visit

__all__ = ["Family", "Run", "Visit"]

ROOT = Path(__file__).parent
MODELS = ("sdar_b4", "sdar_b8", "sdar_b4_tied")
DECODED = ("sdar_b4", "sdar_b8")
RUN_LOGITS = {"sdar_b4": "sdar_b4.r001"}


def model_dir(name: str) -> Path:
    """The checkpoint folder of a toy model."""
    return folder(ROOT, name, MODELS)


def logits(model: str) -> dict[str, Tensor]:
    """Logits, hidden states and K/V of whole sequences in one pass."""
    return read_tensors(model_dir(model) / "logits.safetensors.gz")


def run_logits(model: str) -> dict[str, Tensor]:
    """The logits of the first passes of the run `RUN_LOGITS[model]`."""
    return read_tensors(model_dir(model) / "run_logits.safetensors.gz")


@cache
def prompts() -> dict[str, list[int]]:
    """All prompts by id."""
    data = json.loads((ROOT / "prompts.json").read_text(encoding="utf-8"))
    ids: dict[str, list[int]] = data["prompts"]
    return ids


def runs(model: str) -> list[Run]:
    """All decodes of a model: every strategy, with stop ids, and those of the families."""
    return [
        Run(recorded, prompts()[recorded["prompt_id"]])
        for suffix in ("", "_stop", "_shared")
        for recorded in _runs_file(f"{model}{suffix}")["runs"]
    ]


def families(model: str) -> list[Family]:
    """Requests with common left parts, to be served one after the other."""
    by_id = {run.id: run for run in runs(model)}
    return [
        Family(
            id=family["id"],
            page_sizes=tuple(family["page_sizes"]),
            visits=tuple(
                Visit(
                    run=by_id[request["run_id"]],
                    prefill_length=request["prefill_len"],
                    prompt_page_hits=_by_page_size(request["hit_tokens_prompt_pages"]),
                    all_page_hits=_by_page_size(request["hit_tokens_all_pages"]),
                )
                for request in family["requests"]
            ),
        )
        for family in _runs_file(f"{model}_shared")["families"]
    ]


def _runs_file(name: str) -> dict[str, Any]:
    return read_json(ROOT / "runs" / f"{name}.json.gz")


def _by_page_size(hits: dict[str, int]) -> dict[int, int]:
    return {int(page): tokens for page, tokens in hits.items()}
