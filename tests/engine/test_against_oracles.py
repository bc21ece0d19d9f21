"""Random requests under every policy, in mixed batches, against dense decoders that know nothing of this package.

Both sides compute in float64; logits are read in float32. Decodes that turn on a rounding are not drawn: the oracle
must come to the same in float32 and float64, and what is transferred must differ in probability from what is not.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from remask.checkpoint.loaded import find_model
from remask.checkpoint.settings import ModelSettings
from remask.engine.request import Request
from remask.policies.registry import POLICIES
from remask.request.result import Result
from tests import goldens
from tests.checkpoint import checkpoints
from tests.engine.support import CPU, CheckedTransformer, Work, first_clear, poisoned_engine, policy_of, run
from tests.goldens import moe
from tests.leftovers import lasting_folder
from tests.oracles import decode as oracles
from tests.oracles.canvas import Canvas, Decode
from tests.oracles.decode import decode, load
from tests.oracles.dense import DenseModel
from tests.sampling_fields import flat_params

Line: TypeAlias = dict[str, Any]
Settings: TypeAlias = Callable[[random.Random, int], Line]  # of a policy, on a model of so many layers
Kind: TypeAlias = tuple[Callable[[random.Random], Line], Settings]  # the former are sampling parameters

VOCAB, MASK_ID = 256, 255
INNER = set[str]()  # caches of other packages that are `none` without a stored part
WRITTEN = {
    "illada": checkpoints.ILLADA | {"vocab_size": VOCAB, "num_hidden_layers": 4},
    # Windows that are far shorter than the canvases.
    "modernbert": checkpoints.MODERNBERT
    | {"vocab_size": VOCAB, "mask_token_id": MASK_ID, "num_hidden_layers": 5, "local_attention": 6},
}
LAYERS = {"llada": 6, "llada_gqa": 4, "dream": 6, "dream_dllm": 4, moe.MASKED: 4, "illada": 4, "modernbert": 5}


# Half of them are too long for every run.
SEEDS = pytest.mark.parametrize(
    "seed", [*range(6), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(6, 12))]
)


@cache
def folder_of(name: str) -> Path:
    if name in WRITTEN:
        return checkpoints.write(lasting_folder() / name, WRITTEN[name], checkpoints.random_tensors(WRITTEN[name]))
    return moe.model_dir(name) if name == moe.MASKED else goldens.model_dir(name)


@cache
def model_of(name: str) -> CheckedTransformer:
    loaded = find_model(ModelSettings(str(folder_of(name)))).load(torch.float64, CPU)
    # Policies are compared here, under the schedule that the oracles of most of them have.
    sampling = replace(loaded.config.sampling, schedule="even")
    return CheckedTransformer(replace(loaded.config, sampling=sampling), loaded.weights)


def dense(name: str, dtype: torch.dtype = torch.float64) -> DenseModel:
    loaded = load(folder_of(name), dtype)
    assert isinstance(loaded, DenseModel)
    return loaded


def blocks(rng: random.Random, least: int = 1) -> Line:
    """A canvas in one to three blocks, and at least `least` steps for each, sometimes more than it has positions."""
    block, count = rng.randint(2, 5), rng.randint(1, 3)
    steps = count * rng.choice([least, max(2, least), 3, block, block + 2])
    return {"max_tokens": block * count, "block_length": block, "steps": max(steps, least * count)}


def llada_sampling(rng: random.Random) -> Line:
    sampling = {**blocks(rng), "remasking": "low_confidence"}
    rule: Line = rng.choice([{}, {}, {"threshold": rng.choice([0.2, 0.5])}, {"factor": rng.choice([0.8, 1.2])}])
    return sampling | rule


def whole_canvas(rng: random.Random) -> Line:
    """Dream's own samplers."""
    if rng.random() < 0.75:
        return scheduled_canvas(rng)
    tokens = rng.randint(4, 10)
    steps = rng.choice([n for n in range(1, tokens + 1) if tokens % n == 0])
    rule = {"remasking": "confidence_threshold", "threshold": rng.choice([0.2, 0.5])}
    return {"max_tokens": tokens, "block_length": tokens, "steps": steps, **rule}


def scheduled_canvas(rng: random.Random) -> Line:
    """Those of Dream's samplers whose number of steps is known."""
    tokens = rng.randint(4, 10)
    rule = {"remasking": rng.choice(["entropy", "topk_margin", "maskgit_plus"]), "eps": rng.choice([1e-3, 0.05])}
    return {"max_tokens": tokens, "block_length": tokens, "steps": rng.randint(2, tokens + 2), **rule}


