"""`remask decide`: answer the questions of a JSON file by the model's distribution over labels."""

import argparse
import json
import sys

from remask.checks.values import json_object
from remask.cli.lines import open_text
from remask.cli.options import engine_config, object_option, open_llm
from remask.request.questions import Decisions


def run(args: argparse.Namespace) -> int:
    """Print the answers by the ids of their questions, and the work, as one JSON object."""
    if args.input == "-":
        text = sys.stdin.read()
    else:
        with open_text(args.input, "r") as source:
            text = source.read()
    asked = Decisions.from_mapping(json_object(f"--input {args.input}", text))
    settings = object_option("--cache-config", args.cache_config)
    with open_llm(args, args.cache, dict(settings), engine_config(args)) as llm:
        found = llm.decide(
            asked.state, asked.questions, together=asked.together, calibrate=asked.calibrate, end_turn=asked.end_turn
        )
    answers = {name: decision.content for name, decision in found.answers.items()}
    usage = found.usage
    work = {name: getattr(usage, name) for name in ("prompt_tokens", "cached_tokens", "forwards", "row_layers")}
    print(json.dumps({"answers": answers, "work": work}, ensure_ascii=False))
    return 0
