"""`remask generate` answers one prompt, or a file of them, each line under its own policy; `remask decide` the
questions of a JSON file, by the model's distribution over labels.
"""

import argparse
import json
import logging
import time
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from typing import Any

from remask.answers.answer import trace_of
from remask.answers.decided import api_answers
from remask.checkpoint.settings import Reads
from remask.checks.values import json_list, json_object, shown
from remask.cli.early import check_objects
from remask.cli.lines import build_request, standard_input, terms_of
from remask.cli.logs import print_error, print_notice
from remask.cli.options import engine_config, object_option, open_llm, open_text, sampling_option
from remask.cli.summary import summary
from remask.engine.request import Request
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM, Output
from remask.machine.disk import LineFile
from remask.machine.speeds import store_speed
from remask.request.questions import Decisions
from remask.request.terms import Terms
from remask.request.trace import step_map

log = logging.getLogger(__name__)


def run(args: argparse.Namespace) -> int:
    """Answer all requests. Returns 0, or 1 if some failed. Raises `ConfigError`, `OutputError`, and as `open_llm`."""
    sampling = sampling_option(args)
    settings = object_option("--cache-config", args.cache_config)
    with ExitStack() as resources:
        # Reading weights may take minutes, so the input is read before them.
        source = _read_lines(args.input) if args.input not in (None, "-") else standard_input()
        reads: Reads = "tokens" if args.prompt is None else "text"  # lines may hold token ids
        llm = resources.enter_context(open_llm(args, args.cache, settings, engine_config(args), reads))
        if args.prompt is not None:
            canvas = None if args.canvas is None else json_list("--canvas", args.canvas)
            line = _prompt_fields(llm, args) | {"canvas": canvas, "suffix": args.suffix}
            return _answer_one(llm, build_request(llm, line, "0", sampling), args)
        target = None if args.output is None else resources.enter_context(LineFile(args.output))
        return _answer_lines(llm, source, target, sampling, args)


def _read_lines(path: str) -> list[str]:
    """Return the lines of a file. Raises `ConfigError` if it cannot be read, or no line is a JSON object."""
    with open_text(path) as source:
        lines = list(source)
    check_objects(path, lines)
    return lines


def _prompt_fields(llm: LLM, args: argparse.Namespace) -> dict[str, Any]:
    """Return `--prompt` as `messages` if the model has a chat template, else as `prompt`."""
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
    """Answer `--prompt`, and print or write the answer. Returns the exit status."""
    start = time.perf_counter()
    (output,) = llm.session.run([request], trace=args.trace)
    if output.error is not None:
        print_error(f"remask generate: error: {output.error}")
        return 1
    store_speed(llm.loaded.name, len(output.token_ids), output.elapsed_s)
    print_notice(
        args, f"remask generate: {summary(llm.loaded.config, [(request, output)], time.perf_counter() - start)}"
    )
    if args.output is None and not args.trace:
        print(output.text if output.text is not None else " ".join(map(str, output.token_ids)))
    else:
        with ExitStack() as files:
            target = None if args.output is None else files.enter_context(LineFile(args.output))
            _write(target, _answer_fields(output, output.id) | (_trace_fields(output) if args.trace else {}))
    return 0


@dataclass(frozen=True, slots=True)
class _Line:
    """A line of the input that has a valid request. Its `id` may be any JSON value, None without one."""

    id: object
    request: Request
    terms: Terms


