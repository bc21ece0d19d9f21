"""Baselines of `none` in fewer steps."""

from typing import Any

import pytest

from remask import LLM, EngineConfig, SamplingParams
from remask.checks import BUNDLED
from remask.errors import ConfigError
from remask.sampling.blocks import even_blocks
from remask_lab.bench.contenders import Contender, contender
from remask_lab.bench.fewer_steps import step_baselines, step_baselines_option, with_steps
from remask_lab.bench.workload import Workload, random_workload, usual_workload
from tests.sampling_fields import flat_params


@pytest.mark.parametrize(
    ("params", "target", "steps", "block"),
    [
        ({"max_tokens": 16}, 8, 8, 16),
        ({"max_tokens": 16}, 5.4, 5, 16),
        ({"max_tokens": 16}, 0.2, 1, 16),
        ({"max_tokens": 16, "block_length": 4, "steps": 16}, 8, 8, 4),
        ({"max_tokens": 16, "block_length": 4, "steps": 16}, 11, 12, 4),
        ({"max_tokens": 16, "block_length": 2, "steps": 8}, 4, 4, 4),
        ({"max_tokens": 16, "block_length": 2, "steps": 8}, 3, 2, 8),
        ({"max_tokens": 12, "block_length": 2, "steps": 6}, 4.9, 3, 4),
        ({"max_tokens": 12, "block_length": 4, "steps": 3}, 1, 1, 12),
    ],
)
def test_the_nearest_schedule(params: dict[str, Any], target: float, steps: int, block: int) -> None:
    full = flat_params(**params)
    found = with_steps(full, target)
    blocks = even_blocks(found)
    assert (found.steps, blocks.length) == (steps, block)
    assert found.max_tokens == full.max_tokens
    assert blocks.total_steps == steps


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("llada-tiny", load_format="dummy", dtype="float32")


ENGINE = EngineConfig(max_num_seqs=2, max_model_len=64)


def workload_of(llm: LLM, **sampling: Any) -> Workload:
    params = flat_params(ignore_eos=True, **{"max_tokens": 8, **sampling})
    return random_workload(llm, requests=3, sampling=params, prefix_tokens=12, prompt_tokens=4)


def rows_of(llm: LLM, workload: Workload, *names: str) -> list[Contender]:
    return [contender(llm, name, None, workload) for name in ("none", *names)]


def test_half_and_numbers(llm: LLM) -> None:
    workload = workload_of(llm)
    rows, left_out = step_baselines(llm, "half, 2", workload, rows_of(llm, workload), ENGINE)
    assert [row.name for row in rows] == ["none steps=4", "none steps=2"]
    assert [dict(row.settings) for row in rows] == [{"steps": 4}, {"steps": 2}]
    assert {row.baseline for row in rows} == {"none"}
    assert not left_out
    for row in rows:
        assert row.workload is not None
        assert row.workload.tasks[0].request.params.steps == row.settings["steps"]
        assert row.workload.tasks[0].request.prompt_token_ids == workload.tasks[0].request.prompt_token_ids


def test_blocks_are_joined_where_there_is_one_step_a_block(llm: LLM) -> None:
    workload = workload_of(llm, block_length=2, steps=4)
    (row,), _ = step_baselines(llm, "half", workload, rows_of(llm, workload), ENGINE)
    assert row.name == "none steps=2 block_length=4"


def test_few_computes_what_a_cache_computes(llm: LLM) -> None:
    """12 + 4 + 8 positions in 8 steps: `dkv-prefill` computes 24 and then 7 times 9 rows, as much as 3.6 steps."""
    workload = workload_of(llm)
    rows = rows_of(llm, workload, "dkv-prefill", "block-dual")
    found, left_out = step_baselines(llm, "few", workload, rows, ENGINE)
    assert [row.name for row in found] == ["none steps=4", "none steps=3"]
    assert found[0].settings["work of"] == "dkv-prefill"
    assert found[1].settings["work of"] == "block-dual", "24 and then 7 times 8 rows: 3.3 steps"
    assert not left_out


def test_one_row_stands_for_all_caches_of_the_same_work(llm: LLM) -> None:
    workload = workload_of(llm)
    rows = rows_of(llm, workload, "block-prefix", "block-dual")
    (found,), _ = step_baselines(llm, "few", workload, rows, ENGINE)
    assert found.settings["work of"] == "block-prefix and block-dual"


def test_a_cache_that_saves_too_little_has_no_such_row(llm: LLM) -> None:
    workload = workload_of(llm, max_tokens=2)
    rows = [*rows_of(llm, workload), contender(llm, "dkv-decode", {"refresh_interval": None}, workload)]
    assert step_baselines(llm, "few", workload, rows, ENGINE) == ([], []), "two full passes, as many as none's"
    workload = workload_of(llm, steps=1)
    rows = [*rows_of(llm, workload), contender(llm, "bicache", {"depth": 1}, workload)]
    found, (left,) = step_baselines(llm, "few", workload, rows, ENGINE)
    assert not found
    assert "as much work as bicache" in left.name


