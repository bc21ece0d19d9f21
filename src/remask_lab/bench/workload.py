"""Workloads: the requests of a benchmark, and their right answers."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from remask.core.sampling import SamplingParams
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.models.source import BUNDLED, BUNDLED_UNIFORM
from remask.tasks import gsm8k, timetable
from remask.tasks.transit import draw_question, is_correct, is_ride, keeps_format, make_workload, reference_response

TRANSIT_SAMPLING = {"max_tokens": 16, "steps": 8, "block_length": 2}  # a stop and its separator a block
TIMETABLE_SAMPLING = {"max_tokens": 32, "block_length": 16}
GSM8K_SAMPLING = {"max_tokens": 256, "steps": 128}  # the BiCache paper's setting
# Random tokens carry no meaning, so an end token among them must not shorten the work.
RANDOM_SAMPLING = {"max_tokens": 16, "ignore_eos": True}
PREFIXES = 4  # different shared prefixes of a workload
PREFIX_TOKENS, PROMPT_TOKENS = 230, 10  # lengths of a random shared prefix, and of the random tokens after it
MAX_GSM8K_PREFIXES = 12
Parts: TypeAlias = Mapping[str, Callable[[str], bool]]
MAX_HISTORY = 2  # the bundled model is trained on conversations of up to three turns


@dataclass(frozen=True, slots=True)
class Task:
    """One request of a workload, and its only right answer where the workload has answers.

    Attributes:
        check: returns whether a text gives an answer. By default the answer must stand after the last `##`.
        parts: further checks of a text by name, such as whether it follows one part of the system prompt.
    """

    request: Request
    answer: str | None = None
    check: Callable[[str, str], bool] = is_correct
    parts: Parts = field(default_factory=dict)

    def correct(self, text: str | None) -> bool | None:
        """Whether `text` gives the right answer. None where the task has no answer."""
        return None if self.answer is None or text is None else self.check(text, self.answer)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests over `prefixes` different shared prefixes. `name` and `seed` identify the draw."""

    name: str
    seed: int
    tasks: tuple[Task, ...]
    prefixes: int

    def under(self, params: SamplingParams) -> "Workload":
        """The same requests with other sampling parameters."""
        tasks = tuple(replace(task, request=replace(task.request, params=params)) for task in self.tasks)
        return replace(self, tasks=tasks)

    @property
    def seeded(self) -> "Workload":
        """The same requests. One without a seed gets the workload's seed plus its index, so every run is the same."""
        tasks = tuple(
            replace(task, request=seeded(task.request, self.seed + index)) for index, task in enumerate(self.tasks)
        )
        return replace(self, tasks=tasks)

    @property
    def prefix_ratio(self) -> float:
        """Mean share of the canvas that the shared prefix takes."""
        lengths = [
            task.request.prefix_length / (len(task.request.prompt_token_ids) + task.request.params.max_tokens)
            for task in self.tasks
        ]
        return float(np.mean(lengths))


def seeded(request: Request, seed: int) -> Request:
    """The same request, which gets `seed` where it has none: every run of it draws the same."""
    params = request.params
    return request if params.seed is not None else replace(request, params=replace(params, seed=seed))


def usual_workload(
    llm: LLM,
    requests: int,
    seed: int,
    sampling: Mapping[str, Any],
    *,
    prefixes: int = PREFIXES,
    prefix_tokens: int | None = None,
    prompt_tokens: int | None = None,
) -> Workload:
    """The workload that suits a model: a bundled model's task, GSM8K where it reads chats, else random tokens.

    `sampling` overrides the workload's usual sampling parameters. Lengths ask for random tokens on any model.
    Raises `ConfigError` where the workload cannot be drawn.
    """
    if prefix_tokens is None and prompt_tokens is None:
        if is_bundled(llm):
            params = SamplingParams.from_mapping({**TRANSIT_SAMPLING, **sampling})
            return bundled_workload(llm, requests, prefixes, seed, params)
        if is_bundled_uniform(llm):
            return timetable_workload(
                llm, requests, seed, SamplingParams.from_mapping({**TIMETABLE_SAMPLING, **sampling})
            )
        if reads_chats(llm):
            params = SamplingParams.from_mapping({**GSM8K_SAMPLING, **sampling})
            return gsm8k_workload(llm, requests, prefixes, seed, params)
    params = SamplingParams.from_mapping({**RANDOM_SAMPLING, **sampling})
    prefix = PREFIX_TOKENS if prefix_tokens is None else prefix_tokens
    prompt = PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    return random_workload(llm, requests, prefixes, seed, params, prefix, prompt)


def bundled_workload(
    llm: LLM, requests: int, prefixes: int, seed: int, sampling: SamplingParams, *, with_prefix: bool = True
) -> Workload:
    """Held-out questions of the bundled model's task. Without the prefix, the questions stand alone."""
    if llm.tokenizer is None:
        raise ConfigError("the bundled task is made of words, and this model folder has no tokenizer")
    tasks = []
    prefixes = min(prefixes, requests)
    for index, item in enumerate(make_workload(requests, prefixes, seed)):
        messages = item.messages if with_prefix else item.messages[-1:]
        request = Request(
            str(index), llm.tokenizer.apply_chat(messages), sampling, llm.tokenizer.shared_prefix(messages)
        )
        parts: Parts = {"rules": partial(is_ride, item.prompt, item.question), "format": keeps_format}
        tasks.append(Task(request, item.answer, parts=parts))
    return Workload("transit" if with_prefix else "transit without its prefix", seed, tuple(tasks), prefixes)


