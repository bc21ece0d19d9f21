"""Golden vectors of the original public implementations, and how each is asked for.

`README.md` beside this file says what the data are. Runs are plain dicts as recorded, with three keys added: `file`,
`index` (their place in that file) and `model`. The one batched run is given as one run per batch row. Treat every
returned value as read-only: parsed files are cached.
"""

from collections.abc import Container
from functools import cache
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from tests.goldens.archive import folder, read_json
from tests.goldens.requests import exempt, expected_forwards, prompt_ids, prompts, request_line, run_id

__all__ = [
    "MODELS",
    "ROOT",
    "Run",
    "cache_policy",
    "exempt",
    "expected_forwards",
    "model_dir",
    "profiler",
    "prompt_ids",
    "prompts",
    "request_line",
    "row_layers",
    "run_files",
    "run_id",
    "runs",
    "tensors",
    "transfers",
]

Run = dict[str, Any]

ROOT = Path(__file__).parent
MODELS = ("llada", "llada_gqa", "dream", "dream_dllm")


def model_dir(name: str) -> Path:
    """The checkpoint folder of a toy model (`config.json`, `model.safetensors`, ...)."""
    return folder(ROOT, name, MODELS)


def run_files() -> list[str]:
    """The names that `runs` takes, sorted."""
    return sorted(path.name.removesuffix(".json.gz") for path in (ROOT / "runs").glob("*.json.gz"))


def runs(file: str, methods: Container[str] | None = None) -> list[Run]:
    """The runs of one file, in recorded order; with `methods`, only those whose `method` is in it."""
    return [run for run in _runs(file) if methods is None or run["method"] in methods]


def transfers(run: Run) -> list[tuple[int, list[int], list[int]]]:
    """What each pass transferred: (1-based number of the pass, absolute positions ascending, their tokens)."""
    return [(event["fwd"], event["pos"], event["tok"]) for event in run["transfers"]]


def row_layers(run: Run, layers: int) -> int:
    """Rows times layers, summed over the passes of a run on a model of that many layers.

    The recorded row counts leave restored prefix rows out; BiCache runs list the layers that computed those.
    """
    passed_in = sum(rows * passes for rows, passes in run["rows_per_forward_rle"])
    prefix_layers = sum(count * passes for count, passes in run.get("layers_with_prefix_rows_rle", []))
    return int(passed_in * layers + prefix_layers * run.get("prefix_len", 0))


@cache
def tensors(name: str) -> dict[str, Tensor]:
    """The tensors of `<model>/logits` (by model name) or of `bicache_tensors`."""
    return dict(load_file(ROOT / f"{name}/logits.safetensors" if name in MODELS else ROOT / f"{name}.safetensors"))


def profiler() -> dict[str, Any]:
    """Similarities of shared-prefix pairs, depth-table cases and ratio cases (model `llada`)."""
    return read_json(ROOT / "bicache_profiler.json.gz")


def cache_policy() -> dict[str, Any]:
    """Request logs of the prefix cache under several token budgets."""
    return read_json(ROOT / "bicache_cache_policy.json.gz")


@cache
def _runs(file: str) -> list[Run]:
    if file not in run_files():
        raise KeyError(f"no golden runs {file!r}; there are {', '.join(run_files())}")
    data = read_json(ROOT / "runs" / f"{file}.json.gz")
    return [
        row | {"file": file, "index": index, "model": data["model"]}
        for index, run in enumerate(data["runs"])
        for row in _batch_rows(run)
    ]


def _batch_rows(run: Run) -> list[Run]:
    if "prompt_ids" not in run:
        return [run]
    return [
        run
        | {
            "row": row,
            "prompt_ids": prompt,
            "output_ids": run["output_ids"][row],
            "transfers": [event for event in run["transfers"] if event["row"] == row],
        }
        for row, prompt in enumerate(run["prompt_ids"])
    ]
