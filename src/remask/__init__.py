"""remask: an inference engine for diffusion language models."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from remask.core.request import Usage
    from remask.core.sampling import SamplingParams
    from remask.core.slowfast import SlowFastKnobs
    from remask.engine.config import EngineConfig
    from remask.errors import RemaskError
    from remask.llm import LLM, Output

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "Output", "RemaskError", "SamplingParams", "SlowFastKnobs", "Usage", "__version__"]

# Names are looked up when they are first asked for: importing the package does not import PyTorch.
_HOMES = {
    "LLM": "remask.llm",
    "EngineConfig": "remask.engine.config",
    "Output": "remask.llm",
    "RemaskError": "remask.errors",
    "SamplingParams": "remask.core.sampling",
    "SlowFastKnobs": "remask.core.slowfast",
    "Usage": "remask.core.request",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'remask' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
