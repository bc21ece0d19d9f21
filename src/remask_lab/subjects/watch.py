"""Requests run one at a time, with somebody looking on after every pass."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor
from tqdm import tqdm

from remask.engine.engine import Engine, Event
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM
from remask.models.attention import Attention
from remask.models.transformer import Transformer
from remask.policies import CachePolicy
from remask_lab.subjects.series import Floats

T = TypeVar("T", covariant=True)

HEAD_ROWS = 256  # rows of logits held at a time

Look = Callable[[RunningRequest, Tensor], None]
"""Takes the request of a pass that has just run, and the final hidden states of its predicted rows, [M, D]."""
Change = Callable[[NDArray[np.bool_]], None]
"""Is told which positions of the canvas the pass gave another token, [T]."""


class Watcher:
    """An engine of its own over the weights of `llm`, whose own engine is not touched.

    `attention` takes the place of the model's; `limits` are those of the engine, beside one request at a time.
    """

    def __init__(self, llm: LLM, attention: Attention | None = None, **limits: Any) -> None:
        model = llm.model if attention is None else Transformer(llm.model.config, llm.model.weights, attention)
        config = replace(llm.engine_config, **{"max_num_seqs": 1, "max_row_layers": None, **limits})
        decode = llm.tokenizer.decode if llm.tokenizer is not None else None
        self.engine = Engine(model, config, llm.loaded.fingerprint, decode)
        self._tokens: NDArray[np.int64] | None = None

    def run(self, item: Request, look: Look, change: Change | None = None) -> None:
        """Run a request to its end: `look` before a pass' tokens change, then `change`, if given.

        Raises `ConfigError` where it cannot run, and `RemaskError` where it ends before its response is complete.
        """
        running: RunningRequest | None = None

        def probe(requests: Sequence[RunningRequest], hidden: Tensor) -> None:
            nonlocal running
            if denoises(requests):
                (running,) = requests
                self._tokens = running.branches[0].canvas.tokens.copy()
                look(running, hidden)

        self.engine.probe = torch.inference_mode()(probe)
        self.engine.add(item)
        while self.engine.busy:
            self._tokens = None
            check_ends(self.engine.step())
            if change is not None and self._tokens is not None:
                assert running is not None
                change(running.branches[0].canvas.tokens != self._tokens)


class Tracing(Protocol[T]):
    """Makes a trace of one request."""

    def check(self, item: Request) -> None:
        """Raise `ConfigError` where `trace` would."""
        ...

    def trace(self, item: Request) -> T:
        """Run a request to its end."""
        ...


def trace_all(tracer: Tracing[T], work: Sequence[Request], progress: bool) -> list[T]:
    """A trace of each request. Raises `ConfigError`, before anything runs, where there is none or one cannot run."""
    if not work:
        raise ConfigError("there is no request to look at; give one at least")
    for item in work:
        tracer.check(item)
    return [tracer.trace(item) for item in tqdm(work, desc="requests", unit="req", disable=not progress)]


def denoises(requests: Sequence[RunningRequest]) -> bool:
    """Whether a pass denoises: prefix-only passes have no request, and a closing pass follows a complete response."""
    return any(not running.closing for running in requests)


def check_ends(events: Sequence[Event]) -> None:
    """Raise `RemaskError` where a request ended before its response was complete."""
    for event in events:
        if event.result is not None and event.result.finish_reason not in ("stop", "length"):
            raise RemaskError(f"the request ended early: {event.result.error or event.result.finish_reason}")


def check_uncached(item: Request, none: CachePolicy, what: str) -> None:
    """Raise `ConfigError` where a request asks for more than blocks being denoised on one dense canvas.

    `what` is measured there. Refused are caches, guidance and corrections.
    """
    if item.policy != none:
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


def leading_slots(running: RunningRequest, device: torch.device) -> Tensor:
    """Where the K/V of the rows that a pass under `none` computes live: those of leading positions, int64 [rows]."""
    (table,) = running.branches[0].tables
    rows = int(running.plan.spans[0].rows.sum())
    return torch.from_numpy(table.slots[:rows]).to(device)


def units(x: Tensor) -> Tensor:
    """Vectors [rows, ...] as unit vectors [rows, D] in float32, heads concatenated."""
    return F.normalize(x.flatten(1).float(), dim=-1)


def distance(before: Tensor, after: Tensor) -> Tensor:
    """1 - cosine of unit vectors [..., rows, D], without the cancellation; of the leading rows that both have."""
    common = min(before.shape[-2], after.shape[-2])
    found: Tensor = (before[..., :common, :] - after[..., :common, :]).square().sum(dim=-1) / 2
    return found


def certainty(model: Transformer, hidden: Tensor) -> tuple[Floats, Floats]:
    """Entropy in nats and largest probability of the rows that `hidden` [M, D] predicts, [M] each.

    Both are those over all tokens but the mask. Logits exist for a few rows at a time.
    """
    entropy, largest = [torch.empty(0, device=model.device)], [torch.empty(0, device=model.device)]
    for at in range(0, len(hidden), HEAD_ROWS):
        logits = model.head(hidden[at : at + HEAD_ROWS])
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
