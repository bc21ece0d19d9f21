"""What the engine adds to the matrix products and attention of a step under `none`.

    python -m remask_lab.speed.overhead [--model llada-100m] [--length 1024] [--dtype float32]

Times whole engine steps against the bare products and attention of the same shapes, taking turns in one run.
"""

import argparse
import json
import statistics

import torch

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.request import Request
from remask_lab.records.machine import commit, machine
from remask_lab.speed.bare import bare_pass, timed


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llada-100m")
    parser.add_argument("--length", type=int, default=1024, help="canvas length")
    parser.add_argument("--response", type=int, default=64, help="masked positions, all of which are predicted")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--turns", type=int, default=15)
    args = parser.parse_args()
    engine_config = EngineConfig(max_num_seqs=1, max_model_len=args.length)
    llm = LLM(args.model, load_format="dummy", dtype=args.dtype, device=args.device, engine=engine_config)
    prompt = torch.randint(0, llm.loaded.config.vocab, (args.length - args.response,)).tolist()

    params = SamplingParams(max_tokens=args.response, steps=args.response, ignore_eos=True)
    bare = bare_pass(llm, [args.length] * llm.loaded.config.layers, args.response, args.length)
    engine = llm.engine
    engine.add(Request("0", prompt, params, policy=llm.policy("none")))
    ratios, ours, theirs = [], [], []
    for turn in range(args.turns + 2):
        ours.append(timed(llm, lambda: engine.step()))
        theirs.append(timed(llm, bare))
        if turn >= 2:
            ratios.append(ours[-1] / theirs[-1])
    engine.cancel("0")
    result = {
        "machine": machine(llm),
        "commit": commit(),
        "model": args.model,
        "length": args.length,
        "engine_step_ms": 1e3 * statistics.median(ours[2:]),
        "bare_step_ms": 1e3 * statistics.median(theirs[2:]),
        "ratio": statistics.median(ratios),
        "ratio_range": [min(ratios), max(ratios)],
    }
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
