"""The bundled graded models: answers that need what they claim, by masks and by uniform noise."""

from dataclasses import replace

import pytest

from remask import LLM, EngineConfig, SamplingParams
from remask.tasks import relay
from remask.tasks.relay import RelaySettings
from remask_lab.bench.workload import TaskChoice, Workload, chat_workload, usual_workload
from tests.sampling_fields import grouped

QUESTIONS = 16


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=QUESTIONS))


@pytest.fixture(scope="module")
def uniform() -> LLM:
    return LLM("bundled-uniform", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=QUESTIONS))


@pytest.fixture(scope="module")
def workload(llm: LLM) -> Workload:
    sampling = SamplingParams.from_mapping(relay.SAMPLING)
    return chat_workload(
        llm, TaskChoice("relay"), requests=QUESTIONS, prefixes=QUESTIONS // 2, seed=11, sampling=sampling
    )


def asked(uniform: LLM, legs: int = 1, **sampling: object) -> Workload:
    return usual_workload(uniform, QUESTIONS, 11, grouped(sampling), task=TaskChoice("relay", RelaySettings(legs=legs)))


def answers(llm: LLM, workload: Workload, cache: str = "none", **settings: object) -> list[str]:
    policy = llm.session.policy(cache, settings)
    work = [task.request.with_policy(policy) for task in workload.tasks]
    found = llm.session.run(work, engine=llm.session.new_engine(), progress=False)
    texts = {output.id: output.text or "" for output in found}
    return [texts[task.request.id] for task in workload.tasks]


def right(llm: LLM, workload: Workload, cache: str = "none", **settings: object) -> int:
    found = answers(llm, workload, cache, **settings)
    return sum(bool(task.correct(text)) for task, text in zip(workload.tasks, found, strict=True))


def hops(uniform: LLM, workload: Workload) -> float:
    """The share of right towns."""
    pairs = zip(workload.tasks, answers(uniform, workload), strict=True)
    return sum(task.parts["hops"](text) for task, text in pairs) / QUESTIONS


def test_the_prefix_is_what_questions_share(workload: Workload) -> None:
    assert 0.75 <= workload.prefix_ratio <= 0.85


def test_routes_are_right_hop_by_hop_and_wrong_in_fewer_steps(llm: LLM, workload: Workload) -> None:
    assert right(llm, workload, "none") >= QUESTIONS - 1
    for steps in (1, relay.HOPS // 2):
        fewer = workload.under(SamplingParams.from_mapping({**relay.SAMPLING, "steps": steps}))
        assert right(llm, fewer, "none") <= QUESTIONS // 4


def test_a_prefix_that_never_saw_the_question_misleads(llm: LLM, workload: Workload) -> None:
    assert right(llm, workload, "reuse") <= QUESTIONS // 8


def test_the_shipped_table_keeps_the_answers(llm: LLM, workload: Workload) -> None:
    table = llm.depth_table
    assert table is not None
    assert table.model == "bundled"
    assert "the task relay" in table.source
    assert table.entries
    assert right(llm, workload, "bicache") >= right(llm, workload, "none") - 1


def test_the_season_of_the_question_decides(llm: LLM) -> None:
    """One system prompt and start in both seasons: two routes, and the model gives each."""
    asked = []
    for request in relay.make_workload(6, 6, 5):
        (one, starts), (other, others) = request.prompt.starts
        start = next(town for town in starts if town in others)
        for season in (one, other):
            question = relay.RelayQuestion(season, start)
            reference = relay.reference_response(request.prompt, question)
            asked.append(replace(request, question=question, reference=reference))
    outputs = llm.generate([request.messages for request in asked])
    wrong = [
        each for each, out in zip(asked, outputs, strict=True) if not relay.is_correct(out.text or "", each.reference)
    ]
    assert len(wrong) <= 1
    assert all(one.reference != other.reference for one, other in zip(asked[::2], asked[1::2], strict=True))


@pytest.mark.few(3)
@pytest.mark.parametrize("cache", ["none", "block-prefix", "uniform-cache"])
def test_routes_are_right(uniform: LLM, cache: str) -> None:
    assert right(uniform, asked(uniform), cache) >= QUESTIONS - 2


@pytest.mark.thorough
def test_quality_rises_with_the_steps(uniform: LLM) -> None:
    """From one pass to twelve, the last six of which change again what was changed too early."""
    shares = [hops(uniform, asked(uniform, steps_per_block=1, tokens_per_step=relay.HOPS))]
    shares += [hops(uniform, asked(uniform, steps_per_block=3, tokens_per_step=relay.HOPS))]
    shares += [hops(uniform, asked(uniform))]
    assert shares[0] < 0.4 < shares[1] < 0.8 < 0.9 < shares[2]
    assert right(uniform, asked(uniform, steps_per_block=1, tokens_per_step=relay.HOPS)) <= QUESTIONS // 8


@pytest.mark.thorough
def test_a_route_is_held_back_by_what_was_changed_too_early(uniform: LLM) -> None:
    assert right(uniform, asked(uniform, steps_per_block=relay.HOPS)) < right(uniform, asked(uniform))


@pytest.mark.thorough
def test_corrections_mend_what_half_of_the_steps_left(uniform: LLM) -> None:
    half = {"steps_per_block": 3, "tokens_per_step": 2}
    assert (
        right(uniform, asked(uniform, **half, correction_steps=24))
        > right(uniform, asked(uniform, **half)) + QUESTIONS // 2
    )


def test_a_second_leg_needs_a_prompt_that_has_seen_the_first(uniform: LLM) -> None:
    workload = asked(uniform, legs=2, block_length=relay.LEG, steps_per_block=relay.HOPS)
    assert right(uniform, workload, "uniform-cache") >= QUESTIONS - 2
    assert right(uniform, workload, "uniform-cache", border="neighbours") <= QUESTIONS // 8


def test_rows_that_moved_and_were_not_renewed_lose_the_answer(uniform: LLM) -> None:
    assert right(uniform, asked(uniform), "uniform-cache", drift=0.3) <= QUESTIONS // 8
