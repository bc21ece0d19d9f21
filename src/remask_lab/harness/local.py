"""A benchmark on local data, without lm-eval and without a network."""

from collections.abc import Mapping, Sequence
from typing import Any

from remask.errors import ConfigError
from remask.llm import LLM
from remask.models.tokenizer import Tokenizer
from remask.policies import CachePolicy
from remask_lab.harness.benchmark import Benchmark
from remask_lab.harness.docs import Doc
from remask_lab.harness.generation import Ask, generate, params_for
from remask_lab.harness.score import score, shares


def chat_tokenizer(llm: LLM, task: str) -> Tokenizer:
    """What renders the chats that `task` asks. Raises `ConfigError` where the model has no chat template."""
    if llm.tokenizer is None or not llm.tokenizer.has_chat_template:
        raise ConfigError(
            f"{task} is asked as a chat under a system prompt, and this model folder has no chat template; put one "
            "into it as chat_template.jinja"
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
) -> dict[str, Any]:
    """Ask all of `docs` under the shared system prompt, and judge the answers: one row of results.

    With `own.scoring` "code" this runs what the model wrote. Raises `ConfigError`, before anything runs, where the
    model has no chat template, or a question does not fit.
    """
    tokenizer = chat_tokenizer(llm, own.task)
    params = params_for(sampling, own.max_tokens)
    asks = []
    for doc in docs:
        messages = own.messages(role, doc)
        asks.append(Ask(tokenizer.apply_chat(messages), tokenizer.shared_prefix(messages), params))
    generation = generate(llm, asks, policy, seed, llm.progress)
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
