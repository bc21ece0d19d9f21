"""Questions that people ask first (`questions.json`), so that the base answers them in its own words."""

import json
import random
from pathlib import Path


def questions(seed: int = 0) -> list[str]:
    """All of them in random order, each once: forms with each of their words, and questions that stand alone."""
    told = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))
    found = {ask.format(word) for form in told["forms"] for ask in form["ask"] for word in form["of"]}
    return random.Random(seed).sample(sorted(found | set(told["alone"])), len(found | set(told["alone"])))
