"""The same prompts under several variants: what each answers, and where it departs from the first of them."""

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from remask.core.sampling import SamplingParams
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy, name_of, settings_of
from remask_lab.bench.contenders import described
from remask_lab.bench.workload import token_agreement


@dataclass(frozen=True, slots=True)
class Variant:
    """A policy, with `settings` that tell it from others, and sampling parameters that come on top of a request's."""

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
    name, told = (cache, settings) if isinstance(cache, str) else (name_of(cache), settings_of(cache))
    words = described({**told, **sampling})
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
    requests = [_seeded(item, index) for index, item in enumerate(work)]
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
        first = _words(outputs[0].text, outputs[0].token_ids)
        answers = tuple(
            Answer(
                variant=variant.name,
                pieces=tuple(pieces(first, _words(output.text, output.token_ids))),
                token_ids=output.token_ids,
                agreement=token_agreement(output.token_ids, outputs[0].token_ids),
                forwards=output.usage.forwards,
                row_layers=output.usage.row_layers,
                seconds=output.elapsed_s,
                finish_reason=output.finish_reason,
            )
            for variant, output in zip(variants, outputs, strict=True)
        )
        prompt = request.prompt_token_ids
        text = " ".join(map(str, prompt)) if llm.tokenizer is None else llm.tokenizer.decode(prompt)
        cases.append(Case(text, answers))
    return cases


def pieces(reference: Sequence[str], words: Sequence[str]) -> list[Piece]:
    """`words` in runs, those that are not in `reference` at their place marked."""
    matcher = difflib.SequenceMatcher(None, reference, words, autojunk=False)
    return [
        Piece(" ".join(words[start:stop]), kind != "equal")
        for kind, _, _, start, stop in matcher.get_opcodes()
        if stop > start
    ]


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


def _words(text: str | None, tokens: Sequence[int]) -> list[str]:
    return [str(token) for token in tokens] if text is None else text.split()


def _seeded(request: Request, seed: int) -> Request:
    return request if request.params.seed is not None else replace(request, params=replace(request.params, seed=seed))
