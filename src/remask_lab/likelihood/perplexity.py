"""Generative perplexity: how likely an external judge finds what a model generates."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from remask.core.checks import json_object
from remask.core.sampling import SamplingParams
from remask.errors import ConfigError
from remask.llm import LLM, Output
from remask.policies import CachePolicy, name_of, settings_of
from remask_lab.likelihood.judge import Judge

RESAMPLES = 10_000
FIELDS = ("text", "prompt")


@dataclass(frozen=True, slots=True)
class Score:
    """One response as judged: `nll` in nats summed over its `tokens`, which are the judge's."""

    nll: float
    tokens: int
    text: str
    dropped: int  # generated tokens that are no text: PAD, and other special tokens


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
    empty: int  # responses without any text; they count for nothing
    scores: tuple[Score, ...]


@dataclass(frozen=True, slots=True)
class Policy:
    """A cache policy by name, with its settings."""

    name: str
    settings: Mapping[str, Any]


def read_texts(path: str | Path) -> Iterator[str]:
    """The texts of a file: the lines that are not blank, or of a `.jsonl` file each object's `text` or `prompt`.

    Raises `ConfigError` where the file or a line of it cannot be read.
    """
    try:
        content = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the prompts {str(path)!r} cannot be read: {error}") from error
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        if Path(path).suffix != ".jsonl":
            yield line
            continue
        try:
            yield _text(json_object("a line", line))
        except ConfigError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from error


def cut_prompts(llm: LLM, texts: Iterator[str], tokens: int, count: int) -> list[list[int]]:
    """The first `tokens` token ids of the first `count` texts that have so many, an end token at the end aside.

    Raises `ConfigError` without a tokenizer, and where there are fewer such texts.
    """
    if llm.tokenizer is None:
        raise ConfigError("this model folder has no tokenizer, and a judge reads text; give a model with one")
    stops = llm.loaded.config.stop_ids
    prompts: list[list[int]] = []
    longest = 0
    for text in texts:
        if len(prompts) == count:
            break
        ids = llm.tokenizer.encode(text)
        if ids and ids[-1] in stops:
            ids = ids[:-1]
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
    policies: Sequence[Policy | CachePolicy],
    params: SamplingParams,
    seed: int = 0,
    progress: bool = False,
) -> list[Perplexity]:
    """Generate from all prompts under every policy, named or an object, and let the judge score the responses.

    Request i has the seed `seed` + i under every policy, so that all begin with the same noise and draws. The intervals
    are bootstrapped over responses with the same `seed`. Special tokens of the model, PAD among them, are dropped from
    what is scored.

    Raises `ConfigError` before anything runs where a policy or a parameter cannot be used, and where no response has
    any text.
    """
    each = [replace(params, seed=seed + number) for number in range(len(prompts))]
    named = [
        policy if isinstance(policy, Policy) else Policy(name_of(policy), settings_of(policy)) for policy in policies
    ]
    parsed = [llm.policy(policy.name, policy.settings) if isinstance(policy, Policy) else policy for policy in policies]
    work = [llm.requests(list(prompts), each, policy=policy) for policy in parsed]
    for item in (item for items in work for item in items):
        llm.engine.check(item)
    rows = []
    for policy, items in zip(named, work, strict=True):
        outputs = sorted(llm.run(items), key=lambda output: int(output.id))
        pairs = zip(prompts, outputs, strict=True)
        shown = tqdm(pairs, total=len(outputs), desc=f"judging {policy.name}", unit="resp", disable=not progress)
        scores = tuple(_score(llm, judge, prompt, output) for prompt, output in shown)
        rows.append(_summary(policy, scores, seed))
    return rows


def bootstrap(
    nll: Sequence[float], tokens: Sequence[int], seed: int, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """95 % interval of exp(sum of `nll` / sum of `tokens`) by the percentiles of resampled responses."""
    rng = np.random.default_rng(seed)
    sums, counts = np.asarray(nll, dtype=np.float64), np.asarray(tokens, dtype=np.float64)
    means = []
    for _ in range(resamples):
        chosen = rng.integers(0, len(sums), len(sums))
        means.append(sums[chosen].sum() / counts[chosen].sum())
    low, high = np.exp(np.percentile(means, [2.5, 97.5])).tolist()
    return low, high


def _text(line: Mapping[str, Any]) -> str:
    given = [name for name in FIELDS if name in line]
    if len(given) != 1 or not isinstance(line[given[0]], str):
        raise ConfigError(f"a line needs one text as {' or '.join(map(repr, FIELDS))}, and has {', '.join(line)}")
    text: str = line[given[0]]
    return text


def _score(llm: LLM, judge: Judge, prompt: Sequence[int], output: Output) -> Score:
    assert llm.tokenizer is not None
    if output.error is not None:
        raise ConfigError(f"request {output.id} failed: {output.error}")
    kept = [token for token in output.token_ids if token not in llm.tokenizer.special_ids]
    text = llm.tokenizer.decode(kept)
    nll, tokens = judge.score(llm.tokenizer.decode(prompt), text)
    return Score(nll, tokens, text, len(output.token_ids) - len(kept))


def _summary(policy: Policy, scores: tuple[Score, ...], seed: int) -> Perplexity:
    full = [score for score in scores if score.tokens]
    if not full:
        raise ConfigError(f"no response under {policy.name!r} has any text to judge")
    total, tokens = sum(score.nll for score in full), sum(score.tokens for score in full)
    low, high = bootstrap([score.nll for score in full], [score.tokens for score in full], seed)
    mean = total / tokens
    empty = len(scores) - len(full)
    return Perplexity(policy.name, policy.settings, math.exp(mean), low, high, mean, tokens, empty, scores)
