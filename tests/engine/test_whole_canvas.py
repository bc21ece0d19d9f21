"""Sumi, which denoises its canvas as a whole: recorded runs with their draws, random runs, refusals."""

import json
import random
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remask import LLM, EngineConfig, loading
from remask.checkpoint.files import ignored_keys, read_sampling
from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.denoising.noise import canvas_log_snrs
from remask.engine.request import Request
from remask.errors import CheckpointError, ConfigError
from remask.families import family_of, preset
from remask.families.sumi import SUMI
from remask.plan.canvas import OPEN, Hole, Template
from remask.policies import Dense
from remask.policies.uniform_cache import UniformCache
from remask.request.result import Transfer
from remask.request.sampling_params import SamplingParams
from remask.sampling import filters
from remask.sampling.filters import Draws
from remask.sampling.uniform_score import Transition, reverse_step
from tests.engine.support import CPU, CheckedTransformer, Work, poisoned_engine, run
from tests.goldens import sumi as goldens
from tests.oracles import sumi as oracle

NAMES = pytest.mark.parametrize("name", goldens.MODELS)
OURS = ("sampler", "schedule", "min_log_snr", "max_log_snr", "canvas_length", "anchor", "trim", "frozen", "denoise_end")


@cache
def llm(name: str) -> LLM:
    return LLM(str(goldens.folder(name)), dtype="float32", engine=EngineConfig(max_num_seqs=8))


def sampling(asked: Mapping[str, Any], noise: Sequence[int], seed: int) -> dict[str, Any]:
    """Our parameters of a run in the authors' words."""
    uniform = {name: asked[name] for name in OURS if name in asked} | {"initial_canvas": list(noise)}
    if asked["sampler"] == "adaptive":
        uniform["tokens_per_step"] = asked["tokens_per_step"]
    given = {"max_tokens": asked["max_new_tokens"], "steps_per_block": asked["steps"], "uniform": uniform}
    return given | {"temperature": asked.get("temperature", 0.0), "seed": seed}


@pytest.fixture
def given_draws(monkeypatch: pytest.MonkeyPatch) -> dict[int, Callable[[int, int], float | None]]:
    """By seeds, the numbers that draws are made of, for a step and a position; None there: the most probable token."""
    numbers: dict[int, Callable[[int, int], float | None]] = {}

    def draw(logits: Tensor, draws: Draws) -> Tensor:
        shares, found = logits.double().softmax(-1).cumsum(-1), logits.argmax(-1)
        for row, place in enumerate(np.asarray(draws.rows).tolist()):
            u = numbers[draws.seed](draws.step, place)
            if u is not None:
                found[row] = int((shares[row] > u).int().argmax())
        return found

    monkeypatch.setattr(filters, "draw", draw)
    return numbers


def recorded_draws(recorded: Mapping[str, Any]) -> Callable[[int, int], float | None]:
    every = recorded["sampler"] == "ancestral"
    steps = [
        dict(zip(recorded["open"] if every else each["chosen"], each["u"], strict=True)) if "u" in each else {}
        for each in recorded["trace"]
    ]
    return lambda step, place: steps[step].get(place)


def changes(trace: Sequence[Transfer] | None, steps: int) -> list[list[list[int]]]:
    assert trace is not None
    found = {each.step: [list(pair) for pair in zip(each.positions, each.token_ids, strict=True)] for each in trace}
    return [found.get(step, []) for step in range(steps)]


@pytest.mark.thorough
@NAMES
def test_recorded_runs_together(name: str, given_draws: dict[int, Callable[[int, int], float | None]]) -> None:
    model, runs = llm(name), goldens.runs(name)
    for seed, each in enumerate(runs):
        given_draws[seed] = recorded_draws(each)
    asked = [sampling(each, each["noise"], seed) for seed, each in enumerate(runs)]
    outputs = model.generate([each["prompt"] for each in runs], asked, trace=True)
    for each, output in zip(runs, outputs, strict=True):
        assert list(output.token_ids) == each["tokens"]
        assert changes(output.trace, each["steps"]) == [step["changed"] for step in each["trace"]]
        assert output.usage.completion_tokens == len(each["tokens"])


