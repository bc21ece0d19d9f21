"""`remask chat`: a conversation in the terminal with a server, or with a model in this process."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from remask.checks.values import json_object
from remask.cli.arguments.serve import KEY_VARIABLE
from remask.cli.chat_client import ChatClient
from remask.cli.logs import tell, tell_people
from remask.errors import RemaskError, UnknownNameError

_COMMAND = re.compile(r"/([a-z]+|[0-9])")
Turns = list[dict[str, str]]
Answerer = Callable[[Turns], Iterator[str]]

Card = Mapping[str, Any]  # what `remask.tasks.cards` and a server's list of models say of a bundled model

LEAVE, ANEW, HELP, SYSTEM = ("/exit", "/quit"), "/new", "/help", "/system"
COMMANDS = (HELP, ANEW, SYSTEM, *LEAVE)
_HELP = (
    f"{ANEW} starts a new conversation, {LEAVE[0]} or {LEAVE[1]} ends it, {SYSTEM} shows the system prompt, {HELP} "
    "says this. All else is for the model."
)
_ALONE: Final = "Each line is a conversation of its own, as the model knows one question only."
_CONNECT_S = 5.0  # to ask a server what it serves


def run(args: argparse.Namespace) -> int:
    """Read turns until the end of input or `/exit`; `/new` starts a new conversation, and `/help` lists such words."""
    answer, known = _remote(args) if args.base_url else _local(args)
    system = args.system
    offered: dict[str, str] = {}
    if known is not None and system is None:
        # The questions are about the model's own system prompt.
        system = known["system"]
        offered = {f"/{number}": each["question"] for number, each in enumerate(known["questions"], 1)}
    told = "\n".join([_HELP, *_offer(known, offered)])
    opening: Turns = [] if system is None else [{"role": "system", "content": system}]
    turns = list(opening)
    shown = sys.stdin.isatty()
    if shown:
        print(told)
    while (line := _read(shown)) is not None:
        if line == ANEW:
            turns = list(opening)
        elif line == HELP:
            print(told)
        elif line == SYSTEM:
            print("There is no system prompt; --system gives one." if system is None else system)
        elif line not in offered and _COMMAND.fullmatch(line):
            tell(f"error: {UnknownNameError('command', line, (*offered, *COMMANDS))}")
        elif line:
            if known is not None:
                turns = list(opening)
            turns.append({"role": "user", "content": offered.get(line, line)})
            said = _say(answer, turns)
            if said is None:
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": said})
    return 0


def _offer(known: Card | None, offered: Mapping[str, str]) -> list[str]:
    """What a bundled model can answer, and what to type for it; nothing of other models."""
    return [] if known is None else [known["answers"], *(f"  {key}  {text}" for key, text in offered.items()), _ALONE]


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
        tell(f"error: {error}")
        return None
    print()
    return said


def _local(args: argparse.Namespace) -> tuple[Answerer, Card | None]:
    # Imported here, as a conversation with a server needs no PyTorch.
    from remask.cli.chat_local import local_answers

    return local_answers(args)


def _remote(args: argparse.Namespace) -> tuple[Answerer, Card | None]:
    client = ChatClient(args.base_url, args.api_key or os.environ.get(KEY_VARIABLE))
    extra = {} if args.sampling is None else json_object("--sampling", args.sampling)
    if args.cache is not None:
        extra["cache"] = args.cache
    if args.cache_config is not None:
        extra["cache_config"] = json_object("--cache-config", args.cache_config)

    def answer(turns: Turns) -> Iterator[str]:
        model = args.model or client.first_model()
        yield from client.stream({"model": model, "messages": turns, **extra})

    try:
        served = client.models(_CONNECT_S)
    except RemaskError:
        served = []  # the first question says what is wrong
    model = next((each for each in served if args.model in (None, each["id"])), {})
    tell_people(args, f"remask chat: {args.model or model.get('id', 'no model yet')} at {args.base_url}")
    return answer, model.get("card") if model.get("owned_by") == "remask" else None
