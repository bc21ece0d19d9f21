"""Rounds of a bench that share its requests among them."""

from dataclasses import replace

import pytest

from remask import LLM, SamplingParams
from remask.errors import ConfigError
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender
from remask_lab.bench.workload import Workload, chat_workload, own_task


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled-tariff", dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def workload(llm: LLM) -> Workload:
    sampling = SamplingParams(max_tokens=8, steps=8)
    return chat_workload(llm, own_task(llm), requests=6, prefixes=3, seed=5, sampling=sampling)


@pytest.mark.thorough
def test_divided_rounds_run_every_request_once_and_judge_all(llm: LLM, workload: Workload) -> None:
    config = replace(llm.session.engine_config, max_num_seqs=2)
    rows = [Contender("none", llm.session.policy("none")), Contender("bicache", llm.session.policy("bicache"))]
    whole = run_bench(llm, workload, rows, 1, config, False, responses=True).data
    shared = run_bench(llm, workload, rows, 3, config, False, responses=True, divided=True).data

    def answers(data: dict[str, list[dict[str, list[dict[str, object]]]]]) -> dict[str, list[object]]:
        return {str(each["prompt"]): [answer["token_ids"] for answer in each["answers"]] for each in data["answers"]}

    assert answers(shared) == answers(whole)
    for part, all_at_once in zip(shared["results"], whole["results"], strict=True):
        assert sum(map(len, part["verdicts"])) == 6
        assert sorted(part["verdicts"]) == sorted(all_at_once["verdicts"])
        # Two requests of a prefix are in one round, so the second finds what the first has stored.
        for name in ("accuracy", "accuracy_interval", "row_layers", "forwards", "prefix_hits", "agreement_with_none"):
            assert part[name] == pytest.approx(all_at_once[name]), name
        assert part["work_ratio_to_none"] == pytest.approx(all_at_once["work_ratio_to_none"])
    low, high = shared["results"][1]["ratio_range"]
    assert low < high, "each of the three rounds has a time of its own"


@pytest.mark.thorough
def test_depths_are_earned_before_the_rounds_and_what_moves_is_told() -> None:
    """Nothing is known of the model, and still all rounds read as deep; `reuse` moves predictions and `none` cannot."""
    llm = LLM("bundled-tariff", dtype="float32", device="cpu", depth_table="none")
    work = chat_workload(llm, own_task(llm), requests=30, prefixes=30, seed=5, sampling=SamplingParams(max_tokens=8))
    rows = [Contender(name, llm.session.policy(name)) for name in ("none", "bicache", "reuse", "block-dual")]
    data = run_bench(llm, work, rows, 2, llm.session.engine_config, False, audits=True).data
    none, bicache, reuse, dual = data["results"]
    assert (none["prefix_depth"], bicache["prefix_depth"]) == (0, 2)
    assert bicache["work_ratio_to_none"] > 1
    assert none.get("divergence_nats") is None
    assert bicache["divergence_nats"] < 0.1 < reuse["divergence_nats"]
    assert reuse["divergence_interval"][0] <= reuse["divergence_nats"] <= reuse["divergence_interval"][1]
    assert dual["divergence_nats"] is not None


def test_fewer_prefixes_than_rounds_are_refused(llm: LLM, workload: Workload) -> None:
    rows = [Contender("none", llm.session.policy("none"))]
    with pytest.raises(ConfigError, match="4 rounds are to share 3 prefixes among them; ask for at most 3 rounds"):
        run_bench(llm, workload, rows, 4, llm.session.engine_config, False, divided=True)
