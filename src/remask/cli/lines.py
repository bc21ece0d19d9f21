"""Request lines: JSON objects, one a line, from which commands read requests."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from remask.checks.fields import declared
from remask.checks.values import json_object, shown
from remask.cli.options import object_option, sampling_option
from remask.cli.policy_file import policy_option
from remask.engine.build_request import request_of
from remask.engine.request import Request
from remask.errors import ConfigError, UnknownNameError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask.request.terms import Terms
from remask.text.prompts import encode

PROMPTS = ("prompt", "messages", "prompt_token_ids")
KEYS = ("id", *PROMPTS, "sampling", *declared(Terms))


@dataclass(frozen=True, slots=True)
class Defaults:
    """Values for what a line leaves out."""

    sampling: Mapping[str, Any]
    cache: str | CachePolicy
    cache_config: Mapping[str, Any]


def defaults_of(args: argparse.Namespace) -> Defaults:
    """Return the values of these options. Raises `ConfigError` where one cannot be used."""
    cache = policy_option(args.cache, object_option("--cache-config", args.cache_config))
    return Defaults(sampling_option(args), *cache)


def as_request(llm: LLM, line: Mapping[str, Any], request_id: str, defaults: Defaults) -> Request:
    """Build the request of a line. Raises `ConfigError` where the line is invalid."""
    for key in line:
        if key not in KEYS:
            raise UnknownNameError("key", str(key), KEYS)
    given = [key for key in PROMPTS if line.get(key) is not None]
    if len(given) != 1:
        raise ConfigError(f"a line needs exactly one of {', '.join(PROMPTS)}; got {', '.join(given) or 'none'}")
    terms = terms_of(line)
    tokens, shared = _tokens(llm, given[0], line[given[0]], terms.control_tokens)
    own = line.get("sampling")
    if own is not None and not isinstance(own, dict):
        raise ConfigError(f"sampling must be an object of sampling parameters, got {shown(own)}")
    params, template = llm.response(terms, own or {}, len(tokens), command=defaults.sampling)
    policy = _policy(llm, terms, defaults)
    kind, constraint = llm.loaded.config.kind, llm.constraint(terms.structured_outputs)
    more: dict[str, Any] = {"constraint": constraint, "template": template}
    return request_of(request_id, tokens, params, policy, terms, kind, shared=shared, **more)


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


def _policy(llm: LLM, terms: Terms, defaults: Defaults) -> CachePolicy:
    cache, settings = terms.policy
    if cache is None:
        return llm.policy(defaults.cache, defaults.cache_config if settings is None else settings)
    return llm.policy(cache, settings)


def read_requests(llm: LLM, path: str, defaults: Defaults) -> list[Request]:
    """Read the requests of a file. A request is named by its line's `id`, as JSON where that is no text, or its number.

    Raises `ConfigError`, naming the first bad line, and where two have one name.
    """
    requests, lines = [], dict[str, int]()
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
                requests.append(as_request(llm, line, name, defaults))
                llm.engine.check(requests[-1])
            except ConfigError as error:
                raise ConfigError(f"{path}, line {number}: {error}") from error
    return requests


def open_text(path: str, mode: str) -> TextIO:
    """Open a text file in UTF-8. Raises `ConfigError` if it cannot be opened."""
    try:
        # Bytes that are not UTF-8 reach the tokenizer as lone surrogates, which it refuses line by line.
        return Path(path).open(mode, encoding="utf-8", errors="surrogateescape")  # type: ignore[return-value]
    except OSError as error:
        raise ConfigError(f"cannot open {path!r}: {error.strerror}") from error
