"""`remask chat`: a conversation in the terminal with a server, or with a model in this process.

The client of chat completions is of the standard library alone, so that a conversation starts at once.
"""

import argparse
import http.client
import json
import os
import re
import sys
import textwrap
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from remask.checks import BUNDLED
from remask.checks.values import json_object
from remask.cli.logs import tell, tell_people
from remask.cli.options import KEY_VARIABLE, open_text
from remask.engine.config import AUTO
from remask.errors import ConfigError, RemaskError, UnknownNameError
from remask.tasks.town import RULES

if TYPE_CHECKING:
    from remask.llm import LLM

_COMMAND = re.compile(r"/([a-z]+|[0-9])")
Turns = list[dict[str, str]]
Answer = Generator[str, None, str | None]  # pieces of the text; then what it took, where that is known
Answerer = Callable[[Turns], Answer]

Card = Mapping[str, Any]  # what `remask.tasks.cards` and a server's list of models say of a bundled model

LEAVE, ANEW, HELP, SYSTEM, PAGE = ("/exit", "/quit"), "/new", "/help", "/system", "/page"
CONTINUE, EDIT = "/continue", "/edit"
COMMANDS = (HELP, ANEW, SYSTEM, PAGE, CONTINUE, EDIT, *LEAVE)
_HELP = (
    f"{CONTINUE} goes on with the last answer, {EDIT} TEXT goes on from TEXT in its place, {ANEW} starts a new "
    f"conversation, {LEAVE[0]} or {LEAVE[1]} ends it, {SYSTEM} shows the system prompt, {PAGE} FILE takes a page of "
    f"your own to ask about, {HELP} says this. All else is for the model."
)
_ALONE: Final = "Each line is a conversation of its own, as the model knows one question only."
_ASK: Final = "Ask about this page, or about one of your own (/page FILE):"
_WIDTH: Final = 100
_CONNECT_S = 5.0  # to ask a server what it serves


def run(args: argparse.Namespace) -> int:
    """Read turns until the end of input or `/exit`; `/help` lists the other commands."""
    answer, known = _remote(args) if args.base_url else _local(args)
    system = args.system
    offered: dict[str, str] = {}
    if known is not None and system is None:
        # The questions are about the model's own system prompt, where it has one.
        system = known["system"] or None
        offered = {f"/{number}": each["question"] for number, each in enumerate(known["questions"], 1)}
    opening: Turns = [] if system is None else [{"role": "system", "content": system}]
    turns = list(opening)
    shown = sys.stdin.isatty()
    if shown:
        print("\n".join([_HELP, *_offer(known, offered)]))
    while (typed := _read(shown)) is not None:
        line = typed.strip()
        if line == CONTINUE or line.split(" ")[0] == EDIT:
            _continue(args, answer, turns, None if line == CONTINUE else typed.partition(f"{EDIT} ")[2])
        elif line == ANEW:
            turns = list(opening)
        elif line.split(" ")[0] == PAGE:
            page = _page(line.partition(" ")[2].strip())
            if page is not None:
                system, offered = page, {}
                opening = [{"role": "system", "content": page}]
                turns = list(opening)
        elif line == HELP:
            print("\n".join([_HELP, *_offer(known, offered)]))
        elif line == SYSTEM:
            print("There is no system prompt; --system gives one." if system is None else system)
        elif line not in offered and _COMMAND.fullmatch(line):
            tell(f"error: {UnknownNameError('command', line, (*offered, *COMMANDS))}")
        elif line:
            if known is not None and known["alone"]:
                turns = list(opening)
            turns.append({"role": "user", "content": offered.get(line, line)})
            said = _say(args, answer, turns)
            if said is None:
                turns.pop()
            else:
                turns.append({"role": "assistant", "content": said})
    return 0


