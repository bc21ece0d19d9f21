"""The start of a model of 8B, and a step of it beside its matrix products."""

import argparse
import resource
import statistics
import sys
import time
from typing import Any

from remask import LLM, EngineConfig, SamplingParams
from remask.errors import ConfigError
from remask_lab.bench.workload import random_workload
from remask_lab.speed.command import cpu_seconds, in_turns, ratio_and_range, report
from remask_lab.speed.runs import bare_pass


def large(args: argparse.Namespace) -> dict[str, Any]:
    """A model of a laptop's size: CPU time and memory of its start, and a step beside its matrix products alone.

    Opens the preset with random weights, and answers one request under `block-dual`. Steps between refreshes take turns
    with products of as many rows, those of the output matrix included. Times are CPU seconds of all threads, except for
    `step_s`, the seconds that pass. The peak of memory is the operating system's, Python and PyTorch included.
    """
    if args.block < 4:
        raise ConfigError(f"--block must be at least 4, got {args.block}")
    peak_before = _peak_bytes()
    start = time.process_time()
    llm = LLM(
        args.model,
        load_format="dummy",
        dtype=args.dtype,
        device="cpu",
        threads=args.threads,
        quantization=None if args.quantization == "none" else args.quantization,
        engine=EngineConfig(store_budget_tokens="auto"),
    )
    start_seconds = time.process_time() - start
    peak = _peak_bytes()
    weights = llm.loaded.weights.nbytes
    params = SamplingParams(max_tokens=args.block, block_length=args.block, steps=args.block, ignore_eos=True)
    engine = llm.engine
    policy = llm.session.policy("block-dual")
    for task in random_workload(llm, requests=1, sampling=params, prompt_tokens=args.prompt).tasks:
        engine.add(task.request.with_policy(policy))
    first_pass = cpu_seconds(engine.step)
    step_seconds: list[float] = []

    def step() -> None:
        begin = time.perf_counter()
        engine.step()
        step_seconds.append(time.perf_counter() - begin)

    products = bare_pass(llm, [args.block] * llm.loaded.config.layers, args.block, keys=0)
    times = in_turns({"step": step, "products": products}, min(args.turns, args.block - 3), cpu_seconds)
    return report(
        llm,
        start_cpu_s=start_seconds,
        weight_bytes=weights,
        peak_bytes=peak,
        peak_over_weights=(peak - peak_before) / weights,
        peak_bytes_after=_peak_bytes(),
        kv_tokens=engine.pool.page_count * engine.pool.page_size,
        kv_bytes=engine.pool.nbytes,
        max_model_len=engine.max_model_len,
        store_tokens=engine.memory.store_budget,
        first_pass_cpu_s=first_pass,
        step_s=statistics.median(step_seconds[1:]),
        **{f"{name}_cpu_s": statistics.median(seconds) for name, seconds in times.items()},
        **ratio_and_range(times["step"], times["products"]),
    )


def _peak_bytes() -> int:
    """The peak of this process' memory so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