@pytest.mark.few(8)
@pytest.mark.parametrize("share", range(16))
@NAMES
def test_recorded_runs_alone(name: str, share: int, given_draws: dict[int, Callable[[int, int], float | None]]) -> None:
    for seed, each in enumerate(goldens.runs(name)[share::16]):
        given_draws[seed] = recorded_draws(each)
        (output,) = llm(name).generate([each["prompt"]], sampling(each, each["noise"], seed), trace=True)
        assert list(output.token_ids) == each["tokens"]
        assert changes(output.trace, each["steps"]) == [step["changed"] for step in each["trace"]]
        ended = each.get("anchor", True) and "frozen" not in each and len(each["tokens"]) == each["max_new_tokens"]
        assert not ended or output.finish_reason == "length"


@NAMES
def test_grids_and_steps_of_the_reverse_process(name: str) -> None:
    recorded, config = goldens.reverse(name), llm(name).loaded.config
    for grid in recorded["grids"]:
        levels = canvas_log_snrs(grid["schedule"], grid["steps"], grid["min_log_snr"], grid["max_log_snr"])
        np.testing.assert_allclose(levels[::-1], grid["log_snr"], atol=1e-8)
    logits = oracle.load(goldens.folder(name)).predict(recorded["input_ids"])
    assert config.noise is not None
    for step in recorded["steps"]:
        rows = step["rows"]
        current = torch.tensor(recorded["input_ids"])[rows]
        transition = Transition(config.noise, step["before"], step["after"])
        found = reverse_step(logits[rows].float(), current, transition, greedy=False)
        torch.testing.assert_close(found.double(), torch.tensor(step["posterior"]).double(), rtol=1e-4, atol=1e-6)


@pytest.mark.few(10)
@pytest.mark.parametrize("seed", range(20))
def test_random_runs_against_the_oracle(seed: int, given_draws: dict[int, Callable[[int, int], float | None]]) -> None:
    """15 runs of each of 20 seeds: in float64, in one batch, with requests that join while others run."""
    rng = random.Random(seed)
    name = rng.choice(goldens.MODELS)
    loaded = find_model(ModelSettings(str(goldens.folder(name)))).load(torch.float64, CPU)
    model = oracle.load(goldens.folder(name))
    work, expected = [], []
    for number in range(15):
        prompt = [120, *(rng.randrange(120) for _ in range(rng.randint(0, 9)))]
        canvas = rng.randint(len(prompt) + 3, 40)
        asked: dict[str, Any] = {
            "prompt": prompt,
            "sampler": rng.choice(["ancestral", "ancestral", "adaptive", "greedy"]),
            "schedule": rng.choice(["linear", "cosine"]),
            "steps": rng.randint(1, 7),
            "temperature": rng.choice([0.0, 0.7, 1.0]),
            "max_new_tokens": rng.randint(1, 40),
            "canvas_length": canvas,
        }
        places = rng.sample(range(canvas), 2)
        more: list[dict[str, Any]] = [
            {"anchor": False}, {"frozen": [[place, rng.randrange(128)] for place in places]}, {"trim": False},
            {"denoise_end": rng.randint(0, canvas)}, {"min_log_snr": -3.0, "max_log_snr": 4.0},
        ]  # fmt: skip
        asked |= {key: value for each in rng.sample(more, rng.randint(0, 2)) for key, value in each.items()}
        if asked["sampler"] == "adaptive":
            asked["tokens_per_step"] = rng.randint(1, 8)
        own = random.Random(f"{seed} {number}")
        table = [[own.random() for _ in range(canvas)] for _ in range(asked["steps"])]
        given_draws[number] = lambda step, place, table=table: table[step][place]  # type: ignore[misc]
        noise = [rng.randrange(128) for _ in range(canvas - len(prompt))]
        params = SamplingParams.from_mapping(sampling(asked, noise, number))
        work.append(Work(Request(str(number), prompt, params), Dense(), number % 4))
        expected.append(oracle.decode(model, asked, noise, lambda step, place, table=table: table[step][place]))  # type: ignore[misc]
    engine = poisoned_engine(CheckedTransformer(loaded.config, loaded.weights), max_num_seqs=5, max_model_len=48)
    results = run(engine, work)
    for number, (tokens, trace) in enumerate(expected):
        assert list(results[str(number)].token_ids) == tokens
        assert changes(results[str(number)].trace, len(trace)) == [
            [list(pair) for pair in each.items()] for each in trace
        ]


def test_matrices_of_eight_bits_predict_nearly_the_same() -> None:
    """By the greedy sampler, whose one step is the most probable token of every place."""
    prompt = [120, *range(1, 20)]
    asked = {"max_tokens": 40, "steps_per_block": 1, "seed": 3, "uniform": {"sampler": "greedy", "canvas_length": 100}}
    models = llm("plain"), LLM(str(goldens.folder("plain")), quantization="int8")
    plain, few = (model.generate([prompt], asked, trace=True)[0].trace for model in models)
    assert plain is not None
    assert few is not None
    pairs = [set(zip(trace[0].positions, trace[0].token_ids, strict=True)) for trace in (plain, few)]
    assert len(pairs[0] & pairs[1]) > 0.8 * len(pairs[0])


