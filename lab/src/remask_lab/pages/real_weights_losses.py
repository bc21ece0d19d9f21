"""Losses of answers whose half is masked, read through the engine."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.plan.canvas import OPEN, Hole, Template
from remask.readers.forced import ForcedTokens
from remask.readers.logprobs import Logprobs
from remask.request.result import Transfer
from remask.request.sampling_params import SamplingParams
from remask_lab.pages.real_weights_sizes import SEED, NumberFormat, Source, open_model
from remask_lab.records.interval import mean_interval

CANVAS, QUESTION, ANSWER = 360, 160, 200
"""Tokens of a canvas whose answer is half masked: at most so many of the question's end, and of the answer."""


def held_out(
    source: Source, solved: Sequence[tuple[str, str]], quantization: NumberFormat = "none"
) -> tuple[dict[str, Any], LLM]:
    """Loss of answers to questions, of which half is masked, through the engine: one pass of it an answer."""
    llm = open_model(source, quantization)
    rng = np.random.default_rng(SEED)
    requests, answered = [], []
    for number, (question, worked) in enumerate(solved):
        request, own = _half_masked(llm, str(number), question, worked, rng)
        requests.append(request)
        answered.append(own)
    losses: list[list[float]] = []
    right: list[list[float]] = []
    for output, own in zip(llm.session.run(requests, progress=False), answered, strict=True):
        if output.error is not None:
            raise ConfigError(f"the answer {output.id} could not be read: {output.error}")
        read = [each for each, counts in zip(output.logprobs or (), own, strict=True) if counts]
        losses.append([-each.logprob for each in read])
        right.append([float(each.top[0][0] == each.token_id) for each in read])
    return {
        "answers": len(losses),
        "tokens": sum(map(len, losses)),
        **_over_tokens("loss", losses),
        **_over_tokens("right", right),
    }, llm


def _over_tokens(name: str, answers: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The mean over the tokens of all answers, and its interval, as answers and not their tokens are independent.

    That of a ratio: an answer counts as much as it has tokens.
    """
    sums, counts = (np.array([each(own) for own in answers], dtype=np.float64) for each in (sum, len))
    mean = float(sums.sum() / counts.sum())
    low, high = mean_interval(((sums - mean * counts) / counts.mean()).tolist(), range(len(answers)))
    return {name: mean, f"{name}_interval": [mean + low, mean + high]}


def _half_masked(
    llm: LLM, name: str, question: str, worked: str, rng: np.random.Generator
) -> tuple[Request, list[bool]]:
    """A request that writes the masked half of a canvas in one step, and which of the tokens it writes are answer's.

    The canvas is as the adapter's training reads it: the question and its answer as plain text, then end tokens.
    """
    assert llm.tokenizer is not None
    end = min(llm.loaded.config.stop_ids)
    prompt = llm.tokenizer.encode(f"Question: {question}\nAnswer:", add_special_tokens=False)[-QUESTION:]
    answer = llm.tokenizer.encode(f" {worked}", add_special_tokens=False)[:ANSWER]
    response = np.array([*answer, *([end] * (CANVAS - len(prompt) - len(answer)))])
    masked = np.flatnonzero(rng.random(len(response)) < 0.5)
    fixed = response.copy()
    fixed[masked] = OPEN
    runs = np.split(masked, np.flatnonzero(np.diff(masked) > 1) + 1)
    template = Template(tuple(fixed.tolist()), tuple(Hole(int(run[0]), int(run[-1]) + 1) for run in runs))
    params = SamplingParams(max_tokens=len(response), steps=1, ignore_eos=True, blocks={"growing_canvas": False})
    written = Transfer(0, tuple((len(prompt) + masked).tolist()), tuple(response[masked].tolist()))
    request = Request(name, prompt, params, policy=llm.session.policy("none"), template=template)
    return request.with_readers(ForcedTokens([written]), Logprobs(1)), (masked < len(answer)).tolist()
