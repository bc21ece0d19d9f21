"""Models and requests for tests of what is watched."""

from pathlib import Path
from typing import Any

import torch

from remask.engine.config import EngineConfig
from remask.engine.request import Request
from remask.llm import LLM
from remask.policies import CachePolicy
from remask_lab.subjects.drift import DriftTrace, DriftTracer
from tests.sampling_fields import flat_params

PROMPT = list(range(5, 16))


def open_model(folder: Path, **limits: Any) -> LLM:
    return LLM(str(folder), dtype="float32", device="cpu", engine=EngineConfig(**{"max_model_len": 64, **limits}))


def work(llm: LLM, policy: str = "none", deadline: float | None = None, **sampling: Any) -> Request:
    params = flat_params(**{"max_tokens": 12, "ignore_eos": True, **sampling})
    return Request("a", PROMPT, params, prefix_length=4, deadline_s=deadline, policy=llm.session.policy(policy))


def canvases(llm: LLM, request: Request, **asked: Any) -> list[torch.Tensor]:
    """The request's tokens before each of its steps; `asked` are further arguments of `generate`, such as a cache."""
    tokens = [*request.prompt_token_ids, *[llm.model.config.mask_id] * request.params.max_tokens]
    (output,) = llm.generate(list(request.prompt_token_ids), request.params, trace=True, **asked)
    assert output.trace is not None
    found = []
    for transfer in output.trace:
        found.append(torch.tensor(tokens))
        for position, token in zip(transfer.positions, transfer.token_ids, strict=True):
            tokens[position] = token
    return found


def trace_drift(llm: LLM, *items: Request, policy: CachePolicy | None = None) -> DriftTrace:
    """The last of `items`, which run one after another under `policy`."""
    tracer = DriftTracer(llm, policy)
    return tracer.trace_all(tracer.begin, items, progress=False)[-1]
