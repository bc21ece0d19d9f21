"""`remask analyze compare`: responses to the same prompts side by side, differences marked.

The page, one HTML file that needs nothing else, is drawn from `compare.html` in this folder.
"""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment
from tqdm import tqdm

from remask.checks.values import listed
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.policies import CachePolicy, name_of, settings_of
from remask.request.sampling_params import SamplingParams
from remask_lab.asked.requests import about_requests, open_requests
from remask_lab.bench.contenders import described
from remask_lab.bench.workload import seeded, token_agreement
from remask_lab.records.machine import processor_text
from remask_lab.records.outcome import Outcome
from remask_lab.records.record import Record

TEMPLATE = Path(__file__).with_name("compare.html")
PROMPT_CHARACTERS = 600  # of a prompt's end that the page shows before one asks for all of it


def measure(args: argparse.Namespace) -> Outcome:
    """Answer the requests that `args` name under every variant."""
    given = _variants(args.variants)
    llm, requests = open_requests(args)
    variants = [variant(llm, {"cache": one} if isinstance(one, str) else one) for one in given]
    cases = compare(llm, requests, variants, progress=llm.progress)
    facts = about_requests(args, llm, requests, variants=given)
    record = Record("analyze compare", facts, {"cases": [asdict(case) for case in cases]})
    return Outcome(text(cases), record, None, reading(cases), partial(page, llm.loaded.name, cases, facts))


def _variants(given: str) -> list[Any]:
    try:
        found = json.loads(given)
    except json.JSONDecodeError as error:
        raise ConfigError(f"--variants is not JSON: {error}") from error
    return list(listed("--variants", found, "policies"))


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, and sampling parameters that come on top of a request's."""

    name: str
    policy: CachePolicy
    sampling: dict[str, Any]

    def of(self, request: Request) -> Request:
        """The request as this variant runs it."""
        if not self.sampling:
            return request.with_policy(self.policy)
        own = {name: getattr(request.params, name) for name in SamplingParams.__dataclass_fields__}
        return replace(request, params=SamplingParams.from_mapping({**own, **self.sampling}), policy=self.policy)


@dataclass(frozen=True, slots=True)
class Piece:
    """A run of words, and whether it differs from the first variant's response."""

    text: str
    differs: bool


@dataclass(frozen=True, slots=True)
class Answer:
    """What one variant made of one prompt. `agreement` is the share of tokens that equal the first variant's."""

    variant: str
    pieces: tuple[Piece, ...]
    token_ids: tuple[int, ...]
    agreement: float
    forwards: int
    row_layers: int
    seconds: float
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Case:
    """A prompt, and an answer of each variant."""

    prompt: str
    answers: tuple[Answer, ...]


def reading(cases: Sequence[Case]) -> str:
    """The comparison in a paragraph."""
    first, *others = [[case.answers[index] for case in cases] for index in range(len(cases[0].answers))]
    parts = [f"{len(cases)} prompts; {first[0].variant} took {_sum(first, 'forwards'):.0f} forwards."]
    for answers in others:
        same = sum(answer.agreement == 1 for answer in answers)
        parts.append(
            f"{answers[0].variant}: {same} of {len(cases)} responses are the same to the token, "
            f"{100 * sum(answer.agreement for answer in answers) / len(answers):.1f} % of tokens on average, with "
            f"{_sum(answers, 'row_layers') / _sum(first, 'row_layers'):.2f} of the row-layers in "
            f"{_sum(answers, 'seconds') / _sum(first, 'seconds'):.2f} of the time."
        )
    return " ".join(parts)


def _sum(answers: Sequence[Answer], name: str) -> float:
    return float(sum(getattr(answer, name) for answer in answers))


def variant(llm: LLM, given: Any) -> Variant:
    """The variant that {"cache", "cache_config", "sampling"} asks for; `cache` is a name or a `CachePolicy` object.

    Raises `ConfigError` on what cannot be used.
    """
    if not isinstance(given, dict) or set(given) - {"cache", "cache_config", "sampling"}:
        raise ConfigError(f"a variant is an object of cache, cache_config and sampling, got {given!r}")
    cache, settings, sampling = given.get("cache", "none"), given.get("cache_config", {}), given.get("sampling", {})
    if not isinstance(cache, str | CachePolicy) or not isinstance(settings, dict) or not isinstance(sampling, dict):
        raise ConfigError(f"a variant's cache is a name, its cache_config and sampling are objects; got {given!r}")
    SamplingParams.from_mapping(sampling)
    policy = llm.policy(cache, settings)
    name, chosen = (cache, settings) if isinstance(cache, str) else (name_of(cache), settings_of(cache))
    words = described({**chosen, **sampling})
    return Variant(f"{name} {words}".strip(), policy, sampling)


