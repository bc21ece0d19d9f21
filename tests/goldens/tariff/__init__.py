"""A checkpoint on which reuse of a shared prefix in all layers fails, with requests. `README.md` says what they are."""

import json
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from remask import LLM, EngineConfig, SamplingParams
from remask.engine.request import Request

FOLDER = Path(__file__).parent
PARAMS = SamplingParams(max_tokens=8, steps=8, block_length=8, ignore_eos=True)


@cache
def lines() -> tuple[Mapping[str, Any], ...]:
    """The first 24 requests, as they stand in the file."""
    text = (FOLDER / "requests.jsonl").read_text(encoding="utf-8")
    return tuple(json.loads(line) for line in text.splitlines()[:24])


def requests() -> list[Request]:
    """The same, with their shared prefixes."""
    return [Request(line["id"], line["prompt_token_ids"], PARAMS, line["prefix_length"]) for line in lines()]


def open_model() -> LLM:
    """The model in float32, on an engine that runs all requests at once."""
    engine = EngineConfig(max_num_seqs=24, max_model_len=160, store_budget_tokens=8000)
    return LLM(str(FOLDER), dtype="float32", device="cpu", engine=engine)


def right(answers: Mapping[str, Sequence[int]]) -> int:
    """How many of these responses, by the request's id, name all four names."""
    return sum(tuple(answers[line["id"]][1::2]) == tuple(line["answer_token_ids"][1::2]) for line in lines())
