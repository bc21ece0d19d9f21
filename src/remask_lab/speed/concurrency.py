"""What running requests together gains, and what a prefix hit saves until the first settled token.

    python -m remask_lab.speed.concurrency [--cache bicache] [--requests 48]

Uses the bundled model. Eight at a time against one at a time take turns in one run; then single requests, each with a
prefix that the store does not hold, are set against the same requests once it does.
"""

import argparse
import json
import statistics
import time
from collections.abc import Sequence

from remask import LLM, EngineConfig, SamplingParams
from remask.policies import CachePolicy
from remask_lab.bench.workload import TRANSIT_SAMPLING, Task, bundled_workload
from remask_lab.records.machine import commit, machine


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", default="bicache")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    llm = LLM("bundled", dtype=args.dtype, device=args.device)
    policy = llm.policy(args.cache)
    sampling = SamplingParams.from_mapping(TRANSIT_SAMPLING)
    tasks = bundled_workload(llm, args.requests, 4, 11, sampling).tasks
    seconds(llm, policy, tasks[:8], 8)
    gains = []
    for _ in range(args.rounds):
        alone = seconds(llm, policy, tasks, 1)
        gains.append(alone / seconds(llm, policy, tasks, 8))
    misses, hits = first_settled(llm, policy, bundled_workload(llm, 12, 12, 12, sampling).tasks)
    result = {
        "machine": machine(llm),
        "commit": commit(),
        "cache": args.cache,
        "eight_at_a_time_gain": statistics.median(gains),
        "gain_range": [min(gains), max(gains)],
        "first_settled_miss_ms": 1e3 * statistics.median(misses),
        "first_settled_hit_ms": 1e3 * statistics.median(hits),
    }
    print(json.dumps(result, indent=2))


def seconds(llm: LLM, policy: CachePolicy, tasks: Sequence[Task], at_a_time: int) -> float:
    """Time of all tasks on an engine of their own."""
    engine = llm.new_engine(EngineConfig(max_num_seqs=at_a_time))
    start = time.perf_counter()
    for _ in llm.run([task.request.with_policy(policy) for task in tasks], engine=engine, progress=False):
        pass
    return time.perf_counter() - start


def first_settled(llm: LLM, policy: CachePolicy, tasks: Sequence[Task]) -> tuple[list[float], list[float]]:
    """Seconds until the first response token was final, on a miss and then on a hit of the same prefix."""
    engine = llm.new_engine(EngineConfig(max_num_seqs=1, store_budget_tokens=16384))
    misses: list[float] = []
    hits: list[float] = []
    for task in tasks:
        for times in (misses, hits):
            (output,) = llm.run([task.request.with_policy(policy)], engine=engine, progress=False)
            assert output.first_settled_s is not None
            assert bool(output.usage.cached_tokens) is (times is hits)
            times.append(output.first_settled_s)
    return misses, hits


if __name__ == "__main__":
    main()
