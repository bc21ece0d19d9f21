"""remask: an inference engine for diffusion language models."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remask.async_llm import AsyncLLM
    from remask.engine.config import EngineConfig
    from remask.errors import RemaskError
    from remask.llm import LLM
    from remask.outputs import Output, StreamedOutput
    from remask.request.result import Usage
    from remask.request.sampling_params import SamplingParams

__version__ = "0.1.0"
__all__ = [
    "LLM",
    "AsyncLLM",
    "EngineConfig",
    "Output",
    "RemaskError",
    "SamplingParams",
    "StreamedOutput",
    "Usage",
    "__version__",
]

# Names are looked up when they are first asked for: importing the package does not import PyTorch.
_MODULES = {
    "LLM": "remask.llm",
    "AsyncLLM": "remask.async_llm",
    "EngineConfig": "remask.engine.config",
    "Output": "remask.outputs",
    "RemaskError": "remask.errors",
    "SamplingParams": "remask.request.sampling_params",
    "StreamedOutput": "remask.outputs",
    "Usage": "remask.request.result",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        from remask.errors import REPLACEMENTS, UnknownNameError

        if name in REPLACEMENTS:
            raise ImportError(str(UnknownNameError("class", name, __all__)))
        raise AttributeError(f"module 'remask' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULES[name]), name)


def __dir__() -> list[str]:
    return __all__
