"""Requests that run one at a time on an engine of their own, and are observed after every pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from remask.engine.audit_passes import AuditPasses
from remask.engine.request import Request
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM
from remask.plan.canvas import Canvas
from remask.policies import CachePolicy
from remask_lab.observe import ObservedPass, observe_passes
from remask_lab.similarity.probe import KV

Observe = Callable[[ObservedPass], None]
"""Called after a pass has run, before its tokens change."""
T = TypeVar("T")


class Watcher:
    """Runs requests one at a time on a new engine with the weights of `llm`, whose own engine is not used.

    `limits` are settings of its `EngineConfig`.
    """

    def __init__(self, llm: LLM, **limits: Any) -> None:
        self.engine = llm.session.new_engine(
            replace(llm.session.engine_config, **{"max_num_seqs": 1, "max_row_layers": None, **limits})
        )

    def run(self, request: Request, observe: Observe) -> None:
        """Run a request to its end, and call `observe` after each pass, before its tokens change.

        Raises `ConfigError` where it cannot run, or its canvas grows, and `RemaskError` where it ends before its
        response is complete.
        """
        if self.engine.check(request).decoding.can_grow:
            raise ConfigError(
                "growing_canvas: what is measured pass by pass is that of a canvas of one length, and this one grows "
                'with each block; say {"blocks": {"growing_canvas": false}} in --sampling'
            )

        def observer(passes: Sequence[ObservedPass]) -> None:
            for observed in passes:
                observe(observed)

        attachment = observe_passes(self.engine, observer)
        try:
            self.engine.add(request)
            while self.engine.busy:
                for event in self.engine.step():
                    if event.result is not None and event.result.finish_reason not in ("stop", "length"):
                        reason = event.result.error or event.result.finish_reason
                        raise RemaskError(f"the request ended early: {reason}")
        finally:
            self.engine.detach(attachment)


class Passes:
    """Watches requests with a shared prefix on an engine whose prefix store holds one prefix.

    Raises `ConfigError` where the model is not masked, there is no request, or one has no shared prefix or is guided.
    """

    def __init__(self, llm: LLM, requests: Sequence[Request]) -> None:
        check_masked(llm)
        if not requests:
            raise ConfigError("there is no request to measure on")
        self.max_tokens = max(len(request.prompt_token_ids) + request.params.max_tokens for request in requests)
        limits = {"max_model_len": self.max_tokens, "store_budget_tokens": self.max_tokens}
        self._watcher = Watcher(llm, prefix_match="exact", **limits)
        for request in requests:
            if self.prefix(request) < 1:
                raise ConfigError(f"request {request.id!r} has no shared prefix to measure: set prefix_length")
            if request.params.cfg_scale > 0:
                raise ConfigError(
                    f"cfg_scale={request.params.cfg_scale:g}: one canvas a request is measured, and a guided one has "
                    "two; leave cfg_scale out"
                )

    def check(self, requests: Sequence[Request], policy: CachePolicy) -> None:
        """Raise `ConfigError` where one of `requests` cannot run under `policy`."""
        for request in requests:
            self._watcher.engine.check(request.with_policy(policy))

    def run(self, request: Request, policy: CachePolicy, measure: Callable[[ObservedPass], T]) -> list[T]:
        """Run a request to its end, and return what `measure` returns for each pass; it is called before tokens change.

        Raises `ConfigError` where the request cannot run.
        """
        results: list[T] = []
        self._watcher.run(request.with_policy(policy), lambda observed: results.append(measure(observed)))
        return results

    @property
    def audits(self) -> AuditPasses:
        """The engine's passes over whole canvases, exact ones and ones that reuse a prefix."""
        return self._watcher.engine.auditor.passes

    def canvas(self, request: Request) -> Canvas:
        """The first canvas of a request. Raises `ConfigError` where the request cannot run."""
        return self._watcher.engine.check(request).decoding.canvas()

    def prefix(self, request: Request) -> int:
        """Tokens of a request's shared prefix that can be leased. Rows that predict the response must be computed."""
        return min(request.prefix_length, len(request.prompt_token_ids) - self._watcher.engine.model.config.shift)


def leading_kv(observed: ObservedPass, count: int) -> KV:
    """Copies of K and V that a pass attended to at the first `count` positions."""
    keys, values = zip(*observed.kv(slice(count)), strict=True)
    return keys, values


def check_masked(llm: LLM) -> None:
    """Raise `ConfigError` unless `llm` is a masked model, the kind that BiCache is defined for."""
    kind = llm.loaded.config.kind
    if kind != "masked":
        reason = {
            "uniform": "there clean rows attend to clean rows alone, and nothing of a prompt is shared",
            "block_causal": "there K/V of committed blocks are final, and shared exactly",
        }[kind]
        raise ConfigError(f"BiCache is defined for masked models, and {llm.loaded.name!r} is a {kind} one: {reason}")