def guided(rng: random.Random) -> Line:
    return {**blocks(rng), "remasking": "low_confidence", "cfg_scale": rng.choice([0.5, 1.5])}


def fixed(rng: random.Random) -> Line:
    return {**blocks(rng), "remasking": "low_confidence"}


def ordered(rng: random.Random) -> Line:
    """The order counts from the response's first position: the prompt's length is added once it is known."""
    sampling = blocks(rng)
    block, tokens = sampling["block_length"], sampling["max_tokens"]
    order = [rng.sample(range(start, start + block), block) for start in range(0, tokens, block)]
    return {**sampling, "remasking": "order", "order": order}


def dream_blocks(rng: random.Random) -> Line:
    """Fast-dLLM's samplers for Dream. The original leaves canvases of one step a block unfinished."""
    sampling = blocks(rng, least=2)
    if rng.random() < 0.5:
        return sampling | {"remasking": "entropy"}
    del sampling["steps"]
    return sampling | {"remasking": "confidence_threshold", "threshold": rng.choice([0.2, 0.5])}


def seeded(sampling: Callable[[random.Random], Line]) -> Callable[[random.Random], Line]:
    """The same with a seed, from which a policy may draw."""
    return lambda rng: sampling(rng) | {"seed": rng.randrange(1000)}


def any_of(**settings: Any) -> Settings:
    return lambda rng, _: {
        name: rng.choice(value) if isinstance(value, list) else value for name, value in settings.items()
    }


def bicache_config(rng: random.Random, layers: int) -> Line:
    interval, boundary = rng.choice([None, 1, 2, 3, 5]), rng.choice(["stored", "recomputed"])
    depth = rng.randint(0, layers)
    within = {} if depth else {"within_request": True}
    return {"depth": depth, "refresh_interval": interval, "boundary": boundary} | within


def bicache_dual_config(rng: random.Random, layers: int) -> Line:
    return bicache_config(rng, layers) | {"fill_pass": rng.choice(["separate", "separate", "transfer"])}


no_config = any_of()
INTERVALS = [1, 2, 3, 4, 7]
dkv_config = any_of(refresh_interval=INTERVALS)
dkv_dream_config = any_of(refresh_interval=INTERVALS, shift=["un", "un_right"])
dkv_right_config = any_of(refresh_interval=INTERVALS, shift="right")
greedy_config = any_of(refresh_interval=INTERVALS, window=[0, 1, 2, 4])
greedy_previous_config = any_of(refresh_interval=INTERVALS, window=[1, 2, 4], centre="previous")
greedy_interval_config = any_of(
    window=[0, 1, 2, 3, 5], centre=["current", "previous"], refresh_interval=INTERVALS, extent="interval"
)
DLLM: Line = {
    "prompt_interval": [1, 2, 4, 100],
    "response_interval": [1, 2, 3, 5],
    "ratio": [0.0, 0.25, 0.5, 1.0],
    "select_layers": [1, 1, 2, 3, 100],
}
SEVERAL: Line = {**DLLM, "response_interval": [2, 3, 5]}  # so that there is something to select, or to count down
dllm_config = any_of(**DLLM)
dllm_down_config = any_of(**SEVERAL, phase="down")
dllm_key_config = any_of(**SEVERAL, select="key")
dllm_random_config = any_of(**SEVERAL, select="random")
dllm_guided_config = any_of(**DLLM, cfg_interval=[1, 2, 3])


# What stands after a comma tells requests of one policy apart.
LLADA: dict[str, Kind] = {
    "none": (llada_sampling, no_config),
    "none, guided": (guided, no_config),
    "reuse": (llada_sampling, no_config),
    "bicache": (llada_sampling, bicache_config),
    "bicache, another": (llada_sampling, bicache_config),
    "block-prefix": (llada_sampling, no_config),
    "block-dual": (llada_sampling, no_config),
    "bicache+block-dual": (fixed, bicache_dual_config),
    "dkv-decode": (llada_sampling, dkv_config),
    "dkv-greedy": (ordered, greedy_config),
    "dkv-greedy, around the last step": (ordered, greedy_previous_config),
    "dkv-greedy, an interval": (ordered, greedy_interval_config),
    "dllm-cache": (llada_sampling, dllm_config),
    "dllm-cache, guided": (guided, dllm_guided_config),
    "dllm-cache, counting down": (fixed, dllm_down_config),
    "dllm-cache, by key": (llada_sampling, dllm_key_config),
    "dllm-cache, at random": (seeded(llada_sampling), dllm_random_config),
}
DREAM: dict[str, Kind] = {
    "none": (whole_canvas, no_config),
    "reuse": (whole_canvas, no_config),
    "bicache": (whole_canvas, bicache_config),
    "bicache, another": (whole_canvas, bicache_config),
    "block-prefix": (dream_blocks, no_config),
    "block-dual": (dream_blocks, no_config),
    "dkv-decode": (whole_canvas, dkv_dream_config),
    "dkv-decode, shifted right": (whole_canvas, dkv_right_config),
    "dkv-pd": (whole_canvas, dkv_dream_config),
    "dkv-pd, shifted right": (whole_canvas, dkv_right_config),
    "dkv-prefill": (whole_canvas, no_config),
    "dllm-cache": (whole_canvas, dllm_config),
    "dllm-cache, counting down": (scheduled_canvas, dllm_down_config),
    "dllm-cache, by key": (whole_canvas, dllm_key_config),
    "dllm-cache, at random": (seeded(whole_canvas), dllm_random_config),
}


