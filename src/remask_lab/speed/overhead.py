"""The time that the engine adds to the matrix products and attention of a step under `none`.

    python -m remask_lab.speed.overhead [--model llada-100m] [--length 1024] [--dtype float32]

Times whole engine steps, and the bare products and attention of the same shapes. Both take turns in one run.
"""

import statistics
import sys

import torch

from remask import EngineConfig, SamplingParams
from remask.engine.request import Request
from remask_lab.ops.clock import time_call
from remask_lab.speed.bare import bare_pass
from remask_lab.speed.command import add_model_options, command_parser, open_random, print_report, run_command


def main() -> None:
    """Measure and print one JSON object."""
    parser = command_parser(__doc__)
    parser.add_argument("--length", type=int, default=1024, help="canvas length")
    parser.add_argument("--response", type=int, default=64, help="masked positions, all of which are predicted")
    parser.add_argument("--turns", type=int, default=15)
    add_model_options(parser, "llada-100m")
    args = parser.parse_args()
    engine_config = EngineConfig(max_num_seqs=1, max_model_len=args.length)
    llm = open_random(args, engine_config)
    prompt = torch.randint(0, llm.loaded.config.vocab, (args.length - args.response,)).tolist()

    params = SamplingParams(max_tokens=args.response, steps=args.response, ignore_eos=True)
    bare = bare_pass(llm, [args.length] * llm.loaded.config.layers, args.response, args.length)
    engine = llm.engine
    engine.add(Request("0", prompt, params, policy=llm.policy("none")))
    ratios, ours, theirs = [], [], []
    for turn in range(args.turns + 2):
        ours.append(time_call(engine.step, llm.model.device))
        theirs.append(time_call(bare, llm.model.device))
        if turn >= 2:
            ratios.append(ours[-1] / theirs[-1])
    engine.cancel("0")
    print_report(
        llm,
        model=args.model,
        length=args.length,
        engine_step_ms=1e3 * statistics.median(ours[2:]),
        bare_step_ms=1e3 * statistics.median(theirs[2:]),
        ratio=statistics.median(ratios),
        ratio_range=[min(ratios), max(ratios)],
    )


if __name__ == "__main__":
    sys.exit(run_command(main))