def _answer_lines(
    llm: LLM, source: Iterable[str], target: LineFile | None, sampling: Mapping[str, Any], args: argparse.Namespace
) -> int:
    """Answer the request lines of `source`, and write the answers in their order. Returns the exit status.

    A line that cannot be answered gets an answer with `error`, and the others are answered all the same.
    """
    lines: dict[str, _Line] = {}  # by engine id, the number of the line
    numbers: dict[str, int] = {}  # of lines, by their `id` as JSON
    pending: deque[str] = deque()  # engine ids of lines whose answers are not yet written, in order
    answers: dict[str, Mapping[str, Any]] = {}  # by engine id, not yet written
    failure_count = 0

    def write_in_order(request_id: str, answer: Mapping[str, Any]) -> None:
        """Write this answer and all that wait for it, once those of earlier lines are written."""
        answers[request_id] = answer
        while pending and pending[0] in answers:
            _write(target, answers.pop(pending.popleft()))

    for number, text in enumerate(source, start=1):
        if not text.strip():
            continue
        request_id = str(number)
        line_id = None
        pending.append(request_id)
        try:
            fields = json_object("a line", text)
            line_id = fields.get("id")
            first_number = (
                number if line_id is None else numbers.setdefault(json.dumps(line_id, sort_keys=True), number)
            )
            if first_number != number:
                raise ConfigError(
                    f"id {shown(line_id)} is used by line {first_number} too; ids must differ, or be left out"
                )
            request = build_request(llm, fields, request_id, sampling)
            llm.engine.check(request)
        # All exceptions, so that a defect which one line reveals does not lose the answers of the others.
        except Exception as error:
            if not isinstance(error, RemaskError):
                log.error("line %s cannot be read: %s", request_id, error, exc_info=True)
            failure_count += 1
            write_in_order(request_id, _report_failure(line_id, request_id, str(error)))
            continue
        lines[request_id] = _Line(line_id, request, terms_of(fields))
    successes: list[tuple[Request, Output]] = []
    start = time.perf_counter()
    for output in llm.session.run([line.request for line in lines.values()], trace=True):
        line = lines[output.id]
        if output.error is None:
            successes.append((line.request, output))
            report = _report_fields(llm, line.request, line.terms, args.trace, output)
            write_in_order(output.id, _answer_fields(output, line.id) | report)
        else:
            failure_count += 1
            write_in_order(output.id, _report_failure(line.id, output.id, output.error))
    if successes:
        print_notice(args, f"remask generate: {summary(llm.loaded.config, successes, time.perf_counter() - start)}")
    return 1 if failure_count else 0


def _answer_fields(output: Output, line_id: object) -> dict[str, Any]:
    """Return the fields that every answer has, and `holes` if its canvas has some."""
    return {
        "id": line_id,
        "token_ids": output.token_ids,
        "text": output.text,
        "finish_reason": output.finish_reason,
        "usage": {key: value for key, value in asdict(output.usage).items() if value is not None},
    } | ({} if output.holes is None else {"holes": output.holes})


def _report_fields(llm: LLM, request: Request, terms: Terms, trace: bool, output: Output) -> dict[str, Any]:
    """Return the fields that the terms of a line and `--trace` add to its answer: logprobs, step maps, traces."""
    assert output.trace is not None
    fields = _trace_fields(output) if trace else {}
    if terms.top_logprobs is not None:
        fields["logprobs"] = [asdict(logprob) for logprob in output.logprobs or ()]
    if terms.return_step_maps:
        steps = step_map(output.trace, len(request.prompt_token_ids), request.params.max_tokens)
        positions = request.response.answer_places(len(steps))[: len(output.token_ids)]
        fields["step_maps"] = [steps[position] for position in positions]
    if terms.return_trace:
        fingerprint = llm.session.fingerprint_of(request.adapter)
        fields["trace"] = trace_of(request, output.trace, output.usage, fingerprint).content
    return fields


def _trace_fields(output: Output) -> dict[str, Any]:
    """Return the transfers of `--trace`, with canvas positions and without empty fields."""
    assert output.trace is not None
    transfers = map(asdict, output.trace)
    return {
        "trace": [{name: value for name, value in fields.items() if name == "step" or value} for fields in transfers]
    }


def _report_failure(line_id: object, number: str, error: str) -> dict[str, Any]:
    """Print an error of line `number` on stderr. Returns the answer of the line."""
    print_error(f"remask generate: line {number}: {error}")
    return {"id": line_id, "error": error}


def _write(target: LineFile | None, value: Mapping[str, Any]) -> None:
    """Write an answer as a line of JSON into `target`, or to standard output if it is None."""
    line = json.dumps(value)
    if target is None:
        print(line, flush=True)
    else:
        target.write(line)


def decide(args: argparse.Namespace) -> int:
    """Print the answers by question id, and the work, as one JSON object.

    Returns 0. Raises `ConfigError` on questions that cannot be asked, and `CheckpointError` on a missing model.
    """
    if args.input == "-":
        text = standard_input().read()
    else:
        with open_text(args.input) as source:
            text = source.read()
    decisions = Decisions.from_mapping(json_object(f"--input {args.input}", text))
    settings = object_option("--cache-config", args.cache_config)
    with open_llm(args, args.cache, settings, engine_config(args), "text") as llm:
        if llm.tokenizer is not None and not llm.tokenizer.has_chat_template:
            log.warning(
                "the model %r has no chat template, so the state and each question are paragraphs of one text; "
                "--chat-template FILE gives it one",
                args.model,
            )
        result = llm.decide(decisions)
    answers = api_answers(decisions, result.answers)
    work = {name: getattr(result.usage, name) for name in ("prompt_tokens", "cached_tokens", "forwards", "row_layers")}
    print(json.dumps({"answers": answers, "work": work}))
    return 0
