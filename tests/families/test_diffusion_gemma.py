"""DiffusionGemma against transformers' own model and decoding."""

import json
import random
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.diffusion_gemma.generation_diffusion_gemma import (
    DiffusionGemmaGenerationConfig,
    EntropyBoundSamplerConfig,
)

from remask import LLM, EngineConfig
from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.engine.canvas_state import CanvasState, plain_table
from remask.engine.pack import Target, pack
from remask.errors import CheckpointError
from remask.families import family_of
from remask.model.pool import Pool
from remask.plan.canvas import Canvas, Ledger
from remask.plan.plan import Plan
from remask.plan.spans import Span
from remask.sampling import canvases
from remask.store.pages import Extent
from tests.checkpoint.checkpoints import DIFFUSION_GEMMA as RAW
from tests.checkpoint.checkpoints import SDAR, random_tensors, write
from tests.engine.support import CPU, CheckedTransformer
from tests.leftovers import lasting_folder
from tests.oracles import diffusion_gemma as oracle

EACH = pytest.mark.parametrize("name", oracle.SHAPES)


@cache
def made(name: str, told: float = 1.0) -> oracle.Oracle:
    return oracle.make(name, lasting_folder() / "gemma", told=told)


def model_of(own: oracle.Oracle, dtype: torch.dtype = torch.float32) -> CheckedTransformer:
    loaded = find_model(ModelSettings(str(own.folder))).load(dtype, CPU)
    return CheckedTransformer(loaded.config, loaded.weights)


@torch.inference_mode()
def our_logits(
    model: CheckedTransformer, prompt: list[int], canvases: list[list[int]], before: Tensor | None
) -> Tensor:
    """Logits [C, V] of the last of `canvases`, in one pass over all that is before it."""
    config, given = model.config, [token for each in (prompt, *canvases[:-1]) for token in each]
    start, count = len(given), len(given) + len(canvases[-1])
    canvas = Canvas(given, canvases[-1], len(canvases[-1]))
    table = plain_table(Extent(range(config.layers), np.arange(count), 1, count))
    state = CanvasState(canvas, Ledger(config.layers, count, None), (table,), conditioned=before is not None)
    pool, sees = Pool(config, count, 1, model.dtype, CPU), np.arange(1, count + 1)
    sees[start:] = count
    for tensor in (*pool.k, *pool.v):
        tensor.fill_(torch.nan)
    assert pool.signals is not None
    pool.signals[:-1] = torch.nan
    if before is not None:
        pool.signals[start:count] = model.expected_embedding(before.softmax(dim=-1))
    plan = Plan((Span(range(config.layers), np.ones(count, dtype=np.bool_)),), predict=canvas.noisy, sees=sees)
    target = Target(CPU, sliding=config.sliding, roles=True)
    return model.head(model.forward(pack([(state, plan)], target), pool))


@pytest.mark.few(5)
@EACH
def test_logits_are_those_of_transformers(name: str) -> None:
    """Canvas by canvas, in the first step and in those that take in what was predicted."""
    own, rng = made(name), random.Random(name)
    model = model_of(own, torch.float64)
    for _ in range(4):
        prompt = oracle.prompt_of(rng)
        canvases = [[rng.randrange(oracle.VOCAB) for _ in range(own.canvas)] for _ in range(3)]
        for number in range(3):
            asked, before = canvases[: number + 1], None
            for _ in range(3):
                expected = oracle.logits(own, prompt, asked, before)
                found = our_logits(model, prompt, asked, before)
                torch.testing.assert_close(found, expected.double(), rtol=0, atol=1e-5)
                before = expected / 0.7


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("num_experts", None, "the key 'num_experts' is missing"),
        ("attention_bias", True, "'attention_bias' is true"),
        ("hidden_activation", "silu", "'hidden_activation' is \"silu\""),
        ("use_bidirectional_attention", "all", "leave text causal"),
        ("layer_types", ["full_attention"], "'layer_types' is .*a list of 2 times"),
        ("sliding_window", 1, "'sliding_window' is 1; supported: an integer from 2"),
        ("num_global_key_value_heads", 3, "'num_global_key_value_heads' is 3; supported: a divisor of the 4"),
        (
            "per_layer_config",
            {"1": {"head_dim": 6}, "0": {"head_dim": 6}},
            "'per_layer_config' is .*nothing for others",
        ),
        ("per_layer_config", {"1": 3}, "'per_layer_config' is"),
        ("rope_parameters", {"full_attention": {"rope_theta": 3.0}}, "an object of objects, with 'sliding_attention'"),
        ("rope_parameters", {"sliding_attention": {"rope_theta": 3.0, "beta": 1}}, "objects of factor, partial_"),
        ("rope_parameters", {"sliding_attention": {"rope_theta": 3.0, "rope_type": "yarn"}}, "'rope_type' is \"yarn\""),
        ("tie_word_embeddings", False, "'tie_word_embeddings' is false"),
        ("head_dim", 7, "an even number"),
    ],
)
def test_what_the_transformer_cannot_do_is_refused_by_key(key: str, value: Any, message: str) -> None:
    raw = RAW | {"text_config": RAW["text_config"] | {key: value}}
    with pytest.raises(CheckpointError, match=message):
        family_of(RAW).config(raw)


