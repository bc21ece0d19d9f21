"""Reads large bodies of requests in a process of its own. `remask.server.bodies` starts it and speaks to it.

Both send frames (`remask.text.workers`), whose content is pickled: first the limits, then a model's name and a body
each time. The answers are a body that was read, or what the error is made of that says why it was refused.
"""

import os
import pickle
import sys
from importlib import import_module

from remask.server.bodies import READ, REFUSED, error_fields, read_body
from remask.server.errors import ApiError
from remask.text.template_worker import HEAD, allow, limit_memory

NICE = 5  # whoever waits for a step goes before whoever sends a large body


def main() -> None:
    """Answer frames until standard input ends."""
    source, target = sys.stdin.buffer, sys.stdout.buffer
    job = pickle.loads(source.read(HEAD.unpack(source.read(HEAD.size))[1]))
    if sys.platform != "win32":
        os.nice(NICE)
        limit_memory(job["bytes"])
    while len(head := source.read(HEAD.size)) == HEAD.size:
        name, content = pickle.loads(source.read(HEAD.unpack(head)[1]))
        module, _, model = name.partition(":")
        allow(job["seconds"])
        try:
            kind, answer = READ, pickle.dumps(read_body(getattr(import_module(module), model), content, job["most"]))
        except ApiError as refused:
            kind, answer = REFUSED, pickle.dumps(error_fields(refused))
        except MemoryError:
            most = job["bytes"] >> 20
            large = ApiError(413, f"reading the body takes more than {most} MiB of memory; send less in one request")
            kind, answer = REFUSED, pickle.dumps(error_fields(large))
        allow(0)
        target.write(HEAD.pack(kind, len(answer)))
        target.write(answer)
        target.flush()


if __name__ == "__main__":
    main()
