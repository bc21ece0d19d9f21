"""The requests of a table: the model's own questions, texts of a file, or random tokens."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.workload import (
    Task,
    Workload,
    chat_workload,
    gsm8k_workload,
    has_own_task,
    own_task,
    random_workload,
    reads_chats,
)
from remask_lab.likelihood.perplexity import cut_prompts, read_texts


def draw(llm: LLM, spec: Mapping[str, Any], sampling: SamplingParams, seed: int, prompts: str | None) -> Workload:
    """Draw the requests that `spec` (the `workload` of a scale) describes. The same seed gives the same requests.

    Every request has its own seed, so that every policy begins with the same noise.

    Raises `ConfigError` where the model has no questions, or texts are wanted and `prompts` names no file of them.
    """
    return _drawn(llm, spec, sampling, seed, prompts).seeded


def _drawn(llm: LLM, spec: Mapping[str, Any], sampling: SamplingParams, seed: int, prompts: str | None) -> Workload:
    if spec["name"] == "random":
        # Random tokens have no meaning, so an end token among them must not shorten the response.
        endless = replace(sampling, ignore_eos=True)
        return random_workload(
            llm, spec["requests"], spec["prefixes"], seed, endless, spec["prefix_tokens"], spec["prompt_tokens"]
        )
    if spec["name"] == "texts":
        return _texts(llm, spec, sampling, seed, prompts)
    return _questions(llm, spec, sampling, seed)


def _questions(llm: LLM, spec: Mapping[str, Any], sampling: SamplingParams, seed: int) -> Workload:
    if has_own_task(llm):
        return chat_workload(llm, own_task(llm), spec["requests"], spec["prefixes"], seed, sampling)
    if reads_chats(llm):
        return gsm8k_workload(llm, spec["requests"], spec["prefixes"], seed, sampling)
    raise ConfigError(
        f"the model {llm.loaded.name!r} has no chat template, so it cannot be asked questions; "
        "--workload random measures speed on random tokens of the table's lengths"
    )


def _texts(llm: LLM, spec: Mapping[str, Any], sampling: SamplingParams, seed: int, path: str | None) -> Workload:
    """Texts for the model to continue."""
    if path is None:
        raise ConfigError(
            f"this table reads texts of {spec['prompt_tokens']} tokens: give a file of them with --prompts, or "
            "--workload random for speed on random tokens"
        )
    tokens = cut_prompts(llm, read_texts(path), spec["prompt_tokens"], spec["requests"])
    tasks = tuple(Task(Request(str(number), ids, sampling)) for number, ids in enumerate(tokens))
    return Workload("texts", seed, tasks, 0)
