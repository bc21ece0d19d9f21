"""Losses of half-masked answers, computed by the engine."""

from collections.abc import Sequence
from itertools import compress
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
"""Tokens of a canvas whose answer is half masked; the most that the end of the question and the answer take."""


def held_out(
    source: Source, pairs: Sequence[tuple[str, str]], quantization: NumberFormat = "none"
) -> tuple[dict[str, Any], LLM]:
    """The loss of `pairs` of questions and answers, in nats a masked token of the answers, and the model.

    Half of each answer is masked, and predicted in one pass. `right` is the share of tokens that are the most probable
    ones. Raises `ConfigError` if a request fails.
    """
    llm = open_model(source, quantization)
    rng = np.random.default_rng(SEED)
    cases = [_half_masked(llm, str(number), *pair, rng) for number, pair in enumerate(pairs)]
    losses: list[list[float]] = []
    right: list[list[float]] = []
    outputs = llm.session.run([request for request, _ in cases], progress=False)
    for output, (_, in_answer) in zip(outputs, cases, strict=True):
        if output.error is not None:
            raise ConfigError(f"the answer {output.id} could not be read: {output.error}")
        tokens = list(compress(output.logprobs or (), in_answer))
        losses.append([-token.logprob for token in tokens])
        right.append([float(token.top[0][0] == token.token_id) for token in tokens])
    return {
        "answers": len(losses),
        "tokens": sum(map(len, losses)),
        **_token_mean("loss", losses),
        **_token_mean("right", right),
    }, llm


def _token_mean(name: str, answers: Sequence[Sequence[float]]) -> dict[str, Any]:
    """The mean of a value over the tokens of all answers, and its 95 % interval, in fields that begin with `name`.

    Answers are independent, and not their tokens. The interval is that of a ratio, the sum of values to the number of
    tokens: it follows from each answer's deviation from the ratio.
    """
    sums = np.array([sum(values) for values in answers], dtype=np.float64)
    counts = np.array([len(values) for values in answers], dtype=np.float64)
    mean = float(sums.sum() / counts.sum())
    low, high = mean_interval(((sums - mean * counts) / counts.mean()).tolist(), range(len(answers)))
    return {name: mean, f"{name}_interval": [mean + low, mean + high]}


def _half_masked(
    llm: LLM, name: str, question: str, answer: str, rng: np.random.Generator
) -> tuple[Request, list[bool]]:
    """A request that writes the masked half of a response in one step, and whether each masked token is of the answer.

    The canvas is as in the adapter's training: question and answer as plain text, then end tokens up to `CANVAS`.
    """
    assert llm.tokenizer is not None
    end_id = min(llm.loaded.config.stop_ids)
    prompt = llm.tokenizer.encode(f"Question: {question}\nAnswer:", add_special_tokens=False)[-QUESTION:]
    answer_ids = llm.tokenizer.encode(f" {answer}", add_special_tokens=False)[:ANSWER]
    response = np.array([*answer_ids, *([end_id] * (CANVAS - len(prompt) - len(answer_ids)))])
    masked = np.flatnonzero(rng.random(len(response)) < 0.5)
    fixed = response.copy()
    fixed[masked] = OPEN
    runs = np.split(masked, np.flatnonzero(np.diff(masked) > 1) + 1)
    template = Template(tuple(fixed.tolist()), tuple(Hole(int(run[0]), int(run[-1]) + 1) for run in runs))
    params = SamplingParams(max_tokens=len(response), steps=1, ignore_eos=True, blocks={"growing_canvas": False})
    transfer = Transfer(0, tuple((len(prompt) + masked).tolist()), tuple(response[masked].tolist()))
    request = Request(name, prompt, params, policy=llm.session.policy("none"), template=template)
    return request.with_readers(ForcedTokens([transfer]), Logprobs(1)), (masked < len(answer_ids)).tolist()
