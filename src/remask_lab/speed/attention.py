"""Attention beside PyTorch's fused attention of the same shape, and what a leased prefix costs a cached step.

    python -m remask_lab.speed.attention [--model llada-100m] [--capped gidd-100m] [--dtype float32]

Everything is a ratio of CPU times of one thread that takes turns with itself:

- `one_run`, `behind_a_prefix`: the rows of a block attend to a canvas that lies in one run of slots, and to one whose
  leading part is leased, over fused attention to one run.
- `capped`: a whole canvas with capped scores and a sink, over fused attention without either.
- `leased_step`: a cached engine step under `bicache+block-dual` over one under `block-dual`. Both compute one block.
"""

import statistics
import sys
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.nn.functional as F

from remask import LLM, EngineConfig, SamplingParams
from remask.checkpoint.presets import preset
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError, IntegrityError
from remask.model.attention import Sink
from remask.model.attention_torch import TorchAttention
from remask.model.config import ModelConfig
from remask.model.work_list import WorkList, WorkListBuilder
from remask_lab.arguments.common import check_least
from remask_lab.speed.command import add_model_options, command_parser, open_random, print_report, run_command


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--capped", default="gidd-100m", help="preset with capped scores (default gidd-100m)")
    parser.add_argument("--canvas", type=int, default=1024, help="positions of a canvas; twice as many of a capped one")
    parser.add_argument("--block-length", type=int, default=32)
    parser.add_argument("--turns", type=int, default=15)
    add_model_options(parser, "llada-100m")
    args = parser.parse_args()
    check_least(args, canvas=4, block_length=4, turns=1)
    length, block = args.canvas, args.block_length
    if length < 4 * block:
        raise ConfigError(f"--canvas must be at least four blocks of {block}, got {length}")
    torch.set_num_threads(1)
    llm = open_random(args, EngineConfig(max_num_seqs=1, max_model_len=length, store_budget_tokens=length))
    dtype, prefix = llm.model.dtype, (length - 2 * block) * 9 // 10
    plain, capped = llm.loaded.config, preset(args.capped)
    ratios = {
        "one_run": over_fused(plain, block, [length], dtype, args.turns),
        "behind_a_prefix": over_fused(plain, block, [prefix, length - prefix], dtype, args.turns),
        "capped": over_fused(capped, 2 * length, [2 * length], dtype, args.turns),
        "leased_step": leased_step(llm, prefix, length, block, args.turns),
    }
    print_report(llm, model=args.model, capped=args.capped, canvas=length, block_length=block, ratios=ratios)


def over_fused(
    config: ModelConfig, rows: int, runs: list[int], dtype: torch.dtype, turns: int
) -> dict[str, float | list[float]]:
    """Times of attention of `rows` rows to runs of slots, with a gap between them, over those of fused attention."""
    slots = sum(runs) + len(runs)
    q = torch.randn(rows, config.heads, config.head_dim, dtype=dtype)
    k, v = (torch.randn(slots, config.kv_heads, config.head_dim, dtype=dtype) for _ in range(2))
    one: Sink = (k[0], v[0])
    work, attention = work_of(rows, runs), TorchAttention(config.score_cap)
    whole = [x.transpose(0, 1)[None] for x in (q, k[: sum(runs)], v[: sum(runs)])]

    def ours() -> None:
        attention(q, k, v, work, one if config.sink else None)

    def fused() -> None:
        F.scaled_dot_product_attention(whole[0], whole[1], whole[2], enable_gqa=config.heads != config.kv_heads)

    return ratio({"ours": ours, "fused": fused}, turns)


def work_of(rows: int, runs: list[int]) -> WorkList:
    """All rows see all of `runs`, which stand one slot apart from each other."""
    starts = np.cumsum([0, *(count + 1 for count in runs[:-1])])
    slots = np.concatenate([np.arange(start, start + count) for start, count in zip(starts, runs, strict=True)])
    builder = WorkListBuilder()
    builder.add(0, rows, builder.slots(slots), len(slots), None)
    return builder.list()


def leased_step(llm: LLM, prefix: int, length: int, block: int, turns: int) -> dict[str, float | list[float]]:
    """Times of steps that compute one block behind a leased prefix, over those of such steps without one."""
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, llm.loaded.config.vocab, length - 2 * block).tolist()
    params = SamplingParams(max_tokens=2 * block, block_length=block, ignore_eos=True)
    depth = {"depth": llm.loaded.config.layers // 2, "refresh_interval": None}
    engines: dict[str, Engine] = {}
    for name, cache, settings in (("ours", "bicache+block-dual", depth), ("fused", "block-dual", None)):
        engine = engines[name] = llm.new_engine()
        engine.add(Request(name, tokens, params, prefix, llm.policy(cache, settings)))
        while engine.stats.steps - engine.stats.prefix_passes < 2:  # the pass that fills the cache, and a cached one
            before = engine.stats.row_layers
            engine.step()
        if engine.stats.row_layers - before != block * llm.loaded.config.layers:
            raise IntegrityError(f"{cache}: a cached step computes {engine.stats.row_layers - before} row-layers")
    return ratio({name: engine.step for name, engine in engines.items()}, min(turns, block - 3))


def ratio(calls: Mapping[str, Callable[[], object]], turns: int) -> dict[str, float | list[float]]:
    """Median and range of the time of "ours" over that of "fused", which take turns; the first turn warms up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    with torch.inference_mode():
        for _ in range(turns + 1):
            for name, call in calls.items():
                start = time.thread_time()
                call()
                seconds[name].append(time.thread_time() - start)
    ratios = [ours / fused for ours, fused in zip(seconds["ours"][1:], seconds["fused"][1:], strict=True)]
    return {
        "ratio": statistics.median(ratios),
        "range": [min(ratios), max(ratios)],
        "ours_ms": 1e3 * statistics.median(seconds["ours"][1:]),
        "beside_ms": 1e3 * statistics.median(seconds["fused"][1:]),
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
