"""Generative perplexity: the perplexity of generated responses under a causal language model, the judge."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from remask.errors import CheckpointError, ConfigError
from remask.llm import LLM, Output
from remask.request.sampling_params import SamplingParams
from remask_lab.likelihood.passes import encode_open
from remask_lab.records.jsonl import Line, read_lines

ROWS = 256  # rows of logits in float32 at a time
RESAMPLES = 10_000
FIELDS = ("text", "prompt")


class Judge:
    """A causal language model that `transformers` loads, with its own tokenizer. Code in its folder never runs.

    Args:
        name: hub id or local folder.
        dtype: `auto` for the checkpoint's own, or `float32`, `bfloat16`, `float16`.
        device: where it runs.

    Raises `CheckpointError` where it cannot be loaded.
    """

    def __init__(self, name: str, dtype: str = "auto", device: torch.device | str = "cpu") -> None:
        self.name = name
        with _loading("The judge", name):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = load_causal_model("The judge", name, dtype if dtype == "auto" else getattr(torch, dtype))
        self._model = model.to(device).eval()
        self._limit: int | None = getattr(model.config, "max_position_embeddings", None)

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return str(self._model.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def score(self, prompt: str, response: str) -> tuple[float, int]:
        """The negative log-likelihood of `response` after `prompt` in nats, and the number of scored tokens.

        Both are encoded separately, so that no token spans them, after the judge's begin token if it has one. Without
        a begin token and a prompt, the first token of the response is not scored. Raises `ConfigError` where both
        together exceed the judge's positions.
        """
        begin = self._tokenizer.bos_token_id
        prompt_ids = ([] if begin is None else [begin]) + self._encode(prompt)
        response_ids = self._encode(response)
        ids = prompt_ids + response_ids
        if self._limit is not None and len(ids) > self._limit:
            raise ConfigError(
                f"prompt and response have {len(ids)} tokens of the judge {self.name!r}, which reads {self._limit}; "
                "use shorter prompts or responses, or another judge"
            )
        first = max(1, len(prompt_ids))
        if len(ids) <= first:
            return 0.0, 0
        tokens = torch.tensor([ids], device=self._model.device)
        logits: Tensor = self._model(input_ids=tokens).logits[0, first - 1 : -1]
        targets, total = tokens[0, first:], 0.0
        for start in range(0, len(targets), ROWS):
            rows = slice(start, start + ROWS)
            total += float(F.cross_entropy(logits[rows].float(), targets[rows], reduction="sum"))
        return total, len(targets)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids


def load_causal_model(description: str, name: str, dtype: torch.dtype | str) -> Any:
    """Load a causal language model from a folder or the hub, without running code in it; errors name `description`.

    Raises `CheckpointError` where it cannot be loaded.
    """
    with _loading(description, name):
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    return model


@contextmanager
def _loading(description: str, name: str) -> Iterator[None]:
    """Turn all errors of the block into a `CheckpointError` that names the model."""
    try:
        yield
    # A missing name, a missing file and a foreign architecture surface as OSError, ValueError, KeyError and others.
    except Exception as error:
        raise CheckpointError(
            f"{description} {name!r} cannot be loaded: {error}\nGive the folder or the hub id of a causal "
            "language model that transformers knows, with its tokenizer."
        ) from error


@dataclass(frozen=True, slots=True)
class JudgedResponse:
    """One response and its score.

    Attributes:
        nll: negative log-likelihood in nats, summed over the response's `tokens` of the judge.
        dropped: generated tokens that are no text, such as PAD and other special tokens.
    """

    nll: float
    tokens: int
    text: str
    dropped: int


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Generative perplexity of one cache policy: exp of the mean NLL over all response tokens, with a 95 % interval."""

    cache: str
    settings: Mapping[str, Any]
    perplexity: float
    low: float
    high: float
    mean_nll: float
    tokens: int
    empty: int  # responses without any text, which are not scored
    scores: tuple[JudgedResponse, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """A cache policy by name, with its settings."""

    name: str
    settings: Mapping[str, Any]


def read_texts(path: str | Path) -> Iterator[str]:
    """Yield the texts of a file: its lines that are not blank, or the `text` or `prompt` of each line of JSONL.

    Raises `ConfigError` where the file or a line of it cannot be read.
    """
    if ".jsonl" in Path(path).suffixes:
        yield from map(_text, read_lines(path))
        return
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts {str(path)!r} cannot be read: {error}") from error
    yield from (line for line in content.split("\n") if line.strip())


def cut_prompts(llm: LLM, texts: Iterator[str], tokens: int, count: int) -> list[list[int]]:
    """The first `tokens` token ids of each of the first `count` texts that have as many.

    Raises `ConfigError` without a tokenizer, and where fewer texts are long enough.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, and a judge reads text; give a model with one")
    prompts: list[list[int]] = []
    longest = 0
    for text in texts:
        if len(prompts) == count:
            break
        ids = encode_open(llm, llm.tokenizer, text)
        longest = max(longest, len(ids))
        if len(ids) >= tokens:
            prompts.append(ids[:tokens])
    if len(prompts) < count:
        raise ConfigError(
            f"{count} prompts of {tokens} tokens were asked for, and the file has {len(prompts)} texts that long (the "
            f"longest has {longest} tokens); use fewer requests, shorter prompts, or another file"
        )
    return prompts


def measure(
    llm: LLM,
    judge: Judge,
    prompts: Sequence[Sequence[int]],
    policies: Sequence[Policy],
    params: SamplingParams,
    seed: int = 0,
    progress: bool = False,
) -> list[Perplexity]:
    """Generate a response to each prompt under every policy, and let the judge score the responses.

    Request i has the seed `seed` + i under every policy, so that all begin with the same noise. The intervals are
    bootstrapped over responses, with the same `seed`. The judge reads responses without the model's special tokens.

    Raises `ConfigError`, before anything runs, where a policy or a parameter cannot be used, and where no response has
    any text.
    """
    seeded = [replace(params, seed=seed + number) for number in range(len(prompts))]
    cache_policies = [llm.session.policy(policy.name, policy.settings) for policy in policies]
    requests = [llm.session.requests(list(prompts), seeded, policy=policy) for policy in cache_policies]
    for request in (request for policy_requests in requests for request in policy_requests):
        llm.engine.check(request)
    rows = []
    for policy, policy_requests in zip(policies, requests, strict=True):
        outputs = sorted(llm.session.run(policy_requests), key=lambda output: int(output.id))
        pairs = zip(prompts, outputs, strict=True)
        bar = tqdm(pairs, total=len(outputs), desc=f"judging {policy.name}", unit="resp", disable=not progress)
        scores = tuple(_score(llm, judge, prompt, output) for prompt, output in bar)
        rows.append(_summary(policy, scores, seed))
    return rows


def bootstrap(
    nll: Sequence[float], tokens: Sequence[int], seed: int, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95 % interval of exp(sum of `nll` / sum of `tokens`): percentiles over resampled responses."""
    rng = np.random.default_rng(seed)
    sums, counts = np.asarray(nll, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    means = []
    for _ in range(resamples):
        sample = rng.integers(0, len(sums), len(sums))
        means.append(sums[sample].sum() / counts[sample].sum())
    low, high = np.exp(np.percentile(means, [2.5, 97.5])).tolist()
    return low, high


def _text(line: Line) -> str:
    """The text of a line. Raises `ConfigError` unless it has exactly one of `FIELDS`, a text."""
    names = [name for name in FIELDS if line.has(name)]
    text = line.get(names[0]) if len(names) == 1 else None
    if not isinstance(text, str):
        fields = ", ".join(line.record) or "none"
        raise line.error(f"a line needs one text as {' or '.join(map(repr, FIELDS))}; its fields: {fields}")
    return text


def _score(llm: LLM, judge: Judge, prompt: Sequence[int], output: Output) -> JudgedResponse:
    """Judge one response. Raises `ConfigError` where its request failed."""
    assert llm.tokenizer is not None
    if output.error is not None:
        raise ConfigError(f"request {output.id} failed: {output.error}")
    ids = [token for token in output.token_ids if token not in llm.tokenizer.special_ids]
    text = llm.tokenizer.decode(ids)
    nll, tokens = judge.score(llm.tokenizer.decode(prompt), text)
    return JudgedResponse(nll=nll, tokens=tokens, text=text, dropped=len(output.token_ids) - len(ids))


def _summary(policy: Policy, scores: tuple[JudgedResponse, ...], seed: int) -> Perplexity:
    """The perplexity over all responses. Raises `ConfigError` where none has a token."""
    judged = [score for score in scores if score.tokens]
    if not judged:
        raise ConfigError(f"no response under {policy.name!r} has any text to judge")
    total, tokens = sum(score.nll for score in judged), sum(score.tokens for score in judged)
    low, high = bootstrap([score.nll for score in judged], [score.tokens for score in judged], seed)
    mean = total / tokens
    empty = len(scores) - len(judged)
    return Perplexity(
        cache=policy.name,
        settings=policy.settings,
        perplexity=math.exp(mean),
        low=low,
        high=high,
        mean_nll=mean,
        tokens=tokens,
        empty=empty,
        scores=scores,
    )
