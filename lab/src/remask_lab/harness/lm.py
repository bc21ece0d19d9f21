"""The engine as a model of lm-eval in the same process, and lm-eval's tasks run with it."""

import logging
import socket
import threading
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import datasets.config
from huggingface_hub import constants
from lm_eval import simple_evaluate
from lm_eval.api.model import LM
from lm_eval.tasks import TaskManager

from remask.checks.values import check_choice
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask.request.sampling_params import merge_sampling
from remask.text.prompts import Message
from remask_lab.harness.benchmark import FOLDER, is_own
from remask_lab.harness.run import Generation, generate, sampling_of
from remask_lab.harness.score import shares
from remask_lab.likelihood.masked import MaskLikelihoods
from remask_lab.likelihood.passes import Pair, encode_pair
from remask_lab.records.interval import wilson

_MAX_TOKENS = 256  # of a response, if the task gives no length
_GENERATION = ("until", "max_gen_toks", "max_tokens", "do_sample", "temperature", "top_p", "top_k")


class RemaskLM(LM):
    """Answers lm-eval's requests with one model.

    `generate_until` runs all requests batched, under one cache policy. The part of a chat before its last user turn is
    the shared prefix. `loglikelihood` returns a Monte-Carlo estimate, which uses no cache.

    Args:
        sampling: sampling parameters, which override those of a task.
        seed: request i of a task has the seed `seed` + i, unless `sampling` has one.
        estimator: estimates likelihoods; with None, tasks that need them raise `ConfigError`.
        examples: worked examples before the last message of every chat, as part of the shared prefix.
    """

    def __init__(
        self,
        llm: LLM,
        policy: CachePolicy,
        sampling: Mapping[str, Any],
        seed: int = 0,
        estimator: MaskLikelihoods | None = None,
        examples: Sequence[Message] = (),
    ) -> None:
        """Raises `ConfigError` if the model has no tokenizer."""
        super().__init__()
        if llm.tokenizer is None:
            raise ConfigError("this model folder has no tokenizer, and lm-eval's tasks are text; give a model with one")
        self._llm = llm
        self._tokenizer = llm.tokenizer
        self._policy = policy
        self._sampling = sampling
        self._seed = seed
        self._estimator = estimator
        self._examples = examples
        self._shared: dict[str, int] = {}  # number of shared tokens of every rendered chat, by its text
        self.generation: Generation | None = None  # of the last `generate_until`
        self.standard_errors: list[float] = []  # of the last log-likelihoods, in nats

    @property
    def tokenizer_name(self) -> str:
        """The model's name, which identifies its tokenizer and chat template in lm-eval's request cache."""
        return self._llm.loaded.name.replace("/", "__")

    def apply_chat_template(self, chat_history: list[Message], add_generation_prompt: bool = True) -> str:
        """Render the chat, with the examples, by the model's template.

        Without a generation prompt the text ends with the last message, which the model continues.
        """
        messages = [*chat_history[:-1], *self._examples, chat_history[-1]]
        if add_generation_prompt:
            text = self._tokenizer.render_chat(messages)
        else:
            text = self._tokenizer.render_chat(messages[:-1]) + messages[-1]["content"]
        self._shared[text] = self._tokenizer.shared_prefix(messages)
        return text

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Generate one response per request, which ends before the first of its stop texts."""
        queue = [self._request(str(number), *request.args) for number, request in enumerate(requests)]
        self.generation = generate(self._llm, queue, self._policy, self._seed, self._llm.session.progress)
        return [output.text or "" for output in self.generation.outputs]

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Estimate the log-likelihood of each continuation in nats, and tell whether greedy decoding would give it.

        Continuations of one document get the same masks.
        """
        estimator = self._likelihoods()
        pairs = [self._pair(*request.args) for request in requests]
        groups = [request.doc_id or 0 for request in requests]
        likelihoods = estimator.score(pairs, groups, self._llm.session.progress)
        self.standard_errors = [likelihood.standard_error for likelihood in likelihoods]
        greedy = estimator.are_greedy(pairs)
        return [(result.log_likelihood, flag) for result, flag in zip(likelihoods, greedy, strict=True)]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Estimate the log-likelihoods of whole texts in nats.

        A text that exceeds the model's positions is cut into parts of half as many tokens, each scored after the part
        before it.
        """
        estimator = self._likelihoods()
        half = self._llm.model.config.max_length // 2
        pairs, owners = [], []  # parts of texts, and the number of each part's text
        for number, request in enumerate(requests):
            tokens = self._tokenizer.encode(request.args[0], add_special_tokens=False)
            starts = [0, *range(half, len(tokens), half)] if len(tokens) > 2 * half else [0]
            for start in starts:
                stop = start + half if len(starts) > 1 else len(tokens)
                pairs.append(Pair(tokens[max(0, start - half) : start], tokens[start:stop]))
                owners.append(number)
        likelihoods = estimator.score(pairs, range(len(pairs)), self._llm.session.progress)
        sums = [0.0] * len(requests)
        for number, likelihood in zip(owners, likelihoods, strict=True):
            sums[number] += likelihood.log_likelihood
        return sums

    def _request(self, identity: str, context: str, options: Mapping[str, Any]) -> Request:
        """The request of a prompt with lm-eval's generation `options`. Raises `UnknownNameError` on other options."""
        for name in options:
            check_choice("generation parameter", name, _GENERATION)
        until = options.get("until") or ()
        stop = [text for text in ([until] if isinstance(until, str) else until) if text]
        task_sampling: dict[str, Any] = {}
        if options.get("do_sample") or options.get("temperature"):
            names = ("temperature", "top_p", "top_k")
            task_sampling = {name: options[name] for name in names if options.get(name) is not None}
        length = options.get("max_gen_toks") or options.get("max_tokens") or _MAX_TOKENS
        params = sampling_of(self._llm, merge_sampling(task_sampling, self._sampling), length, stop)
        # A chat template writes the special tokens itself.
        shared_tokens = self._shared.get(context)
        tokens = self._tokenizer.encode(context, add_special_tokens=shared_tokens is None)
        return Request(identity, tokens, params, shared_tokens or 0)

    def _pair(self, context: str, continuation: str) -> Pair:
        """The token ids of both; those of a rendered chat get no special tokens."""
        if context in self._shared:
            encode = self._tokenizer.encode
            return Pair(encode(context, add_special_tokens=False), encode(continuation, add_special_tokens=False))
        return encode_pair(self._llm, context, continuation)

    def _likelihoods(self) -> MaskLikelihoods:
        """The estimator. Raises `ConfigError` without one."""
        if self._estimator is None:
            raise ConfigError(
                f"the task needs log-likelihoods, which are estimated for masked models; "
                f"{self._llm.loaded.name!r} is a {self._llm.loaded.config.kind} one"
            )
        return self._estimator


