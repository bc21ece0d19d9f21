"""Requests that run one at a time and are observed after every pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM
from remask.model.attention import Attention
from remask.model.transformer import Transformer
from remask.observe import ObservedPass, observe_passes, replace_attention
from remask.policies import CachePolicy
from remask.policies.dense import Dense
from remask.request.result import Event
from remask_lab.instruments.series import Floats

T = TypeVar("T")

NONE = Dense()  # the policy `none`
HEAD_ROWS = 256  # rows of logits held at a time

Observe = Callable[[ObservedPass], None]
"""Is called after a pass has run, before its tokens change."""
Change = Callable[[NDArray[np.bool_]], None]
"""Is called after `Observe` with the positions of the response to which the pass gave another token, [response]."""


class Watcher:
    """An engine of its own over the weights of `llm`, whose own engine is not touched.

    `attention` takes the place of the model's; `limits` are those of the engine, beside one request at a time.
    """

    def __init__(self, llm: LLM, attention: Attention | None = None, **limits: Any) -> None:
        self.engine = llm.new_engine(
            replace(llm.engine_config, **{"max_num_seqs": 1, "max_row_layers": None, **limits})
        )
        if attention is not None:
            replace_attention(self.engine, attention)

    def run(self, item: Request, observe: Observe, change: Change | None = None) -> None:
        """Run a request to its end; call `observe` before a pass' tokens change, and then `change`, if given.

        Raises `ConfigError` where it cannot run, or its canvas grows, and `RemaskError` where it ends before its
        response is complete.
        """
        check_length(self.engine, item)
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
        finally:
            self.engine.detach(attached)


def _changed(before: NDArray[np.int64], events: Sequence[Event]) -> NDArray[np.bool_]:
    """Where the tokens that `events` wrote differ from those of `before`, [T]."""
    after = before.copy()
    for event in events:
        if event.transfer is not None:
            after[list(event.transfer.positions)] = event.transfer.token_ids
    changed: NDArray[np.bool_] = after != before
    return changed


class UncachedWatcher(Watcher):
    """A watcher of requests under `none`, which share nothing.

    `what` names in errors what is measured. `policy` runs in the place of `none`, and must plan as it does.
    """

    def __init__(
        self, llm: LLM, what: str, attention: Attention | None = None, policy: CachePolicy | None = None
    ) -> None:
        super().__init__(llm, attention, store_budget_tokens=0)
        self.what, self.policy = what, policy or NONE

    def check(self, item: Request) -> None:
        """Raise `ConfigError` where a request cannot run, or asks for a cache, for guidance or for corrections."""
        check_uncached(item, self.what)
        check_length(self.engine, replace(item, prefix_length=0))

    def run(self, item: Request, observe: Observe, change: Change | None = None) -> None:
        """Check a request, and run it to its end. `Watcher.run` has the rest."""
        self.check(item)
        super().run(replace(item, prefix_length=0, policy=self.policy), observe, change)

    def trace_all(self, trace: Callable[[Request], T], work: Sequence[Request], progress: bool) -> list[T]:
        """What `trace`, which runs a request here, returns for each request of `work`.

        Raises `ConfigError`, before anything runs, where there is no request or one cannot run.
        """
        if not work:
            raise ConfigError("there is no request to measure; give one at least")
        for item in work:
            self.check(item)
        return [trace(item) for item in tqdm(work, desc="requests", unit="req", disable=not progress)]


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
            'each block; say {"growing_canvas": false} in --sampling'
        )


def check_uncached(item: Request, what: str) -> None:
    """Raise `ConfigError` where a request asks for more than blocks being denoised on one dense canvas.

    `what` is measured there. Refused are caches, guidance and corrections.
    """
    if item.policy != NONE:
        raise ConfigError(f"{what} is that of a model without a cache; leave cache out, or say 'none'")
    if item.params.cfg_scale > 0:
        raise ConfigError(
            f"cfg_scale={item.params.cfg_scale:g}: {what} is measured on one canvas, and a guided request "
            "has two; leave cfg_scale out"
        )
    if item.params.correction_steps:
        raise ConfigError(
            f"correction_steps={item.params.correction_steps}: {what} is that of blocks being denoised, and a "
            "correction goes over the whole response; leave correction_steps out"
        )


def certainty(model: Transformer, hidden: Tensor) -> tuple[Floats, Floats]:
    """Entropy in nats and largest probability of the rows that `hidden` [M, D] predicts, [M] each.

    Both are those over all tokens but the mask. Logits exist for a few rows at a time.
    """
    entropy, largest = [torch.empty(0, device=model.device)], [torch.empty(0, device=model.device)]
    for at in range(0, len(hidden), HEAD_ROWS):
        logits = model.head(hidden[at : at + HEAD_ROWS]).float()
        logits[:, model.config.mask_id] = -torch.inf
        logs = logits.log_softmax(dim=-1)
        largest.append(logs.amax(dim=-1).exp())
        logs[:, model.config.mask_id] = 0.0
        probabilities = logs.exp()
        probabilities[:, model.config.mask_id] = 0.0
        entropy.append(-(probabilities * logs).sum(dim=-1))
    both = torch.stack([torch.cat(entropy), torch.cat(largest)])
    found: Floats = both.cpu().double().numpy()
    return found[0], found[1]