def test_null_switches_the_cap_of_logits_off() -> None:
    """As in transformers, where a file without the key has the usual cap."""
    config = family_of(RAW).config
    text = {key: value for key, value in RAW["text_config"].items() if key != "final_logit_softcapping"}
    for own, cap in (({}, 30.0), ({"final_logit_softcapping": None}, None), ({"final_logit_softcapping": 7}, 7.0)):
        assert config(RAW | {"text_config": text | own}).logit_cap == cap
    with pytest.raises(CheckpointError, match="'final_logit_softcapping' is 0"):
        config(RAW | {"text_config": text | {"final_logit_softcapping": 0}})


def test_keys_of_both_spellings_are_one_model() -> None:
    config = family_of(RAW).config(RAW)
    inner = {key: value for key, value in RAW["text_config"].items() if "global" not in key}
    inner["per_layer_config"] = {"1": {"head_dim": 8, "num_key_value_heads": 1}}
    assert family_of(RAW).config(RAW | {"text_config": inner}) == config
    # The last layer sees everything whatever is said of it.
    last = RAW["text_config"] | {"layer_types": ["sliding_attention"] * 2}
    assert family_of(RAW).config(RAW | {"text_config": last}) == config
    with pytest.raises(CheckpointError, match="'text_config' is missing"):
        family_of(RAW).config({"model_type": "diffusion_gemma"})


SAMPLINGS: tuple[dict[str, Any], ...] = (
    {},
    {"steps_per_block": 6},
    {"renoising": {"entropy_bound": 2.0}},
    {"renoising": {"entropy_bound": 8.0, "t_max": 0.3, "t_min": 0.1, "confidence_threshold": 0.5}},
    {"renoising": {"stability_threshold": 2, "confidence_threshold": 1.5, "entropy_bound": 4.0}},
    {"renoising": {"stability_threshold": 0, "confidence_threshold": 1.0, "entropy_bound": 20.0}},
    {"temperature": 0.5, "steps_per_block": 9, "renoising": {"entropy_bound": 5.0}},
)


def requests(own: oracle.Oracle, seed: str) -> list[tuple[list[int], dict[str, Any]]]:
    """Random prompts, each with its sampling parameters."""
    rng, asked = random.Random(seed), []
    for number in range(18):
        sampling = rng.choice(SAMPLINGS) | {"max_tokens": rng.randint(1, 3 * own.canvas), "seed": rng.randrange(2**40)}
        asked.append((oracle.prompt_of(rng), sampling | {"ignore_eos": number % 3 > 0}))
    return asked


def decoded(own: oracle.Oracle, prompt: list[int], sampling: dict[str, Any]) -> tuple[list[int], int]:
    """The response by transformers, and its passes."""
    tokens, passes = oracle.decode(own, prompt, sampling)
    tokens = tokens[: sampling["max_tokens"]]
    if not sampling["ignore_eos"] and oracle.EOS in tokens:
        tokens = tokens[: tokens.index(oracle.EOS) + 1]
    return tokens, passes


@pytest.mark.thorough
@EACH
def test_decodes_are_those_of_transformers(name: str) -> None:
    """The same draws, alone and all in one batch: tokens and passes of 18 requests of each of the models."""
    own = made(name, 0.03)
    llm = LLM(str(own.folder), dtype="float32", engine=EngineConfig(max_num_seqs=8, page_size=4))
    prompts, asked = map(list, zip(*requests(own, name), strict=True))
    together = llm.generate(prompts, asked)
    for prompt, sampling, output in zip(prompts, asked, together, strict=True):
        assert (list(output.token_ids), output.usage.forwards) == decoded(own, prompt, sampling)


GENERATION: Any = DiffusionGemmaGenerationConfig
ITS_OWN: dict[str, Any] = {
    "max_new_tokens": 21,
    "max_denoising_steps": 7,
    "sampler_config": EntropyBoundSamplerConfig(entropy_bound=4.0),
    "t_min": 0.1,
    "t_max": 0.3,
    "stability_threshold": 2,
    "confidence_threshold": 0.5,
}
SAME = {
    "max_tokens": 21,
    "steps_per_block": 7,
    "renoising": {
        "entropy_bound": 4.0,
        "t_min": 0.1,
        "t_max": 0.3,
        "stability_threshold": 2,
        "confidence_threshold": 0.5,
    },
}