def test_rows_compared_with_another_baseline_get_theirs(llm: LLM) -> None:
    workload = workload_of(llm)
    drawn = workload_of(llm, remasking="random")
    rows = [
        *rows_of(llm, workload),
        Contender("none, random order", llm.session.policy("none"), workload=drawn, baseline="none, random order"),
        Contender("dkv-greedy", llm.session.policy("dkv-greedy"), workload=drawn, baseline="none, random order"),
    ]
    (found,), _ = step_baselines(llm, "few", workload, rows, ENGINE)
    assert found.baseline == "none, random order"
    assert found.name.startswith("none, random order steps=")
    assert found.settings["remasking"] == "random"
    assert found.workload is not None
    assert found.workload.tasks[0].request.params.remasking.rule == "random"


@pytest.mark.parametrize(
    ("text", "sampling", "message"),
    [
        ("third", {}, "takes half, few, or a number of steps, separated by commas; got 'third'"),
        ("8", {}, "8 is not below the workload's 8 steps"),
        ("0", {}, "0 is not below the workload's 8 steps, and at least 1"),
        ("3", {"block_length": 4}, "3 steps cannot be shared evenly among the 2 blocks; use 2"),
        ("half", {"threshold": 0.5}, "shortens a schedule of steps"),
        ("half", {"remasking": {"factor": 0.5}}, "shortens a schedule of steps"),
    ],
)
def test_what_cannot_be(llm: LLM, text: str, sampling: dict[str, Any], message: str) -> None:
    workload = workload_of(llm, **sampling)
    with pytest.raises(ConfigError, match=message):
        step_baselines(llm, text, workload, rows_of(llm, workload), ENGINE)


def test_a_model_without_steps_to_reduce_says_so() -> None:
    causal = LLM("sdar-tiny", load_format="dummy", dtype="float32")
    workload = random_workload(
        causal, requests=2, sampling=SamplingParams(max_tokens=8, ignore_eos=True), prefix_tokens=8, prompt_tokens=4
    )
    with pytest.raises(ConfigError, match="steps is for masked models, and this one is block-causal"):
        step_baselines(causal, "half", workload, rows_of(causal, workload), ENGINE)


def test_a_bundled_models_questions_are_asked_in_fewer_steps_too(llm: LLM) -> None:
    bundled = LLM(BUNDLED, dtype="float32", device="cpu")
    own = usual_workload(bundled, 4, 0, {}, prefixes=2)
    full = own.tasks[0].request.params.steps
    assert full is not None
    rows = rows_of(bundled, own)
    assert [row.name for row in step_baselines_option(bundled, None, own, rows, ENGINE)[0]] == [
        "none steps=1",
        f"none steps={full // 2}",
    ]
    assert step_baselines_option(bundled, "off", own, rows, ENGINE) == ([], [])
    free = usual_workload(bundled, 4, 0, {"steps": None, "threshold": 0.9}, prefixes=2)
    made, left_out = step_baselines_option(bundled, None, free, rows_of(bundled, free), ENGINE)
    assert made == []
    assert "leave out threshold" in left_out[0].reason
    single = usual_workload(bundled, 4, 0, {"steps": 1}, prefixes=2)
    made, left_out = step_baselines_option(bundled, None, single, rows_of(bundled, single), ENGINE)
    assert made == []
    assert "no schedule comes closer" in left_out[0].reason
    random = workload_of(llm)
    assert step_baselines_option(llm, None, random, rows_of(llm, random), ENGINE) == ([], [])


def test_a_uniform_model_in_fewer_steps_may_change_every_position() -> None:
    uniform = LLM("gidd-tiny", load_format="dummy", dtype="float32", device="cpu")
    own = {"max_tokens": 12, "block_length": 6}

    def baselines(text: str, **sampling: Any) -> list[Contender]:
        workload = workload_of(uniform, **own, **sampling).seeded
        made, _ = step_baselines(uniform, text, workload, rows_of(uniform, workload), ENGINE)
        seeds = [[task.request.params.seed for task in row.workload.tasks] for row in made if row.workload is not None]
        assert seeds == [[0, 1, 2]] * len(made), "each begins with the noise that it has in all steps"
        return made

    half, one = baselines("half, 1")
    assert half.name == "none steps=6 tokens_per_step=2"
    assert one.name == "none steps=1 block_length=12 tokens_per_step=12"
    assert half.workload is not None
    params = half.workload.tasks[0].request.params
    assert (params.steps, params.steps_per_block, params.uniform.tokens_per_step) == (None, 3, 2)
    (drawn,) = baselines("half", uniform={"sampler": "ancestral"})
    assert drawn.name == "none steps=6", "the ancestral samplers draw every position in any step"
    (few,) = baselines("half", uniform={"tokens_per_step": 2})
    assert few.settings["steps"] == 2, "of three a block"
