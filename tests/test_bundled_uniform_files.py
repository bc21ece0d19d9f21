"""The packaged uniform model: what GIDD loaders need of its files, what its tokenizer gives, and that it can count."""

import json
from pathlib import Path

import pytest
from transformers import AutoTokenizer, PreTrainedTokenizerFast

import remask
from remask import LLM, SamplingParams
from remask.checkpoint.load import read_config
from remask.tasks.timetable import MINUTES, timetables
from remask_lab.bench.workload import TIMETABLE_SAMPLING, timetable_workload

FOLDER = Path(remask.__file__).parent / "bundled_uniform"


@pytest.fixture(scope="module")
def config() -> dict[str, object]:
    loaded: dict[str, object] = json.loads((FOLDER / "config.json").read_text())
    return loaded


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    loaded = AutoTokenizer.from_pretrained(FOLDER)
    assert isinstance(loaded, PreTrainedTokenizerFast)
    return loaded


def test_files() -> None:
    names = {"config.json", "remask.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "README.md"}
    assert {path.name for path in FOLDER.iterdir()} == names
    assert (FOLDER / "model.safetensors").stat().st_size < 8 << 20


def test_config_is_that_of_the_published_models_but_for_its_sizes(config: dict[str, object]) -> None:
    expected = {
        "architectures": ["GiddForDiffusionLM"],
        "model_type": "gidd",
        "attention_bias": True,
        "mlp_bias": True,
        "use_qk_norm": True,
        "attn_soft_cap": 30.0,
        "resid_scale": 4.0,
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
    assert 1_000_000 < shape.parameters < 2_500_000


def test_special_tokens(config: dict[str, object], tokenizer: PreTrainedTokenizerFast) -> None:
    assert len(tokenizer) == config["vocab_size"]
    ids = (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id, tokenizer.mask_token_id)
    assert ids == (0, 1, 2, 3)
    assert ids == tuple(config[f"{name}_token_id"] for name in ("bos", "eos", "pad", "mask"))


def test_tokenizer_round_trips_every_text_of_the_task(tokenizer: PreTrainedTokenizerFast) -> None:
    for table in (*timetables(held_out=True), *timetables(held_out=False)):
        text = f"{table.text} {table.response(MINUTES)}"
        ids = tokenizer(text)["input_ids"]
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids, skip_special_tokens=True) == text
    typed = tokenizer("Bus every 4 minutes: 7")["input_ids"]
    assert typed == tokenizer("bus every 4 minutes : 7")["input_ids"]


@pytest.mark.few(3)
@pytest.mark.parametrize("cache", ["none", "block-prefix", "uniform-cache"])
def test_it_lists_held_out_timetables(cache: str) -> None:
    llm = LLM("bundled-uniform", dtype="float32")
    workload = timetable_workload(llm, 8, 5, SamplingParams.from_mapping(TIMETABLE_SAMPLING))
    policy = llm.policy(cache)
    outputs = {output.id: output for output in llm.run([task.request.with_policy(policy) for task in workload.tasks])}
    right = sum(bool(task.correct(outputs[task.request.id].text)) for task in workload.tasks)
    assert right >= 7, "a guess of 32 departures is right with probability 60 ** -32"


@pytest.mark.thorough
@pytest.mark.parametrize("cache", ["none", "block-prefix", "uniform-cache"])
def test_corrections_mend_what_half_of_the_steps_left(cache: str) -> None:
    llm = LLM("bundled-uniform", dtype="float32")
    half = {**TIMETABLE_SAMPLING, "steps_per_block": 8, "ignore_eos": True}
    right = {}
    for steps in (0, 20):
        params = SamplingParams.from_mapping({**half, "correction_steps": steps})
        workload = timetable_workload(llm, 12, 5, params)
        work = [task.request.with_policy(llm.policy(cache)) for task in workload.tasks]
        outputs = {output.id: output for output in llm.run(work)}
        right[steps] = sum(bool(task.correct(outputs[task.request.id].text)) for task in workload.tasks)
    assert right == {0: 0, 20: 12}


def test_a_workload_gives_each_request_its_own_noise() -> None:
    llm = LLM("bundled-uniform", dtype="float32")
    drawn = timetable_workload(llm, 3, 5, SamplingParams())
    assert [task.request.params.seed for task in drawn.tasks] == [5, 6, 7]
    fixed = timetable_workload(llm, 3, 5, SamplingParams(seed=9))
    assert [task.request.params.seed for task in fixed.tasks] == [9, 9, 9]
    assert drawn.prefix_ratio == 0
