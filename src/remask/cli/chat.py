"""`remask chat`: a conversation in the terminal with a server, or with a model in this process."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

from remask.checkpoint.source import BUNDLED
from remask.cli.options import (
    add_engine_options,
    add_model_options,
    engine_config,
    object_option,
    open_llm,
    sampling_option,
)
from remask.cli.serve import KEY_VARIABLE, check_extra
from remask.errors import ConfigError, RemaskError, UnknownNameError
from remask.llm import AUTO, LLM
from remask.server.answer import Answer
from remask.tasks.cards import card

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the command's arguments."""
    in_process = argparse.ArgumentParser(add_help=False)
    for each in (in_process, parser):
        add_model_options(each, BUNDLED)
        add_engine_options(each)
        each.set_defaults(model=None)
    parser.add_argument("--base-url", metavar="URL", help="a server's, such as http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", metavar="KEY", help=f"for --base-url; also from {KEY_VARIABLE}")
    parser.add_argument("--system", metavar="TEXT", help="system prompt")
    parser.add_argument("--cache", metavar="SPEC", help="policy (default: the one that 'remask serve' chooses)")
    parser.add_argument("--cache-config", metavar="JSON", help="settings of the policy")
    parser.add_argument(
        "--sampling", metavar="JSON", help="sampling parameters; 'remask generate --help-fields' lists them"
    )
    parser.set_defaults(in_process=in_process.parse_args([]))


def run(args: argparse.Namespace) -> int:
    """Read turns until the end of input or `/exit`; `/new` starts a new conversation, and `/help` lists such words."""
    answer, known = _remote(args) if args.base_url else _local(args)
    system = args.system
    offered: dict[str, str] = {}
    if known is not None and known["system"] is not None and system is None:
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
            print(f"error: {UnknownNameError('command', line, (*offered, *COMMANDS))}", file=sys.stderr)
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
        print(f"error: {error}", file=sys.stderr)
        return None
    print()
    return said


def _local(args: argparse.Namespace) -> tuple[Answerer, Card | None]:
    args.model = args.model or BUNDLED
    sampling = sampling_option(args)
    llm = open_llm(args, args.cache or AUTO, object_option("--cache-config", args.cache_config), engine_config(args))
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigError(f"the model {args.model!r} has no chat template; a conversation needs one")
    found = card(llm.loaded.name)
    return lambda turns: _in_process(llm, turns, sampling), None if found is None else found.as_json()


def _in_process(llm: LLM, turns: Turns, sampling: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settled text of the answer, computed by the engine of `llm`."""
    assert llm.tokenizer is not None
    (request,) = llm.requests([turns], sampling)
    answer = Answer(0, request, llm.tokenizer, llm.loaded.config.stop_ids)
    llm.engine.add(request)
    while llm.engine.busy:
        delta = answer.take(llm.engine.step())
        if delta.result is not None and delta.result.error is not None:
            raise RemaskError(delta.result.error)
        yield delta.text


def _remote(args: argparse.Namespace) -> tuple[Answerer, Card | None]:
    for name, default in vars(args.in_process).items():
        if name != "model" and getattr(args, name) != default:
            flag = "--" + name.replace("_", "-")
            raise ConfigError(f"{flag} is for a model in this process; leave out either {flag} or --base-url")
    check_extra("openai")
    import openai

    client = openai.OpenAI(
        base_url=args.base_url, api_key=args.api_key or os.environ.get(KEY_VARIABLE) or "none", max_retries=0
    )
    extra = object_option("--sampling", args.sampling)
    if args.cache is not None:
        extra["cache"] = args.cache
    if args.cache_config is not None:
        extra["cache_config"] = object_option("--cache-config", args.cache_config)

    def answer(turns: Turns) -> Iterator[str]:
        try:
            model = args.model or client.models.list().data[0].id
            messages: Any = turns
            stream = client.chat.completions.create(model=model, messages=messages, stream=True, extra_body=extra)
            for chunk in stream:
                for choice in chunk.choices:
                    yield choice.delta.content or ""
        except openai.APIConnectionError as error:
            raise RemaskError(
                f"the connection to {args.base_url} failed: {error.__cause__ or error}; is a server running there?"
            ) from error
        except openai.OpenAIError as error:
            raise RemaskError(str(error)) from error

    try:
        served = client.with_options(timeout=_CONNECT_S).models.list().data
    except openai.OpenAIError:
        served = []  # the first question says what is wrong
    model = next((each for each in served if args.model in (None, each.id)), None)
    if model is None or model.owned_by != "remask":
        return answer, None
    return answer, (model.model_extra or {}).get("card")