def test_every_policy_of_masked_models_has_an_oracle() -> None:
    """Without an entry above a new policy would be compared with nothing."""
    names = {name for key in (*LLADA, *DREAM) for name in key.partition(",")[0].split("+")}
    assert POLICIES.built_in.keys() - names == {"exact", "uniform-cache"}, "add the policy to LLADA or DREAM"


def draw_line(rng: random.Random, name: str, kind: Kind, layers: int) -> Line:
    """A request line under one policy. Prefixes are one of few, so that some are shared."""
    sampling, config = kind
    line: Line = {"cache": name.split(",")[0], "cache_config": config(rng, layers), "sampling": sampling(rng)}
    length = rng.choice([2, 5, 9])
    shared = random.Random(f"{length} {rng.randrange(2)}")
    # The mask token may be among them, as users may type it.
    prompt = [shared.randrange(VOCAB) for _ in range(length)] + [rng.randrange(VOCAB) for _ in range(rng.randint(1, 4))]
    if rng.random() < 0.3:
        prompt[rng.randrange(length)] = MASK_ID
    if "order" in line["sampling"]:
        order = [[len(prompt) + offset for offset in block] for block in line["sampling"]["order"]]
        line["sampling"] = line["sampling"] | {"order": order}
    if "window" in line["cache_config"]:
        window = min(line["cache_config"]["window"], line["sampling"]["max_tokens"])
        line["cache_config"] = line["cache_config"] | {"window": window}
    return line | {"prompt_token_ids": prompt, "prefix_length": length}


class WatchedCanvas(Canvas):
    """A canvas that knows how close its decode came to choosing other positions."""

    narrowest = 1.0

    def transfer(self, positions: Sequence[int], logits: Tensor) -> None:
        best = logits.softmax(-1).amax(-1)
        taken = torch.zeros_like(self.noisy)
        taken[list(positions)] = True
        gaps = (best[taken][:, None] - best[self.noisy & ~taken]).abs()
        gaps = gaps[~gaps.isnan()]  # positions that this pass does not predict
        if len(gaps):
            self.decided(float(gaps.min()))
        super().transfer(positions, logits)

    def decided(self, gap: float) -> None:
        WatchedCanvas.narrowest = min(WatchedCanvas.narrowest, gap)


def oracle(name: str, line: Line) -> Decode | None:
    """What the line decodes to; None where a rounding would decide that."""
    folder, boundary = folder_of(name), line["cache_config"].get("boundary", "stored")
    WatchedCanvas.narrowest = 1.0
    with patch.object(oracles, "Canvas", WatchedCanvas):
        exact = decode(load(folder, torch.float64), line, boundary)
    if WatchedCanvas.narrowest < 1e-5:
        return None
    rough = decode(load(folder, torch.float32), line, boundary)
    return exact if (exact.transfers, exact.picks) == (rough.transfers, rough.picks) else None


def drawn(rng: random.Random, model: str, name: str, kind: Kind) -> tuple[Line, Decode]:
    return first_clear(lambda: draw_line(rng, name, kind, LAYERS[model]), lambda line: oracle(model, line))


def work_of(line: Line, name: str, joins: int) -> Work:
    sampling = flat_params({"temperature": 0.0, "ignore_eos": True, "growing_canvas": False, **line["sampling"]})
    policy = policy_of(line["cache"], **line["cache_config"])
    prompt, prefix = line["prompt_token_ids"], line["prefix_length"]
    return Work(Request(name, prompt, sampling, prefix), policy, joins)


