"""Models that write canvases of noise (DiffusionGemma): shared pages, forms, seeds, log-probabilities, refusals."""

import json
import random
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from remask import LLM, EngineConfig, SamplingParams
from remask.checkpoint.tokenizer import byte_tokenizer
from remask.engine.request import Request
from remask.errors import CheckpointError, ConfigError
from remask.policies import Dense
from remask.policies.exact import Exact
from remask.readers.logprobs import Logprobs
from remask.request.result import Result
from remask.sampling.canvases import within_budget
from tests.engine.support import CheckedTransformer, Work, lively_weights, poisoned_engine, run
from tests.engine.support import small_config as small
from tests.leftovers import lasting_folder
from tests.oracles import diffusion_gemma as oracle

NAME, CANVAS = "diffusion-gemma", 8
FAST: dict[str, Any] = {"steps_per_block": 5, "renoising": {"entropy_bound": 3.0}}


def model_of(seed: int = 0) -> CheckedTransformer:
    config = small(NAME)
    weights = lively_weights(config, seed=seed)
    for layer in weights.layers:
        assert layer.scale is not None
        layer.scale.copy_(torch.tensor([0.9, 1.2]))
    return CheckedTransformer(config, weights)


def asked(name: str, prompt: list[int], cache: Any = None, joins: int = 0, **sampling: Any) -> Work:
    params = SamplingParams.from_mapping({"max_tokens": 12, "seed": 3, "ignore_eos": True, **FAST, **sampling})
    return Work(Request(name, prompt, params, readers=(Logprobs(2),)), cache or Exact(), joins)


def told(result: Result) -> tuple[Any, ...]:
    """All that must not depend on what was shared or cached."""
    logprobs = [round(each, 4) for transfer in result.trace for each in transfer.logprobs]
    return result.token_ids, [each.token_ids for each in result.trace], logprobs


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(63) for _ in range(count)]


@pytest.mark.few(3)
@pytest.mark.parametrize("seed", range(6))
def test_a_prefix_hit_changes_no_token(seed: int) -> None:
    """Whatever was cached: nothing, pages of a prompt, and those of canvases of an answer, which a next turn sends."""
    rng, model = random.Random(seed), model_of(seed)
    engine = poisoned_engine(model, store_budget_tokens=256, max_model_len=96)
    prompt = tokens(rng, rng.randint(9, 30))
    first = run(engine, [asked("first", prompt, max_tokens=20)])["first"]
    longer = prompt + list(first.token_ids)
    # Of the answer's three canvases the last one was never computed as final rows.
    final = len(prompt) + 2 * CANVAS
    for number, (turn, cached) in enumerate(
        [(prompt, len(prompt)), (longer + tokens(rng, 5), final), (longer + tokens(rng, 3), len(longer))]
    ):
        found = run(engine, [asked(f"turn {number}", turn)])[f"turn {number}"]
        assert found.usage.cached_tokens == cached // 4 * 4
        for cache in (Exact(), Exact(prefill_chunk=3), Dense()):
            alone = run(poisoned_engine(model, max_model_len=96), [asked("alone", turn, cache)])["alone"]
            assert told(alone) == told(found)
            assert alone.usage.cached_tokens == 0


def test_pages_are_shared_while_others_run() -> None:
    rng, model = random.Random(5), model_of(5)
    shared = tokens(rng, 24)
    work = [
        asked(
            f"r{number}", shared[: rng.choice([8, 24])] + tokens(rng, rng.randint(1, 9)), joins=number % 4, seed=number
        )
        for number in range(12)
    ]
    engine = poisoned_engine(model, store_budget_tokens=128)
    together = run(engine, work)
    assert sum(each.usage.cached_tokens for each in together.values()) > 0
    for item in work:
        name = item.request.id
        assert told(run(poisoned_engine(model), [replace(item, joins=0)])[name]) == told(together[name])