def _offer(known: Card | None, offered: Mapping[str, str]) -> list[str]:
    """What a bundled model can answer, and what to type for it; nothing of other models."""
    if known is None:
        return []
    lines = [known["answers"]]
    if offered and not known["alone"]:
        lines += [_ASK, textwrap.fill(known["system"], _WIDTH, initial_indent="  ", subsequent_indent="  ")]
    lines += [f"  {key}  {text}" for key, text in offered.items()]
    return [*lines, _ALONE] if known["alone"] else lines


def _page(path: str) -> str | None:
    """The system prompt that the page in a file makes; None, after saying why, where it cannot be read."""
    try:
        with open_text(path, "r") as source:
            text = " ".join(source.read().split())
    except (ConfigError, UnicodeError) as error:
        tell(f"error: {PAGE}: {error}")
        return None
    if not text:
        tell(f"error: {PAGE}: {path!r} is empty")
        return None
    print(f"Ask about it: {len(text.split())} words.")
    return f"{RULES} {text}"


def _read(shown: bool) -> str | None:
    """Return the next line, or None at the end."""
    try:
        line = input("> " if shown else "")
    except EOFError:
        return None
    return None if line.strip() in LEAVE else line


def _continue(args: argparse.Namespace, answer: Answerer, turns: Turns, given: str | None) -> None:
    """Go on with the last answer, or with a text that is `given` in its place."""
    if not turns or turns[-1]["role"] != "assistant":
        tell("error: There is no answer to go on with. Ask something first.")
    elif given == "":
        tell(f"error: {EDIT} needs the text to go on from, as in {EDIT} Once upon a time")
    else:
        begun = turns[-1]["content"] if given is None else given
        said = _say(args, answer, [*turns[:-1], {"role": "assistant", "content": begun}])
        if said is not None:
            turns[-1]["content"] = begun + said


def _say(args: argparse.Namespace, answer: Answerer, turns: Turns) -> str | None:
    """Print an answer as it settles and tell people what it took. Returns it; None if it failed."""
    said, pieces = "", answer(turns)
    try:
        while True:
            text = next(pieces)
            print(text, end="", flush=True)
            said += text
    except StopIteration as end:
        print(flush=True)
        if end.value is not None:
            tell_people(args, f"  {end.value}")
        return said
    except RemaskError as error:
        tell(f"error: {error}")
        return None


def _local(args: argparse.Namespace) -> tuple[Answerer, Card | None]:
    """Load the model. Returns what answers with it, and its card, which bundled ones have."""
    # Imported here, as a conversation with a server needs no PyTorch.
    from remask.cli.options import engine_config, object_option, open_llm, sampling_option
    from remask.tasks.cards import card

    args.model = args.model or BUNDLED
    sampling = sampling_option(args)
    settings = object_option("--cache-config", args.cache_config)
    llm = open_llm(args, args.cache or AUTO, settings, engine_config(args), "chat")
    found = card(llm.loaded.name)
    return lambda turns: _settled(llm, turns, sampling), None if found is None else found.as_json()


def _settled(llm: "LLM", turns: Turns, sampling: Mapping[str, Any]) -> Answer:
    """Yield the settled text of the answer, computed by the engine of `llm`, and return what it took."""
    from remask.cli.summary import summary
    from remask.machine.speeds import keep
    from remask.session import events_of

    began = time.perf_counter()
    (request,) = llm.session.requests([turns], sampling, **ending(turns))
    answer = llm.session.answer(llm.engine.check(request))
    for events in events_of([request], llm.engine):
        for piece in llm.session.pieces(answer, events):
            if piece.output is not None and piece.output.error is not None:
                raise RemaskError(piece.output.error)
            if piece.output is not None:
                keep(llm.loaded.name, len(piece.output.token_ids), piece.output.elapsed_s)
            yield piece.delta
            if piece.output is not None:
                return summary(llm.loaded.config, [(request, piece.output)], time.perf_counter() - began)
    return None


