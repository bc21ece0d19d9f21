"""Workloads: the requests of a benchmark, and their right answers."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np

from remask.checks.values import check_choice
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams, merge_sampling
from remask.tasks import relay, tariff, town, transit
from remask.tasks.relay import RelaySettings
from remask.tasks.tariff import TariffSettings
from remask.tasks.town import TownSettings
from remask.tasks.transit import TransitSettings, draw_question, is_correct, make_workload, reference_response
from remask_lab import gsm8k
from remask_lab.bench import lookup
from remask_lab.bench.lookup import LookupSettings
from remask_lab.bench.names import OWN_TASKS, PREFIX_TOKENS, PREFIXES, PROMPT_TOKENS, TASKS
from remask_lab.gsm8k import Gsm8kSettings

# Random tokens carry no meaning, so an end token among them must not shorten the work.
RANDOM_SAMPLING = {"max_tokens": 16, "ignore_eos": True}
Parts: TypeAlias = Mapping[str, Callable[[str], float]]
Settings: TypeAlias = TariffSettings | RelaySettings | TransitSettings | TownSettings | LookupSettings | Gsm8kSettings
MAX_HISTORY = 2  # the transit model is trained on conversations of up to three turns


@dataclass(frozen=True, slots=True)
class Task:
    """One request of a workload, and its right answer.

    Attributes:
        answer: the right answer; None if the workload has no answers.
        check: whether a response, the first argument, gives an answer, the second. By default the answer must stand
            after the last `##`.
        parts: more scores of a response from 0 to 1 by name, such as whether it follows one part of the system prompt;
            tasks of one workload may have different ones.
        question: without the shared prefix and the texts of a chat template; None for random tokens.
        reference: a response in which the answer is right; None for random tokens.
        rule: what `check` requires, in words.
    """

    request: Request
    answer: str | None = None
    check: Callable[[str, str], bool] = is_correct
    parts: Parts = field(default_factory=dict)
    question: str | None = None
    reference: str | None = None
    rule: str = "the answer stands after the last '##'"

    def correct(self, text: str | None) -> bool | None:
        """Whether `text` gives the right answer. None if the task has no answer, or there is no text."""
        return None if self.answer is None or text is None else self.check(text, self.answer)


SAYS = (
    "the text, or what stands after its last '##', is the answer; capitals, white space and a full stop at the end do "
    "not count"
)


def says(text: str, answer: str) -> bool:
    """Whether `text` gives `answer`, by the rule `SAYS`."""

    def normalized(side: str) -> str:
        return " ".join(side.rpartition("##")[2].split()).rstrip(".").casefold()

    return normalized(text) == normalized(answer)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests with `prefixes` different shared prefixes. `name` and `seed` identify the draw."""

    name: str
    _: KW_ONLY
    seed: int
    tasks: tuple[Task, ...]
    prefixes: int

    def under(self, params: SamplingParams) -> "Workload":
        """The same requests with other sampling parameters."""
        tasks = tuple(replace(task, request=replace(task.request, params=params)) for task in self.tasks)
        return replace(self, tasks=tasks)

    @property
    def seeded(self) -> "Workload":
        """The same requests; those without a seed get the workload's seed plus their index, so that runs are equal."""
        tasks = tuple(
            replace(task, request=seeded(task.request, self.seed + index)) for index, task in enumerate(self.tasks)
        )
        return replace(self, tasks=tasks)

    @property
    def clusters(self) -> list[int]:
        """The `prefix_clusters` of the tasks."""
        return prefix_clusters(self.tasks)

    @property
    def prefix_ratio(self) -> float:
        """The mean share of the canvas that the shared prefix takes."""
        lengths = [
            task.request.prefix_length / (len(task.request.prompt_token_ids) + task.request.params.max_tokens)
            for task in self.tasks
        ]
        return float(np.mean(lengths))


def prefix_clusters(tasks: Sequence[Task]) -> list[int]:
    """The number of each task's cluster.

    Tasks are in one cluster if they share a prefix, or if their prefixes begin with the same third one, as those of the
    turns of a conversation do. A task without a shared prefix is a cluster by itself.
    """
    prefixes = [tuple(task.request.prompt_token_ids[: task.request.prefix_length]) for task in tasks]
    numbers: dict[tuple[int, ...], int] = {}
    root: tuple[int, ...] = ()
    # In order of their tokens, all prefixes that begin with another one follow it.
    for prefix in sorted({prefix for prefix in prefixes if prefix}):
        if not root or prefix[: len(root)] != root:
            root = prefix
        numbers[prefix] = numbers.get(root, len(numbers))
    return [numbers[prefix] if prefix else len(numbers) + index for index, prefix in enumerate(prefixes)]


