"""Workloads and how answers are compared."""

import pytest

from remask import LLM, SamplingParams
from remask.core.request import Request
from remask.evals.workload import Task, random_workload, token_agreement


@pytest.mark.parametrize(
    ("these", "those", "share"), [([1, 2], [1, 2], 1.0), ([1, 2], [1, 3], 0.5), ([1], [1, 2], 0.5), ([], [], 1.0)]
)
def test_agreement_counts_missing_positions(these: list[int], those: list[int], share: float) -> None:
    assert token_agreement(these, those) == share


def test_a_task_without_an_answer_has_no_verdict() -> None:
    request = Request("0", [1])
    assert Task(request).correct("## a") is None
    assert Task(request, "a").correct(None) is None
    assert Task(request, "a").correct("x ## a") is True


def test_random_workloads_share_their_prefixes_and_repeat() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    params = SamplingParams(max_tokens=4)
    workload = random_workload(llm, 6, 2, 3, params, 10, 5)
    prompts = [task.request.prompt_token_ids for task in workload.tasks]
    assert {tuple(prompt[:10]) for prompt in prompts} == {tuple(prompts[0][:10]), tuple(prompts[1][:10])}
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert workload == random_workload(llm, 6, 2, 3, params, 10, 5)
    assert workload.prefix_ratio == pytest.approx(10 / 19)
