"""`remask chat`: a conversation in the terminal with a server, or with a model in this process."""

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

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

_COMMAND = re.compile(r"/[a-z]+")
Turns = list[dict[str, str]]
Answerer = Callable[[Turns], Iterator[str]]

LEAVE, ANEW, HELP = ("/exit", "/quit"), "/new", "/help"
COMMANDS = (HELP, ANEW, *LEAVE)
_HELP = (
    f"{ANEW} starts a new conversation, {LEAVE[0]} or {LEAVE[1]} ends it, {HELP} says this. All else is for the model."
)


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
    args.model = args.model or BUNDLED
    sampling = sampling_option(args)
    llm = open_llm(args, args.cache or AUTO, object_option("--cache-config", args.cache_config), engine_config(args))
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigError(f"the model {args.model!r} has no chat template; a conversation needs one")
    return lambda turns: _in_process(llm, turns, sampling)


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


def _remote(args: argparse.Namespace) -> Answerer:
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

    return answer
