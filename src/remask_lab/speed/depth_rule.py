"""The depth at which BiCache's accuracy falls, beside the depth that each rule of a depth table picks.

    python -m remask_lab.speed.depth_rule

Runs on a small trained model whose prefix rows must see the question (`tests/goldens/tariff`). Prints a JSON line for
`none` and for each boundary and depth, then one for each rule, profiled on canvases of one request and of several.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from remask import LLM, EngineConfig, Output, SamplingParams
from remask.depth.conversations import TokenPrompts
from remask.depth.limits import Floats, depth_at
from remask.depth.profile import Cuts, rule_limits
from remask.depth.rule import RULES
from remask.depth.settings import ProfileSettings
from remask.engine.request import Request
from remask_lab.records.interval import clustered
from remask_lab.speed.command import command_parser, run_command

FOLDER = Path(__file__).parents[3] / "tests" / "goldens" / "tariff"
PARAMS = SamplingParams(max_tokens=8, steps=8, block_length=8, ignore_eos=True)
RATIO = 85  # of its requests, in percent
CANVASES = {"one request": 144, "several requests": 400}  # tokens


def main() -> None:
    """Print accuracy and row-layers by depth and boundary, then depths by rule."""
    parser = command_parser(__doc__)
    parser.add_argument("--requests", type=int, default=100, help="how many of its 100 requests (default all)")
    parser.add_argument("--samples", type=int, default=32, help="requests of a profile (default 32)")
    args = parser.parse_args()
    lines, llm = read_lines(args.requests), open_model()
    print(json.dumps({"cache": "none", **measure(llm, lines, "none", {})}))
    for boundary in ("stored", "recomputed"):
        for depth in range(1, llm.loaded.config.layers + 1):
            settings = {"depth": depth, "boundary": boundary}
            print(json.dumps({**settings, **measure(llm, lines, "bicache", settings)}), flush=True)
    prompts = TokenPrompts("its requests", tuple(tuple(line["prompt_token_ids"]) for line in lines))
    curves = {name: similarities(llm, prompts, canvas, args.samples) for name, canvas in CANVASES.items()}
    for rule in RULES:
        depths = {
            name: depth_at(rule_limits(rule, (RATIO,), measured)[RATIO], ProfileSettings().tau)
            for name, measured in curves.items()
        }
        print(json.dumps({"rule": str(rule), **depths}))


def read_lines(count: int) -> list[dict[str, Any]]:
    """The first `count` requests of the model's folder, with their right answers."""
    text = (FOLDER / "requests.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()[:count]]


def open_model() -> LLM:
    """The model, in float32 on the CPU."""
    limits = EngineConfig(max_num_seqs=16, max_model_len=160, store_budget_tokens=4096)
    return LLM(str(FOLDER), dtype="float32", device="cpu", engine=limits)


def is_right(line: Mapping[str, Any], output: Output) -> bool:
    """Whether all names of an answer are right; they stand at odd places."""
    right: bool = list(output.token_ids[1::2]) == line["answer_token_ids"][1::2]
    return right


def measure(llm: LLM, lines: Sequence[Mapping[str, Any]], cache: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Share of answers in which all names are right, its 95 % interval, and row-layers without prefix-only passes."""
    policy = llm.policy(cache, settings)
    work = [
        Request(line["id"], line["prompt_token_ids"], PARAMS, line["prefix_length"]).with_policy(policy)
        for line in lines
    ]
    found = {output.id: output for output in llm.run(work, engine=llm.new_engine(), progress=False)}
    right = [is_right(line, found[line["id"]]) for line in lines]
    prefixes = [tuple(line["prompt_token_ids"][: line["prefix_length"]]) for line in lines]
    return {
        "accuracy": round(sum(right) / len(lines), 3),
        "interval": [round(bound, 3) for bound in clustered(right, prefixes)],
        "row_layers": sum(output.usage.row_layers for output in found.values()),
    }


def similarities(llm: LLM, prompts: TokenPrompts, canvas: int, samples: int) -> list[Floats]:
    """Similarities of each request at `RATIO`, [1, layers]."""
    cuts = Cuts(llm, prompts, ProfileSettings(ratios=(RATIO,), canvas=canvas, response=PARAMS.max_tokens))
    return [cuts.measure(number, lambda: None) for number in range(samples)]


if __name__ == "__main__":
    sys.exit(run_command(main))
