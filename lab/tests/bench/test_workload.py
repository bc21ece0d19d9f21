"""Workloads and how answers are compared."""

from pathlib import Path

import pytest

from remask import LLM, SamplingParams
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.tasks import relay, tariff, town, transit
from remask.tasks.town import TownSettings
from remask_lab.bench.names import OWN_TASKS
from remask_lab.bench.workload import (
    Task,
    TaskChoice,
    chat_workload,
    choose_task,
    conversation_workload,
    prefix_clusters,
    random_workload,
    reads_chats,
    token_agreement,
    usual_workload,
)
from tests.depth.models import open_model, with_ascii_tokenizer
from tests.goldens import model_dir


@pytest.mark.parametrize(
    ("these", "those", "share"), [([1, 2], [1, 2], 1.0), ([1, 2], [1, 3], 0.5), ([1], [1, 2], 0.5), ([], [], 1.0)]
)
def test_agreement_counts_missing_positions(these: list[int], those: list[int], share: float) -> None:
    assert token_agreement(these, those) == share


@pytest.mark.parametrize(
    ("model", "sampling"),
    [
        ("bundled-tariff", tariff.SAMPLING),
        ("bundled", relay.SAMPLING),
        ("bundled-transit", transit.SAMPLING),
        ("bundled-uniform", relay.UNIFORM_SAMPLING),
    ],
)
def test_a_bundled_model_is_asked_as_its_own_files_say(model: str, sampling: dict[str, int]) -> None:
    assert LLM(model, dtype="float32").session.sampling.items() >= sampling.items()


def test_questions_to_a_uniform_model_have_a_system_prompt_and_a_noise_of_their_own() -> None:
    llm = LLM("bundled-uniform", dtype="float32")
    workload = usual_workload(llm, 5, 3, {})
    assert workload.prefixes == 5
    requests = [task.request for task in workload.tasks]
    assert len({tuple(request.prompt_token_ids[: request.prefix_length]) for request in requests}) == 5
    assert [request.params.seed for request in requests] == [3, 4, 5, 6, 7]
    usual = SamplingParams.from_mapping({**relay.UNIFORM_SAMPLING, "seed": 3})
    assert requests[0].params == usual
    fixed = usual_workload(llm, 3, 3, {"seed": 9}, prefixes=1)
    assert fixed.prefixes == 1
    assert {task.request.params.seed for task in fixed.tasks} == {9}
    masked = usual_workload(LLM("bundled", dtype="float32"), 5, 3, {})
    assert masked.prefixes == 4
    assert masked.tasks[0].request.params.seed is None


def test_tasks_are_of_one_cluster_where_one_prefix_begins_with_the_other() -> None:
    shared = [[1, 2], [1, 2, 3, 4], [5], [1, 2], [], [], [1]]
    sampling = SamplingParams(max_tokens=4)
    tasks = [Task(Request(str(at), [*ids, 9], sampling, len(ids))) for at, ids in enumerate(shared)]
    found = prefix_clusters(tasks)
    assert found[0] == found[1] == found[3] == found[6]
    assert len(set(found)) == 4, "those without a prefix stand alone"
    assert prefix_clusters(tasks[:4])[2] not in prefix_clusters(tasks[:2])


def test_turns_of_one_system_prompt_are_of_one_cluster() -> None:
    llm = LLM("bundled-transit", dtype="float32", device="cpu")
    workload = conversation_workload(
        llm, requests=12, prefixes=3, seed=0, sampling=SamplingParams.from_mapping(transit.SAMPLING)
    )
    assert len(set(workload.clusters)) == 3
    assert len({task.request.prefix_length for task in workload.tasks}) > 3, "their histories differ"


def test_a_task_without_an_answer_has_no_verdict() -> None:
    request = Request("0", [1])
    assert Task(request).correct("## a") is None
    assert Task(request, "a").correct(None) is None
    assert Task(request, "a").correct("x ## a") is True


