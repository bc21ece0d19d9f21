"""The line that ends answers: tokens, passes, tokens a second, and what a cache has saved."""

from dataclasses import replace

import pytest

from remask.cli.summary import saved_share, summary
from remask.engine.request import Request
from remask.families import preset
from remask.llm import Output
from remask.policies import Dense
from remask.request.result import Usage
from remask.request.sampling_params import SamplingParams

MODEL = preset("llada-tiny")
ROWS = 20 * MODEL.layers  # of a pass over a canvas: twelve tokens of a prompt and eight of an answer


def answered(tokens: int, passes: int, done: int, **usage: object) -> tuple[Request, Output]:
    """A request of that canvas, and an output that took so many row-layers."""
    own = Usage(12, tokens, forwards=passes, row_layers=done, **usage)  # type: ignore[arg-type]
    request = Request("0", [1] * 12, SamplingParams(max_tokens=8), policy=Dense())
    return request, Output("0", (), "", "stop", own, None, None, 1.0)


@pytest.mark.parametrize(
    ("tokens", "passes", "done", "seconds", "told"),
    [
        (8, 3, 3 * ROWS, 2.0, "8 tokens in 3 passes, 4.0 tokens/s, 2.7 tokens a pass"),
        (8, 8, 8 * ROWS, 2.0, "8 tokens in 8 passes, 4.0 tokens/s"),
        (8, 4, ROWS, 2.0, "8 tokens in 4 passes, 4.0 tokens/s, 2.0 tokens a pass, 75 % of the work saved"),
        (1, 1, ROWS, 1.0, "1 token in 1 pass, 1.0 s"),  # and not 1 token/s
        (8, 1, ROWS, 0.5, "8 tokens in 1 pass, 0.5 s, 8.0 tokens a pass"),
        (0, 0, 0, 0.1, "0 tokens in 0 passes, 0.1 s"),
    ],
)
def test_the_line_of_an_answer(tokens: int, passes: int, done: int, seconds: float, told: str) -> None:
    assert summary(MODEL, [answered(tokens, passes, done)], seconds) == told


def test_several_answers_are_one_line_that_names_what_saved() -> None:
    both = [answered(4, 2, ROWS, approximation="bicache"), answered(4, 2, 2 * ROWS, prefix_row_layers=ROWS // 2)]
    assert summary(MODEL, both, 4.0) == (
        "8 tokens in 4 passes, 2.0 tokens/s, 2.0 tokens a pass, 12 % of the work saved by bicache"
    )


def test_nothing_is_told_of_what_cannot_be_compared() -> None:
    request, output = answered(8, 4, ROWS)
    assert saved_share(MODEL, [(request, output)]) == 0.75
    assert saved_share(replace(MODEL, kind="uniform"), [(request, output)]) is None
    for params in ({"cfg_scale": 1.5}, {"blocks": {"growing_canvas": True}}):
        other = replace(request, params=SamplingParams.from_mapping({"max_tokens": 8, **params}))
        assert saved_share(MODEL, [(other, output)]) is None