def conversation_workload(llm: LLM, requests: int, prefixes: int, seed: int, sampling: SamplingParams) -> Workload:
    """Questions of the bundled model's task as turns of conversations, so that shared prefixes nest.

    A request's shared prefix is the system prompt, alone or with one or two earlier turns and their right answers.
    Turns of one conversation follow one another. Many conversations share a system prompt.
    """
    if llm.tokenizer is None:
        raise ConfigError("the bundled task is made of words, and this model folder has no tokenizer")
    rng = random.Random(seed)
    tasks = []
    prefixes = min(prefixes, requests)
    for index, item in enumerate(make_workload(requests, prefixes, seed)):
        turn = index % (MAX_HISTORY + 1)
        if turn == 0:
            line, history = item, item.messages[:1]
        # Turns after the first are about their conversation's line, whatever line was drawn for them.
        question = item.question if turn == 0 else draw_question(rng, line.prompt)
        messages = [*history, {"role": "user", "content": question.text}]
        tokens = llm.tokenizer.apply_chat(messages)
        answer = reference_response(line.prompt, question)
        request = Request(str(index), tokens, sampling, llm.tokenizer.shared_prefix(messages))
        tasks.append(Task(request, answer.rsplit(maxsplit=1)[-1]))
        history = [*messages, {"role": "assistant", "content": answer}]
    return Workload("transit, conversations", seed, tuple(tasks), prefixes)


def timetable_workload(llm: LLM, requests: int, seed: int, sampling: SamplingParams) -> Workload:
    """Held-out timetables of the bundled uniform model's task. They share no prefix."""
    if llm.tokenizer is None:
        raise ConfigError("the bundled task is made of words, and this model folder has no tokenizer")
    tasks = []
    for index, item in enumerate(timetable.make_timetables(requests, seed)):
        request = Request(str(index), llm.tokenizer.encode(item.text), sampling)
        tasks.append(Task(request, item.response(sampling.max_tokens), timetable.is_correct))
    # The seed of a request decides its initial noise, so every policy begins with the same canvas.
    return Workload("timetable", seed, tuple(tasks), 0).seeded


def gsm8k_workload(llm: LLM, requests: int, prefixes: int, seed: int, sampling: SamplingParams) -> Workload:
    """GSM8K questions under shared system prompts of rules and worked examples, answered after `##`.

    Raises `ConfigError` for more shared prompts than the questions at hand allow.
    """
    if llm.tokenizer is None:
        raise ConfigError("GSM8K is text, and this model folder has no tokenizer")
    if not 1 <= prefixes <= MAX_GSM8K_PREFIXES:
        raise ConfigError(f"GSM8K workloads have 1 to {MAX_GSM8K_PREFIXES} shared prefixes, got {prefixes}")
    tasks = []
    for index, item in enumerate(gsm8k.make_questions(requests, prefixes, seed)):
        tokens = llm.tokenizer.apply_chat(item.messages)
        request = Request(str(index), tokens, sampling, llm.tokenizer.shared_prefix(item.messages))
        parts: Parts = {"rules": partial(gsm8k.is_solved, item.answer), "format": gsm8k.keeps_format}
        tasks.append(Task(request, item.answer, parts=parts))
    return Workload("GSM8K", seed, tuple(tasks), prefixes)


def random_workload(
    llm: LLM, requests: int, prefixes: int, seed: int, sampling: SamplingParams, prefix_tokens: int, prompt_tokens: int
) -> Workload:
    """Random token ids without answers: `prefix_tokens` that requests share, then `prompt_tokens` of their own."""
    rng = np.random.default_rng(seed)
    vocabulary = llm.loaded.config.vocab
    prefixes = min(prefixes, requests)
    shared = [rng.integers(0, vocabulary, prefix_tokens).tolist() for _ in range(prefixes)]
    tasks = []
    for index in range(requests):
        prompt = shared[index % prefixes] + rng.integers(0, vocabulary, prompt_tokens).tolist()
        tasks.append(Task(Request(str(index), prompt, sampling, prefix_tokens)))
    return Workload("random tokens", seed, tuple(tasks), prefixes)


def reads_chats(llm: LLM) -> bool:
    """Whether the model takes chat messages in plain English, as the GSM8K workload gives them."""
    return llm.tokenizer is not None and llm.tokenizer.has_chat_template and not is_bundled(llm)


def is_bundled(llm: LLM) -> bool:
    """Whether the bundled masked model is loaded, whose task has shared prefixes."""
    return llm.loaded.name == BUNDLED


def is_bundled_uniform(llm: LLM) -> bool:
    """Whether the bundled uniform model is loaded, whose task shares nothing."""
    return llm.loaded.name == BUNDLED_UNIFORM


def token_agreement(these: Sequence[int], those: Sequence[int]) -> float:
    """Share of positions at which two responses hold the same token. A missing position counts as different."""
    length = max(len(these), len(those))
    return sum(a == b for a, b in zip(these, those, strict=False)) / length if length else 1.0