def test_a_canvas_costs_its_own_rows_and_once_more_where_another_follows() -> None:
    model, prompt = model_of(), list(range(10))
    sampling: dict[str, Any] = {
        "max_tokens": 2 * CANVAS,
        "steps_per_block": 3,
        "renoising": {"confidence_threshold": 0.0},
    }
    usage = run(poisoned_engine(model), [asked("r", prompt, **sampling)])["r"].usage
    rows = 10 + CANVAS + 2 * CANVAS + 2 * CANVAS + 2 * CANVAS  # prompt, steps of a canvas, and the first one committed
    assert (usage.forwards, usage.row_layers) == (6, rows * model.config.layers)


def test_logits_are_read_in_pieces() -> None:
    """Where logits of a whole canvas do not fit: draws, entropies and what the next pass takes in stay the same."""
    model, work = model_of(2), [asked(f"r{number}", list(range(number + 3)), seed=number) for number in range(3)]
    whole, engine = run(poisoned_engine(model), work), poisoned_engine(model)
    engine.runner._logit_rows = 5
    assert {name: told(each) for name, each in run(engine, work).items()} == {
        k: told(each) for k, each in whole.items()
    }


@pytest.mark.thorough
def test_log_probabilities_are_those_of_the_pass_that_ends_a_canvas() -> None:
    """One step: the pass over the first noise, whose most probable tokens the canvas becomes."""
    own = oracle.make("windows shorter than a canvas", lasting_folder() / "gemma")
    llm, prompt, seed = LLM(str(own.folder), dtype="float32"), [5, 9, 22, 3], 17
    (found,) = llm.generate(
        [prompt], {"max_tokens": 8, "steps_per_block": 1, "seed": seed, "ignore_eos": True}, top_logprobs=2, trace=True
    )
    noise = np.random.default_rng([seed, 0]).integers(0, oracle.VOCAB, 8)
    expected = oracle.logits(own, prompt, [noise.tolist()]).log_softmax(dim=-1)
    assert found.trace is not None
    (transfer,) = found.trace
    assert list(found.token_ids) == expected.argmax(dim=-1).tolist() == list(transfer.token_ids)
    assert transfer.logprobs == pytest.approx(expected.max(dim=-1).values.tolist(), abs=1e-4)
    for top, row in zip(transfer.top_logprobs, expected, strict=True):
        values, ids = row.topk(2)
        assert [token for token, _ in top] == ids.tolist()
        assert [value for _, value in top] == pytest.approx(values.tolist(), abs=1e-4)


def test_a_seed_makes_it_reproducible() -> None:
    llm = LLM("diffusion-gemma-tiny", load_format="dummy", dtype="float32")
    sampling = {"max_tokens": 24, "steps_per_block": 4, "ignore_eos": True}
    seeds = [1, 1, 2, None, None]
    found = [each.token_ids for each in llm.generate([[3, 4, 5]] * 5, [sampling | {"seed": seed} for seed in seeds])]
    assert found[0] == found[1]
    assert len({found[0], *found[2:]}) == 4


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    own = oracle.make("mixed layers", tmp_path_factory.mktemp("texts") / "gemma", vocab=300, told=0.03, eos=298)
    byte_tokenizer(300, -1, [298])._backend.backend_tokenizer.save(str(own.folder / "tokenizer.json"))
    return LLM(str(own.folder), dtype="float32", engine=EngineConfig(max_num_seqs=4))


SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 99}, "b": {"enum": ["x", "yy"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}


def test_answers_keep_their_form(texts: LLM) -> None:
    """A schema, an expression and a choice, over one canvas and several, under all samplings."""
    for seed in range(4):
        sampling = {"max_tokens": 40, "seed": seed, "steps_per_block": 4} | (FAST if seed % 2 else {})
        (schema,) = texts.generate(["say"], sampling, structured_outputs={"json": SCHEMA})
        assert schema.finish_reason == "stop"
        answer = json.loads(schema.text or "")
        assert answer.keys() == {"a", "b"}
        assert 0 <= answer["a"] <= 99
        assert answer["b"] in ("x", "yy")
        (regex,) = texts.generate(["say"], sampling | {"max_tokens": 18}, structured_outputs={"regex": "(ab|cd){9}"})
        assert re.fullmatch("(ab|cd){9}", regex.text or "")
        (choice,) = texts.generate(["say"], sampling, structured_outputs={"choice": ["yes", "no, never ever"]})
        assert choice.text in ("yes", "no, never ever")


def test_a_form_is_kept_in_a_batch_as_alone(texts: LLM) -> None:
    asked = [{"max_tokens": 12, "seed": seed, **FAST} for seed in range(4)]
    form = {"regex": "[0-9]{3,12}"}
    together = texts.generate(["say"] * 4, asked, structured_outputs=form)
    assert len({each.token_ids for each in together}) > 1  # noise has a say in them
    for sampling, each in zip(asked, together, strict=True):
        (alone,) = texts.generate(["say"], sampling, structured_outputs=form)
        assert alone.token_ids == each.token_ids


def test_a_budget_of_entropies() -> None:
    entropies = np.array([0.5, 0.125, 0.25, 0.125, 4.0], dtype=np.float32)
    for budget, kept in [(0.0, [1]), (0.2, [1, 3]), (0.25, [1, 2, 3]), (0.5, [0, 1, 2, 3]), (1.0, [0, 1, 2, 3, 4])]:
        assert np.flatnonzero(within_budget(entropies, budget)).tolist() == kept


@pytest.mark.parametrize(
    ("sampling", "message"),
    [
        ({"mode": "ar"}, "mode is for models that fill masks, and this one has none"),
        ({"threshold": 0.5}, "threshold is for models that fill masks"),
        ({"remasking": "low_confidence"}, "remasking is for models that fill masks"),
        ({"blocks": {"early_stop": True}}, "blocks is for models that fill masks"),
        ({"block_length": 4}, "block_length=4: this model writes canvases of 8; leave it out"),
        ({"renoising": {"t_max": 0.3}}, "renoising.t_max=0.3 is below t_min=0.4"),
        ({"renoising": {"t_min": 0.0}}, "renoising.t_min must be"),
        ({"cfg_scale": 1.0}, "cfg_scale is not defined|cfg_scale"),
        ({"max_tokens": 505}, "whole blocks of block_length=8 make a canvas of 514"),
    ],
)
def test_what_has_no_meaning_is_refused(sampling: dict[str, Any], message: str) -> None:
    llm = LLM("diffusion-gemma-tiny", load_format="dummy")
    with pytest.raises(ConfigError, match=message):
        llm.generate([[3, 4]], sampling)


def test_other_models_have_no_canvases_of_noise() -> None:
    llm = LLM("sdar-tiny", load_format="dummy")
    with pytest.raises(ConfigError, match="renoising is for models that write canvases of noise; leave it out on sdar"):
        llm.generate([[3, 4]], {"renoising": {"t_max": 0.5}})


def test_what_the_engine_cannot_do_with_it_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"its 8 experts are not a multiple of 3\. Use 1 or 2 or 4"):
        LLM("diffusion-gemma-tiny", load_format="dummy", tensor_parallel=3)
    with pytest.raises(ConfigError, match="graphs=True needs a dense model"):
        LLM("diffusion-gemma-tiny", load_format="dummy", engine=EngineConfig(graphs=True))


def test_images_are_refused_in_a_sentence(texts: LLM) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    with pytest.raises(ConfigError, match=r"'content' is .*; it must be text") as caught:
        texts.chat([{"role": "user", "content": [image]}])
    assert "\n" not in str(caught.value)


def test_adapters_are_refused(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 2}))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError, match="Adapters are not supported on diffusion-gemma models"):
        LLM("diffusion-gemma-tiny", load_format="dummy", adapters={"one": str(tmp_path)})
