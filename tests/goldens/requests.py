"""A golden run as the JSON line that asks `remask generate` for it, and which of its figures are binding."""

import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any, Literal

from tests.sampling_fields import grouped

Run = dict[str, Any]
Figure = Literal["tokens", "passes", "forwards", "row_layers"]

_POLICY = {
    "llada_low_confidence": "none",
    "llada_low_confidence_batch2": "none",
    "fast_dllm_nocache": "none",
    "fast_dllm_prefix_cache": "block-prefix",
    "fast_dllm_dual_cache": "block-dual",
    "bicache": "bicache",
    "bicache_no_refresh": "bicache",
    "vllm_style_reuse": "reuse",
    "bicache_fast_dllm_dual": "bicache+block-dual",
    "dllm_cache": "dllm-cache",
    "dllm_cache_cfg": "dllm-cache",
    "dllm_cache_dream": "dllm-cache",
    "dkv_cache_decode": "dkv-decode",
    "dkv_cache_greedy": "dkv-greedy",
    "dream_baseline": "none",
    "dkv_cache_decode_dream": "dkv-decode",
    "dkv_cache_pd_dream": "dkv-pd",
    "dkv_cache_prefill_dream": "dkv-prefill",
    "fast_dream_nocache_threshold": "none",
}

# The recorded parameter of each setting, by policy.
_CACHE_CONFIG = {
    "bicache": {"depth": "b", "refresh_interval": "interval"},
    "bicache+block-dual": {"depth": "b", "refresh_interval": "interval"},
    "dllm-cache": {"prompt_interval": "Kp", "response_interval": "Kr", "ratio": "rho", "cfg_interval": "Kcfg"},
    "dkv-greedy": {"refresh_interval": "cache_reloading_step", "window": "window_size"},
    "dkv-pd": {"refresh_interval": "cache_steps", "shift": "shift_type"},
}


def request_line(run: Run, id: str) -> dict[str, Any]:
    """The request that reproduces `run`: one line of `remask generate --input`.

    `fast_dllm_dual_without_bicache_engine` is a reference of another engine that no request stands for: KeyError.
    """
    policy = _policy(run)
    line: dict[str, Any] = {"id": id, "prompt_token_ids": prompt_ids(run)}
    if "prefix_len" in run:
        line["prefix_length"] = run["prefix_len"]
    return line | {"cache": policy, "cache_config": _cache_config(run, policy), "sampling": grouped(_sampling(run))}


def exempt(run: Run) -> frozenset[Figure]:
    """The figures of a run that an engine need not reproduce.

    `tokens`: what is transferred, in which order, and the output. `passes`: the pass numbers of the transfers.
    `forwards` and `row_layers`: the totals. Runs whose original left masks in the output bind nothing. The policy
    `none` may skip passes that could change nothing. dLLM-Cache's recorded rows are those passed in, not computed.
    Fast-dLLM on LLaDA recorded passes that change nothing, and its rows are not compared.
    """
    if run.get("masks_left", 0) > 0:
        return frozenset({"tokens", "passes", "forwards", "row_layers"})
    if _fast_dllm_llada(run):
        skips = _policy(run) == "none" or run["nfe"] != run["nfe_active"]
        return frozenset({"passes", "row_layers"} if skips else {"row_layers"})
    if _policy(run) == "none":
        return frozenset({"passes", "forwards", "row_layers"})
    return frozenset({"row_layers"} if _policy(run) == "dllm-cache" else ())


def expected_forwards(run: Run) -> int | None:
    """How many forward passes a run takes (without the prefix-only pass); None where the count is exempt."""
    if "forwards" in exempt(run):
        return None
    return int(run["nfe_active"] if _fast_dllm_llada(run) else run["nfe"])


def run_id(run: Run) -> str:
    """A name for the run that is unique over all files."""
    row = f".{run['row']}" if "row" in run else ""
    return f"{run['file']}-{run['index']:03d}{row}-{run['method']}"


@cache
def prompts() -> dict[str, list[int]]:
    """All prompts by id; of a shared-prefix pair (`s0a`, `s0b`, ...) the first `prefix_len` tokens are the same."""
    data = json.loads((Path(__file__).parent / "prompts.json").read_text(encoding="utf-8"))
    ids: dict[str, list[int]] = data["prompts"]
    return ids | {name: entry["ids"] for name, entry in data["shared_prefix"].items()}


def prompt_ids(run: Run) -> list[int]:
    """The prompt tokens of a run."""
    return list(run["prompt_ids"] if run["prompt_id"] is None else prompts()[run["prompt_id"]])


def _policy(run: Run) -> str:
    if run["method"] == "fast_dream_block_cache":
        return "block-dual" if run["params"]["dual_cache"] else "block-prefix"
    return _POLICY[run["method"]]


def _fast_dllm_llada(run: Run) -> bool:
    return bool(run["method"].startswith("fast_dllm_"))


def _cache_config(run: Run, policy: str) -> dict[str, Any]:
    if policy == "dkv-decode":
        dream = run["method"] == "dkv_cache_decode_dream"
        names = _CACHE_CONFIG["dkv-pd"] if dream else {"refresh_interval": "cache_reloading_step"}
    else:
        names = _CACHE_CONFIG.get(policy, {})
    params = run["params"]
    config = {setting: params[name] for setting, name in names.items() if name in params}
    return config | ({"fill_pass": "separate"} if policy == "bicache+block-dual" else {})


def _sampling(run: Run) -> dict[str, Any]:
    params = run["params"]
    common = {"temperature": 0.0, "ignore_eos": True}
    if "gen_length" not in params:
        return common | _dream_sampling(run["method"], params)
    sampling = common | {"max_tokens": params["gen_length"]}
    sampling["block_length"] = params.get("block_length", params["gen_length"])
    if run["method"] == "dkv_cache_greedy":
        order = run["denoising_order_per_block"]
        return sampling | {"remasking": "order", "order": order, "steps": params["steps"]}
    sampling["remasking"] = "low_confidence"
    mode = params.get("mode", "fixed")
    return sampling | (_named(params, ["steps", "cfg_scale"]) if mode == "fixed" else {mode: params[mode]})


def _dream_sampling(method: str, params: dict[str, Any]) -> dict[str, Any]:
    length = params["max_new_tokens"]
    sampling = {"max_tokens": length, "block_length": params.get("block_length", length), "remasking": params["alg"]}
    if method == "fast_dream_block_cache":
        return sampling | _named(params, ["threshold" if params["alg"] == "confidence_threshold" else "steps"])
    return sampling | _named(params, ["steps", "eps", "threshold"])


def _named(params: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
    return {name: params[name] for name in names if name in params}
