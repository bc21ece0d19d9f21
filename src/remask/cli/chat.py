"""`remask chat`: a conversation in the terminal with a server, or with a model in this process.

The client of chat completions uses the standard library alone, so that a conversation with a server starts at once.
"""

import argparse
import http.client
import io
import json
import os
import re
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Final

from remask.checks import BUNDLED
from remask.checks.values import json_object
from remask.cli.logs import print_error, print_notice
from remask.cli.options import KEY_VARIABLE, open_text
from remask.engine.config import AUTO
from remask.errors import ConfigError, RemaskError, UnknownNameError
from remask.tasks.town import RULES

if TYPE_CHECKING:
    from remask.llm import LLM

_COMMAND = re.compile(r"/([a-z]+|[0-9])")
Turns = list[dict[str, str]]
Answer = Generator[str, None, str | None]  # yields pieces of the text; returns a summary of the work, if known
Answerer = Callable[[Turns], Answer]

Card = Mapping[str, Any]  # `remask.tasks.cards.Card.as_json`, which a server's list of models has too

EXIT = ("/exit", "/quit")
NEW = "/new"
HELP = "/help"
SYSTEM = "/system"
PAGE = "/page"
CONTINUE = "/continue"
EDIT = "/edit"
COMMANDS = (HELP, NEW, SYSTEM, PAGE, CONTINUE, EDIT, *EXIT)
_HELP = (
    f"{CONTINUE} goes on with the last answer, {EDIT} TEXT goes on from TEXT in its place, {NEW} starts a new "
    f"conversation, {EXIT[0]} or {EXIT[1]} ends it, {SYSTEM} shows the system prompt, {PAGE} FILE takes a page of "
    f"your own to ask about, {HELP} says this. All else is for the model."
)
_SINGLE_TURN_NOTE: Final = "Each line is a conversation of its own, as the model knows one question only."
_ASK_NOTE: Final = "Ask about this page, or about one of your own (/page FILE):"
_WIDTH: Final = 100
_CONNECT_S = 5.0  # timeout of the first list of models


def run(args: argparse.Namespace) -> int:
    """Answer lines of standard input until its end or `/exit`. Returns 0. Raises `ConfigError`, and as `open_llm`."""
    with ExitStack() as resources:
        answerer, card = _remote_answerer(args) if args.base_url else _local_answerer(args, resources)
        _converse(args, answerer, card)
    return 0


def _converse(args: argparse.Namespace, answerer: Answerer, card: Card | None) -> None:
    """Answer lines until the end of input. Without `--system`, the system prompt is that of the `card`."""
    system = args.system
    shortcuts: dict[str, str] = {}  # questions of the card, by what is typed for them
    if card is not None and system is None:
        # The questions are about the card's system prompt.
        system = card["system"] or None
        shortcuts = {f"/{number}": item["question"] for number, item in enumerate(card["questions"], 1)}
    opening: Turns = [] if system is None else [{"role": "system", "content": system}]
    turns = list(opening)
    if isinstance(sys.stdin, io.TextIOWrapper):
        # Bytes that are not the locale's become lone surrogates, which are refused with their line alone.
        sys.stdin.reconfigure(errors="surrogateescape")
    is_terminal = sys.stdin.isatty()
    if is_terminal:
        print("\n".join([_HELP, *_card_lines(card, shortcuts)]))
    while (text := _read_line(is_terminal)) is not None:
        line = text.strip()
        if line == CONTINUE or line.split(" ")[0] == EDIT:
            _continue_answer(args, answerer, turns, None if line == CONTINUE else text.partition(f"{EDIT} ")[2])
        elif line == NEW:
            turns = list(opening)
        elif line.split(" ")[0] == PAGE:
            page = _page_prompt(line.partition(" ")[2].strip())
            if page is not None:
                system, shortcuts = page, {}
                opening = [{"role": "system", "content": page}]
                turns = list(opening)
        elif line == HELP:
            print("\n".join([_HELP, *_card_lines(card, shortcuts)]))
        elif line == SYSTEM:
            print("There is no system prompt; --system gives one." if system is None else system)
        elif line not in shortcuts and _COMMAND.fullmatch(line):
            print_error(f"error: {UnknownNameError('command', line, (*shortcuts, *COMMANDS))}")
        elif line:
            if card is not None and card["alone"]:
                turns = list(opening)
            turns.append({"role": "user", "content": shortcuts.get(line, line)})
            answer = _print_answer(args, answerer, turns)
            if answer is None:
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": answer})


