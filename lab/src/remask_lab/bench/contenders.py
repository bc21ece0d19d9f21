"""The contenders of a bench: the policies that can run a workload, and the reasons why others cannot."""

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
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
RANDOM_ORDER = "none, random order"


@dataclass(frozen=True, slots=True)
class Contender:
    """One row of the table: a policy, on the bench's workload or on a variant of it.

    Attributes:
        name: unique among the contenders.
        workload: the variant; None takes the bench's.
        settings: those that the table shows.
        baseline: the name of the contender with which it is compared.
        prefix_match: what a request may read if its shared prefix is not in the store.
    """

    name: str
    policy: CachePolicy
    _: KW_ONLY
    workload: Workload | None = None
    settings: Mapping[str, Any] = field(default_factory=dict)
    baseline: str = "none"
    prefix_match: PrefixMatch = "exact"


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A policy that cannot run, and the reason."""

    name: str
    reason: str


def contender(llm: LLM, cache: str | CachePolicy, settings: Mapping[str, Any] | None, workload: Workload) -> Contender:
    """The policy `cache`, a name or an object, as a contender. Raises `ConfigError` if it cannot run `workload`."""
    policy = llm.session.policy(cache, settings)
    for task in workload.tasks:
        llm.engine.check(task.request.with_policy(policy))
    return Contender(cache if isinstance(cache, str) else name_of(cache), policy, settings=settings_of(policy))


def at_depths(
    llm: LLM, workload: Workload, depths: Iterable[int], settings: Mapping[str, Any] | None = None
) -> list[Contender]:
    """`bicache` at each of `depths` with `settings`, as contenders with names like "bicache depth=5".

    Raises `ConfigError` on depths that the model does not have.
    """
    rows = {depth: contender(llm, "bicache", {**(settings or {}), "depth": depth}, workload) for depth in depths}
    return [replace(row, name=f"bicache depth={depth}") for depth, row in rows.items()]


def every_contender(
    llm: LLM, workload: Workload, settings: Mapping[str, Mapping[str, Any]]
) -> tuple[list[Contender], list[LeftOut]]:
    """`none`, then all other policies for this kind of model and the papers' compositions; and those that cannot run.

    `settings` are by the policy's name. A policy that cannot run with the workload's sampler gets one that draws
    positions at random, if it can run with that; its baseline is then `none` with the same sampler. Raises
    `ConfigError` on settings that no request could use.
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
        variant = _random_order(workload)
        variant_reason: str | None = "no schedule says how many a step transfers"
        if variant is not None:
            variant_reason = _refusal(llm, policy, variant)
        if variant is None or variant_reason is not None:
            left_out.append(LeftOut(name, f"{reason}; with remasking 'random': {variant_reason}"))
            continue
        sampling = {"remasking": "random"}
        if all(row.name != RANDOM_ORDER for row in rows):
            rows.append(
                Contender(
                    RANDOM_ORDER, llm.session.policy("none"), workload=variant, settings=sampling, baseline=RANDOM_ORDER
                )
            )
        rows.append(
            Contender(name, policy, workload=variant, settings=settings_of(policy) | sampling, baseline=RANDOM_ORDER)
        )
    return rows, left_out


def variants(llm: LLM, specs: Sequence[Any], workload: Workload) -> list[Contender]:
    """Policies with sampling parameters on top of each request's, all compared with the first.

    `specs` are names of policies, or objects of "cache" (a name or a `CachePolicy`), "cache_config" and "sampling".
    Raises `ConfigError` if there are none, if one cannot be used or cannot run a request, and if two are equal.
    """
    rows: list[Contender] = []
    for spec in specs:
        row = _variant(llm, {"cache": spec} if isinstance(spec, str) else spec, workload)
        if any(row.name == other.name for other in rows):
            raise ConfigError(f"variant {row.name!r} is there twice; variants must differ")
        rows.append(replace(row, baseline=rows[0].name if rows else row.name))
    if not rows:
        raise ConfigError("--variants names none; give at least one policy")
    return rows


def _variant(llm: LLM, spec: Any, workload: Workload) -> Contender:
    """The contender of one of the objects of `variants`, named by its policy and its settings."""
    if not isinstance(spec, dict) or set(spec) - {"cache", "cache_config", "sampling"}:
        raise ConfigError(f"a variant is an object of cache, cache_config and sampling, got {spec!r}")
    cache, settings, sampling = spec.get("cache", "none"), spec.get("cache_config", {}), spec.get("sampling", {})
    if not isinstance(cache, str | CachePolicy) or not isinstance(settings, dict) or not isinstance(sampling, dict):
        raise ConfigError(f"a variant's cache is a name, its cache_config and sampling are objects; got {spec!r}")
    check_sampling(sampling)
    SamplingParams.from_mapping(sampling)
    if sampling:
        tasks = [replace(task, request=_with_sampling(task.request, sampling)) for task in workload.tasks]
        workload = replace(workload, tasks=tuple(tasks))
    parameters = by_path(SamplingParams, sampling)
    text = settings_text({**(settings if isinstance(cache, str) else settings_of(cache)), **parameters})
    try:
        row = contender(llm, cache, settings, workload)
    except ConfigError as error:
        raise ConfigError(f"{f'{cache} {text}'.strip()}: {error}") from error
    return replace(row, name=f"{row.name} {text}".strip(), workload=workload, settings={**row.settings, **parameters})


def _with_sampling(request: Request, sampling: Mapping[str, Any]) -> Request:
    """`request` with `sampling` merged into its parameters."""
    params = {name: getattr(request.params, name) for name in SamplingParams.__dataclass_fields__}
    return replace(request, params=SamplingParams.from_mapping(merge_sampling(params, sampling)))


def _refusal(llm: LLM, policy: CachePolicy, workload: Workload) -> str | None:
    """Why the first request of `workload` cannot run under `policy`; None if it can."""
    try:
        llm.engine.check(workload.tasks[0].request.with_policy(policy))
    except ConfigError as error:
        return str(error)
    except Exception as error:  # of another package's policy: the others are measured
        log.exception("a cache policy's check failed")
        return f"its check raised {type(error).__name__}: {error}"
    return None


def _random_order(workload: Workload) -> Workload | None:
    """The same requests with positions drawn at random; None without a schedule of how many a step transfers."""
    params = workload.tasks[0].request.params
    if params.threshold is not None or params.remasking.factor is not None or not params.uses_steps:
        return None
    return workload.under(replace(params, remasking="random"))


def settings_text(settings: Mapping[str, Any]) -> str:
    """Settings in one line, such as "depth=5, refresh_interval=null"."""
    return ", ".join(f"{name}={'null' if value is None else value}" for name, value in settings.items())