def _remote(args: argparse.Namespace) -> tuple[Answerer, Card | None]:
    client = ChatClient(args.base_url, args.api_key or os.environ.get(KEY_VARIABLE))
    extra = {} if args.sampling is None else json_object("--sampling", args.sampling)
    if args.cache is not None:
        extra["cache"] = args.cache
    if args.cache_config is not None:
        extra["cache_config"] = json_object("--cache-config", args.cache_config)

    def answer(turns: Turns) -> Answer:
        model = args.model or client.first_model()
        yield from client.stream({"model": model, "messages": turns, **ending(turns), **extra})
        return None

    try:
        served = client.models(_CONNECT_S)
    except RemaskError:
        served = []  # the first question says what is wrong
    model = next((each for each in served if args.model in (None, each["id"])), {})
    tell_people(args, f"remask chat: {args.model or model.get('id', 'no model yet')} at {args.base_url}")
    return answer, model.get("card") if model.get("owned_by") == "remask" else None


TIMEOUT_S = 600.0  # without a byte


def ending(turns: Sequence[Mapping[str, str]]) -> dict[str, Any]:
    """How the template of a conversation ends: an answer that is the last turn is continued."""
    continues = turns[-1]["role"] == "assistant"
    return {"add_generation_prompt": False, "continue_final_message": True} if continues else {}


class ChatClient:
    """A server with OpenAI's API.

    Every method raises `RemaskError` where no server answers, where it refuses, and where it answers in another form.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        """`base_url` ends in `/v1` as a rule. Raises `ConfigError` where it is no URL of HTTP."""
        if not base_url.startswith(("http://", "https://")):
            raise ConfigError(f"--base-url must begin with http:// or https://, got {base_url!r}")
        self.base_url = base_url
        self._headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self._headers["Authorization"] = f"Bearer {api_key}"

    def models(self, timeout: float = TIMEOUT_S) -> list[Mapping[str, Any]]:
        """What the server serves, as it lists it."""
        with self._answer("/models", None, timeout) as response:
            listed = _object(response.read()).get("data")
        if not isinstance(listed, list) or not all(isinstance(each, dict) and "id" in each for each in listed):
            raise RemaskError(f"{self.base_url}/models lists no models; is this the URL of an API that ends in /v1?")
        return listed

    def first_model(self) -> str:
        """The name of the first model that the server lists."""
        listed = self.models()
        if not listed:
            raise RemaskError(f"{self.base_url}/models lists no model; name one with --model")
        return str(listed[0]["id"])

    def stream(self, body: Mapping[str, Any]) -> Iterator[str]:
        """Yield the text of the answer to a chat, piece by piece."""
        with self._answer("/chat/completions", {**body, "stream": True}, TIMEOUT_S) as response:
            for line in response:
                field, _, value = line.strip().partition(b":")
                if field != b"data" or value.strip() == b"[DONE]":
                    continue
                chunk = _object(value)
                if "error" in chunk:
                    raise RemaskError(_message(chunk, "the server ends the answer"))
                for choice in chunk.get("choices") or ():
                    yield (choice.get("delta") or {}).get("content") or ""

    @contextmanager
    def _answer(self, path: str, body: Mapping[str, Any] | None, timeout: float) -> Iterator[http.client.HTTPResponse]:
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.base_url.rstrip("/") + path, data, self._headers)
            with urllib.request.urlopen(request, timeout=timeout) as response:
                yield response
        except urllib.error.HTTPError as error:
            with error:
                text = error.read().decode(errors="replace")
            raise RemaskError(_refusal(text, f"the server answers with status {error.code}")) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            cause = getattr(error, "reason", error)
            raise RemaskError(
                f"the connection to {self.base_url} failed: {cause}; is a server running there?"
            ) from error


def _object(text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise RemaskError(f"the server's answer is not JSON: {text[:200]!r}") from error
    if not isinstance(found, dict):
        raise RemaskError(f"the server's answer is not a JSON object: {text[:200]!r}")
    return found


def _refusal(text: str, what: str) -> str:
    try:
        return _message(json.loads(text), what)
    except ValueError:
        return f"{what}: {text[:200].strip()}" if text.strip() else what


def _message(body: Any, what: str) -> str:
    """What an error of OpenAI's form says; else that there is one."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return f"{what}: {message}" if message else what
