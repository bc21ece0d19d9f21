"""The contenders of a bench: the policies that can run on a workload, and the reasons why others cannot."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from remask.checks.fields import by_path
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy, name_of, names_for, settings_of
from remask.request.sampling_params import SamplingParams, merge_sampling
from remask.request.terms import check_sampling
from remask.store import PrefixMatch
from remask_lab.bench.workload import Workload

log = logging.getLogger(__name__)

COMPOSITIONS = ("bicache+block-dual", "bicache+dllm-cache", "bicache+dkv-decode")
DRAWN = "none, random order"


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table: a policy, on the bench's workload or on a variant of it.

    Attributes:
        name: unique among the contenders.
        workload: its own; None takes the bench's.
        settings: those that the table shows.
        baseline: name of the contender that it is compared with.
        prefix_match: what a request may read where its shared prefix is not in the store.
    """

    name: str
    policy: CachePolicy
    workload: Workload | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = "none"
    prefix_match: PrefixMatch = "exact"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A policy that cannot run, and the reason."""

    name: str
    reason: str


def contender(
    llm: LLM,
    cache: str | CachePolicy,
    settings: Mapping[str, Any] | None,
    workload: Workload,
) -> Contender:
    """Returns the policy `cache`, a name or an object, as a contender.

    Raises `ConfigError` where it cannot run `workload`.
    """
    policy = llm.session.policy(cache, settings)
    for task in workload.tasks:
        llm.engine.check(task.request.with_policy(policy))
    return Contender(cache if isinstance(cache, str) else name_of(cache), policy, settings=settings_of(policy))


def at_depths(
    llm: LLM, workload: Workload, depths: Iterable[int], settings: Mapping[str, Any] | None = None
) -> list[Contender]:
    """Returns `bicache` at each of `depths` as contenders named "bicache depth=B". `settings` are its other settings.

    Raises `ConfigError` on depths that the model does not have.
    """
    own = settings or {}
    rows = {depth: contender(llm, "bicache", {**own, "depth": depth}, workload) for depth in depths}
    return [replace(row, name=f"bicache depth={depth}") for depth, row in rows.items()]


def every_contender(
    llm: LLM, workload: Workload, settings: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Contender], list[LeftOut]]:
    """Returns `none`, then every other policy and the compositions that the papers measure, and what is left out.

    `settings` holds settings by the policy's name. A policy that cannot run with the workload's sampler, but can where
    positions are drawn at random, runs so, and its baseline is `none` with the same sampler. A policy that cannot run
    on the model at all is left out. Policies of other kinds of models are not listed. Raises `ConfigError` on settings
    that no request could use.
    """
    rows = [contender(llm, "none", settings.get("none"), workload)]
    left_out: list[LeftOut] = []
    kind = llm.loaded.config.kind
    for name in (*names_for(kind), *(COMPOSITIONS if kind == "masked" else ())):
        if name == "none":
            continue
        policy = llm.session.policy(name, settings.get(name))
        reason = _refusal(llm, policy, workload)
        if reason is None:
            rows.append(Contender(name, policy, settings=settings_of(policy)))
            continue
        variant = _drawn(workload)
        also = "no schedule says how many a step transfers" if variant is None else _refusal(llm, policy, variant)
        if variant is None or also is not None:
            left_out.append(LeftOut(name, f"{reason}; with remasking 'random': {also}"))
            continue
        drawn = {"remasking": "random"}
        if all(row.name != DRAWN for row in rows):
            rows.append(Contender(DRAWN, llm.session.policy("none"), variant, drawn, DRAWN))
        rows.append(Contender(name, policy, variant, settings_of(policy) | drawn, DRAWN))
    return rows, left_out


def variants(llm: LLM, given: Sequence[Any], workload: Workload) -> list[Contender]:
    """Returns policies with sampling parameters on top of each request's, all compared with the first.

    `given` holds names of policies, or objects of "cache" (a name or a `CachePolicy`), "cache_config" and "sampling".
    Raises `ConfigError` on what cannot be used, where a request cannot run so, and where two are alike.
    """
    rows: list[Contender] = []
    for each in given:
        row = _variant(llm, {"cache": each} if isinstance(each, str) else each, workload)
        if any(row.name == other.name for other in rows):
            raise ConfigError(f"variant {row.name!r} is there twice; variants must differ")
        rows.append(replace(row, baseline=rows[0].name if rows else row.name))
    if not rows:
        raise ConfigError("--variants names none; give at least one policy")
    return rows


def _variant(llm: LLM, given: Any, workload: Workload) -> Contender:
    if not isinstance(given, dict) or set(given) - {"cache", "cache_config", "sampling"}:
        raise ConfigError(f"a variant is an object of cache, cache_config and sampling, got {given!r}")
    cache, settings, sampling = given.get("cache", "none"), given.get("cache_config", {}), given.get("sampling", {})
    if not isinstance(cache, str | CachePolicy) or not isinstance(settings, dict) or not isinstance(sampling, dict):
        raise ConfigError(f"a variant's cache is a name, its cache_config and sampling are objects; got {given!r}")
    check_sampling(sampling)
    SamplingParams.from_mapping(sampling)
    own = workload
    if sampling:
        tasks = [replace(task, request=_with(task.request, sampling)) for task in workload.tasks]
        own = replace(workload, tasks=tuple(tasks))
    chosen = settings if isinstance(cache, str) else settings_of(cache)
    changed = by_path(SamplingParams, sampling)
    words = described({**chosen, **changed})
    try:
        row = contender(llm, cache, settings, own)
    except ConfigError as error:
        raise ConfigError(f"{f'{cache} {words}'.strip()}: {error}") from error
    return replace(row, name=f"{row.name} {words}".strip(), workload=own, settings={**row.settings, **changed})


def _with(request: Request, sampling: Mapping[str, Any]) -> Request:
    own = {name: getattr(request.params, name) for name in SamplingParams.__dataclass_fields__}
    return replace(request, params=SamplingParams.from_mapping(merge_sampling(own, sampling)))


def _refusal(llm: LLM, policy: CachePolicy, workload: Workload) -> str | None:
    """Why the first request of `workload` cannot run under `policy`; None where it can."""
    try:
        llm.engine.check(workload.tasks[0].request.with_policy(policy))
    except ConfigError as error:
        return str(error)
    except Exception as error:  # of another package's policy: the others are measured
        log.exception("a cache policy's check failed")
        return f"its check raised {type(error).__name__}: {error}"
    return None


def _drawn(workload: Workload) -> Workload | None:
    """The same requests with positions drawn at random; None where no schedule fixes how many a step transfers."""
    params = workload.tasks[0].request.params
    if params.threshold is not None or params.remasking.factor is not None or not params.uses_steps:
        return None
    return workload.under(replace(params, remasking="random"))


def described(settings: Mapping[str, Any]) -> str:
    """Settings in one line, for a table."""
    return ", ".join(f"{name}={'null' if value is None else value}" for name, value in settings.items())
