"""Runs a benchmark on local data, without lm-eval and without a network."""

from collections.abc import Mapping, Sequence
from typing import Any

from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask.text.tokenizer import Tokenizer
from remask_lab.harness.benchmark import Benchmark
from remask_lab.harness.formats import Doc
from remask_lab.harness.generation import generate, sampling_of
from remask_lab.harness.score import score, shares


def chat_tokenizer(llm: LLM, task: str) -> Tokenizer:
    """Returns the tokenizer that renders the chats of `task`. Raises `ConfigError` where it has no chat template."""
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigError(
            f"{task} is asked as a chat under a system prompt, and this model has no chat template; put one "
            "into its folder as chat_template.jinja"
        )
    return llm.tokenizer


def run_local(
    llm: LLM,
    own: Benchmark,
    docs: Sequence[Doc],
    role: str,
    policy: CachePolicy,
    sampling: Mapping[str, Any],
    seed: int,
    shots: Sequence[Doc] = (),
) -> dict[str, Any]:
    """Ask all of `docs` under the shared system prompt, score the responses, and return one row of results.

    `shots` are worked examples that stand before every question, and are shared like the system prompt.

    With `own.scoring` "code" this runs the code that the model wrote. Raises `ConfigError`, before anything runs, where
    the model has no chat template, and where a question is too long.
    """
    tokenizer = chat_tokenizer(llm, own.task)
    params = sampling_of(llm, sampling, own.max_tokens)
    requests = []
    for number, doc in enumerate(docs):
        messages = own.messages(role, doc, shots)
        tokens = tokenizer.apply_chat(messages)
        requests.append(Request(str(number), tokens, params, tokenizer.shared_prefix(messages)))
    generation = generate(llm, requests, policy, seed, llm.progress)
    samples = []
    for doc, output in zip(docs, generation.outputs, strict=True):
        found = score(own.scoring, output.text or "", doc.right, doc.before, doc.entry)
        samples.append(
            {
                "text": output.text,
                "token_ids": list(output.token_ids),
                "right": doc.right,
                "answer": found.answer,
                "failure": found.failure,
                **found.metrics,
            }
        )
    return {**generation.costs(), "metrics": shares(samples), "samples": samples}
