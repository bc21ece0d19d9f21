"""What sharing a prefix's K/V of the first layer could save: the time of that product in a whole step under `none`.

    python -m remask_lab.speed.first_layer [--model llada-100m] [--length 1024] [--ratio 0.9]

K and V of the first layer depend only on token and position, so they could be shared exactly. The product and the step
are timed in turns in one run.
"""

import statistics
import sys

import torch
import torch.nn.functional as F

from remask import EngineConfig, SamplingParams
from remask.engine.request import Request
from remask_lab.ops.clock import time_call
from remask_lab.speed.command import add_model_options, command_parser, open_random, print_report, run_command


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--length", type=int, default=1024, help="canvas length")
    parser.add_argument("--ratio", type=float, default=0.9, help="share of the canvas that the prefix takes")
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--turns", type=int, default=9)
    add_model_options(parser, "llada-100m")
    args = parser.parse_args()
    limits = EngineConfig(max_num_seqs=1, max_model_len=args.length)
    llm = open_random(args, limits)
    config, layer = llm.loaded.config, llm.loaded.weights.layers[0]
    rows = torch.randn(int(args.ratio * args.length), config.hidden, dtype=llm.model.dtype, device=llm.model.device)
    keys = layer.qkv[config.heads * config.head_dim :]
    prompt = torch.randint(0, config.vocab, (args.length - args.response,)).tolist()
    params = SamplingParams(max_tokens=args.response, steps=args.response, ignore_eos=True)
    llm.engine.add(Request("0", prompt, params, policy=llm.policy("none")))
    products, steps = [], []
    for turn in range(args.turns + 2):
        product = time_call(lambda: F.linear(rows, keys), llm.model.device)
        step = time_call(llm.engine.step, llm.model.device)
        if turn >= 2:
            products.append(product)
            steps.append(step)
    llm.engine.cancel("0")
    print_report(
        llm,
        model=args.model,
        length=args.length,
        ratio=args.ratio,
        product_ms=1e3 * statistics.median(products),
        step_ms=1e3 * statistics.median(steps),
        share_of_step=statistics.median(p / s for p, s in zip(products, steps, strict=True)),
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
