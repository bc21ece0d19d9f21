"""Compiles one form of answers in a process of its own, which `remask.answers.structured` starts and sends a job.

Both are of Python's `marshal`. Patterns are whatever clients send: the process has limits of time and memory, which end
it by a signal or an exception. It imports nothing of remask, so that it is small.
"""

import marshal
import os
import re
import sys
from array import array
from contextlib import suppress
from typing import Any

END = "\U0010ffff"
"""Stands behind a pattern, as a token of its own. outlines-core leaves out what leads from a text that is whole to one
that is not, such as from `yes` to `yes n`; with a token behind it no text is whole."""
NICE = 5  # whoever waits for a step goes before whoever sends a new form


def compiled(job: dict[str, Any]) -> dict[str, Any]:
    """The transitions between tokens of a job's pattern, or {"error": ...}."""
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
        return {"error": str(error).split("\n")[0][:300]}
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
            return {"error": f"its automaton has more than {job['most']} transitions"}
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


def main() -> None:
    """Answer the job on standard input."""
    job = marshal.loads(sys.stdin.buffer.read())
    if sys.platform != "win32":
        import resource

        os.nice(NICE)
        for kind, most in ((resource.RLIMIT_AS, job["bytes"]), (resource.RLIMIT_CORE, 0)):
            with suppress(OSError, ValueError):
                resource.setrlimit(kind, (most, most))
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_CPU, (job["seconds"], job["seconds"]))
    try:
        answer = compiled(job)
    except MemoryError:
        answer = {"error": "it needs too much memory"}
    sys.stdout.buffer.write(marshal.dumps(answer))


if __name__ == "__main__":
    main()
