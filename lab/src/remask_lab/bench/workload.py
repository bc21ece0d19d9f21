"""Workloads: the requests of a benchmark, and their right answers."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
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
    """One request of a workload, and its only right answer where the workload has answers.

    Attributes:
        check: returns whether a text gives an answer. By default the answer must stand after the last `##`.
        parts: further scores of a text from 0 to 1 by name, such as whether it follows one part of the system prompt;
            tasks of one workload may have different ones.
        question: what is asked, without the shared prefix and what a chat template adds; None for random tokens.
        reference: a response in which the answer is right; None for random tokens.
        rule: what `check` asks for, in words.
    """

    request: Request
    answer: str | None = None
    check: Callable[[str, str], bool] = is_correct
    parts: Parts = field(default_factory=dict)
    question: str | None = None
    reference: str | None = None
    rule: str = "the answer stands after the last '##'"

    def correct(self, text: str | None) -> bool | None:
        """Whether `text` gives the right answer. None where the task has no answer."""
        return None if self.answer is None or text is None else self.check(text, self.answer)


SAYS = (
    "the text, or what stands after its last '##', is the answer; capitals, white space and a full stop at the end do "
    "not count"
)


def says(text: str, answer: str) -> bool:
    """Whether `text` says `answer`, as `SAYS` has it."""
    told, right = (" ".join(each.rpartition("##")[2].split()).rstrip(".").casefold() for each in (text, answer))
    return told == right


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
    def clusters(self) -> list[int]:
        """That of every task, as `prefix_clusters` numbers them."""
        return prefix_clusters(self.tasks)

    @property
    def prefix_ratio(self) -> float:
        """Mean share of the canvas that the shared prefix takes."""
        lengths = [
            task.request.prefix_length / (len(task.request.prompt_token_ids) + task.request.params.max_tokens)
            for task in self.tasks
        ]
        return float(np.mean(lengths))


def prefix_clusters(tasks: Sequence[Task]) -> list[int]:
    """A number for each task: equal ones share a prefix, or one's prefix begins with the other's, as turns' do.

    A task without a shared prefix has a number of its own.
    """
    shared = [tuple(task.request.prompt_token_ids[: task.request.prefix_length]) for task in tasks]
    numbers: dict[tuple[int, ...], int] = {}
    root: tuple[int, ...] = ()
    # In order of their tokens, all prefixes that begin with another one follow it.
    for prefix in sorted({prefix for prefix in shared if prefix}):
        if not root or prefix[: len(root)] != root:
            root = prefix
        numbers[prefix] = numbers.get(root, len(numbers))
    alone = len(numbers)
    return [numbers[prefix] if prefix else alone + place for place, prefix in enumerate(shared)]


def steps_of(params: SamplingParams) -> int:
    """The number of steps of a whole response that the parameters ask for."""
    block = params.block_length or params.max_tokens
    per_block = params.steps_per_block or max(1, block // (params.uniform.tokens_per_step or 1))
    return params.steps or per_block * -(-params.max_tokens // block)


def seeded(request: Request, seed: int) -> Request:
    """The same request, which gets `seed` where it has none: every run of it draws the same."""
    params = request.params
    return request if params.seed is not None else replace(request, params=replace(params, seed=seed))


def _tariff(item: tariff.TariffRequest, settings: Any) -> dict[str, Any]:
    """Right is a response in which every name is; the parts are their share, and accuracy by kind of question."""
    parts: dict[str, Callable[[str], float]] = {"names": partial(tariff.right_names, answer=item.reference)}
    if len(settings.kinds) > 1:
        parts[item.question.kind] = partial(tariff.is_correct, answer=item.reference)
    own = {"check": tariff.is_correct, "parts": parts, "rule": "every name is right, in its place"}
    return {"answer": item.reference, "reference": item.reference, **own}


def _relay(item: relay.RelayRequest, _: Any) -> dict[str, Any]:
    """Right is a response in which every town is; the part is the share of them."""
    parts = {"hops": partial(relay.right_hops, answer=item.reference)}
    own = {"check": relay.is_correct, "parts": parts, "rule": "every town is right, in its place"}
    return {"answer": item.reference, "reference": item.reference, **own}


def _transit(item: transit.TransitRequest, _: Any) -> dict[str, Any]:
    """The parts are whether the ride is right, and whether the form is."""
    parts = {"rules": partial(transit.is_ride, item.prompt, item.question), "format": transit.keeps_format}
    return {"answer": item.answer, "parts": parts, "reference": reference_response(item.prompt, item.question)}


def _town(item: town.TownRequest, _: Any) -> dict[str, Any]:
    """Right is a response that says what was asked; the part is its kind of question."""

    right = partial(town.is_correct, item)
    rule = "the response says what was asked, in the form of the page's answers"
    own = {"check": lambda text, _: right(text), "parts": {item.kind: right}, "rule": rule}
    return {"answer": item.fact, "reference": item.answer, **own}


def _lookup(item: lookup.LookupRequest, _: Any) -> dict[str, Any]:
    """Right is a response that names what was asked for; the part is the topic of its page."""

    right = partial(lookup.is_correct, item)
    rule = "the response names what was asked for, and nothing else of its kind"
    own = {"check": lambda text, _: right(text), "parts": {item.page.topic: right}, "rule": rule}
    return {"answer": item.asked, "reference": item.asked, **own}


def _gsm8k(item: gsm8k.MathQuestion, _: Any) -> dict[str, Any]:
    """The parts are whether it is solved, and whether the form is right."""
    parts = {"rules": partial(gsm8k.is_solved, item.answer), "format": gsm8k.keeps_format}
    return {"answer": item.answer, "parts": parts, "reference": item.reference}


def _gsm8k_questions(requests: int, prefixes: int, seed: int, settings: Gsm8kSettings) -> Sequence[Any]:
    if not 1 <= prefixes <= gsm8k.MAX_PROMPTS:
        raise ConfigError(f"GSM8K workloads have 1 to {gsm8k.MAX_PROMPTS} shared prefixes, got {prefixes}")
    return gsm8k.make_questions(requests, prefixes, seed, settings.shots)


@dataclass(frozen=True, slots=True)
class _Kind:
    """A task whose system prompts are shared.

    Attributes:
        settings: the class of its settings.
        sampling: its usual sampling parameters.
        draw: its items, each with `messages`, by requests, prefixes, seed and settings.
        judged: the fields of `Task` that judge an item.
    """

    settings: Any
    sampling: Mapping[str, Any]
    draw: Callable[[int, int, int, Any], Sequence[Any]]
    judged: Callable[[Any, Any], dict[str, Any]]


_KINDS: Mapping[str, _Kind] = {
    "tariff": _Kind(TariffSettings, tariff.SAMPLING, tariff.make_workload, _tariff),
    "relay": _Kind(RelaySettings, relay.SAMPLING, relay.make_workload, _relay),
    "transit": _Kind(
        TransitSettings,
        transit.SAMPLING,
        lambda requests, prefixes, seed, settings: make_workload(requests, prefixes, seed, settings.rows),
        _transit,
    ),
    "town": _Kind(TownSettings, town.SAMPLING, town.make_workload, _town),
    "lookup": _Kind(LookupSettings, lookup.SAMPLING, lookup.make_workload, _lookup),
    "gsm8k": _Kind(Gsm8kSettings, gsm8k.SAMPLING, _gsm8k_questions, _gsm8k),
}


@dataclass(frozen=True, slots=True)
class TaskChoice:
    """Which of `TASKS` a workload draws from, and how hard it is: `settings` of that task's class, None for its usual.

    Raises `UnknownNameError` where there is no such task, and `ConfigError` where `settings` are those of another one.
    """

    name: str
    settings: Settings | None = None

    def __post_init__(self) -> None:
        check_choice("task", self.name, TASKS)
        own = _KINDS.get(self.name)
        if self.settings is not None and not (own and isinstance(self.settings, own.settings)):
            raise ConfigError(f"the task {self.name} does not take {type(self.settings).__name__}")


def choose_task(name: str | None, settings: Mapping[str, Any]) -> TaskChoice | None:
    """The task of this name under these settings; None, a model's own task, without a name.

    Raises `UnknownNameError` where there is no such task or setting, and `ConfigError` on settings that are not allowed
    or that belong to no task.
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
    """The task that suits a model: that of a bundled one, GSM8K where it reads chats, else random tokens."""
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
    """Requests of `task`, by default the one that suits the model (`own_task`).

    `sampling` overrides the task's usual sampling parameters. Lengths ask for random tokens on any model. Without
    `prefixes` there are `PREFIXES`; questions to a uniform model have a system prompt each, as no cache of such models
    shares one. Raises `ConfigError` where the workload cannot be drawn.
    """
    if task is None:
        task = own_task(llm) if prefix_tokens is None and prompt_tokens is None else TaskChoice("random")
    uniform, kind = llm.loaded.config.kind == "uniform", _KINDS.get(task.name)
    usual = RANDOM_SAMPLING if kind is None else kind.sampling
    if uniform and task.name == "relay":
        usual = relay.UNIFORM_SAMPLING
    params = SamplingParams.from_mapping(merge_sampling(usual, sampling))
    if kind is not None:
        prefixes = prefixes or (requests if uniform else PREFIXES)
        workload = chat_workload(llm, task, requests, prefixes, seed, params)
        # The seed of a request decides its initial noise, so every policy begins with the same canvas.
        return workload.seeded if uniform else workload
    prefixes = prefixes or PREFIXES
    prefix = PREFIX_TOKENS if prefix_tokens is None else prefix_tokens
    prompt = PROMPT_TOKENS if prompt_tokens is None else prompt_tokens
    return random_workload(llm, requests, prefixes, seed, params, prefix, prompt)


