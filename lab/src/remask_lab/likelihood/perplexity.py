"""Generative perplexity: how likely an external causal language model, the judge, finds what a model generates."""

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
        kind: Any = dtype if dtype == "auto" else getattr(torch, dtype)
        with _loading("The judge", name):
            self._tokenizer: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        model = load_causal_model("The judge", name, kind)
        self._model = model.to(device).eval()
        self._limit: int | None = getattr(model.config, "max_position_embeddings", None)

    @property
    def dtype(self) -> str:
        """The dtype of the weights."""
        return str(self._model.dtype).removeprefix("torch.")

    @torch.inference_mode()
    def score(self, prompt: str, response: str) -> tuple[float, int]:
        """Returns the negative log-likelihood of `response` after `prompt` in nats, and the number of scored tokens.

        Both are encoded apart, so that no token spans them, behind the judge's begin token, where it has one. The first
        token of a response is scored only where a token stands before it. Raises `ConfigError` where both together
        exceed the judge's positions.
        """
        begin = self._tokenizer.bos_token_id
        before = ([] if begin is None else [begin]) + self._encode(prompt)
        own = self._encode(response)
        ids = before + own
        if self._limit is not None and len(ids) > self._limit:
            raise ConfigError(
                f"prompt and response have {len(ids)} tokens of the judge {self.name!r}, which reads {self._limit}; "
                "use shorter prompts or responses, or another judge"
            )
        first = max(1, len(before))
        if len(ids) <= first:
            return 0.0, 0
        tokens = torch.tensor([ids], device=self._model.device)
        logits: Tensor = self._model(input_ids=tokens).logits[0, first - 1 : -1]
        targets, total = tokens[0, first:], 0.0
        for at in range(0, len(targets), ROWS):
            rows = slice(at, at + ROWS)
            total += float(F.cross_entropy(logits[rows].float(), targets[rows], reduction="sum"))
        return total, len(targets)

    def _encode(self, text: str) -> list[int]:
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids


def load_causal_model(what: str, name: str, dtype: torch.dtype | str) -> Any:
    """Load a causal language model from a folder or the hub. `what` names it in errors. Code in its folder never runs.

    Raises `CheckpointError` where it cannot be loaded.
    """
    with _loading(what, name):
        model: Any = AutoModelForCausalLM.from_pretrained(name, dtype=dtype, trust_remote_code=False)
    return model


@contextmanager
def _loading(what: str, name: str) -> Iterator[None]:
    try:
        yield
    # A missing name, a missing file and a foreign architecture surface as OSError, ValueError, KeyError and others.
    except Exception as error:
        raise CheckpointError(
            f"{what} {name!r} cannot be loaded: {error}\nGive the folder or the hub id of a causal language model that "
            "transformers knows, with its tokenizer."
        ) from error


@dataclass(frozen=True, slots=True)
class JudgedResponse:
    """One response and its score: negative log-likelihood in nats, summed over the judge's `tokens`.

    `dropped` counts generated tokens that are no text, such as PAD and other special tokens.
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
    """Yields the texts of a file: the lines that are not blank, or each object's `text` or `prompt` in a JSONL file.

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
    """Returns the first `tokens` token ids of the first `count` texts that have as many, without a final end token.

    Raises `ConfigError` without a tokenizer, and where there are fewer such texts.
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
    """Generate from all prompts under every policy, and have the judge score the responses.

    Request i has the seed `seed` + i under every policy, so that all begin with the same noise. The intervals are
    bootstrapped over responses, with the same `seed`. The judge reads responses without the model's special tokens.

    Raises `ConfigError`, before anything runs, where a policy or a parameter cannot be used, and where no response has
    any text.
    """
    seeded = [replace(params, seed=seed + number) for number in range(len(prompts))]
    parsed = [llm.session.policy(policy.name, policy.settings) for policy in policies]
    work = [llm.session.requests(list(prompts), seeded, policy=policy) for policy in parsed]
    for item in (item for items in work for item in items):
        llm.engine.check(item)
    rows = []
    for policy, items in zip(policies, work, strict=True):
        outputs = sorted(llm.session.run(items), key=lambda output: int(output.id))
        pairs = zip(prompts, outputs, strict=True)
        shown = tqdm(pairs, total=len(outputs), desc=f"judging {policy.name}", unit="resp", disable=not progress)
        scores = tuple(_score(llm, judge, prompt, output) for prompt, output in shown)
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
        chosen = rng.integers(0, len(sums), len(sums))
        means.append(sums[chosen].sum() / counts[chosen].sum())
    low, high = np.exp(np.percentile(means, [2.5, 97.5])).tolist()
    return low, high


def _text(line: Line) -> str:
    names = [name for name in FIELDS if line.has(name)]
    text = line.get(names[0]) if len(names) == 1 else None
    if not isinstance(text, str):
        fields = ", ".join(line.record) or "none"
        raise line.error(f"a line needs one text as {' or '.join(map(repr, FIELDS))}; its fields: {fields}")
    return text


def _score(llm: LLM, judge: Judge, prompt: Sequence[int], output: Output) -> JudgedResponse:
    assert llm.tokenizer is not None
    if output.error is not None:
        raise ConfigError(f"request {output.id} failed: {output.error}")
    kept = [token for token in output.token_ids if token not in llm.tokenizer.special_ids]
    text = llm.tokenizer.decode(kept)
    nll, tokens = judge.score(llm.tokenizer.decode(prompt), text)
    return JudgedResponse(nll, tokens, text, len(output.token_ids) - len(kept))


def _summary(policy: Policy, scores: tuple[JudgedResponse, ...], seed: int) -> Perplexity:
    full = [score for score in scores if score.tokens]
    if not full:
        raise ConfigError(f"no response under {policy.name!r} has any text to judge")
    total, tokens = sum(score.nll for score in full), sum(score.tokens for score in full)
    low, high = bootstrap([score.nll for score in full], [score.tokens for score in full], seed)
    mean = total / tokens
    empty = len(scores) - len(full)
    return Perplexity(policy.name, policy.settings, math.exp(mean), low, high, mean, tokens, empty, scores)
