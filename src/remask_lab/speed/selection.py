"""The cost of dLLM-Cache's selection when next to no row is selected.

    python -m remask_lab.speed.selection [--model llada-100m] [--prompt 512] [--response 256]

Times the steps between refreshes. For each `select` all response rows are compared and one is computed. The same steps
with all rows held (`ratio` 0), and the bare projections that comparing needs, stand beside them. "random" computes as
many rows and compares none, so a selection's time above "random" is the comparison. The time of "random" above held
rows is the reading of all weights for one row. dLLM-Cache's paper names this cost as its weakness: it does not fall
with the ratio.
"""

import argparse
import statistics
import sys
from collections.abc import Callable

import torch
import torch.nn.functional as F

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.policies.dllm import SELECTS
from remask_lab.ops.clock import time_call
from remask_lab.speed.command import add_model_options, command_parser, open_random, print_report, run_command

HELD = "held"
BARE = "bare projections"


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--response", type=int, default=256)
    parser.add_argument("--turns", type=int, default=15)
    add_model_options(parser, "llada-100m")
    args = parser.parse_args()
    if args.response < args.turns + 3:
        parser.error(f"--response must be at least --turns + 3, {args.turns + 3}: a turn settles a token")
    limits = EngineConfig(max_num_seqs=args.batch, max_model_len=args.prompt + args.response, store_budget_tokens=0)
    llm = open_random(args, limits)
    calls: dict[str, Callable[[], object]] = {HELD: engine_of(llm, args, {"ratio": 0.0}).step}
    for select in SELECTS:
        # A ratio a little above one row of the response, which rounds down to one row.
        calls[select] = engine_of(llm, args, {"ratio": 1.5 / args.response, "select": select}).step
    calls[BARE] = bare_projections(llm, args.batch * args.response)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(args.turns + 2):
        for name, call in calls.items():
            seconds = time_call(call, llm.model.device)
            if turn >= 2:  # the first step computes all rows, the second warms up
                times[name].append(seconds)
    medians = {name: 1e3 * statistics.median(found) for name, found in times.items()}
    print_report(
        llm,
        model=args.model,
        batch=args.batch,
        prompt=args.prompt,
        response=args.response,
        step_ms={name: ms for name, ms in medians.items() if name != BARE},
        bare_projections_ms=medians[BARE],
        over_held_ms={select: medians[select] - medians[HELD] for select in SELECTS},
        over_random_ms={select: medians[select] - medians["random"] for select in ("value", "key")},
    )


def engine_of(llm: LLM, args: argparse.Namespace, settings: dict[str, object]) -> Engine:
    """Returns an engine whose requests are refreshed in their first step and never again."""
    never = {"prompt_interval": 10**6, "response_interval": 10**6}
    policy = llm.policy("dllm-cache", {**never, **settings})
    engine = llm.new_engine()
    params = SamplingParams(max_tokens=args.response, seed=0, ignore_eos=True)
    for number in range(args.batch):
        prompt = torch.randint(0, llm.loaded.config.vocab, (args.prompt,)).tolist()
        engine.add(Request(str(number), prompt, params, policy=policy))
    return engine


def bare_projections(llm: LLM, rows: int) -> Callable[[], None]:
    """Returns a call that projects V of `rows` rows in every layer but the first."""
    c = llm.loaded.config
    x = torch.randn(rows, c.hidden, dtype=llm.model.dtype, device=llm.model.device)
    first = (c.heads + c.kv_heads) * c.head_dim

    @torch.inference_mode()
    def run() -> None:
        for layer in llm.loaded.weights.layers[1:]:
            F.linear(x, layer.qkv[first:])

    return run


if __name__ == "__main__":
    sys.exit(run_command(main))
