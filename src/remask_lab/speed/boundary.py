"""BiCache's stored boundary state against one recomputed on refreshes: work saved, and tokens equal to `none`'s.

    python -m remask_lab.speed.boundary

Runs on a small LLaDA model with random weights (`tests/goldens/llada`), on which a prefix's K/V drift strongly and any
difference shows in the tokens.
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from remask import LLM, EngineConfig, Output, SamplingParams
from remask.engine.request import Request
from remask_lab.bench.workload import token_agreement

GOLDENS = Path(__file__).parents[3] / "tests" / "goldens"
PARAMS = SamplingParams(max_tokens=16, steps=16, ignore_eos=True)


def main() -> None:
    """Print one line for every depth, interval and boundary."""
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
                print(
                    json.dumps({**settings, "equal": round(equal, 3), "work": round(work(reference) / work(found), 2)})
                )


def outputs(llm: LLM, requests: Sequence[Request], cache: str, settings: dict[str, Any]) -> dict[str, Output]:
    """Answers by id, from an engine of their own."""
    policy = llm.policy(cache, settings)
    jobs = [request.with_policy(policy) for request in requests]
    return {output.id: output for output in llm.run(jobs, engine=llm.new_engine(), progress=False)}


def work(found: Mapping[str, Output]) -> int:
    """Row-layers computed, prefix-only passes left out."""
    return sum(output.usage.row_layers for output in found.values())


if __name__ == "__main__":
    main()
