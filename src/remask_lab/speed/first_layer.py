"""What sharing the first layer's K/V of a prefix could save: that product alone, against a whole step under `none`.

    python -m remask_lab.speed.first_layer [--model llada-100m] [--length 1024] [--ratio 0.9]

K and V of the first layer depend on token and position alone, so they could be shared exactly. Both are timed in turns
in one run.
"""

import argparse
import json
import statistics

import torch
import torch.nn.functional as F

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.request import Request
from remask_lab.records.machine import commit, machine
from remask_lab.speed.bare import timed


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llada-100m")
    parser.add_argument("--length", type=int, default=1024, help="canvas length")
    parser.add_argument("--ratio", type=float, default=0.9, help="share of the canvas that the prefix takes")
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    limits = EngineConfig(max_num_seqs=1, max_model_len=args.length)
    llm = LLM(args.model, load_format="dummy", dtype=args.dtype, device=args.device, engine=limits)
    config, layer = llm.loaded.config, llm.loaded.weights.layers[0]
    rows = torch.randn(int(args.ratio * args.length), config.hidden, dtype=llm.model.dtype, device=llm.model.device)
    keys = layer.qkv[config.heads * config.head_dim :]
    prompt = torch.randint(0, config.vocab, (args.length - args.response,)).tolist()
    params = SamplingParams(max_tokens=args.response, steps=args.response, ignore_eos=True)
    llm.engine.add(Request("0", prompt, params, policy=llm.policy("none")))
    products, steps = [], []
    for turn in range(args.turns + 2):
        product, step = timed(llm, lambda: F.linear(rows, keys)), timed(llm, llm.engine.step)
        if turn >= 2:
            products.append(product)
            steps.append(step)
    llm.engine.cancel("0")
    result = {
        "machine": machine(llm),
        "commit": commit(),
        "model": args.model,
        "length": args.length,
        "ratio": args.ratio,
        "product_ms": 1e3 * statistics.median(products),
        "step_ms": 1e3 * statistics.median(steps),
        "share_of_step": statistics.median(p / s for p, s in zip(products, steps, strict=True)),
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