class Harness:
    """lm-eval with our own tasks beside its own, whose index is read once."""

    def __init__(self, *, own_only: bool, folders: Sequence[str] = ()) -> None:
        """`own_only` leaves out lm-eval's tasks; `folders` hold further configs."""
        self._manager = TaskManager(include_path=[str(FOLDER), *folders], include_defaults=not own_only)

    def check(self, tasks: Sequence[str]) -> None:
        """Raise `ConfigError` on unknown tasks and on tags, and then call `go_offline_without_network`."""
        known = self._manager.all_tasks
        for task in tasks:
            if task not in known:
                raise ConfigError(f"Unknown task {task!r}: neither one of ours nor of lm-eval's ('lm_eval ls tasks')")
            if task in self._manager.all_tags:
                raise ConfigError(f"{task!r} is a tag of several tasks, which have no common score; name them instead")
        go_offline_without_network()

    def run(
        self,
        lm: RemaskLM,
        task: str | Mapping[str, Any],
        *,
        role: str | None = None,
        chat: bool = False,
        limit: int | None = None,
        run_code: bool = False,
        seed: int = 0,
        shots: int | None = None,
    ) -> dict[str, Any]:
        """Run a task, a name or a config, and return one row: its metrics, samples, and the costs of generation.

        Args:
            role: the first part of the system prompt. None leaves the task's own prompt alone.
            chat: whether the chat template renders the prompts.
            limit: documents of a task. None takes all.
            run_code: whether tasks that execute generated code may run.
            seed: of the choice of few-shot examples.
            shots: number of few-shot examples; None takes the task's own.

        Raises `ConfigError` where lm-eval cannot run the task: its data are missing, or it would run code and may not.
        """
        logging.getLogger("lm_eval").setLevel(logging.WARNING)
        try:
            output = simple_evaluate(
                model=lm,
                tasks=[task if isinstance(task, str) else dict(task)],
                limit=limit,
                num_fewshot=shots,
                fewshot_as_multiturn=bool(shots) and chat,
                bootstrap_iters=0,
                system_instruction=role,
                apply_chat_template=chat,
                task_manager=self._manager,
                confirm_run_unsafe_code=run_code,
                random_seed=seed,
                numpy_random_seed=seed,
                torch_random_seed=seed,
                fewshot_random_seed=seed,
            )
        except (OSError, ValueError, ImportError) as error:
            if isinstance(error, ConfigError):
                raise
            advice = ". The hub cannot be reached: give local data by --data" if constants.HF_HUB_OFFLINE else ""
            raise ConfigError(f"lm-eval cannot run {task!r}: {type(error).__name__}: {error}{advice}") from error
        assert output is not None
        name = task if isinstance(task, str) else task["task"]
        row: dict[str, Any] = {} if lm.generation is None else lm.generation.costs()
        if is_own(name):
            samples = _own_samples(output["samples"][name], lm)
            return {**row, "metrics": shares(samples), "samples": samples}
        samples = _samples(output["samples"])
        return {**row, "metrics": _metrics(output["results"][name], samples), "samples": samples}


