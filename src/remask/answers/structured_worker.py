"""Compiles a form of answers: a task of helpers (`remask.machine.helper`), which `remask.answers.structured` asks.

Patterns are whatever clients send, so that compiling them has limits of time and memory.
"""

import marshal
import re
from array import array
from typing import Any

from remask.machine.helper import Answers, RefusedError

END = "\U0010ffff"
"""Follows a pattern, as a token of its own. outlines-core leaves out transitions from complete to incomplete texts,
such as from `yes` to `yes n`; with a token behind it, no text is complete."""


def compile_pattern(job: dict[str, Any]) -> dict[str, Any]:
    """Return the automaton of the pattern `job["text"]`: columns of int64 as bytes, and the start and final states.

    Raises `RefusedError` if outlines-core refuses the pattern, or there are more than `job["max_transitions"]`.
    """
    from outlines_core import Index, Vocabulary

    tokens: dict[str | bytes, list[int]] = {}
    for token, content in job["tokens"]:
        tokens.setdefault(content, []).append(token)
    pattern = job["text"]
    end = job["vocab"]  # the id of `END`
    ends_itself = _ends_itself(pattern)
    if not ends_itself:
        pattern = f"({pattern}){END}"
    tokens[END.encode()] = [end]
    try:
        index = Index(pattern, Vocabulary(end + 1, tokens))
    except (ValueError, TypeError) as error:
        raise RefusedError(str(error).split("\n")[0][:300]) from error
    source, label, target = array("q"), array("q"), array("q")
    index_final_states = index.get_final_states()
    final = set(index_final_states) if ends_itself else set[int]()
    for state, transitions in index.get_transitions().items():
        if not ends_itself and transitions.get(end) in index_final_states:
            final.add(state)
        for token, next_state in transitions.items():
            if token < end:  # `END` and outlines-core's own end are no tokens of the model
                source.append(state)
                label.append(token)
                target.append(next_state)
        if len(source) > job["max_transitions"]:
            raise RefusedError(f"its automaton has more than {job['max_transitions']} transitions")
    arrays = {"source": source.tobytes(), "label": label.tobytes(), "target": target.tobytes()}
    return arrays | {"start": index.get_initial_state(), "final": sorted(final)}


def _ends_itself(pattern: str) -> bool:
    """Whether `END` cannot follow a pattern: it has an end anchor, or would close a bracket around it."""
    depth = 0
    for piece in re.findall(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|.", pattern, re.DOTALL):  # a set is one piece
        depth += (piece == "(") - (piece == ")")
        if piece in ("$", r"\z") or depth < 0:
            return True
    return False


def compiler(settings: bytes) -> Answers:
    """A function that compiles patterns for the tokens of `settings`. All bytes are Python's `marshal` format."""
    job = marshal.loads(settings)

    def compile_form(pattern: bytes) -> bytes:
        return marshal.dumps(compile_pattern({**job, "text": marshal.loads(pattern)}))

    return compile_form
