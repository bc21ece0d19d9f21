"""Recorded decodes of requests whose documents stand anywhere: `python -m tests.goldens.parts` writes the file anew.

They are what the oracle decoded when it was written: oracle and engine cannot change together unnoticed.
"""

import json
from pathlib import Path
from typing import Any

from tests import goldens
from tests.oracles.decode import decode, load

FILE = Path(__file__).parent / "parts.json"
PARTS = [{"start": 1, "length": 6}, {"start": 7, "length": 5}, {"start": 15, "length": 4}]
CACHES: list[tuple[str, dict[str, Any]]] = [
    ("reuse", {}),
    ("bicache", {"depth": 2, "refresh_interval": 3}),
    ("bicache", {"depth": 1, "refresh_interval": 2, "boundary": "recomputed"}),
    ("acache", {"ratio": 0.3}),
]


def lines() -> list[dict[str, Any]]:
    """What is asked for, of two models."""
    sampling = {
        "llada": {"max_tokens": 8, "block_length": 4, "steps": 8, "remasking": "low_confidence"},
        "dream": {"max_tokens": 8, "block_length": 8, "steps": 8, "remasking": "entropy"},
    }
    prompt = [3 + 7 * place % 200 for place in range(22)]
    what = {"prompt_token_ids": prompt, "segments": PARTS}
    return [
        {**what, "model": model, "sampling": own, "cache": cache, "cache_config": config}
        for model, own in sampling.items()
        for cache, config in CACHES
    ]


def decoded(line: dict[str, Any]) -> dict[str, Any]:
    """What the oracle makes of a line: tokens, what each pass wrote, and the rows that it computed."""
    config = line["cache_config"]
    found = decode(load(goldens.model_dir(line["model"])), line, config.get("boundary", "stored"))
    transfers = [[number, positions, tokens] for number, positions, tokens in found.transfers]
    return {"output_ids": found.output_ids, "transfers": transfers, "row_layers": found.row_layers}


def recorded() -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each line, and what was recorded of it."""
    return list(zip(lines(), json.loads(FILE.read_text(encoding="utf-8")), strict=True))


if __name__ == "__main__":
    text = ",\n".join(json.dumps(decoded(line)) for line in lines())
    FILE.write_text(f"[\n{text}\n]\n", encoding="utf-8")
