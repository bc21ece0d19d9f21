"""Golden vectors of GIDD and Uniform-Cache: `README.md` beside this file says what the data are.

Everything returned is to be treated as read-only: parsed files are cached.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from tests.goldens.archive import folder, read_json, read_tensors
from tests.goldens.uniform.requests import Run, Trace

__all__ = ["Run", "Trace"]

ROOT = Path(__file__).parent
MODELS = ("unif", "gentle", "mask", "hybrid")
STRATEGIES = ("baseline", "prefix", "uniform_r0", "uniform_r1", "uniform_r4")


def model_dir(name: str) -> Path:
    """The checkpoint folder of a toy model."""
    return folder(ROOT, name, MODELS)


def forward(model: str) -> dict[str, Tensor]:
    """Logits, hidden states, attention and caches of single forward passes."""
    return read_tensors(ROOT / "forward" / f"{model}.safetensors.gz")


def cases(file: str, kind: str) -> Iterator[tuple[dict[str, Any], dict[str, Tensor]]]:
    """Parameters and tensors of the cases of one kind in `torch_steps` or `gidd_v1`, without the case's name."""
    recorded = sampling(file)[1]
    for case in _sampling_json(file)["cases"]:
        stem = f"{case['name']}."
        if stem.startswith(f"{kind}."):
            yield case, {key.removeprefix(stem): value for key, value in recorded.items() if key.startswith(stem)}


def sampling(file: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The settings common to a sampling file's cases, and its tensors."""
    common = {name: value for name, value in _sampling_json(file).items() if name != "cases"}
    return common, read_tensors(ROOT / "sampling" / f"{file}.safetensors.gz")


def trace_names() -> list[str]:
    """The names that `trace` takes, sorted."""
    return sorted(path.name.removesuffix(".json.gz") for path in (ROOT / "traces").glob("*.json.gz"))


def trace(name: str) -> Trace:
    """One whole generation under all strategies."""
    path = ROOT / "traces" / name
    return Trace(read_json(path.with_name(f"{name}.json.gz")), read_tensors(path.with_name(f"{name}.safetensors.gz")))


def runs(model: str) -> list[Run]:
    """Every decode of a model that a request can ask for: each strategy and batch row of its adaptive traces.

    The tokens of the ancestral traces were drawn by the original's generator, which no request reproduces.
    """
    return [
        Run(one, strategy, row)
        for one in map(trace, trace_names())
        if one.model == model and one.parameters["sampling_method"] == "adaptive"
        for strategy in STRATEGIES
        for row in range(one.parameters["batch"])
    ]


def _sampling_json(file: str) -> dict[str, Any]:
    return read_json(ROOT / "sampling" / f"{file}.json.gz")
