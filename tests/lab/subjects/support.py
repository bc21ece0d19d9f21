"""Models and requests for tests of what is watched."""

from pathlib import Path
from typing import Any

from remask.engine.config import EngineConfig
from remask.engine.request import Request
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams

PROMPT = list(range(5, 16))


def open_model(folder: Path, **limits: Any) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", engine=EngineConfig(**{"max_model_len": 64, **limits}))


def work(llm: LLM, policy: str = "none", deadline: float | None = None, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    return Request("a", PROMPT, params, prefix_length=4, deadline_s=deadline, policy=llm.policy(policy))
