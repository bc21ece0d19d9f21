"""Request lines: JSON objects, one a line, from which commands read requests."""

import io
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, TextIO

from remask.checks.fields import declared, unknown_name
from remask.checks.values import json_object, shown
from remask.cli.options import open_text
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies.registry import check_setting
from remask.request.sampling_params import SamplingParams
from remask.request.terms import SAMPLING, Terms, flatten_sampling
from remask.text.prompts import encode

PROMPTS = ("prompt", "messages", "prompt_token_ids")
BESIDE = ("id", *PROMPTS, *declared(Terms))
KEYS = (*BESIDE, SAMPLING, *declared(SamplingParams))


def as_request(llm: LLM, line: Mapping[str, Any], request_id: str, sampling: Mapping[str, Any]) -> Request:
    """Build the request of a line, which the command's `sampling` completes. Raises `ConfigError` if it is invalid."""
    line = flatten_sampling(line, BESIDE)
    for key in line:
        if key not in KEYS:
            check_setting(str(key))
            raise unknown_name(SamplingParams, "key", str(key), KEYS)
    given = [key for key in PROMPTS if line.get(key) is not None]
    if len(given) != 1:
        raise ConfigError(f"a line needs exactly one of {', '.join(PROMPTS)}; got {', '.join(given) or 'none'}")
    terms = terms_of(line)
    tokens, shared = _tokens(llm, given[0], line[given[0]], terms.control_tokens)
    own = {name: line[name] for name in declared(SamplingParams) if line.get(name) is not None}
    policy = llm.session.policy_of(terms)
    return llm.session.request(request_id, tokens, shared, own, terms, policy, command=sampling)


def terms_of(line: Mapping[str, Any]) -> Terms:
    """The terms of a line. Raises `ConfigError` where one cannot be used."""
    return Terms.from_mapping({name: line[name] for name in declared(Terms) if name in line})


def _tokens(llm: LLM, kind: str, value: Any, control_tokens: bool | None) -> tuple[list[int], int]:
    if kind == "prompt_token_ids":
        if not isinstance(value, list):
            raise ConfigError(f"prompt_token_ids must be a list of token ids, got {shown(value)}")
        return value, 0
    if kind == "prompt" and not isinstance(value, str):
        raise ConfigError(f"prompt must be a text, got {shown(value)}; token ids go into prompt_token_ids")
    # `encode` would take a list of numbers, and an empty one, for token ids.
    if kind == "messages" and (not isinstance(value, list) or all(isinstance(item, int) for item in value)):
        raise ConfigError(f"messages must be a list of {{role, content}}, got {shown(value)}")
    return encode(value, llm.tokenizer, control_tokens)


@dataclass(frozen=True, slots=True)
class Lines:
    """The objects in a file of requests, before there is a model to read them: each with its line and its name."""

    path: str
    each: tuple[tuple[int, str, dict[str, Any]], ...]


def load_lines(path: str, without: Collection[str] = ()) -> Lines:
    """Read the lines of a file of requests, which needs no model.

    A request is named by its line's `id`, as JSON where that is no text, or its number. Raises `ConfigError` where the
    file cannot be read, naming the first line that is no object, where two have one name, and where a line has a key
    that it must be `without`.
    """
    found, lines = [], dict[str, int]()
    with open_text(path, "r") as source:
        for number, text in enumerate(source, start=1):
            if not text.strip():
                continue
            try:
                line = json_object("a line", text)
                own = line.get("id", number)
                name = own if isinstance(own, str) else json.dumps(number if own is None else own)
                if lines.setdefault(name, number) != number:
                    raise ConfigError(f"id {shown(name)} is used by line {lines[name]} too; ids must differ")
                for key in without:
                    if line.get(key) is not None:
                        raise ConfigError(f"{key} is an option of the command, for all lines; leave it out")
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            found.append((number, name, line))
    return Lines(path, tuple(found))


def read_lines(
    llm: LLM, lines: Lines, sampling: Mapping[str, Any], beside: Collection[str] = ()
) -> list[tuple[Request, dict[str, Any]]]:
    """The requests of a file, each with those keys `beside` it that its line has.

    Raises `ConfigError`, naming the first line that is no request of the model.
    """
    requests = []
    for number, name, line in lines.each:
        own = {key: value for key, value in line.items() if key not in beside}
        try:
            request = as_request(llm, own, name, sampling)
            llm.engine.check(request)
        except ConfigError as error:
            raise ConfigError(f"{lines.path}, line {number}: {error}") from error
        requests.append((request, {key: line[key] for key in beside if key in line}))
    return requests


def standard_input() -> TextIO:
    """Standard input, read as `open_text` reads files whatever the locale says."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin
