"""Requests that run one at a time on an engine of their own, and are observed after every pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from remask.depth.similarity import KV
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM
from remask.model.attention import Attention
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from remask.policies import CachePolicy
from remask.policies.dense import Dense
from remask.request.result import Event
from remask_lab.instruments.series import Floats
from remask_lab.observe import ObservedPass, observe_passes, replace_attention

NONE = Dense()  # the policy `none`
HEAD_ROWS = 256  # rows of logits held at a time

Observe = Callable[[ObservedPass], None]
"""Is called after a pass has run, before its tokens change."""
Change = Callable[[NDArray[np.bool_]], None]
"""Is called after `Observe` with the positions of the response to which the pass gave another token, [response]."""


class Trace:
    """What the passes over one canvas showed."""

    def observe(self, seen: ObservedPass) -> None:
        """Take in a pass that has run, before its tokens change."""
        raise NotImplementedError

    def change(self, changed: NDArray[np.bool_]) -> None:
        """Take in the positions of the response, [response], to which the pass gave another token."""


T = TypeVar("T")
S = TypeVar("S", bound=Trace)


class Watcher:
    """An engine of its own over the weights of `llm`, whose own engine is not touched.

    `attention` takes the place of the model's; `limits` are those of the engine, beside one request at a time.
    """

    def __init__(self, llm: LLM, attention: Attention | None = None, **limits: Any) -> None:
        self.engine = llm.session.new_engine(
            replace(llm.session.engine_config, **{"max_num_seqs": 1, "max_row_layers": None, **limits})
        )
        if attention is not None:
            replace_attention(self.engine, attention)

    def trace(self, item: Request, trace: S) -> S:
        """Run a request to its end, and let `trace` take it in. Raises as `run`."""
        self.run(item, trace.observe, trace.change)
        return trace

    def run(self, item: Request, observe: Observe, change: Change | None = None) -> tuple[int, ...]:
        """Run a request to its end; call `observe` before a pass' tokens change, and then `change`, if given.

        Returns the response. Raises `ConfigError` where it cannot run, or its canvas grows, and `RemaskError` where it
        ends before its response is complete.
        """
        check_length(self.engine, item)
        response: tuple[int, ...] = ()
        seen: list[ObservedPass] = []

        def observer(passes: Sequence[ObservedPass]) -> None:
            seen.extend(passes)
            for each in passes:
                observe(each)

        attached = observe_passes(self.engine, observer)
        try:
            self.engine.add(item)
            while self.engine.busy:
                seen.clear()
                events = self.engine.step()
                check_ends(events)
                if change is not None:
                    for each in seen:
                        change(_changed(each.tokens, events)[each.prompt : each.end])
                for event in events:
                    response = response if event.result is None else tuple(event.result.token_ids)
        finally:
            self.engine.detach(attached)
        return response


def _changed(before: NDArray[np.int64], events: Sequence[Event]) -> NDArray[np.bool_]:
    """Where the tokens that `events` wrote differ from those of `before`, [T]."""
    after = before.copy()
    for event in events:
        if event.transfer is not None:
            after[list(event.transfer.positions)] = event.transfer.token_ids
    changed: NDArray[np.bool_] = after != before
    return changed


class UncachedWatcher(Watcher):
    """A watcher of requests that name no cache and share nothing.

    `what` names in errors what is measured. They run under `policy`, by default `none`.
    """

    def __init__(
        self, llm: LLM, what: str, attention: Attention | None = None, policy: CachePolicy | None = None
    ) -> None:
        super().__init__(llm, attention, store_budget_tokens=0)
        self.what, self.policy = what, policy or NONE

    def check(self, item: Request) -> None:
        """Raise `ConfigError` where a request cannot run, or asks for a cache, for guidance or for corrections."""
        check_uncached(item, self.what)
        check_length(self.engine, replace(item, prefix_length=0, policy=self.policy))

    def run(self, item: Request, observe: Observe, change: Change | None = None) -> tuple[int, ...]:
        """Check a request, and run it to its end. `Watcher.run` has the rest."""
        self.check(item)
        return super().run(replace(item, prefix_length=0, policy=self.policy), observe, change)

    def trace_all(self, begin: Callable[[], S], work: Sequence[Request], progress: bool) -> list[S]:
        """Run each request of `work` to its end, and return a trace of each, which `begin` makes.

        Raises `ConfigError`, before anything runs, where there is no request or one cannot run.
        """
        if not work:
            raise ConfigError("there is no request to measure; give one at least")
        for item in work:
            self.check(item)
        return [self.trace(item, begin()) for item in tqdm(work, desc="requests", unit="req", disable=not progress)]


class Passes:
    """A watcher of requests with a shared prefix; the prefix store holds one prefix.

    Raises `ConfigError` where the model is not a masked one, there is no request, or one has no shared prefix or asks
    for guidance.
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

    def canvas(self, request: Request) -> Canvas:
        """The canvas with which a request begins. Raises `ConfigError` where the request cannot run."""
        return self._watcher.engine.check(request).decoding.canvas()

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


def check_ends(events: Sequence[Event]) -> None:
    """Raise `RemaskError` where a request ended before its response was complete."""
    for event in events:
        if event.result is not None and event.result.finish_reason not in ("stop", "length"):
            raise RemaskError(f"the request ended early: {event.result.error or event.result.finish_reason}")


def check_length(engine: Engine, item: Request) -> None:
    """Raise `ConfigError` where a request cannot run on `engine`, or its canvas grows.

    Passes over one canvas are compared with each other.
    """
    if engine.check(item).decoding.grows:
        raise ConfigError(
            "growing_canvas: what is measured pass by pass is that of a canvas of one length, and this one grows with "
            'each block; say {"blocks": {"growing_canvas": false}} in --sampling'
        )


def check_uncached(item: Request, what: str) -> None:
    """Raise `ConfigError` where a request asks for caches, guidance or corrections.

    `what` is measured of blocks being denoised on one dense canvas.
    """
    if item.policy != NONE:
        raise ConfigError(f"{what} is that of a model without a cache; leave cache out, or say 'none'")
    if item.params.cfg_scale > 0:
        raise ConfigError(
            f"cfg_scale={item.params.cfg_scale:g}: {what} is measured on one canvas, and a guided request "
            "has two; leave cfg_scale out"
        )
    if item.params.uniform.correction_steps:
        raise ConfigError(
            f"correction_steps={item.params.uniform.correction_steps}: {what} is that of blocks being denoised, and a "
            "correction goes over the whole response; leave correction_steps out"
        )


def certainty(model: Transformer, hidden: Tensor) -> tuple[Floats, Floats]:
    """Entropy in nats and largest probability of the rows that `hidden` [M, D] predicts, [M] each.

    Both are those over all tokens but the mask. Logits exist for a few rows at a time.
    """
    found = [np.empty((2, 0))]
    for at in range(0, len(hidden), HEAD_ROWS):
        logits = model.head(hidden[at : at + HEAD_ROWS]).float()
        logits[:, model.config.mask_id] = -torch.inf
        probabilities = logits.softmax(dim=-1)
        entropy = torch.special.entr(probabilities).sum(dim=-1)
        found.append(torch.stack([entropy, probabilities.amax(dim=-1)]).cpu().double().numpy())
    both = np.concatenate(found, axis=1)
    return both[0], both[1]
