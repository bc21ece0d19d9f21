"""The oracle's front door: decodes what one line of `remask generate --input` asks for."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.oracles import (
    bicache,
    block_causal,
    blocks,
    dkv,
    dllm,
    experts,
    gidd,
    modernbert,
    sdar,
    uniform,
)
from tests.oracles.bicache import Boundary
from tests.oracles.canvas import Canvas, Decode
from tests.oracles.dense import DenseModel
from tests.oracles.dense import load as load_masked
from tests.oracles.gidd import GiddModel
from tests.oracles.sampling import (
    BlockSampler,
    DreamSampler,
    DreamThreshold,
    Factor,
    Fixed,
    Ordered,
    Rule,
    Sampler,
    Threshold,
)
from tests.oracles.sdar import SdarModel

Line = Mapping[str, Any]
Model = DenseModel | GiddModel | SdarModel


@dataclass(frozen=True)
class OwnCache:
    """The oracle of a cache of another package: `run_out` tells whether its clocks count the steps of a schedule."""

    decode: Callable[[DenseModel, Canvas, Sampler, Line], None]
    run_out: bool


CACHES: dict[str, OwnCache] = {}
"""Caches of other packages, whose tests add their oracles."""
RULES: dict[str, Callable[[Line], Rule]] = {}
"""Their remasking rules, by the sampling parameters of a line."""


def load(folder: Path, dtype: torch.dtype = torch.float64) -> Model:
    """The model of a checkpoint folder of any family; the same object for the same arguments."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if "num_experts" in config:
        return experts.load(folder, dtype)
    match config["model_type"]:
        case "gidd":
            return gidd.load(folder, dtype)
        case "sdar":
            return sdar.load(folder, dtype)
        case "modernbert":
            return modernbert.load(folder, dtype)
    return load_masked(folder, dtype)


def decode(model: Model, line: Line, boundary: Boundary = "stored") -> Decode:
    """Decodes a request line at temperature 0.

    Stop ids are not honoured, so the output is `max_tokens` long; but block-causal models and oracles of `CACHES` may
    honour `stop_token_ids`. The latter leave masks after them.
    `template`, if the line has one, holds a token or null for each place of the response. `boundary` is for BiCache:
    whether refreshes restore the prefix rows or run them through the shallow layers.
    """
    if isinstance(model, GiddModel):
        return uniform.decode(model, line)
    if isinstance(model, SdarModel):
        return block_causal.decode(model, line)
    sampling, config = line["sampling"], line.get("cache_config", {})
    canvas = Canvas(line["prompt_token_ids"], sampling["max_tokens"], model.mask_id, line.get("template"))
    if model.dream:
        _decode_dream(model, canvas, line, sampling, config, boundary)
    else:
        _decode_llada(model, canvas, line, sampling, config, boundary)
    return canvas.result()


def _decode_llada(
    model: DenseModel, canvas: Canvas, line: Line, sampling: Line, config: Line, boundary: Boundary
) -> None:
    # Fast-dLLM leaves a complete block at once; caches whose clocks count steps run the schedule out. Without a cache a
    # pass over a complete block changes nothing.
    own = CACHES.get(line["cache"])
    run_out = line["cache"] not in ("none", "block-prefix", "block-dual") if own is None else own.run_out
    sampler = BlockSampler(canvas, sampling.get("block_length", sampling["max_tokens"]), _rule(sampling), run_out)
    cfg_scale = sampling.get("cfg_scale", 0.0)
    match line["cache"]:
        case "none":
            blocks.none(model, canvas, sampler, cfg_scale)
        case "block-prefix" | "block-dual" as cache:
            blocks.block_cache(model, canvas, sampler, cache == "block-dual")
        case "bicache+block-dual":
            depth, interval = config["depth"], config.get("refresh_interval", 16)
            fill = config.get("fill_pass", "transfer")
            bicache.bicache_block_dual(model, canvas, sampler, line["prefix_length"], depth, interval, fill, boundary)
        case "dkv-decode":
            dkv.llada_decode(model, canvas, sampler, config["refresh_interval"])
        case "dkv-greedy":
            centre, extent = config.get("centre", "current"), config.get("extent", "noisy")
            dkv.llada_greedy(model, canvas, sampler, config["refresh_interval"], config["window"], centre, extent)
        case "dllm-cache" if cfg_scale:
            dllm.dllm_cache_cfg(model, canvas, sampler, _intervals(config, sampling), cfg_scale, config["cfg_interval"])
        case _:
            _decode_either(model, canvas, sampler, line, config, boundary)


def _decode_dream(
    model: DenseModel, canvas: Canvas, line: Line, sampling: Line, config: Line, boundary: Boundary
) -> None:
    cache, block_length = line["cache"], sampling.get("block_length", sampling["max_tokens"])
    if cache in ("block-prefix", "block-dual"):
        threshold = sampling["threshold"] if sampling["remasking"] == "confidence_threshold" else None
        steps = sampling.get("steps")
        blocks.dream_block_cache(model, canvas, block_length, cache == "block-dual", threshold, steps)
        return
    steps = sampling.get("steps", sampling["max_tokens"] - canvas.given)
    sampler: Sampler
    if sampling["remasking"] == "confidence_threshold":
        sampler = DreamThreshold(canvas, sampling["threshold"], steps)
    elif sampling["remasking"] in RULES:
        sampler = BlockSampler(canvas, block_length, _rule(sampling))
    else:
        sampler = DreamSampler(canvas, sampling["remasking"], steps, sampling.get("eps", 1e-3))
    match cache:
        case "none":
            blocks.none(model, canvas, sampler)
        case "dkv-decode" | "dkv-pd":
            shift = config.get("shift", "un")
            dkv.dream_decode(model, canvas, sampler, config["refresh_interval"], shift, prefill=cache == "dkv-pd")
        case "dkv-prefill":
            dkv.dream_prefill(model, canvas, sampler)
        case _:
            _decode_either(model, canvas, sampler, line, config, boundary)


def _decode_either(
    model: DenseModel, canvas: Canvas, sampler: Sampler, line: Line, config: Line, boundary: Boundary
) -> None:
    match line["cache"]:
        case cache if cache in CACHES:
            CACHES[cache].decode(model, canvas, sampler, line)
        case "reuse":
            bicache.reuse(model, canvas, sampler, line["prefix_length"])
        case "bicache":
            interval = config.get("refresh_interval", 16)
            bicache.bicache(model, canvas, sampler, line["prefix_length"], config["depth"], interval, boundary)
        case "dllm-cache":
            dllm.dllm_cache(model, canvas, sampler, _intervals(config, line["sampling"]))
        case cache:
            raise ValueError(f"no oracle for cache {cache!r}")


def _rule(sampling: Line) -> Rule:
    if sampling["remasking"] in RULES:
        return RULES[sampling["remasking"]](sampling)
    if "threshold" in sampling:
        return Threshold(sampling["threshold"])
    if "factor" in sampling:
        return Factor(sampling["factor"])
    steps = sampling.get("steps")
    return Ordered(steps, sampling["order"]) if sampling["remasking"] == "order" else Fixed(steps)


def _intervals(config: Line, sampling: Line) -> dllm.Intervals:
    select, seed = config.get("select", "value"), sampling.get("seed", 0)
    total = sampling.get("steps", sampling["max_tokens"]) if config.get("phase") == "down" else None
    layers = config.get("select_layers", 1)
    intervals = config["prompt_interval"], config["response_interval"]
    return dllm.Intervals(*intervals, config["ratio"], select, seed, total, layers)
