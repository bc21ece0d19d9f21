"""Runs a benchmark: responses to many requests under one cache policy, their cost, and their scores on local data."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.policies import CachePolicy
from remask.request.sampling_params import SamplingParams
from remask.text.tokenizer import Tokenizer
from remask_lab.bench.bench import FIRST, check_answers
from remask_lab.bench.reference import Reference, mean_loss, measure_losses
from remask_lab.bench.workload import seeded
from remask_lab.harness.benchmark import Benchmark
from remask_lab.harness.formats import Doc
from remask_lab.harness.score import judge, shares


@dataclass(frozen=True, slots=True)
class Generation:
    """Responses in the order of their requests, and the cost of all together.

    Attributes:
        prefix_ratio: share of the canvas that the shared prefix takes, the mean over requests.
        seconds: from the first request to the last response.
        row_layers: rows computed times layers, prefix-only passes included.
        prefix_hits: requests that found their prefix in the store.
    """

    outputs: Sequence[Output]
    prefix_ratio: float
    seconds: float
    row_layers: int
    prefix_hits: int

    def costs(self) -> dict[str, Any]:
        """The costs as a row of results holds them. A response counts up to its end token."""
        tokens = sum(output.usage.completion_tokens for output in self.outputs)
        return {
            "seconds": self.seconds,
            "completion_tokens": tokens,
            "throughput_tok_s": tokens / self.seconds,
            "forwards": sum(output.usage.forwards for output in self.outputs),
            "row_layers": self.row_layers,
            "prefix_ratio": self.prefix_ratio,
            "prefix_hits": self.prefix_hits,
        }


def generate(
    llm: LLM, requests: Sequence[Request], policy: CachePolicy, seed: int, progress: bool = False
) -> Generation:
    """Run all `requests` under `policy` on a new engine with an empty store, so that every prefix is computed once.

    Request i gets the id i, and the seed `seed` + i where its parameters have none. Raises `ConfigError`, before
    anything runs, on a request that cannot run, and where one fails.
    """
    queue = []
    for number, request in enumerate(requests):
        queue.append(replace(seeded(request, seed + number), id=str(number), policy=policy))
        llm.engine.check(queue[-1])
    # The first pass of a process is slower. That time belongs to no policy.
    for _ in llm.session.run(queue[:1], progress=False):
        pass
    engine = llm.session.new_engine()
    start = time.perf_counter()
    outputs = {output.id: output for output in llm.session.run(queue, engine=engine, progress=progress)}
    seconds = time.perf_counter() - start
    for output in outputs.values():
        if output.error is not None:
            raise ConfigError(f"question {output.id} failed: {output.error}")
    ratios = [item.prefix_length / (len(item.prompt_token_ids) + item.params.max_tokens) for item in queue]
    ordered_outputs = [outputs[item.id] for item in queue]
    return Generation(
        outputs=ordered_outputs,
        prefix_ratio=float(np.mean(ratios)),
        seconds=seconds,
        row_layers=sum(output.usage.row_layers for output in ordered_outputs) + engine.stats.prefix_row_layers,
        prefix_hits=engine.store.stats.hits,
    )


def sampling_of(llm: LLM, sampling: Mapping[str, Any], max_tokens: int, stop: Sequence[str] = ()) -> SamplingParams:
    """A task's sampling parameters: those of `sampling`, then the task's own, then the model's defaults.

    Raises `ConfigError` on invalid ones.
    """
    return llm.session.params({"max_tokens": max_tokens, "stop": tuple(stop), **sampling})


def chat_tokenizer(llm: LLM, task: str) -> Tokenizer:
    """The tokenizer that renders the chats of `task`. Raises `ConfigError` where the model has no chat template."""
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigError(
            f"{task} is asked as a chat under a system prompt, and this model has no chat template; put one "
            "into its folder as chat_template.jinja"
        )
    return llm.tokenizer


def run_local(
    llm: LLM,
    task: Benchmark,
    docs: Sequence[Doc],
    *,
    role: str,
    policy: CachePolicy,
    sampling: Mapping[str, Any],
    seed: int,
    shots: Sequence[Doc] = (),
    losses: bool = False,
) -> dict[str, Any]:
    """Ask all of `docs` under the shared system prompt, score the responses, and return one row of results.

    `shots` are worked examples before every question, and shared too. With `losses` the loss of `docs`' solutions is
    measured in place of scores. Raises `ConfigError`, before anything runs, where the model has no chat template, and
    where a question is too long.
    """
    tokenizer = chat_tokenizer(llm, task.task)
    params = sampling_of(llm, sampling, task.max_tokens)
    requests = []
    for number, doc in enumerate(docs):
        messages = task.messages(role, doc, shots)
        tokens = tokenizer.apply_chat(messages)
        requests.append(Request(str(number), tokens, params, tokenizer.shared_prefix(messages)))
    generation = generate(llm, requests, policy, seed, llm.session.progress)
    samples: list[dict[str, Any]]
    samples = [{"text": output.text, "token_ids": list(output.token_ids)} for output in generation.outputs]
    if losses:
        references = [Reference(request, doc.solution) for request, doc in zip(requests, docs, strict=True)]
        losses_by_request, reason = measure_losses(llm, references, policy, seed)
        return {**generation.costs(), **mean_loss(losses_by_request), "no_loss": reason, "samples": samples}
    for doc, sample in zip(docs, samples, strict=True):
        verdict = judge(sample["text"] or "", doc.right)
        sample |= {"right": doc.right, "answer": verdict.answer, **verdict.metrics}
    return {**generation.costs(), "metrics": shares(samples), "samples": samples}


def check_first(
    llm: LLM,
    task: Benchmark,
    docs: Sequence[Doc],
    *,
    role: str,
    sampling: Mapping[str, Any],
    seed: int,
    shots: Sequence[Doc] = (),
) -> None:
    """Ask the first `FIRST` questions without a cache. Raises `ConfigError` where none is answered right.

    `FIRST` questions or fewer are not asked, as the measurement itself takes no longer.
    """
    if len(docs) <= FIRST:
        return
    metrics = run_local(
        llm, task, docs[:FIRST], role=role, policy=llm.session.policy("none"), sampling=sampling, seed=seed, shots=shots
    )["metrics"]
    if not any(metric["value"] for metric in metrics.values()):
        note = f" (the first {FIRST} of {len(docs)} were asked)"
        check_answers("none", 0.0, sampling_of(llm, sampling, task.max_tokens), note)
