"""Compiles one form of answers in a process of its own, which `remask.answers.structured` starts and sends a job.

Both are of Python's `marshal`. Patterns are whatever clients send: the process has limits of time and memory, which end
it by a signal or an exception. It imports nothing of remask, so that it is small.
"""

import marshal
import os
import sys
from array import array
from contextlib import suppress
from typing import Any

NICE = 5  # whoever waits for a step goes before whoever sends a new form


def compiled(job: dict[str, Any]) -> dict[str, Any]:
    """The transitions between tokens of a job's pattern, or {"error": ...}."""
    from outlines_core import Index, Vocabulary
    from outlines_core.json_schema import build_regex_from_schema

    tokens: dict[str | bytes, list[int]] = {}
    for token, content in job["tokens"]:
        tokens.setdefault(content, []).append(token)
    pattern = job["text"]
    try:
        if job["kind"] == "json":
            pattern = build_regex_from_schema(pattern)
            for name, expression in job["parts"].items():
                pattern = pattern.replace(f'"{name}"', f"({expression})")
        index = Index(pattern, Vocabulary(job["vocab"], tokens))
    except (ValueError, TypeError) as error:
        return {"error": str(error).split("\n")[0][:300]}
    source, label, target = array("q"), array("q"), array("q")
    for state, leads in index.get_transitions().items():
        for token, other in leads.items():
            if token < job["vocab"]:  # the one that ends an answer is no token of the model
                source.append(state)
                label.append(token)
                target.append(other)
        if len(source) > job["most"]:
            return {"error": f"its automaton has more than {job['most']} transitions"}
    arrays = {"source": source.tobytes(), "label": label.tobytes(), "target": target.tobytes()}
    return arrays | {"start": index.get_initial_state(), "final": sorted(index.get_final_states())}


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