def _own_samples(samples: Sequence[Mapping[str, Any]], lm: RemaskLM) -> list[dict[str, Any]]:
    """The samples of one of our tasks: response, right answer and metrics, in the order of the documents."""
    assert lm.generation is not None
    rows = []
    ordered = sorted(samples, key=lambda sample: int(sample["doc_id"]))
    for sample, output in zip(ordered, lm.generation.outputs, strict=True):
        metrics = {name: float(sample[name]) for name in sample["metrics"]}
        rows.append(
            {"text": output.text, "token_ids": list(output.token_ids), "right": sample["doc"]["right"], **metrics}
        )
    return rows


def _samples(samples: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """The metrics of each document that are numbers. Others, such as parts of perplexities, are left out."""
    return [
        {
            "task": task,
            "doc": sample["doc_id"],
            "filter": sample["filter"],
            **{name: sample[name] for name in sample["metrics"] if isinstance(sample[name], int | float)},
        }
        for task, task_samples in samples.items()
        for sample in task_samples
    ]


def _metrics(results: Mapping[str, Any], samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """lm-eval's results by "metric,filter", with Wilson's interval where a result is a share of documents."""
    metrics = {}
    for key, value in results.items():
        name, separator, filter_name = key.partition(",")
        if not separator or name.endswith("_stderr") or not isinstance(value, int | float):
            continue
        values = [sample[name] for sample in samples if sample["filter"] == filter_name and name in sample]
        is_share = values and all(item in (0, 1) for item in values) and abs(sum(values) / len(values) - value) < 1e-9
        interval = list(wilson(int(sum(values)), len(values))) if is_share else None
        metrics[key] = {"value": float(value), "interval": interval}
    return metrics


log = logging.getLogger(__name__)

SECONDS = 4.0  # for one connection to the hub


def go_offline_without_network() -> None:
    """Let data sets come from the hub's cache on this machine alone where the hub cannot be reached."""
    if constants.HF_HUB_OFFLINE or getproxies().get("https") or reachable(constants.ENDPOINT):
        return
    log.warning("%s cannot be reached: data sets come from the cache on this machine", constants.ENDPOINT)
    # Read by their packages when they are imported, so the variable of the environment comes too late.
    constants.HF_HUB_OFFLINE = datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True


def reachable(url: str) -> bool:
    """Whether the host of `url` accepts a connection within `SECONDS`, the look-up of its name included."""
    parts = urlsplit(url)
    connected = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((parts.hostname or "", parts.port or 443), SECONDS).close()
        except OSError:
            return
        connected.set()

    # The look-up of a name has no time limit of its own, so it runs in a thread that is given up after `SECONDS`.
    thread = threading.Thread(target=connect, daemon=True)
    thread.start()
    thread.join(SECONDS)
    return connected.is_set()
