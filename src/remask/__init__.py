"""remask: an inference engine for diffusion language models."""

from remask.core.request import Usage
from remask.core.sampling import SamplingParams
from remask.core.slowfast import SlowFastKnobs
from remask.engine.config import EngineConfig
from remask.errors import RemaskError
from remask.llm import LLM, Output

__version__ = "0.1.0"
__all__ = ["LLM", "EngineConfig", "Output", "RemaskError", "SamplingParams", "SlowFastKnobs", "Usage", "__version__"]
