"""The packaged uniform model: what GIDD loaders need of its files, its twin's task, and answers that can be wrong."""

import json
from pathlib import Path

import pytest

import remask
from remask import LLM, EngineConfig
from remask.checkpoint.load import read_config
from remask.tasks import relay
from remask.tasks.relay import RelaySettings
from remask_lab.bench.workload import TaskChoice, Workload, usual_workload
from tests.sampling_fields import grouped

FOLDER = Path(remask.__file__).parent / "bundled_uniform"
TWIN = FOLDER.parent / "bundled"
QUESTIONS = 16


@pytest.fixture(scope="module")
def config() -> dict[str, object]:
    loaded: dict[str, object] = json.loads((FOLDER / "config.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("bundled-uniform", dtype="float32", device="cpu", engine=EngineConfig(max_num_seqs=QUESTIONS))


def asked(llm: LLM, legs: int = 1, **sampling: object) -> Workload:
    return usual_workload(llm, QUESTIONS, 11, grouped(sampling), task=TaskChoice("relay", RelaySettings(legs=legs)))


def answers(llm: LLM, workload: Workload, cache: str = "none", **settings: object) -> list[str]:
    policy = llm.session.policy(cache, settings)
    work = [task.request.with_policy(policy) for task in workload.tasks]
    texts = {
        output.id: output.text or ""
        for output in llm.session.run(work, engine=llm.session.new_engine(), progress=False)
    }
    return [texts[task.request.id] for task in workload.tasks]


def right(llm: LLM, workload: Workload, cache: str = "none", **settings: object) -> int:
    found = answers(llm, workload, cache, **settings)
    return sum(bool(task.correct(text)) for task, text in zip(workload.tasks, found, strict=True))


def hops(llm: LLM, workload: Workload) -> float:
    """The share of right towns."""
    pairs = zip(workload.tasks, answers(llm, workload), strict=True)
    return sum(task.parts["hops"](text) for task, text in pairs) / QUESTIONS


def test_files() -> None:
    names = {"config.json", "remask.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert {path.name for path in FOLDER.iterdir()} == names
    assert (FOLDER / "model.safetensors").stat().st_size < 4 << 20


def test_config_is_that_of_the_published_models_but_for_its_sizes(config: dict[str, object]) -> None:
    expected = {
        "architectures": ["GiddForDiffusionLM"],
        "model_type": "gidd",
        "attention_bias": True,
        "mlp_bias": True,
        "use_qk_norm": True,
        "attn_soft_cap": 30.0,
        "weight_scaling": 1.0,
        "noise_type": 1000.0,
        "min_log_snr": -9.0,
        "max_log_snr": 9.0,
        "rms_norm_eps": 1e-06,
    }
    assert {key: config[key] for key in expected} == expected
    assert "auto_map" not in config
    _, shape = read_config(FOLDER)
    assert (shape.kind, shape.sink, shape.qk_norm, shape.mlp) == ("uniform", True, "whole", "relu2")
    assert shape.structured_attention
    assert 500_000 < shape.parameters < 2_000_000


def test_it_has_its_twin_s_tokenizer(config: dict[str, object]) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (FOLDER / name).read_bytes() == (TWIN / name).read_bytes()
    twin = json.loads((TWIN / "config.json").read_text())
    assert config["vocab_size"] == twin["vocab_size"]
    for name in ("mask_token_id", "eos_token_id", "pad_token_id"):
        assert config[name] == twin[name]


@pytest.mark.few(3)
@pytest.mark.parametrize("cache", ["none", "block-prefix", "uniform-cache"])
def test_routes_are_right(llm: LLM, cache: str) -> None:
    assert right(llm, asked(llm), cache) >= QUESTIONS - 2


def test_quality_rises_with_the_steps(llm: LLM) -> None:
    """From one pass to twelve, the last six of which change again what was changed too early."""
    shares = [hops(llm, asked(llm, steps_per_block=1, tokens_per_step=relay.HOPS))]
    shares += [hops(llm, asked(llm, steps_per_block=3, tokens_per_step=relay.HOPS))]
    shares += [hops(llm, asked(llm))]
    assert shares[0] < 0.4 < shares[1] < 0.8 < 0.9 < shares[2]
    assert right(llm, asked(llm, steps_per_block=1, tokens_per_step=relay.HOPS)) <= QUESTIONS // 8


def test_a_route_is_held_back_by_what_was_changed_too_early(llm: LLM) -> None:
    assert right(llm, asked(llm, steps_per_block=relay.HOPS)) < right(llm, asked(llm))


def test_corrections_mend_what_half_of_the_steps_left(llm: LLM) -> None:
    half = {"steps_per_block": 3, "tokens_per_step": 2}
    assert right(llm, asked(llm, **half, correction_steps=24)) > right(llm, asked(llm, **half)) + QUESTIONS // 2


def test_a_second_leg_needs_a_prompt_that_has_seen_the_first(llm: LLM) -> None:
    workload = asked(llm, legs=2, block_length=relay.LEG, steps_per_block=relay.HOPS)
    assert right(llm, workload, "uniform-cache") >= QUESTIONS - 2
    assert right(llm, workload, "uniform-cache", border="neighbours") <= QUESTIONS // 8


def test_rows_that_moved_and_were_not_renewed_lose_the_answer(llm: LLM) -> None:
    assert right(llm, asked(llm), "uniform-cache", drift=0.3) <= QUESTIONS // 8
