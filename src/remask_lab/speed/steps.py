"""What a step costs beside its bare parts: products, attention, selection, and those of a model of 8B."""

import argparse
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.engine import Engine
from remask.errors import ConfigError
from remask.policies.dllm import SELECTS
from remask_lab.speed.command import cpu_seconds, in_turns, median_and_range, ratios, report
from remask_lab.speed.runs import bare_pass, engine_of, on_device, open_random, random_requests

HELD, BARE = "held", "bare projections"


def overhead(args: argparse.Namespace) -> dict[str, Any]:
    """The time that the engine adds to the matrix products and attention of a step under `none`.

    Times whole engine steps, and the bare products and attention of the same shapes. Both take turns in one run.
    """
    llm = open_random(args, max_num_seqs=1, max_model_len=args.length)
    bare = bare_pass(llm, [args.length] * llm.loaded.config.layers, args.response, args.length)
    engine = _dense(llm, args.length, args.response)
    times = in_turns({"engine": engine.step, "bare": bare}, args.turns, on_device(llm), first=2)
    return report(
        llm,
        **{f"{name}_step_ms": 1e3 * statistics.median(seconds) for name, seconds in times.items()},
        **median_and_range(ratios(times["engine"], times["bare"]), "ratio"),
    )


def first_layer(args: argparse.Namespace) -> dict[str, Any]:
    """What sharing a prefix's K/V of the first layer could save: the time of that product in a step under `none`.

    K and V of the first layer depend only on token and position, so they could be shared exactly. The product and the
    step are timed in turns in one run.
    """
    llm = open_random(args, max_num_seqs=1, max_model_len=args.length)
    config, layer = llm.loaded.config, llm.loaded.weights.layers[0]
    rows = torch.randn(int(args.ratio * args.length), config.hidden, dtype=llm.model.dtype, device=llm.model.device)
    keys = layer.qkv[config.heads * config.head_dim :]
    calls = {"product": lambda: F.linear(rows, keys), "step": _dense(llm, args.length, args.response).step}
    times = in_turns(calls, args.turns, on_device(llm), first=2)
    return report(
        llm,
        **{f"{name}_ms": 1e3 * statistics.median(seconds) for name, seconds in times.items()},
        share_of_step=statistics.median(ratios(times["product"], times["step"])),
    )


def _dense(llm: LLM, length: int, response: int) -> Engine:
    """An engine that computes whole canvases of `length`, a token a step."""
    params = SamplingParams(max_tokens=response, steps=response, ignore_eos=True)
    return engine_of(llm, random_requests(llm, 1, params, llm.session.policy("none"), length - response))


def selection(args: argparse.Namespace) -> dict[str, Any]:
    """The cost of dLLM-Cache's selection when next to no row is selected.

    Times the steps between refreshes. For each `select` all response rows are compared and one is computed. The same
    steps with all rows held (`ratio` 0), and the bare projections that comparing needs, stand beside them. "random"
    computes as many rows and compares none, so a selection's time above "random" is the comparison. The time of
    "random" above held rows is the reading of all weights for one row. dLLM-Cache's paper names this cost as its
    weakness: it does not fall with the ratio.
    """
    if args.response < args.turns + 3:
        raise ConfigError(f"--response must be at least --turns + 3, {args.turns + 3}: a turn settles a token")
    length = args.prompt + args.response
    llm = open_random(args, max_num_seqs=args.batch, max_model_len=length, store_budget_tokens=0)
    params = SamplingParams(max_tokens=args.response, seed=0, ignore_eos=True)

    def steps(**settings: object) -> Callable[[], object]:
        """Steps of requests that are refreshed in their first step and never again."""
        policy = llm.session.policy("dllm-cache", {"prompt_interval": 10**6, "response_interval": 10**6, **settings})
        return engine_of(llm, random_requests(llm, args.batch, params, policy, args.prompt)).step

    # A ratio a little above one row of the response, which rounds down to one row.
    calls = {HELD: steps(ratio=0.0)}
    calls |= {each: steps(ratio=1.5 / args.response, select=each) for each in SELECTS}
    calls[BARE] = _value_projections(llm, args.batch * args.response)
    # The first step computes all rows, the second warms up.
    times = in_turns(calls, args.turns, on_device(llm), first=2)
    medians = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    return report(
        llm,
        step_ms={name: ms for name, ms in medians.items() if name != BARE},
        bare_projections_ms=medians[BARE],
        over_held_ms={select: medians[select] - medians[HELD] for select in SELECTS},
        over_random_ms={select: medians[select] - medians["random"] for select in ("value", "key")},
    )


def _value_projections(llm: LLM, rows: int) -> Callable[[], None]:
    """A call that projects V of `rows` rows in every layer but the first."""
    c = llm.loaded.config
    x = torch.randn(rows, c.hidden, dtype=llm.model.dtype, device=llm.model.device)

    @torch.inference_mode()
    def run() -> None:
        for layer in llm.loaded.weights.layers[1:]:
            F.linear(x, layer.qkv[(c.heads + c.kv_heads) * c.head_dim :])

    return run


def large(args: argparse.Namespace) -> dict[str, Any]:
    """A model of a laptop's size: CPU time and memory of its start, and a step beside its matrix products alone.

    Opens the preset with random weights, and answers one request under `block-dual`. Steps between refreshes take
    turns with products of as many rows, those of the output matrix included. Times are those of the process' CPU, of
    all threads together, and `step_s` is what passes meanwhile. The peak of memory is the operating system's, that of
    Python and PyTorch included.
    """
    if args.block < 4:
        raise ConfigError(f"--block must be at least 4, got {args.block}")
    before, start = _peak_bytes(), time.process_time()
    llm = LLM(
        args.model,
        load_format="dummy",
        dtype=args.dtype,
        device="cpu",
        threads=args.threads,
        quantization=None if args.quantization == "none" else args.quantization,
        engine=EngineConfig(store_budget_tokens="auto"),
    )
    started, peak, weights = time.process_time() - start, _peak_bytes(), llm.loaded.weights.nbytes
    params = SamplingParams(max_tokens=args.block, block_length=args.block, steps=args.block, ignore_eos=True)
    engine = llm.engine
    for request in random_requests(llm, 1, params, llm.session.policy("block-dual"), args.prompt):
        engine.add(request)
    first, passed = cpu_seconds(engine.step), list[float]()

    def step() -> None:
        began = time.perf_counter()
        engine.step()
        passed.append(time.perf_counter() - began)

    products = bare_pass(llm, [args.block] * llm.loaded.config.layers, args.block, keys=0)
    times = in_turns({"step": step, "products": products}, min(args.turns, args.block - 3), cpu_seconds)
    return report(
        llm,
        start_cpu_s=started,
        weight_bytes=weights,
        peak_bytes=peak,
        peak_over_weights=(peak - before) / weights,
        peak_bytes_after=_peak_bytes(),
        kv_tokens=engine.pool.pages * engine.pool.page_size,
        kv_bytes=engine.pool.nbytes,
        max_model_len=engine.max_model_len,
        store_tokens=engine.memory.store_budget,
        first_pass_cpu_s=first,
        step_s=statistics.median(passed[1:]),
        **{f"{name}_cpu_s": statistics.median(seconds) for name, seconds in times.items()},
        **median_and_range(ratios(times["step"], times["products"]), "ratio"),
    )


def _peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
