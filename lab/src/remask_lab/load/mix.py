"""The server that gets a load, and its prompts: a share of them have one of a few shared prefixes, others their own."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import httpx

from remask.checks import BUNDLED, BUNDLED_TARIFF, BUNDLED_TRANSIT
from remask.checks.values import real, whole
from remask.errors import ConfigError, RemaskError, UnknownNameError
from remask.tasks import gsm8k, relay, tariff, transit
from remask.tasks.workload import messages


class ServerError(RemaskError):
    """A server does not answer, or not as OpenAI's API does."""


@dataclass(frozen=True, slots=True)
class Target:
    """A server. `info` is the answer of `/get_model_info`, and is empty for other servers than remask's."""

    base_url: str
    model: str
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)
    info: Mapping[str, Any] = field(default_factory=dict)


def find_target(base_url: str, model: str | None = None, api_key: str | None = None) -> Target:
    """Returns the server at `base_url`, with or without `/v1` at its end. `model` defaults to the first that it lists.

    Raises `ConfigError` where `base_url` is no URL, and `ServerError` where no server answers.
    """
    if not base_url.startswith(("http://", "https://")):
        raise ConfigError(f"--base-url must begin with http:// or https://, got {base_url!r}")
    base = base_url.rstrip("/").removesuffix("/v1").rstrip("/")
    headers = {} if api_key is None else {"Authorization": f"Bearer {api_key}"}
    try:
        with httpx.Client(base_url=base, headers=headers, timeout=30) as client:
            name = model or _first(client.get("/v1/models"))
            answer = client.get("/get_model_info")
            info = answer.json() if answer.status_code == 200 else {}
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
        raise ServerError(f"no server answers at {base_url}: {error}; start one, or name another URL") from error
    return Target(base, name, headers, info if isinstance(info, dict) else {})