def chat_workload(
    llm: LLM,
    task: TaskChoice,
    requests: int,
    prefixes: int,
    seed: int,
    sampling: SamplingParams,
    *,
    with_prefix: bool = True,
) -> Workload:
    """Held-out questions of a task whose system prompts are shared. Without the prefix, the questions stand alone.

    Raises `ConfigError` for tasks of another kind, and for more prefixes than GSM8K has.
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
        tasks.append(Task(request, question=messages[-1]["content"], **kind.judged(item, settings)))
    name = "GSM8K" if task.name == "gsm8k" else task.name
    return Workload(_named(name, settings, with_prefix), seed, tuple(tasks), prefixes)


def conversation_workload(llm: LLM, requests: int, prefixes: int, seed: int, sampling: SamplingParams) -> Workload:
    """Questions of the transit task as turns of conversations, so that shared prefixes nest.

    A request's shared prefix is the system prompt, alone or with one or two earlier turns and their right answers.
    Turns of one conversation follow one another.
    """
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
        answer = reference_response(line.prompt, question)
        request = _chat(llm, index, messages, sampling)
        tasks.append(Task(request, answer.rsplit(maxsplit=1)[-1], question=question.text, reference=answer))
        history = [*messages, {"role": "assistant", "content": answer}]
    return Workload("transit, conversations", seed, tuple(tasks), prefixes)


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
    return llm.tokenizer is not None and llm.tokenizer.has_chat_template and llm.loaded.name not in OWN_TASKS


def has_own_task(llm: LLM) -> bool:
    """Whether a bundled model is loaded, which is trained for one task."""
    return llm.loaded.name in OWN_TASKS


def _chat(llm: LLM, index: int, messages: Sequence[Mapping[str, str]], sampling: SamplingParams) -> Request:
    """The request number `index`: a conversation that waits for the assistant, with its shared prefix."""
    if llm.tokenizer is None:
        raise ConfigError("the task is asked in words, and this model folder has no tokenizer; give --task random")
    tokens = llm.tokenizer.apply_chat(messages)
    return Request(str(index), tokens, sampling, llm.tokenizer.shared_prefix(messages, tokens))


def _named(task: str, settings: Settings, with_prefix: bool) -> str:
    """The name of a workload: its task, the settings that are not the usual ones, and what is missing."""
    usual = asdict(type(settings)())
    changed = {name: value for name, value in asdict(settings).items() if value != usual[name]}
    own = [f"{name}={'+'.join(value) if isinstance(value, tuple) else value}" for name, value in changed.items()]
    return " ".join([task, *([f"({', '.join(own)})"] if own else []), *([] if with_prefix else ["without its prefix"])])


def token_agreement(these: Sequence[int], those: Sequence[int]) -> float:
    """Share of positions at which two responses hold the same token. A missing position counts as different."""
    length = max(len(these), len(those))
    return sum(a == b for a, b in zip(these, those, strict=False)) / length if length else 1.0