def compare(llm: LLM, work: Sequence[Request], variants: Sequence[Variant], progress: bool = False) -> list[Case]:
    """Answer every request of `work` under every variant, one request at a time, whatever policy it names itself.

    A request without a seed gets one, so that every variant draws the same. The first request is run once before it is
    timed. Raises `ConfigError`, before anything runs, where there is nothing to compare or a request cannot run.
    """
    if not work or not variants:
        raise ConfigError("a comparison needs a request and a variant")
    names = [variant.name for variant in variants]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"variant {twice!r} is there twice; variants must differ")
    requests = [seeded(item, index) for index, item in enumerate(work)]
    for request in requests:
        for variant in variants:
            try:
                llm.engine.check(variant.of(request))
            except ConfigError as error:
                raise ConfigError(f"{variant.name}: {error}") from error
    engines = [llm.new_engine(replace(llm.engine_config, max_num_seqs=1)) for _ in variants]
    for variant, engine in zip(variants, engines, strict=True):
        list(llm.run([variant.of(requests[0])], engine=engine, progress=False))
    cases = []
    for request in tqdm(requests, desc="prompts", unit="prompt", disable=not progress):
        outputs = [
            next(iter(llm.run([variant.of(request)], engine=engine, progress=False)))
            for variant, engine in zip(variants, engines, strict=True)
        ]
        answers = tuple(_answer(name, output, outputs[0]) for name, output in zip(names, outputs, strict=True))
        tokens = request.prompt_token_ids
        prompt = " ".join(map(str, tokens)) if llm.tokenizer is None else llm.tokenizer.decode(tokens)
        cases.append(Case(prompt, answers))
    return cases


def _answer(variant: str, output: Output, first: Output) -> Answer:
    return Answer(
        variant=variant,
        pieces=tuple(pieces(_words(first), _words(output))),
        token_ids=output.token_ids,
        agreement=token_agreement(output.token_ids, first.token_ids),
        forwards=output.usage.forwards,
        row_layers=output.usage.row_layers,
        seconds=output.elapsed_s,
        finish_reason=output.finish_reason,
    )


def pieces(reference: Sequence[str], words: Sequence[str]) -> list[Piece]:
    """`words` in runs, those that are not in `reference` at their place marked."""
    matcher = difflib.SequenceMatcher(None, reference, words, autojunk=False)
    return [
        Piece(" ".join(words[start:stop]), kind != "equal")
        for kind, _, _, start, stop in matcher.get_opcodes()
        if stop > start
    ]


def _words(output: Output) -> list[str]:
    """The response in words; token ids where the model has no words."""
    return [str(token) for token in output.token_ids] if output.text is None else output.text.split()


def text(cases: Sequence[Case]) -> str:
    """Every response, with the words in brackets that differ from the first variant's."""
    lines = []
    for number, case in enumerate(cases, start=1):
        lines.append(f"Prompt {number}")
        for answer in case.answers:
            words = " ".join(f"[{piece.text}]" if piece.differs else piece.text for piece in answer.pieces)
            lines.append(f"  {answer.variant} ({answer.forwards} forwards, {1e3 * answer.seconds:.0f} ms): {words}")
    return "\n".join(lines)


def page(model: str, cases: Sequence[Case], about: dict[str, Any]) -> str:
    """The comparison as HTML; all that models and users wrote is escaped."""
    machine = about["machine"]
    facts = (
        f"{model}, {machine['dtype']} on {processor_text(machine)}, one "
        f"request at a time, commit {about['commit'] or 'unknown'}, {about['date']}."
    )
    template = Environment(autoescape=True).from_string(TEMPLATE.read_text(encoding="utf-8"))
    first = cases[0].answers[0].variant
    return template.render(
        model=model, cases=cases, reading=reading(cases), first=first, facts=facts, limit=PROMPT_CHARACTERS
    )