def is_healthy(base_url: str) -> bool:
    """Whether the server's health check answers with success."""
    try:
        return httpx.get(f"{base_url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def empty_store(base_url: str) -> None:
    """Drop all prefixes that a remask server has stored. Raises `httpx.HTTPError` where it does not."""
    httpx.delete(f"{base_url}/v1/cache").raise_for_status()


def read_metrics(target: Target) -> str:
    """The metrics of a server, in Prometheus' text format. Raises `httpx.HTTPError` where it reports none."""
    return httpx.get(f"{target.base_url}/metrics", headers=dict(target.headers)).raise_for_status().text


def _first(response: httpx.Response) -> str:
    """The first name that the server lists."""
    if response.status_code != 200:
        raise ServerError(f"GET /v1/models gives status {response.status_code}: {response.text[:200]}")
    try:
        return str(response.json()["data"][0]["id"])
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ServerError("GET /v1/models lists no model; name one with --model") from error


Body: TypeAlias = dict[str, Any]

CHAT, TEXT = "/v1/chat/completions", "/v1/completions"
DATASETS = ("tariff", "relay", "transit", "gsm8k", "random")
_OWN = {BUNDLED: "relay", BUNDLED_TARIFF: "tariff", BUNDLED_TRANSIT: "transit"}


@dataclass(frozen=True, slots=True)
class HttpRequest:
    """One request: its path, its body, the only right answer where there is one, and its own headers.

    `check` returns whether a text gives the answer. By default the answer must stand after the last `##`.
    """

    path: str
    body: Mapping[str, Any]
    answer: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    check: Callable[[str, str], bool] = transit.is_correct


@dataclass(frozen=True, slots=True)
class PromptMix:
    """How prompts are drawn.

    Attributes:
        dataset: `tariff`, `relay` or `transit` (tasks of the bundled models), `gsm8k`, `random` token ids, or `auto`: a
            bundled model's own task, else the first of the last two that the server supports.
        num_prompts: number of requests.
        prefixes: number of different shared prefixes; fewer where fewer requests share one.
        prefix_share: share of the requests with a shared prefix. The others' prefixes are as long and never repeat.
        prefix_tokens, prompt_tokens: lengths of random prefixes, and of the random tokens after them.
        seed: the same arguments and seed give the same prompts.

    Raises `ConfigError` on values out of range.
    """

    dataset: str = "auto"
    num_prompts: int = 200
    prefixes: int = 4
    prefix_share: float = 1.0
    prefix_tokens: int = 230
    prompt_tokens: int = 10
    seed: int = 0

    def __post_init__(self) -> None:
        if self.dataset not in ("auto", *DATASETS):
            raise UnknownNameError("dataset", self.dataset, ["auto", *DATASETS])
        for name in ("num_prompts", "prefixes", "prefix_tokens", "prompt_tokens"):
            whole(name, getattr(self, name), low=1)
        whole("seed", self.seed, low=0)
        real("prefix_share", self.prefix_share, low=0.0, high=1.0)

    def chosen(self, target: Target) -> str:
        """The dataset for this server: `dataset`, or the one that `auto` chooses."""
        if self.dataset != "auto":
            return self.dataset
        own = _OWN.get(str(target.info.get("model_path")))
        if own is not None:
            return own
        return "gsm8k" if target.info.get("has_chat_template", True) else "random"

    def draw(self, target: Target) -> list[HttpRequest]:
        """Draw the requests. Raises `ConfigError` where random tokens are wanted from a server without a vocabulary."""
        name = self.chosen(target)
        rng = random.Random(self.seed)
        shared = round(self.prefix_share * self.num_prompts)
        # The number of each request's shared prefix. None for one of its own.
        places: list[int | None] = [number % self.prefixes for number in range(shared)]
        places += [None] * (self.num_prompts - shared)
        rng.shuffle(places)
        if name == "gsm8k":
            return _gsm8k(places, self.prefixes, self.seed)
        if name == "random":
            return _random(rng, places, self, target)
        task = _TASKS[name]
        prompts, requests = [task.prompt(rng) for _ in range(self.prefixes)], []
        for place in places:
            prompt = task.prompt(rng) if place is None else prompts[place]
            question = task.question(rng, prompt)
            body = {"messages": messages(prompt, question)}
            answer = task.module.reference_response(prompt, question)
            requests.append(HttpRequest(CHAT, body, task.answer(answer), check=task.module.is_correct))
        return requests


@dataclass(frozen=True, slots=True)
class _Task:
    """A bundled model's task: how a prompt and a question are drawn, and what of the response is the answer."""

    module: Any
    prompt: Callable[[random.Random], Any]
    question: Callable[[random.Random, Any], Any]
    answer: Callable[[str], str] = str


_ORDERS, _ROUTES = tariff.TariffSettings(), relay.RelaySettings()
_TASKS = {
    "tariff": _Task(
        tariff,
        lambda rng: tariff.draw_prompt(rng, _ORDERS),
        lambda rng, prompt: tariff.draw_question(rng, prompt, "plan", _ORDERS.asked),
    ),
    "relay": _Task(relay, lambda rng: relay.draw_prompt(rng, _ROUTES), relay.draw_question),
    "transit": _Task(transit, transit.draw_prompt, transit.draw_question, lambda said: said.rsplit(maxsplit=1)[-1]),
}


def _gsm8k(places: list[int | None], prefixes: int, seed: int) -> list[HttpRequest]:
    if prefixes > gsm8k.MAX_PROMPTS:
        raise ConfigError(f"--prefixes must be at most {gsm8k.MAX_PROMPTS} with GSM8K questions, got {prefixes}")
    questions = gsm8k.make_questions(prefixes * len(places), prefixes, seed)
    requests = []
    for number, place in enumerate(places):
        item = questions[number * prefixes + (place or 0)]
        system, user = item.messages
        if place is None:
            system = {**system, "content": f"Conversation {number}. {system['content']}"}
        requests.append(HttpRequest(CHAT, {"messages": [system, user]}, item.answer))
    return requests


def _random(rng: random.Random, places: list[int | None], mix: PromptMix, target: Target) -> list[HttpRequest]:
    vocab = target.info.get("vocab_size")
    if not isinstance(vocab, int):
        raise ConfigError(
            "--dataset random draws token ids, and this server reports no vocabulary at /get_model_info; use "
            "--dataset gsm8k"
        )
    kept = {target.info.get("mask_token_id"), *target.info.get("stop_token_ids", ())}
    tokens = [token for token in range(vocab) if token not in kept]
    shared = [rng.choices(tokens, k=mix.prefix_tokens) for _ in range(mix.prefixes)]
    requests = []
    for place in places:
        prefix = rng.choices(tokens, k=mix.prefix_tokens) if place is None else shared[place]
        prompt = prefix + rng.choices(tokens, k=mix.prompt_tokens)
        requests.append(HttpRequest(TEXT, {"prompt": prompt, "prefix_length": mix.prefix_tokens}))
    return requests