def steps_of(params: SamplingParams) -> int:
    """The number of steps in the schedule of a whole response."""
    block = params.block_length or params.max_tokens
    per_block = params.steps_per_block or max(1, block // (params.uniform.tokens_per_step or 1))
    return params.steps or per_block * -(-params.max_tokens // block)


def seeded(request: Request, seed: int) -> Request:
    """The same request, with `seed` if it has none, so that every run of it draws the same numbers."""
    params = request.params
    return request if params.seed is not None else replace(request, params=replace(params, seed=seed))


# Each function below returns fields of `Task` about the answer of an item that a task has drawn.


def _tariff(item: tariff.TariffRequest, settings: Any) -> dict[str, Any]:
    """All names of a response must be right. Parts are the share of right names, and accuracy by kind of question."""
    parts: dict[str, Callable[[str], float]] = {"names": partial(tariff.right_names, answer=item.reference)}
    if len(settings.kinds) > 1:
        parts[item.question.kind] = partial(tariff.is_correct, answer=item.reference)
    return {
        "answer": item.reference,
        "reference": item.reference,
        "check": tariff.is_correct,
        "parts": parts,
        "rule": "every name is right, in its place",
    }


def _relay(item: relay.RelayRequest, _: Any) -> dict[str, Any]:
    """All towns of a response must be right. The part is the share of right towns."""
    return {
        "answer": item.reference,
        "reference": item.reference,
        "check": relay.is_correct,
        "parts": {"hops": partial(relay.right_hops, answer=item.reference)},
        "rule": "every town is right, in its place",
    }


def _transit(item: transit.TransitRequest, _: Any) -> dict[str, Any]:
    """Parts are whether the ride is right, and whether the format is."""
    parts = {"rules": partial(transit.is_ride, item.prompt, item.question), "format": transit.keeps_format}
    return {"answer": item.answer, "parts": parts, "reference": reference_response(item.prompt, item.question)}


def _town(item: town.TownRequest, _: Any) -> dict[str, Any]:
    """A response must say the fact in the form of the page's answers. The part is accuracy by kind of question."""
    is_right = partial(town.is_correct, item)
    return {
        "answer": item.fact,
        "reference": item.answer,
        "check": lambda text, _: is_right(text),
        "parts": {item.kind: is_right},
        "rule": "the response says what was asked, in the form of the page's answers",
    }


def _lookup(item: lookup.LookupRequest, _: Any) -> dict[str, Any]:
    """A response must name the value and no other of its kind. The part is accuracy by topic of the page."""
    is_right = partial(lookup.is_correct, item)
    return {
        "answer": item.value,
        "reference": item.value,
        "check": lambda text, _: is_right(text),
        "parts": {item.page.topic: is_right},
        "rule": "the response names what was asked for, and nothing else of its kind",
    }


def _gsm8k(item: gsm8k.MathQuestion, _: Any) -> dict[str, Any]:
    """Parts are whether the question is solved, and whether the format is right."""
    parts = {"rules": partial(gsm8k.is_solved, item.answer), "format": gsm8k.keeps_format}
    return {"answer": item.answer, "parts": parts, "reference": item.reference}


def _gsm8k_questions(requests: int, prefixes: int, seed: int, settings: Gsm8kSettings) -> Sequence[Any]:
    """Questions of GSM8K. Raises `ConfigError` on more prefixes than it has system prompts, or none."""
    if not 1 <= prefixes <= gsm8k.MAX_PROMPTS:
        raise ConfigError(f"GSM8K workloads have 1 to {gsm8k.MAX_PROMPTS} shared prefixes, got {prefixes}")
    return gsm8k.make_questions(requests, prefixes, seed, settings.shots)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A task whose system prompts are shared.

    Attributes:
        settings: the class of its settings.
        sampling: its default sampling parameters.
        draw: draws items, which have `messages`, from the numbers of requests and prefixes, a seed and settings.
        fields: the fields of `Task` about an item's answer, from the item and the settings.
    """

    settings: Any
    sampling: Mapping[str, Any]
    _: KW_ONLY
    draw: Callable[[int, int, int, Any], Sequence[Any]]
    fields: Callable[[Any, Any], dict[str, Any]]


_KINDS: Mapping[str, _Kind] = {
    "tariff": _Kind(TariffSettings, tariff.SAMPLING, draw=tariff.make_workload, fields=_tariff),
    "relay": _Kind(RelaySettings, relay.SAMPLING, draw=relay.make_workload, fields=_relay),
    "transit": _Kind(
        TransitSettings,
        transit.SAMPLING,
        draw=lambda requests, prefixes, seed, settings: make_workload(requests, prefixes, seed, settings.rows),
        fields=_transit,
    ),
    "town": _Kind(TownSettings, town.SAMPLING, draw=town.make_workload, fields=_town),
    "lookup": _Kind(LookupSettings, lookup.SAMPLING, draw=lookup.make_workload, fields=_lookup),
    "gsm8k": _Kind(Gsm8kSettings, gsm8k.SAMPLING, draw=_gsm8k_questions, fields=_gsm8k),
}


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """The task of a workload, one of `TASKS`, and its settings; None takes the defaults.

    Raises `UnknownNameError` if there is no such task, and `ConfigError` if `settings` are of another task's class.
    """

    name: str
    settings: Settings | None = None

    def __post_init__(self) -> None:
        check_choice("task", self.name, TASKS)
        kind = _KINDS.get(self.name)
        if self.settings is not None and not (kind and isinstance(self.settings, kind.settings)):
            raise ConfigError(f"the task {self.name} does not take {type(self.settings).__name__}")


def choose_task(name: str | None, settings: Mapping[str, Any]) -> TaskChoice | None:
    """The task `name` with these settings. None, which stands for the model's own task, without a name.

    Raises `UnknownNameError` if there is no such task or setting, and `ConfigError` on settings that are not allowed,
    have no task's name beside them, or are for a task without settings.
    """
    if name is None:
        if settings:
            raise ConfigError("--task-settings are those of a task; name it with --task")
        return None
    check_choice("--task", name, TASKS)
    if not settings:
        return TaskChoice(name)
    if name not in _KINDS:
        raise ConfigError(f"the task {name} has no settings; --task-settings are for {', '.join(_KINDS)}")
    return TaskChoice(name, _KINDS[name].settings.from_mapping(settings))


def own_task(llm: LLM) -> TaskChoice:
    """The task that a bundled model is made for; for others GSM8K if they read chats, else random tokens."""
    return TaskChoice(OWN_TASKS.get(llm.loaded.name, "gsm8k" if reads_chats(llm) else "random"))


def usual_workload(
    llm: LLM,
    requests: int,
    seed: int,
    sampling: Mapping[str, Any],
    *,
    prefixes: int | None = None,
    prefix_tokens: int | None = None,
    prompt_tokens: int | None = None,
    task: TaskChoice | None = None,
) -> Workload:
    """Requests of `task`, by default `own_task`, or random tokens if one of their lengths is given.

    `sampling` overrides the task's default sampling parameters. `prefixes` defaults to `PREFIXES`, but for questions to
    a uniform model to `requests`, as no cache of such models shares prefixes. Raises `ConfigError` if the workload
    cannot be drawn.
    """
    if task is None:
        task = own_task(llm) if prefix_tokens is None and prompt_tokens is None else TaskChoice("random")
    uniform = llm.loaded.config.kind == "uniform"
    kind = _KINDS.get(task.name)
    defaults = RANDOM_SAMPLING if kind is None else kind.sampling
    if uniform and task.name == "relay":
        defaults = relay.UNIFORM_SAMPLING
    params = SamplingParams.from_mapping(merge_sampling(defaults, sampling))
    if kind is not None:
        prefixes = prefixes or (requests if uniform else PREFIXES)
        workload = chat_workload(llm, task, requests=requests, prefixes=prefixes, seed=seed, sampling=params)
        # The seed of a request decides its initial noise, so every policy begins with the same canvas.
        return workload.seeded if uniform else workload
    prefixes = prefixes or PREFIXES
    prefix_tokens = PREFIX_TOKENS if prefix_tokens is None else prefix_tokens
    prompt_tokens = PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    return random_workload(
        llm,
        requests=requests,
        prefixes=prefixes,
        seed=seed,
        sampling=params,
        prefix_tokens=prefix_tokens,
        prompt_tokens=prompt_tokens,
    )


def chat_workload(
    llm: LLM,
    task: TaskChoice,
    *,
    requests: int,
    prefixes: int,
    seed: int,
    sampling: SamplingParams,
    with_prefix: bool = True,
) -> Workload:
    """Held-out questions of a task whose system prompts are shared, behind these or, without `with_prefix`, alone.

    Raises `ConfigError` on tasks without shared prompts, on GSM8K without its prefix, and on more prefixes than GSM8K
    has.
    """
    kind = _KINDS.get(task.name)
    if kind is None or (task.name == "gsm8k" and not with_prefix):
        raise ConfigError(
            f"the questions of the task {task.name} make no sense without their prefix, or have none; "
            f"{', '.join(name for name in _KINDS if name != 'gsm8k')} can be asked so"
        )
    settings = task.settings or kind.settings()
    prefixes = prefixes if task.name == "gsm8k" else min(prefixes, requests)
    tasks = []
    for index, item in enumerate(kind.draw(requests, prefixes, seed, settings)):
        messages = item.messages
        request = _chat(llm, index, messages if with_prefix else messages[-1:], sampling)
        tasks.append(Task(request, question=messages[-1]["content"], **kind.fields(item, settings)))
    name = "GSM8K" if task.name == "gsm8k" else task.name
    return Workload(_workload_name(name, settings, with_prefix), seed=seed, tasks=tuple(tasks), prefixes=prefixes)


def conversation_workload(llm: LLM, *, requests: int, prefixes: int, seed: int, sampling: SamplingParams) -> Workload:
    """Questions of the transit task as turns of conversations, whose shared prefixes begin with one another.

    The shared prefix of a request is the system prompt, followed by up to `MAX_HISTORY` earlier turns with their right
    answers. Requests of one conversation follow one another.
    """
    rng = random.Random(seed)
    tasks = []
    prefixes = min(prefixes, requests)
    for index, item in enumerate(make_workload(requests, prefixes, seed)):
        if index % (MAX_HISTORY + 1) == 0:
            line, question, history = item.prompt, item.question, item.messages[:1]
        else:  # about the line of the conversation, whatever line was drawn for this request
            question = draw_question(rng, line)
        messages = [*history, {"role": "user", "content": question.text}]
        answer = reference_response(line, question)
        request = _chat(llm, index, messages, sampling)
        tasks.append(Task(request, answer.rsplit(maxsplit=1)[-1], question=question.text, reference=answer))
        history = [*messages, {"role": "assistant", "content": answer}]
    return Workload("transit, conversations", seed=seed, tasks=tuple(tasks), prefixes=prefixes)


def random_workload(
    llm: LLM,
    *,
    requests: int,
    prefixes: int = 1,
    seed: int = 0,
    sampling: SamplingParams,
    prefix_tokens: int = 0,
    prompt_tokens: int,
) -> Workload:
    """Random token ids without answers: `prefix_tokens` that requests share, then `prompt_tokens` that they do not."""
    rng = np.random.default_rng(seed)
    vocab = llm.loaded.config.vocab
    prefixes = min(prefixes, requests)
    prefix_ids = [rng.integers(0, vocab, prefix_tokens).tolist() for _ in range(prefixes)]
    tasks = []
    for index in range(requests):
        prompt = prefix_ids[index % prefixes] + rng.integers(0, vocab, prompt_tokens).tolist()
        tasks.append(Task(Request(str(index), prompt, sampling, prefix_tokens)))
    return Workload("random tokens", seed=seed, tasks=tuple(tasks), prefixes=prefixes)


def reads_chats(llm: LLM) -> bool:
    """Whether the model takes chat messages in plain English, as the questions of GSM8K are."""
    return llm.tokenizer is not None and llm.tokenizer.has_chat_template and llm.loaded.name not in OWN_TASKS


def has_own_task(llm: LLM) -> bool:
    """Whether a bundled model is loaded, which is trained for one task."""
    return llm.loaded.name in OWN_TASKS


def _chat(llm: LLM, index: int, messages: Sequence[Mapping[str, str]], sampling: SamplingParams) -> Request:
    """The request number `index`, whose prompt is `messages` in the chat template, with their shared prefix.

    Raises `ConfigError` if the model has no tokenizer.
    """
    if llm.tokenizer is None:
        raise ConfigError("the task is asked in words, and this model folder has no tokenizer; give --task random")
    tokens = llm.tokenizer.apply_chat(messages)
    return Request(str(index), tokens, sampling, llm.tokenizer.shared_prefix(messages, tokens))


def _workload_name(task: str, settings: Settings, with_prefix: bool) -> str:
    """The name of a workload: its task, the settings that are not defaults, and whether the prefix is missing."""
    defaults = asdict(type(settings)())
    changes = {name: value for name, value in asdict(settings).items() if value != defaults[name]}
    texts = [f"{name}={'+'.join(value) if isinstance(value, tuple) else value}" for name, value in changes.items()]
    name = f"{task} ({', '.join(texts)})" if texts else task
    return name if with_prefix else f"{name} without its prefix"


def token_agreement(response: Sequence[int], other: Sequence[int]) -> float:
    """The share of positions at which two responses have the same token id.

    Positions beyond the end of one count as different; two empty responses agree.
    """
    length = max(len(response), len(other))
    same = sum(token == other_token for token, other_token in zip(response, other, strict=False))
    return same / length if length else 1.0
