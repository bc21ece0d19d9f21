"""BiCache's stored boundary state and one that refreshes recompute: the work saved, and the tokens equal to `none`'s.

    python -m remask_lab.speed.boundary

Runs on a small LLaDA model with random weights (`tests/goldens/llada`). The K/V of its prefixes drift strongly, so any
difference shows in the tokens.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from remask import LLM, EngineConfig, Output, SamplingParams
from remask.engine.request import Request
from remask_lab.bench.workload import token_agreement
from remask_lab.speed.command import command_parser, run_command

GOLDENS = Path(__file__).parents[3] / "tests" / "goldens"
PARAMS = SamplingParams(max_tokens=16, steps=16, ignore_eos=True)


def main() -> None:
    """Print one line for every depth, interval and boundary."""
    command_parser(__doc__).parse_args()
    engine = EngineConfig(max_num_seqs=16, max_model_len=512)
    llm = LLM(str(GOLDENS / "llada"), dtype="float32", device="cpu", engine=engine)
    prompts = json.loads((GOLDENS / "prompts.json").read_text(encoding="utf-8"))["shared_prefix"]
    requests = [Request(name, entry["ids"], PARAMS, entry["prefix_len"]) for name, entry in prompts.items()]
    reference = outputs(llm, requests, "none", {})
    for depth in (1, 2, 4):
        for interval in (1, 4, 16):
            for boundary in ("stored", "recomputed"):
                settings = {"depth": depth, "refresh_interval": interval, "boundary": boundary}
                found = outputs(llm, requests, "bicache", settings)
                equal = mean(token_agreement(found[name].token_ids, reference[name].token_ids) for name in found)
                saved = row_layers(reference) / row_layers(found)
                print(json.dumps({**settings, "equal": round(equal, 3), "work": round(saved, 2)}))


def outputs(llm: LLM, requests: Sequence[Request], cache: str, settings: dict[str, Any]) -> dict[str, Output]:
    """Outputs by the request's id, from a new engine."""
    policy = llm.policy(cache, settings)
    work = [request.with_policy(policy) for request in requests]
    return {output.id: output for output in llm.run(work, engine=llm.new_engine(), progress=False)}


def row_layers(found: Mapping[str, Output]) -> int:
    """Row-layers computed, without prefix-only passes."""
    return sum(output.usage.row_layers for output in found.values())


if __name__ == "__main__":
    sys.exit(run_command(main))
