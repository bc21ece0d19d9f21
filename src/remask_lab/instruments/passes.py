"""Requests with a shared prefix, run one at a time and measured in every pass."""

from collections.abc import Callable, Sequence
from typing import TypeVar

from remask.depth.similarity import KV
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.llm import LLM
from remask.model.attention import Attention
from remask.observe import ObservedPass
from remask.policies import CachePolicy
from remask_lab.instruments.watch import Watcher

T = TypeVar("T")


class Passes:
    """An engine of its own over the weights of `llm` that shows each pass of a request before tokens change.

    Requests run one at a time; the prefix store holds one prefix. Nothing of `llm` is changed. Raises `ConfigError`
    where the model is not a masked one, there is no request, or one has no shared prefix or asks for guidance.
    """

    def __init__(self, llm: LLM, requests: Sequence[Request], attention: Attention | None = None) -> None:
        check_masked(llm)
        if not requests:
            raise ConfigError("there is no request to measure on")
        self.max_tokens = max(len(request.prompt_token_ids) + request.params.max_tokens for request in requests)
        limits = {"max_model_len": self.max_tokens, "store_budget_tokens": self.max_tokens}
        self._watcher = Watcher(llm, attention, prefix_match="exact", **limits)
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
        """Run a request to its end; returns what `measure` returns for each pass, which it gets before tokens change.

        Raises `ConfigError` where the request cannot run.
        """
        found: list[T] = []
        self._watcher.run(request.with_policy(policy), lambda observed: found.append(measure(observed)))
        return found

    def prefix(self, request: Request) -> int:
        """Tokens of a request's shared prefix that can be leased: rows which predict the response must stay live."""
        return min(request.prefix_length, len(request.prompt_token_ids) - self._watcher.engine.model.config.shift)


def leading_kv(observed: ObservedPass, count: int) -> KV:
    """K and V that a pass read at the first `count` positions; copies."""
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
