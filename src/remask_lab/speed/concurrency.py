"""The gain of running requests together, and the time that a prefix hit saves until the first settled token.

    python -m remask_lab.speed.concurrency [--cache bicache] [--requests 48]

Runs the bundled model. Eight requests at a time and one at a time take turns in one run. Then single requests run
twice: first the store does not hold their prefix, then it does.
"""

import statistics
import sys
import time
from collections.abc import Sequence

from remask import LLM, EngineConfig, SamplingParams
from remask.policies import CachePolicy
from remask_lab.bench.workload import TRANSIT_SAMPLING, Task, transit_workload
from remask_lab.speed.command import add_model_options, command_parser, print_report, run_command


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--cache", default="bicache")
    parser.add_argument("--requests", type=int, default=48)
    parser.add_argument("--rounds", type=int, default=3)
    add_model_options(parser)
    args = parser.parse_args()
    llm = LLM("bundled-transit", dtype=args.dtype, device=args.device)
    policy = llm.policy(args.cache)
    sampling = SamplingParams.from_mapping(TRANSIT_SAMPLING)
    tasks = transit_workload(llm, args.requests, 4, 11, sampling).tasks
    seconds(llm, policy, tasks[:8], 8)
    gains = []
    for _ in range(args.rounds):
        alone = seconds(llm, policy, tasks, 1)
        gains.append(alone / seconds(llm, policy, tasks, 8))
    misses, hits = first_settled(llm, policy, transit_workload(llm, 12, 12, 12, sampling).tasks)
    print_report(
        llm,
        cache=args.cache,
        eight_at_a_time_gain=statistics.median(gains),
        gain_range=[min(gains), max(gains)],
        first_settled_miss_ms=1e3 * statistics.median(misses),
        first_settled_hit_ms=1e3 * statistics.median(hits),
    )


def seconds(llm: LLM, policy: CachePolicy, tasks: Sequence[Task], at_a_time: int) -> float:
    """Seconds of all tasks on a new engine."""
    engine = llm.new_engine(EngineConfig(max_num_seqs=at_a_time))
    start = time.perf_counter()
    for _ in llm.run([task.request.with_policy(policy) for task in tasks], engine=engine, progress=False):
        pass
    return time.perf_counter() - start


def first_settled(llm: LLM, policy: CachePolicy, tasks: Sequence[Task]) -> tuple[list[float], list[float]]:
    """Seconds until the first response token is final, on a miss and then on a hit of the same prefix."""
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
    sys.exit(run_command(main))