def _card_lines(card: Card | None, shortcuts: Mapping[str, str]) -> list[str]:
    """Return lines about what a bundled model can answer, and what to type for it; none without a card."""
    if card is None:
        return []
    lines = [card["answers"]]
    if shortcuts and not card["alone"]:
        lines += [_ASK_NOTE, textwrap.fill(card["system"], _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    lines += [f"  {key}  {text}" for key, text in shortcuts.items()]
    return [*lines, _SINGLE_TURN_NOTE] if card["alone"] else lines


def _page_prompt(path: str) -> str | None:
    """Return the system prompt about the page in a file; None, after printing an error, if it cannot be read."""
    try:
        with open_text(path) as source:
            text = " ".join(source.read().split())
    except (ConfigError, UnicodeError) as error:
        print_error(f"error: {PAGE}: {error}")
        return None
    if not text:
        print_error(f"error: {PAGE}: {path!r} is empty")
        return None
    print(f"Ask about it: {len(text.split())} words.")
    return f"{RULES} {text}"


def _read_line(is_terminal: bool) -> str | None:
    """Return the next line; None at the end of input or at `/exit`."""
    try:
        line = input("> " if is_terminal else "")
    except EOFError:
        return None
    return None if line.strip() in EXIT else line


def _continue_answer(args: argparse.Namespace, answerer: Answerer, turns: Turns, replacement: str | None) -> None:
    """Continue the last answer, or the text that replaces it, and update `turns`."""
    if not turns or turns[-1]["role"] != "assistant":
        print_error("error: There is no answer to continue. Ask something first.")
    elif replacement == "":
        print_error(f"error: {EDIT} needs the text to go on from, as in {EDIT} Once upon a time")
    else:
        beginning = turns[-1]["content"] if replacement is None else replacement
        continuation = _print_answer(args, answerer, [*turns[:-1], {"role": "assistant", "content": beginning}])
        if continuation is not None:
            turns[-1]["content"] = beginning + continuation


def _print_answer(args: argparse.Namespace, answerer: Answerer, turns: Turns) -> str | None:
    """Print an answer as it settles, then a summary of its work on stderr.

    Returns the answer; None, after printing the error, if it failed.
    """
    answer = ""
    pieces = answerer(turns)
    try:
        while True:
            text = next(pieces)
            print(text, end="", flush=True)
            answer += text
    except StopIteration as end:
        print(flush=True)
        if end.value is not None:
            print_notice(args, f"  {end.value}")
        return answer
    except RemaskError as error:
        print_error(f"error: {error}")
        return None


def _local_answerer(args: argparse.Namespace, resources: ExitStack) -> tuple[Answerer, Card | None]:
    """Load the model, which `resources` closes. Returns its answerer, and the card of a bundled model."""
    # Imported here, as a conversation with a server needs no PyTorch.
    from remask.cli.options import engine_config, object_option, open_llm, sampling_option
    from remask.tasks.cards import card

    args.model = args.model or BUNDLED
    sampling = sampling_option(args)
    settings = object_option("--cache-config", args.cache_config)
    llm = resources.enter_context(open_llm(args, args.cache or AUTO, settings, engine_config(args), "chat"))
    model_card = card(llm.loaded.name)
    return lambda turns: _generate(llm, turns, sampling), None if model_card is None else model_card.as_json()


def _generate(llm: "LLM", turns: Turns, sampling: Mapping[str, Any]) -> Answer:
    """Yield the text of the answer of `llm` as it settles, and return a summary of the work."""
    from remask.cli.summary import summary
    from remask.machine.speeds import store_speed
    from remask.session import events_of

    start = time.perf_counter()
    (request,) = llm.session.requests([turns], sampling, **template_ending(turns))
    collector = llm.session.collector(llm.engine.check(request))
    for events in events_of([request], llm.engine):
        for piece in llm.session.collect(collector, events):
            output = piece.output
            if output is not None and output.error is not None:
                raise RemaskError(output.error)
            if output is not None:
                store_speed(llm.loaded.name, len(output.token_ids), output.elapsed_s)
            yield piece.delta
            if output is not None:
                return summary(llm.loaded.config, [(request, output)], time.perf_counter() - start)
    return None


def _remote_answerer(args: argparse.Namespace) -> tuple[Answerer, Card | None]:
    """Connect to the server of `--base-url`. Returns its answerer, and the card of its model if that is bundled."""
    client = ChatClient(args.base_url, args.api_key or os.environ.get(KEY_VARIABLE))
    fields = {} if args.sampling is None else json_object("--sampling", args.sampling)
    if args.cache is not None:
        fields["cache"] = args.cache
    if args.cache_config is not None:
        fields["cache_config"] = json_object("--cache-config", args.cache_config)

    def answer(turns: Turns) -> Answer:
        model = args.model or client.first_model()
        yield from client.stream({"model": model, "messages": turns, **template_ending(turns), **fields})
        return None

    try:
        models = client.models(_CONNECT_S)
    except RemaskError:
        models = []  # the first question reports the error
    model = next((item for item in models if args.model in (None, item["id"])), {})
    print_notice(args, f"remask chat: {args.model or model.get('id', 'no model yet')} at {args.base_url}")
    return answer, model.get("card") if model.get("owned_by") == "remask" else None


TIMEOUT_S = 600.0  # without a byte


def template_ending(turns: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """Return the options of the chat template that continue the last turn, if it is an answer."""
    continues = turns[-1]["role"] == "assistant"
    return {"add_generation_prompt": False, "continue_final_message": True} if continues else {}


class ChatClient:
    """A client of a server with OpenAI's API.

    All methods raise `RemaskError` if no server answers, or it answers with an error or in an unknown form.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url` usually ends in `/v1`. Raises `ConfigError` if it is not an HTTP or HTTPS URL."""
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://, got {base_url!r}")
        self.base_url = base_url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self, timeout: float = TIMEOUT_S) -> list[Mapping[str, Any]]:
        """Return the server's list of models, which are objects with an `id`."""
        with self._open("/models", None, timeout) as response:
            models = _parse_object(response.read()).get("data")
        if not isinstance(models, list) or not all(isinstance(model, dict) and "id" in model for model in models):
            raise RemaskError(f"{self.base_url}/models lists no models; is this the URL of an API that ends in /v1?")
        return models

    def first_model(self) -> str:
        """Return the id of the first model that the server lists."""
        models = self.models()
        if not models:
            raise RemaskError(f"{self.base_url}/models lists no model; name one with --model")
        return str(models[0]["id"])

    def stream(self, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the text of the answer to a chat, piece by piece."""
        with self._open("/chat/completions", {**body, "stream": True}, TIMEOUT_S) as response:
            for line in response:
                field, _, value = line.strip().partition(b":")
                if field != b"data" or value.strip() == b"[DONE]":
                    continue
                chunk = _parse_object(value)
                if "error" in chunk:
                    raise RemaskError(_error_message(chunk, "the server ends the answer"))
                try:
                    pieces = [(choice.get("delta") or {}).get("content") or "" for choice in chunk.get("choices") or ()]
                except (AttributeError, TypeError) as error:
                    raise RemaskError(f"the server's answer is no chunk of a chat: {value[:200]!r}") from error
                yield from pieces

    @contextmanager
    def _open(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Iterator[http.client.HTTPResponse]:
        """Yield the response to a POST of `body` or a GET. Errors, also of the block, become `RemaskError`s."""
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url.rstrip("/") + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise RemaskError(_body_error_message(text, f"the server answers with status {error.code}")) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            raise RemaskError(
                f"the connection to {self.base_url} failed: {cause}; is a server running there?"
            ) from error


def _parse_object(text: bytes) -> dict[str, Any]:
    """Return the JSON object in `text`. Raises `RemaskError` if there is none."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise RemaskError(f"the server's answer is not JSON: {text[:200]!r}") from error
    if not isinstance(value, dict):
        raise RemaskError(f"the server's answer is not a JSON object: {text[:200]!r}")
    return value


def _body_error_message(text: str, prefix: str) -> str:
    """Return `prefix` with the message of an error in OpenAI's form, or else with the beginning of the body."""
    try:
        return _error_message(json.loads(text), prefix)
    except ValueError:
        return f"{prefix}: {text[:200].strip()}" if text.strip() else prefix


def _error_message(body: Any, prefix: str) -> str:
    """Return `prefix` with the message of an error in OpenAI's form; `prefix` alone if it has none."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f"{prefix}: {message}" if message else prefix
