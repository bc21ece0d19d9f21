"""none, reuse and BiCache in the BiCache paper's setting, on LLaDA-8B's shape with random weights.

    python -m remask_lab.speed.bicache_paper [--output result.json]

The shared prefix takes 0.759, 0.882, 0.901 and 0.945 of the prompt, on canvases of 1,600 to 4,096 tokens (LLaDA-8B's
limit), 256 new tokens in 128 steps, batch 1 and then 8, bfloat16. Depths come from the shipped LLaDA-8B table. Without
a CUDA device the command runs the same sweep on a small preset at an eighth of the canvas, and reports `real_scale`
false.
"""

import argparse
import json
import sys
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch

from remask import LLM, EngineConfig, SamplingParams
from remask.depth.find import DepthTable
from remask.machine.disk import write_whole
from remask.policies import BiCache
from remask.policies.depth_lookup import percent
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender
from remask_lab.bench.workload import random_workload
from remask_lab.speed.command import command_parser, run_command

CELLS = ((0.759, 1600), (0.882, 2400), (0.901, 3200), (0.945, 4096))  # (prefix share of the prompt, canvas)
STAND_IN = ("llada-100m", "float32")
TABLE = Path(str(files("remask"))) / "tables" / "llada-8b-instruct.json"


def main() -> None:
    """Measure every ratio and batch size, print each, and write one JSON object where `--output` asks for it."""
    parser = command_parser(__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--requests", type=int, default=8, help="requests per batch size and ratio")
    parser.add_argument("--output", help="file for the JSON")
    args = parser.parse_args()
    real = torch.cuda.is_available()
    model, dtype = ("llada-8b", "bfloat16") if real else STAND_IN
    new, steps = (256, 128) if real else (16, 8)
    llm = LLM(model, load_format="dummy", dtype=dtype, engine=EngineConfig(max_num_seqs=1, max_model_len=64))
    results = []
    for ratio, canvas in CELLS:
        for batch in (1, 8):
            # The stand-in model runs on an eighth of the canvas.
            results.append(measure(llm, ratio, canvas if real else canvas // 8, new, steps, batch, args))
            print(json.dumps(results[-1]))
    report = {"real_scale": real, "model": model, "runs": results}
    if args.output:
        write_whole("the result", args.output, json.dumps(report, indent=2) + "\n")


def measure(
    llm: LLM, ratio: float, canvas: int, new: int, steps: int, batch: int, args: argparse.Namespace
) -> dict[str, Any]:
    """Measure one cell: the three policies side by side."""
    prefix = round(ratio * (canvas - new))
    table_depth = DepthTable.load(TABLE).lookup.depth(prefix, canvas)
    # The table is for 32 layers. A smaller stand-in takes the same share of its own layers.
    depth = max(1, round(table_depth * llm.loaded.config.layers / 32))
    sampling = SamplingParams(max_tokens=new, steps=steps, ignore_eos=True)
    workload = random_workload(llm, max(batch, args.requests), 1, 0, sampling, prefix, canvas - new - prefix)
    engine = EngineConfig(max_num_seqs=batch, max_model_len=canvas)
    contenders = [
        Contender("none", llm.policy("none")),
        Contender("reuse", llm.policy("reuse")),
        Contender(f"bicache depth={depth}", BiCache(depth=depth)),
    ]
    record = run_bench(llm, workload, contenders, args.rounds, engine, progress=False)
    return {
        "prefix_percent": percent(prefix, canvas),
        "canvas": canvas,
        "batch": batch,
        "about": record.about,
        **record.data,
    }


if __name__ == "__main__":
    sys.exit(run_command(main))
