"""`remask generate` answers one prompt, or a file of them, each line under its own policy; `remask decide` the
questions of a JSON file, by the model's distribution over labels.
"""

import argparse
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from remask.answers.answer import trace_of
from remask.answers.decided import told
from remask.checkpoint.settings import Reads
from remask.checks.values import json_list, json_object, shown
from remask.cli.early import check_objects
from remask.cli.lines import as_request, standard_input, terms_of
from remask.cli.logs import tell, tell_people
from remask.cli.options import engine_config, object_option, open_llm, open_text, sampling_option
from remask.cli.summary import summary
from remask.engine.request import Request
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM, Output
from remask.machine.disk import LineFile
from remask.machine.speeds import keep
from remask.request.questions import Decisions
from remask.request.terms import Terms
from remask.request.trace import step_map

log = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Answer all requests. Returns 0 if all were answered, 1 if some failed."""
    sampling, settings = sampling_option(args), object_option("--cache-config", args.cache_config)
    with ExitStack() as files:
        # A file is read before the weights are, which may take minutes.
        source = _lines(args.input) if args.input not in (None, "-") else standard_input()
        reads: Reads = "tokens" if args.prompt is None else "text"  # lines may hold token ids
        llm = files.enter_context(open_llm(args, args.cache, settings, engine_config(args), reads))
        if args.prompt is not None:
            canvas = None if args.canvas is None else json_list("--canvas", args.canvas)
            line = _prompt(llm, args) | {"canvas": canvas, "suffix": args.suffix}
            return _answer_one(llm, as_request(llm, line, "0", sampling), args)
        target = None if args.output is None else files.enter_context(LineFile(args.output))
        return _answer_lines(llm, source, target, sampling, args)


def _lines(path: str) -> list[str]:
    """The lines of a file. Raises `ConfigError` where it cannot be read, or none of its lines is an object."""
    with open_text(path, "r") as source:
        lines = list(source)
    check_objects(path, lines)
    return lines


def _prompt(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """A conversation where the model reads these, else the text as it is."""
    if llm.tokenizer is not None and llm.tokenizer.has_chat_template:
        system = [] if args.system is None else [{"role": "system", "content": args.system}]
        return {"messages": [*system, {"role": "user", "content": args.prompt}]}
    if args.system is not None:
        raise ConfigError(
            f"--system: the model {args.model!r} has no chat template; give one with --chat-template FILE, or put the "
            "text into --prompt"
        )
    return {"prompt": args.prompt}


def _answer_one(llm: LLM, request: Request, args: argparse.Namespace) -> int:
    began = time.perf_counter()
    (output,) = llm.session.run([request], trace=args.trace)
    if output.error is not None:
        tell(f"remask generate: error: {output.error}")
        return 1
    keep(llm.loaded.name, len(output.token_ids), output.elapsed_s)
    tell_people(
        args, f"remask generate: {summary(llm.loaded.config, [(request, output)], time.perf_counter() - began)}"
    )
    if args.output is None and not args.trace:
        print(output.text if output.text is not None else " ".join(map(str, output.token_ids)))
    else:
        with ExitStack() as files:
            target = None if args.output is None else files.enter_context(LineFile(args.output))
            _write(target, _answer(output, output.id) | _steps(args.trace, output))
    return 0


def _answer_lines(
    llm: LLM, source: Iterable[str], target: LineFile | None, sampling: Mapping[str, Any], args: argparse.Namespace
) -> int:
    trace: bool = args.trace
    requests: list[Request] = []
    names: dict[str, object] = {}  # engine id -> the line's own id, which need not be text
    lines: dict[str, int] = {}  # the line of each own id, as JSON
    reports: dict[str, Callable[[Output], dict[str, Any]]] = {}  # what a line asks for beside its answer
    turns: deque[str] = deque()  # lines whose answers are not written, in their order
    ready: dict[str, Mapping[str, Any]] = {}
    failed = 0

    def give(request_id: str, answer: Mapping[str, Any]) -> None:
        """Take the answer of a line, and write all answers whose turn it is."""
        ready[request_id] = answer
        while turns and turns[0] in ready:
            _write(target, ready.pop(turns.popleft()))

    for number, text in enumerate(source, start=1):
        if not text.strip():
            continue
        request_id, name = str(number), None
        turns.append(request_id)
        try:
            line = json_object("a line", text)
            name = line.get("id")
            if name is not None:
                first = lines.setdefault(json.dumps(name, sort_keys=True), number)
                if first != number:
                    raise ConfigError(f"id {shown(name)} is used by line {first} too; ids must differ, or be left out")
            request = as_request(llm, line, request_id, sampling)
            llm.engine.check(request)
        # Also what no check foresaw: one line must not lose the answers of the others.
        except Exception as error:
            if not isinstance(error, RemaskError):
                log.error("line %s cannot be read: %s", request_id, error, exc_info=True)
            failed += 1
            give(request_id, _failure(name, request_id, str(error)))
            continue
        requests.append(request)
        names[request_id] = name
        reports[request_id] = partial(_report, llm, request, terms_of(line), trace)
    by_id, answered, began = {each.id: each for each in requests}, list[tuple[Request, Output]](), time.perf_counter()
    for output in llm.session.run(requests, trace=True):
        name = names[output.id]
        if output.error is None:
            answered.append((by_id[output.id], output))
            give(output.id, _answer(output, name) | reports[output.id](output))
        else:
            failed += 1
            give(output.id, _failure(name, output.id, output.error))
    if answered:
        tell_people(args, f"remask generate: {summary(llm.loaded.config, answered, time.perf_counter() - began)}")
    return 1 if failed else 0


def _answer(output: Output, name: object) -> dict[str, Any]:
    return {
        "id": name,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "usage": {key: value for key, value in asdict(output.usage).items() if value is not None},
    } | ({} if output.holes is None else {"holes": output.holes})


def _report(llm: LLM, request: Request, terms: Terms, steps: bool, output: Output) -> dict[str, Any]:
    """What a line asks for beside its answer: log-probabilities, its trace, its step maps."""
    found = _steps(steps, output)
    assert output.trace is not None
    if terms.top_logprobs is not None:
        found["logprobs"] = [asdict(each) for each in output.logprobs or ()]
    if terms.return_step_maps:
        written = step_map(output.trace, len(request.prompt_token_ids), request.params.max_tokens)
        shown = request.response.answer_places(len(written))[: len(output.token_ids)]
        found["step_maps"] = [written[place] for place in shown]
    if terms.return_trace:
        fingerprint = llm.session.fingerprint_of(request.adapter)
        found["trace"] = trace_of(request, output.trace, output.usage, fingerprint).content
    return found


def _steps(wanted: bool, output: Output) -> dict[str, Any]:
    """The events of `--trace`, with positions on the canvas; what is empty in one is left out."""
    if not wanted or output.trace is None:
        return {}
    events = [{name: value for name, value in asdict(each).items() if name == "step" or value} for each in output.trace]
    return {"trace": events}


def _failure(name: object, number: str, error: str) -> dict[str, Any]:
    tell(f"remask generate: line {number}: {error}")
    return {"id": name, "error": error}


def _write(target: LineFile | None, value: Mapping[str, Any]) -> None:
    """Write an answer into a file, or to standard output."""
    line = json.dumps(value)
    if target is None:
        print(line, flush=True)
    else:
        target.write(line)


def decide(args: argparse.Namespace) -> int:
    """Print the answers by the ids of their questions, and the work, as one JSON object."""
    if args.input == "-":
        text = standard_input().read()
    else:
        with open_text(args.input, "r") as source:
            text = source.read()
    asked = Decisions.from_mapping(json_object(f"--input {args.input}", text))
    settings = object_option("--cache-config", args.cache_config)
    with open_llm(args, args.cache, settings, engine_config(args), "text") as llm:
        if llm.tokenizer is not None and not llm.tokenizer.has_chat_template:
            log.warning(
                "the model %r has no chat template, so the state and each question are paragraphs of one text; "
                "--chat-template FILE gives it one",
                args.model,
            )
        found = llm.decide(asked)
    answers = told(asked, found.answers)
    work = {name: getattr(found.usage, name) for name in ("prompt_tokens", "cached_tokens", "forwards", "row_layers")}
    print(json.dumps({"answers": answers, "work": work}, ensure_ascii=False))
    return 0
