"""Request lines: JSON objects, one a line, from which commands make requests."""

import io
import json
import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TextIO

from remask.checks.fields import declared, unknown_name_error
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
TOP_LEVEL_KEYS = ("id", *PROMPTS, *declared(Terms))
KEYS = (*TOP_LEVEL_KEYS, SAMPLING, *declared(SamplingParams))


def build_request(llm: LLM, line: Mapping[str, Any], request_id: str, sampling: Mapping[str, Any]) -> Request:
    """Return the request of a line, whose sampling parameters override the command's `sampling`.

    Raises `ConfigError` if the line is invalid.
    """
    values = flatten_sampling(line, TOP_LEVEL_KEYS)
    for key in values:
        if key not in KEYS:
            check_setting(str(key))
            raise unknown_name_error(SamplingParams, "key", str(key), KEYS)
    prompt_keys = [key for key in PROMPTS if values.get(key) is not None]
    if len(prompt_keys) != 1:
        raise ConfigError(f"a line needs exactly one of {', '.join(PROMPTS)}; got {', '.join(prompt_keys) or 'none'}")
    terms = terms_of(values)
    tokens, shared = _encode_prompt(llm, prompt_keys[0], values[prompt_keys[0]], terms.control_tokens)
    parameters = {name: values[name] for name in declared(SamplingParams) if values.get(name) is not None}
    policy = llm.session.policy_of(terms)
    return llm.session.request(request_id, tokens, shared, parameters, terms, policy, command_sampling=sampling)


def terms_of(line: Mapping[str, Any]) -> Terms:
    """Return the terms of a line. Raises `ConfigError` on a value that is not allowed."""
    return Terms.from_mapping({name: line[name] for name in declared(Terms) if name in line})


def _encode_prompt(llm: LLM, key: str, value: Any, control_tokens: bool | None) -> tuple[list[int], int]:
    """Return the token ids of the prompt in `key`, and its default prefix length. Raises `ConfigError` on a bad one."""
    if key == "prompt_token_ids":
        if not isinstance(value, list):
            raise ConfigError(f"prompt_token_ids must be a list of token ids, got {shown(value)}")
        return value, 0
    if key == "prompt" and not isinstance(value, str):
        raise ConfigError(f"prompt must be a text, got {shown(value)}; token ids go into prompt_token_ids")
    # `encode` would read a list of numbers, or an empty list, as token ids.
    if key == "messages" and (not isinstance(value, list) or all(isinstance(item, int) for item in value)):
        raise ConfigError(f"messages must be a list of {{role, content}}, got {shown(value)}")
    return encode(value, llm.tokenizer, control_tokens)


class RequestLine(NamedTuple):
    """A line of a file of requests: its number in the file, from 1 on, the id of its request, and its object."""

    number: int
    request_id: str
    fields: dict[str, Any]


@dataclass(frozen=True, slots=True)
class RequestFile:
    """The lines of a file of requests, before a model is there to make requests of them."""

    path: str
    lines: tuple[RequestLine, ...]


def load_lines(path: str, forbidden_keys: Collection[str] = ()) -> RequestFile:
    """Read a file of requests. No model is needed.

    The id of a request is the `id` of its line, as JSON if it is not text, or else the line's number. Raises
    `ConfigError` if the file cannot be read, and, naming the first such line, if a line is not an object, has the id of
    another line, or sets one of `forbidden_keys`, which are options of the command.
    """
    lines: list[RequestLine] = []
    numbers: dict[str, int] = {}  # by id
    with open_text(path) as source:
        for number, text in enumerate(source, start=1):
            if not text.strip():
                continue
            try:
                fields = json_object("a line", text)
                line_id = fields.get("id", number)
                request_id = line_id if isinstance(line_id, str) else json.dumps(number if line_id is None else line_id)
                if (first_number := numbers.setdefault(request_id, number)) != number:
                    raise ConfigError(f"id {shown(request_id)} is used by line {first_number} too; ids must differ")
                for key in forbidden_keys:
                    if fields.get(key) is not None:
                        raise ConfigError(f"{key} is an option of the command, for all lines; leave it out")
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
            lines.append(RequestLine(number, request_id, fields))
    return RequestFile(path, tuple(lines))


def build_requests(
    llm: LLM, file: RequestFile, sampling: Mapping[str, Any], extra_keys: Collection[str] = ()
) -> list[tuple[Request, dict[str, Any]]]:
    """Return the requests of a file, each with those of `extra_keys` that its line has, which are not the request's.

    Raises `ConfigError`, naming the line, on the first line that is not a valid request.
    """
    requests = []
    for number, request_id, fields in file.lines:
        values = {key: value for key, value in fields.items() if key not in extra_keys}
        try:
            request = build_request(llm, values, request_id, sampling)
            llm.engine.check(request)
        except ConfigError as error:
            raise ConfigError(f"{file.path}, line {number}: {error}") from error
        requests.append((request, {key: fields[key] for key in extra_keys if key in fields}))
    return requests


def standard_input() -> TextIO:
    """Make standard input read UTF-8 whatever the locale, as `open_text` reads files, and return it."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")
    return sys.stdin
