"""Compiles a form of answers: a task of helpers (`remask.machine.helper`), which `remask.answers.structured` asks.

Patterns are whatever clients send, so that compiling them has limits of time and memory.
"""

import marshal
import re
from array import array
from typing import Any

from remask.machine.helper import Answers, RefusedError

END = "\U0010ffff"
"""Stands behind a pattern, as a token of its own. outlines-core leaves out what leads from a text that is whole to one
that is not, such as from `yes` to `yes n`; with a token behind it no text is whole."""


def compiled(job: dict[str, Any]) -> dict[str, Any]:
    """The transitions between tokens of a job's pattern. Raises `RefusedError`."""
    from outlines_core import Index, Vocabulary

    tokens: dict[str | bytes, list[int]] = {}
    for token, content in job["tokens"]:
        tokens.setdefault(content, []).append(token)
    pattern, end = job["text"], job["vocab"]
    closed = _closed(pattern)
    if not closed:
        pattern = f"({pattern}){END}"
    tokens[END.encode()] = [end]
    try:
        index = Index(pattern, Vocabulary(end + 1, tokens))
    except (ValueError, TypeError) as error:
        raise RefusedError(str(error).split("\n")[0][:300]) from error
    source, label, target = array("q"), array("q"), array("q")
    last = index.get_final_states()
    whole = set(last) if closed else set[int]()
    for state, leads in index.get_transitions().items():
        if not closed and leads.get(end) in last:
            whole.add(state)
        for token, other in leads.items():
            if token < end:  # the others that end an answer are no tokens of the model
                source.append(state)
                label.append(token)
                target.append(other)
        if len(source) > job["most"]:
            raise RefusedError(f"its automaton has more than {job['most']} transitions")
    arrays = {"source": source.tobytes(), "label": label.tobytes(), "target": target.tobytes()}
    return arrays | {"start": index.get_initial_state(), "final": sorted(whole)}


def _closed(pattern: str) -> bool:
    """Whether nothing may stand behind a pattern: it names its own end, or would close a bracket around it."""
    depth = 0
    for piece in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):  # a set is one piece
        depth += (piece == "(") - (piece == ")")
        if piece in ("$", r"\z") or depth < 0:
            return True
    return False


def compiler(settings: bytes) -> Answers:
    """What compiles patterns for the tokens of `settings`. All content is of Python's `marshal`."""
    job = marshal.loads(settings)

    def compile_form(pattern: bytes) -> bytes:
        return marshal.dumps(compiled({**job, "text": marshal.loads(pattern)}))

    return compile_form
