"""A model of a laptop's size: CPU time and memory of its start, and a step beside its matrix products alone.

    python -m remask_lab.speed.large [--model llada-8b] [--quantization int8] [--block 32] [--threads 1] [--turns 5]

Opens the preset with random weights, and answers one request under `block-dual`. Steps between refreshes take turns
with products of as many rows, those of the output matrix included. Times are those of the process' CPU, of all threads
together, and `step_s` is what passes meanwhile. The peak of memory is the operating system's, that of Python and
PyTorch included.
"""

import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.request import Request
from remask_lab.arguments.common import check_least
from remask_lab.speed.bare import bare_pass
from remask_lab.speed.command import command_parser, print_report, run_command

CACHE = "block-dual"


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--model", default="llada-8b", help="preset whose shape is taken (default llada-8b)")
    parser.add_argument("--quantization", default="int8", help="int8, int4, or none")
    parser.add_argument("--dtype", default="auto", help="of what is not quantised (default auto)")
    parser.add_argument("--block", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=64, help="tokens before the response of one block")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--turns", type=int, default=5)
    args = parser.parse_args()
    check_least(args, block=4, prompt=1, threads=1, turns=1)
    kind: Any = None if args.quantization == "none" else args.quantization
    before, start = peak_bytes(), time.process_time()
    llm = LLM(
        args.model,
        load_format="dummy",
        dtype=args.dtype,
        device="cpu",
        threads=args.threads,
        quantization=kind,
        engine=EngineConfig(store_budget_tokens="auto"),
    )
    started, peak = time.process_time() - start, peak_bytes()
    engine, weights = llm.engine, llm.loaded.weights.nbytes
    params = SamplingParams(max_tokens=args.block, block_length=args.block, steps=args.block, ignore_eos=True)
    prompt = [number % llm.loaded.config.vocab for number in range(args.prompt)]
    engine.add(Request("0", prompt, params, policy=llm.policy(CACHE)))
    first = cpu_seconds(engine.step)
    products = bare_pass(llm, [args.block] * llm.loaded.config.layers, args.block, keys=0)
    cpu_seconds(engine.step), cpu_seconds(products)  # the first of a shape makes kernels
    pairs, passed = [], []
    for _ in range(min(args.turns, args.block - 3)):
        start = time.perf_counter()
        step = cpu_seconds(engine.step)
        passed.append(time.perf_counter() - start)
        pairs.append((step, cpu_seconds(products)))
    ratios = [step / bare for step, bare in pairs]
    engine.cancel("0")
    print_report(
        llm,
        **{name: getattr(args, name) for name in ("model", "quantization", "block", "prompt")},
        start_cpu_s=started,
        weight_bytes=weights,
        peak_bytes=peak,
        peak_over_weights=(peak - before) / weights,
        peak_bytes_after=peak_bytes(),
        kv_tokens=engine.pool.pages * engine.pool.page_size,
        kv_bytes=engine.pool.nbytes,
        max_model_len=engine.max_model_len,
        store_tokens=engine.memory.store_budget,
        first_pass_cpu_s=first,
        step_s=statistics.median(passed),
        step_cpu_s=statistics.median(step for step, _ in pairs),
        products_cpu_s=statistics.median(bare for _, bare in pairs),
        ratio=statistics.median(ratios),
        ratio_range=[min(ratios), max(ratios)],
    )


def cpu_seconds(act: Callable[[], object]) -> float:
    """CPU time of this process in a call."""
    start = time.process_time()
    act()
    return time.process_time() - start


def peak_bytes() -> int:
    """The most memory that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    sys.exit(run_command(main))
