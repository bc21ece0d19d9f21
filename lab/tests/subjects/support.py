"""Models and requests for tests of what is watched."""

from typing import Any

import torch

from remask.engine.request import Request
from remask.llm import LLM

PROMPT = list(range(5, 16))


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