def test_random_workloads_share_their_prefixes_and_repeat() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    params = SamplingParams(max_tokens=4)
    workload = random_workload(llm, requests=6, prefixes=2, seed=3, sampling=params, prefix_tokens=10, prompt_tokens=5)
    prompts = [task.request.prompt_token_ids for task in workload.tasks]
    assert {tuple(prompt[:10]) for prompt in prompts} == {tuple(prompts[0][:10]), tuple(prompts[1][:10])}
    assert len({tuple(prompt) for prompt in prompts}) == 6
    assert workload == random_workload(
        llm, requests=6, prefixes=2, seed=3, sampling=params, prefix_tokens=10, prompt_tokens=5
    )
    assert workload.prefix_ratio == pytest.approx(10 / 19)


def test_gsm8k_questions_share_their_worked_examples(tmp_path: Path) -> None:
    llm = open_model(str(with_ascii_tokenizer(model_dir("llada"), tmp_path / "model")))
    assert reads_chats(llm)
    workload = chat_workload(
        llm, TaskChoice("gsm8k"), requests=6, prefixes=2, seed=0, sampling=SamplingParams(max_tokens=256, steps=128)
    )
    prompts = [task.request for task in workload.tasks]
    first, second = prompts[0], prompts[2]
    assert first.prefix_length == second.prefix_length > 1000
    assert first.prompt_token_ids[: first.prefix_length] == second.prompt_token_ids[: first.prefix_length]
    assert first.prompt_token_ids != second.prompt_token_ids
    assert workload.tasks[0].correct(f"It adds up.\n## {workload.tasks[0].answer}") is True
    assert 0.7 < workload.prefix_ratio < 1
    with pytest.raises(ConfigError, match="1 to 12 shared prefixes, got 13"):
        chat_workload(llm, TaskChoice("gsm8k"), requests=20, prefixes=13, seed=0, sampling=SamplingParams())


def test_towns_are_asked_about_in_words_and_judged_by_kind(tmp_path: Path) -> None:
    """The pages of the task reach the model as its chat template writes them, and its own judge decides."""
    llm = open_model(str(with_ascii_tokenizer(model_dir("llada"), tmp_path / "model")))
    task = choose_task("town", {"shops": 5})
    assert task is not None
    workload = usual_workload(llm, 12, 3, {}, prefixes=3, task=task)
    assert workload.name == "town (shops=5)"
    assert workload.prefixes == len(set(workload.clusters)) == 3
    items = town.make_workload(12, 3, 3, TownSettings(shops=5))
    for item, asked in zip(items, workload.tasks, strict=True):
        assert llm.tokenizer is not None
        assert asked.request.prompt_token_ids == llm.tokenizer.apply_chat(item.messages)
        assert asked.question == item.question
        assert asked.correct(asked.reference) is True
        assert asked.correct("The bakery opens at 99.") is False
        assert [score(item.answer) for score in asked.parts.values()] == [1]
        assert list(asked.parts) == [item.kind]
        assert asked.request.params == SamplingParams.from_mapping(town.SAMPLING)
    bare = chat_workload(llm, task, requests=12, prefixes=3, seed=3, sampling=SamplingParams(), with_prefix=False)
    assert all(
        len(one.request.prompt_token_ids) < 200 < two.request.prefix_length
        for one, two in zip(bare.tasks, workload.tasks, strict=True)
    )


def test_the_pretrained_model_is_asked_about_towns() -> None:
    assert OWN_TASKS["smollm2"] == "town"


def test_gsm8k_examples_are_as_many_as_the_settings_say(tmp_path: Path) -> None:
    llm = open_model(str(with_ascii_tokenizer(model_dir("llada"), tmp_path / "model")))
    lengths = []
    for shots in (0, 2):
        workload = usual_workload(llm, 2, 0, {}, prefixes=1, task=choose_task("gsm8k", {"shots": shots}))
        assert workload.name == f"GSM8K (shots={shots})"
        lengths.append(workload.tasks[0].request.prefix_length)
    assert lengths[1] > lengths[0] + 200
    with pytest.raises(ConfigError, match="make no sense without their prefix"):
        chat_workload(
            llm, TaskChoice("gsm8k"), requests=2, prefixes=1, seed=0, sampling=SamplingParams(), with_prefix=False
        )


def test_gsm8k_needs_a_tokenizer() -> None:
    llm = open_model(str(model_dir("llada")))
    assert not reads_chats(llm)
    with pytest.raises(ConfigError, match="no tokenizer"):
        chat_workload(llm, TaskChoice("gsm8k"), requests=2, prefixes=1, seed=0, sampling=SamplingParams())