def told(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [each for each in caplog.messages if "generation_config.json" in each]


def folder_with(tmp_path: Path, said: Any) -> str:
    """A model whose `generation_config.json` is `said`, or as transformers writes it with these keywords."""
    folder = tmp_path / "model"
    shutil.copytree(made("canvases of 3").folder, folder)
    if isinstance(said, str):
        (folder / "generation_config.json").write_text(said)
    else:
        GENERATION(**said).save_pretrained(str(folder))
    return str(folder)


def test_a_checkpoints_own_decoding_is_that_of_requests_which_say_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mechanics = {"cache_implementation": "dynamic", "eos_token_id": oracle.EOS}
    llm = LLM(folder_with(tmp_path, ITS_OWN | mechanics), dtype="float32")
    assert llm.session.sampling == SAME
    assert told(caplog) == []
    own, prompt = made("canvases of 3"), oracle.prompt_of(random.Random(5))
    given = SAME | {"seed": 8, "ignore_eos": True}
    (output,) = llm.generate([prompt], {"seed": 8, "ignore_eos": True})
    assert (list(output.token_ids), output.usage.forwards) == decoded(own, prompt, given)
    # Within a group as elsewhere a request's value holds, and the rest stays.
    assert llm.session.params({"renoising": {"t_min": 0.2}}).renoising.t_max == 0.3
    assert llm.session.params({"renoising": {"t_min": 0.2}}).renoising.t_min == 0.2


def test_a_file_that_says_nothing_changes_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers writes every key, with null where its own defaults hold; they are ours."""
    llm = LLM(folder_with(tmp_path, {}), dtype="float32")
    assert llm.session.sampling == {}
    assert told(caplog) == []
    usual = GENERATION._get_default_generation_params()
    assert usual.pop("max_new_tokens") == 256
    sampler = usual.pop("sampler_config")
    assert usual | {"entropy_bound": sampler.entropy_bound} == {
        "max_denoising_steps": canvases.STEPS,
        "entropy_bound": canvases.ENTROPY_BOUND,
        "t_max": canvases.T_MAX,
        "t_min": canvases.T_MIN,
        "stability_threshold": canvases.STABILITY_THRESHOLD,
        "confidence_threshold": canvases.CONFIDENCE_THRESHOLD,
    }


def test_what_cannot_be_followed_is_said_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    sampler = {"_cls_name": "EntropyBoundSamplerConfig", "entropy_bound": 4.0, "warmup": 2}
    content = {"max_length": 90, "sampler_config": sampler, "t_max": 0.5, "temperature": 0.9, "noise": None}
    content |= {"disable_compile": True}  # which says nothing of answers
    folder = folder_with(tmp_path, json.dumps(content))
    found = find_model(ModelSettings(folder))
    assert found.sampling == {"renoising": {"t_max": 0.5, "entropy_bound": 4.0}}
    (said,) = told(caplog)
    assert "also says max_length, sampler_config.warmup, temperature, which is not followed" in said
    caplog.clear()
    find_model(ModelSettings(folder, reads=None))  # what ranks beside the first one do
    assert told(caplog) == []
    (Path(folder) / "remask.json").write_text('{"sampling": {"max_tokens": 5}}')
    assert find_model(ModelSettings(folder)).sampling == {"max_tokens": 5}
    assert told(caplog) == [], "remask.json is read in its place"


@pytest.mark.parametrize("sampler", [{"_cls_name": "GreedySamplerConfig", "entropy_bound": 4.0}, "EntropyBound", [3]])
def test_another_sampler_is_not_taken_for_the_one_that_is_known(
    tmp_path: Path, sampler: Any, caplog: pytest.LogCaptureFixture
) -> None:
    found = find_model(ModelSettings(folder_with(tmp_path, json.dumps({"sampler_config": sampler, "t_max": 0.5}))))
    assert found.sampling == {"renoising": {"t_max": 0.5}}
    assert len(told(caplog)) == 1
    assert "also says sampler_config, which is not followed" in told(caplog)[0]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"t_min": -1.0}, r"renoising\.t_min must be .* got -1\.0"),
        ({"max_denoising_steps": 0}, "steps_per_block must be .* got 0"),
        ({"sampler_config": {"entropy_bound": "much"}}, "renoising.entropy_bound must be .* got 'much'"),
    ],
)
def test_values_that_are_not_allowed_are_named(tmp_path: Path, content: dict[str, Any], message: str) -> None:
    with pytest.raises(CheckpointError, match=rf"generation_config\.json: {message}.*Mend the file"):
        find_model(ModelSettings(folder_with(tmp_path, json.dumps(content))))


def test_the_same_words_are_nothing_to_other_families(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = write(tmp_path / "sdar", SDAR, random_tensors(SDAR))
    (folder / "generation_config.json").write_text('{"max_denoising_steps": 7, "t_max": 3, "max_new_tokens": 4}')
    assert find_model(ModelSettings(str(folder))).sampling == {"max_tokens": 4}
    assert told(caplog) == []