def test_fixed_parts_of_a_response_stay_and_end_it() -> None:
    model = llm("plain")
    template = Template((7, OPEN, OPEN, 9), (Hole(1, 3),))
    params = SamplingParams.from_mapping({"max_tokens": 4, "steps_per_block": 3, "seed": 1})
    request = Request("r", [120, 4], params, template=template)
    result = run(
        poisoned_engine(CheckedTransformer(model.loaded.config, model.loaded.weights)), [Work(request, Dense())]
    )
    tokens = result["r"].token_ids
    assert (len(tokens), tokens[0], tokens[3]) == (4, 7, 9)


def test_the_cache_of_blocks_keeps_the_prompt_of_the_first_step() -> None:
    """It is no exact one here: K and V of the prompt change with the canvas. docs/models.md says by how much."""
    model, prompt = llm("plain"), [120, *range(3, 20)]
    asked = {"max_tokens": 20, "steps_per_block": 6, "seed": 5, "uniform": {"canvas_length": 64}}
    whole, cached = (model.generate([prompt], asked, cache=cache)[0] for cache in ("none", "uniform-cache"))
    assert whole.usage.row_layers == 6 * 64 * 4
    assert cached.usage.row_layers == (64 + 5 * (64 - len(prompt))) * 4
    assert UniformCache().traits.kinds == ("uniform",)


def test_what_a_laptop_cannot_give_is_said_before_it_starts(caplog: pytest.LogCaptureFixture) -> None:
    loading._announce_work(preset("sumi-tiny"))
    loading._announce_work(preset("gidd-unif-3b"))
    assert not caplog.records
    loading._announce_work(preset("sumi-7b"))
    (record,) = caplog.records
    said = "canvas of 2048 positions, and in 128 steps this is 4.1 PFLOP, 11 hours at 100 GFLOP/s; its K and V are 0.3"
    assert said in record.getMessage()


def test_the_authors_generation_config_is_read_in_their_words(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(
        json.dumps({
            "temperature": 0.5, "num_denoising_steps": 9, "sampler": "adaptive", "tokens_per_step": 3, "top_k": 4,
            "canvas_length": 40, "anchor_eosbos": False, "trim_at_eos": False, "eos_token_id": 121,
        })
    )  # fmt: skip
    uniform = {"sampler": "adaptive", "tokens_per_step": 3, "canvas_length": 40, "anchor": False, "trim": False}
    expected = {"temperature": 0.5, "steps_per_block": 9, "uniform": uniform}
    assert read_sampling(tmp_path, SUMI.read_generation) == expected
    assert ignored_keys(tmp_path, SUMI.read_generation) == ["top_k"]
    assert read_sampling(goldens.folder("plain"), SUMI.read_generation) == {"temperature": 1.0}


def test_what_has_no_meaning_on_a_whole_canvas_is_refused_by_name() -> None:
    model = llm("plain")
    asked: list[tuple[dict[str, Any], str]] = [
        ({"block_length": 4}, "block_length=4: this model denoises its whole canvas"),
        ({"min_tokens": 2}, "min_tokens=2"),
        ({"uniform": {"correction_steps": 2}}, "correction_steps=2"),
        ({"uniform": {"tokens_per_step": 2}}, "tokens_per_step is the adaptive sampler's, and this is 'ancestral'"),
        ({"uniform": {"frozen": [[3]]}}, "pairs"),
        ({"uniform": {"frozen": [[3, 128]]}}, "frozen holds 128"),
        ({"uniform": {"min_log_snr": 9.0}}, "min_log_snr=9 must be below max_log_snr=9"),
        ({"uniform": {"canvas_length": 4}}, "canvas of 4 positions has no room behind the prompt of 2 tokens and the"),
    ]
    for given, message in asked:
        with pytest.raises(ConfigError, match=message):
            model.generate([[120, 1]], {"max_tokens": 8} | given)
    for key, value in (("attention_bias", True), ("mlp_bias", True), ("mask_token_id", 5), ("bos_token_id", None)):
        raw = goldens.config("plain") | {key: value}
        with pytest.raises(CheckpointError, match=f"'{key}'"):
            family_of(raw).config(raw)
