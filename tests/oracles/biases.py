"""What sampling parameters change in logits, token by token, in the order of vLLM."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor


def changed(logits: Tensor, prompt: Sequence[int], written: Sequence[int], sampling: Mapping[str, Any]) -> Tensor:
    """Logits [rows, V] after `logit_bias` and the penalties; `written` are the response's tokens so far."""
    found = logits.clone()
    for token, bias in (sampling.get("logit_bias") or {}).items():
        found[:, int(token)] += bias
    repetition = sampling.get("repetition_penalty", 1.0)
    for row in range(len(found)):
        for token in range(found.shape[1]):
            value = float(found[row, token])
            if token in prompt or token in written:
                value = value / repetition if value > 0 else value * repetition
            value -= sampling.get("frequency_penalty", 0.0) * list(written).count(token)
            if token in written:
                value -= sampling.get("presence_penalty", 0.0)
            found[row, token] = value
    return found


def filtered(logits: Tensor, min_p: float) -> Tensor:
    """Logits [rows, V] in which tokens are minus infinity whose probability is below that share of the largest one."""
    chances = logits.softmax(-1)
    found = logits.clone()
    for row in range(len(found)):
        least = min_p * float(chances[row].max())
        for token in range(found.shape[1]):
            if float(chances[row, token]) < least:
                found[row, token] = -math.inf
    return found
