"""`remask chat`: a conversation in the terminal with a server, or with a model in this process."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator

from remask.checks.values import json_object
from remask.cli.arguments.serve import KEY_VARIABLE
from remask.cli.chat_client import ChatClient
from remask.errors import RemaskError, UnknownNameError

_COMMAND = re.compile(r"/[a-z]+")
Turns = list[dict[str, str]]
Answerer = Callable[[Turns], Iterator[str]]

LEAVE, ANEW, HELP = ("/exit", "/quit"), "/new", "/help"
COMMANDS = (HELP, ANEW, *LEAVE)
_HELP = (
    f"{ANEW} starts a new conversation, {LEAVE[0]} or {LEAVE[1]} ends it, {HELP} says this. All else is for the model."
)


def run(args: argparse.Namespace) -> int:
    """Read turns until the end of input or `/exit`; `/new` starts a new conversation, and `/help` lists such words."""
    answer = _remote(args) if args.base_url else _local(args)
    opening: Turns = [] if args.system is None else [{"role": "system", "content": args.system}]
    turns = list(opening)
    shown = sys.stdin.isatty()
    if shown:
        print(_HELP)
    while (line := _read(shown)) is not None:
        if line == ANEW:
            turns = list(opening)
        elif line == HELP:
            print(_HELP)
        elif _COMMAND.fullmatch(line):
            print(f"error: {UnknownNameError('command', line, COMMANDS)}", file=sys.stderr)
        elif line:
            turns.append({"role": "user", "content": line})
            said = _say(answer, turns)
            if said is None:
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": said})
    return 0


def _read(shown: bool) -> str | None:
    """Return the next line, or None at the end."""
    try:
        line = input("> " if shown else "").strip()
    except EOFError:
        return None
    return None if line in LEAVE else line


def _say(answer: Answerer, turns: Turns) -> str | None:
    """Print an answer as it settles, and return it; None if it failed."""
    said = ""
    try:
        for text in answer(turns):
            print(text, end="", flush=True)
            said += text
    except RemaskError as error:
        print(f"error: {error}", file=sys.stderr)
        return None
    print()
    return said


def _local(args: argparse.Namespace) -> Answerer:
    # Imported here, as a conversation with a server needs no PyTorch.
    from remask.cli.chat_local import local_answers

    return local_answers(args)


def _remote(args: argparse.Namespace) -> Answerer:
    client = ChatClient(args.base_url, args.api_key or os.environ.get(KEY_VARIABLE))
    extra = {} if args.sampling is None else json_object("--sampling", args.sampling)
    if args.cache is not None:
        extra["cache"] = args.cache
    if args.cache_config is not None:
        extra["cache_config"] = json_object("--cache-config", args.cache_config)

    def answer(turns: Turns) -> Iterator[str]:
        model = args.model or client.first_model()
        yield from client.stream({"model": model, "messages": turns, **extra})

    return answer