def left_out(line: Line, expected: Decode, shift: int) -> int:
    """Row-layers of the oracle that dLLM-Cache need not compute.

    The oracle carries prompt rows through the first layer in every pass. Between prompt refreshes nothing reads them,
    except the row that predicts the first response position on Dream.
    """
    if line["cache"] != "dllm-cache":
        return 0
    passes = expected.forwards
    clocks = [passes]
    if line["sampling"].get("cfg_scale"):
        every = line["cache_config"]["cfg_interval"]
        told = blind = 0
        while told + blind < passes:
            blind += told % every == 0 or told < 5
            told += 1
        clocks = [told, blind]
    every = line["cache_config"]["prompt_interval"]
    stale: int = sum(clock % every != 0 for count in clocks for clock in range(count))
    rows: int = len(line["prompt_token_ids"]) - shift
    return stale * rows


def compare(line: Line, expected: Decode, result: Result, shift: int) -> None:
    assert result.error is None
    assert list(result.token_ids) == expected.output_ids
    trace = [(list(transfer.positions), list(transfer.token_ids)) for transfer in result.trace]
    assert trace == [(positions, tokens) for _, positions, tokens in expected.transfers]
    usage = result.usage
    lent = len(line["prompt_token_ids"]) - shift
    shares = min(line["prefix_length"], lent) > 0
    # Passes that transfer nothing are not run. Without a prefix some policies are the one within them.
    if line["cache"] == "none" or (line["cache"] in INNER and not shares):
        assert usage.forwards == len(expected.transfers)
        assert usage.row_layers == sum(sum(expected.rows[number]) for number, _, _ in expected.transfers)
        return
    assert usage.forwards == expected.forwards
    assert usage.row_layers == expected.row_layers - left_out(line, expected, shift)
    if usage.forwards == usage.steps:
        assert [transfer.step for transfer in result.trace] == [number for number, _, _ in expected.transfers]


def limits(rng: random.Random) -> dict[str, Any]:
    return {
        "max_num_seqs": rng.choice([2, 5, 20]),
        "max_row_layers": rng.choice([None, 200, 1000]),
        "page_size": rng.choice([1, 3, 4, 16]),
        "store_budget_tokens": rng.choice([16, 25, 64]),  # three documents fit in
    }


def check(model: str, seed: int, kinds: dict[str, Kind]) -> None:
    """One request of each kind in one batch, joining at different steps."""
    rng = random.Random(f"{model} {seed}")
    lines = {name: drawn(rng, model, name, kind) for name, kind in kinds.items()}
    order = list(lines)
    rng.shuffle(order)
    work = [work_of(lines[name][0], name, rng.randrange(10)) for name in order]
    results = run(poisoned_engine(model_of(model), **limits(rng)), work)
    for name, (line, expected) in lines.items():
        compare(line, expected, results[name], model_of(model).config.shift)


@pytest.mark.few(11)
@SEEDS
@pytest.mark.parametrize("model", ["llada", "llada_gqa"])
def test_llada(model: str, seed: int) -> None:
    check(model, seed, LLADA)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_llada_moe(seed: int) -> None:
    """Stale rows may be routed to other experts, by the oracle as by the engine."""
    check(moe.MASKED, seed, LLADA)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(4))
def test_illada(seed: int) -> None:
    """Tied embeddings, and a mask token that no file names."""
    check("illada", seed, LLADA)


@pytest.mark.thorough
@pytest.mark.parametrize("seed", range(6))
def test_modernbert(seed: int) -> None:
    """Stale rows, and rows that the device chooses, are read within windows alone."""
    check("modernbert", seed, LLADA)


@pytest.mark.thorough
@SEEDS
@pytest.mark.parametrize("model", ["dream", "dream_dllm"])
def test_dream(model: str, seed: int) -> None:
    check(model, seed, DREAM)


def test_recomputed_states_beside_cached_outputs() -> None:
    """Two canvases compute the rows of one leased prefix, which may not be written, in layers that pick rows."""
    rng = random.Random(0)
    states = {"depth": 4, "refresh_interval": 1, "boundary": "recomputed"}
    clocks = {"prompt_interval": 100, "response_interval": 4, "ratio": 0.5}
    prefix = rng.sample(range(VOCAB), 9)
    lines = {
        f"{cache} {number}": {
            "cache": cache,
            "cache_config": config,
            "sampling": {"max_tokens": 8, "remasking": "low_confidence"},
            "prompt_token_ids": [*prefix, number],
            "prefix_length": len(prefix),
        }
        for cache, config in (("bicache", states), ("dllm-cache", clocks))
        for number in range(3)
    }
    engine = poisoned_engine(model_of("llada"), max_num_seqs=6)
    results = run(engine, [work_of(line, name, 0) for name, line in lines.items()])
    for name, line in lines.items():
        expected = oracle("llada", line)
        assert expected is not None
        compare(line, expected, results[name], 0)
