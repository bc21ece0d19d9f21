"""The oracles of this package's caches and rule, and random requests under them."""

import random

from caches.tests.acache_oracle import acache
from caches.tests.elastic_oracle import Elastic, elastic_cache
from caches.tests.entropy_oracle import entropy_cache
from caches.tests.slowfast_oracle import SlowFast
from tests.engine import test_against_oracles as core
from tests.engine.test_against_oracles import (
    Kind,
    Line,
    any_of,
    bicache_config,
    bicache_dual_config,
    blocks,
    dkv_config,
    dkv_dream_config,
    dkv_right_config,
    dllm_config,
    fixed,
    guided,
    llada_sampling,
    no_config,
    whole_canvas,
)
from tests.oracles import decode as oracles
from tests.oracles.canvas import Canvas
from tests.oracles.decode import CACHES, RULES, OwnCache
from tests.oracles.dense import DenseModel
from tests.oracles.sampling import Sampler


def decode_acache(model: DenseModel, canvas: Canvas, sampler: Sampler, line: oracles.Line) -> None:
    config = line["cache_config"]
    dual, every = line["cache"] == "acache+block-dual", config.get("anchor_interval")
    acache(model, canvas, sampler, line["prefix_length"], config["ratio"], dual, every)


def decode_elastic(model: DenseModel, canvas: Canvas, sampler: Sampler, line: oracles.Line) -> None:
    sampling = line["sampling"]
    scale, stops = sampling.get("cfg_scale", 0.0), sampling.get("stop_token_ids", ())
    elastic_cache(model, canvas, sampler, Elastic(**line["cache_config"]), scale, stops)


def decode_entropy(model: DenseModel, canvas: Canvas, sampler: Sampler, line: oracles.Line) -> None:
    config = line["cache_config"]
    whole = config.get("masks", "response") == "response"
    entropy_cache(model, canvas, sampler, config["threshold"], config["recent"], whole)


# Clocks of `acache` count steps, so schedules are run out; the others leave a complete block at once.
CACHES |= dict.fromkeys(("acache", "acache+block-dual"), OwnCache(decode_acache, run_out=True))
CACHES |= {"elastic-cache": OwnCache(decode_elastic, False), "entropy-cache": OwnCache(decode_entropy, False)}
RULES["slowfast"] = lambda sampling: SlowFast(**sampling.get("config", {}))
core.INNER.add("acache")


def slowfast(rng: random.Random) -> Line:
    """SlowFast sampling in one to three blocks, with knobs that these models' confidences reach."""
    sampling = blocks(rng)
    del sampling["steps"]
    knobs = {
        "slow_tokens": rng.choice([1, 1, 2]),
        "slow_steps": rng.choice([1, 2, 8]),
        "min_confidence": rng.choice([0.0, 0.2, 0.4]),
        "window": rng.choice([1, 2, 3]),
        "variance": rng.choice([0.0, 1.0, 4.0]),
        "threshold": rng.choice([0.3, 0.6]),
        "slow_threshold": rng.choice([None, 0.3]),
        "leave_early": rng.random() < 0.7,
    }
    return sampling | {"remasking": "slowfast", "config": knobs}


def slowfast_cut(rng: random.Random) -> Line:
    """Spans that take several fast steps, which leave out what stands after them."""
    knobs = {"min_confidence": 0.2, "window": 1, "threshold": rng.choice([0.6, 1.0]), "cut_tail": True}
    return {"max_tokens": 12, "block_length": 12, "remasking": "slowfast", "config": knobs}


def elastic_option_config(rng: random.Random, layers: int) -> Line:
    options: list[Line] = [
        {"track_num": 2},
        {"track_num": 5, "block_caching": False},
        {"block_caching": False},
        {"block_caching": False, "queries": "masks"},
        {"similarity": "keys"},
        {"similarity": "keys", "track_num": 3},
    ]
    return elastic_config(rng, layers) | rng.choice(options)


acache_config = any_of(ratio=[0.0, 0.1, 0.2, 0.5, 1.0], anchor_interval=[None, None, 1, 2, 3])
# Thresholds with which these models refresh never, now and then, and nearly always; or the other way round.
elastic_config = any_of(window=[1, 2, 3, 5, 100], threshold=[0.0, 0.7, 0.9, 0.97, 0.99])
entropy_config = any_of(threshold=[0.0, 2.0, 3.5, 4.5, 10.0], recent=[0, 1, 3, 64], masks=["response", "block"])

LLADA: dict[str, Kind] = {
    "acache": (llada_sampling, acache_config),
    "acache+block-dual": (fixed, acache_config),
    "none, slowfast": (slowfast, no_config),
    "none, slowfast, cut": (slowfast_cut, no_config),
    "bicache, slowfast": (slowfast, bicache_config),
    "block-prefix, slowfast": (slowfast, no_config),
    "block-dual, slowfast": (slowfast, no_config),
    "bicache+block-dual, slowfast": (slowfast, bicache_dual_config),
    "dkv-decode, slowfast": (slowfast, dkv_config),
    "dllm-cache, slowfast": (slowfast, dllm_config),
    "elastic-cache": (llada_sampling, elastic_config),
    "elastic-cache, another": (fixed, elastic_option_config),
    "elastic-cache, guided": (guided, elastic_config),
    "elastic-cache, slowfast": (slowfast, elastic_config),
    "entropy-cache": (llada_sampling, entropy_config),
    "entropy-cache, slowfast": (slowfast, entropy_config),
}
DREAM: dict[str, Kind] = {
    "acache": (whole_canvas, acache_config),
    "dkv-decode, slowfast, shifted right": (slowfast, dkv_right_config),
    "none, slowfast": (slowfast, no_config),
    "none, slowfast, cut": (slowfast_cut, no_config),
    "dkv-decode, slowfast": (slowfast, dkv_dream_config),
    "dkv-prefill, slowfast": (slowfast, no_config),
    "dllm-cache, slowfast": (slowfast, dllm_config),
    "elastic-cache": (whole_canvas, elastic_config),
    "elastic-cache, another": (whole_canvas, elastic_option_config),
    "elastic-cache, slowfast": (slowfast, elastic_config),
    "entropy-cache": (whole_canvas, entropy_config),
    "entropy-cache, slowfast": (slowfast, entropy_config),
}
