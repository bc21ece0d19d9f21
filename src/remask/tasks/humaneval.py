"""HumanEval: Python functions to complete, as prompts for `remask profile`. Nothing here runs code.

`data/humaneval.jsonl` holds the first 40 problems of HumanEval and their reference solutions (OpenAI, MIT licence in
`data/LICENSE.humaneval`).
"""

import json
from functools import cache
from importlib.resources import files

from remask.tasks.transit import Message


@cache
def conversations() -> tuple[tuple[Message, Message], ...]:
    """The shipped problems and solutions, as a user's and an assistant's message each."""
    lines = (files("remask.tasks") / "data" / "humaneval.jsonl").read_text(encoding="utf-8").splitlines()
    return tuple(tuple(json.loads(line)["messages"]) for line in lines)
