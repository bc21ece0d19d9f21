"""Requests with a shared prefix, run one at a time and looked at after every pass."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from remask.depth.similarity import KV
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.engine.running import RunningRequest
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM
from remask.models.attention import Attention
from remask.models.pool import Pool
from remask.models.transformer import Transformer
from remask.policies import CachePolicy

Look = Callable[[RunningRequest], None]


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
        model = Transformer(llm.model.config, llm.model.weights, attention or llm.model.attention)
        config = EngineConfig(max_num_seqs=1, max_model_len=self.max_tokens, store_budget_tokens=self.max_tokens)
        decode = llm.tokenizer.decode if llm.tokenizer is not None else None
        self._engine = Engine(model, config, llm.loaded.fingerprint, decode)
        for request in requests:
            if self.prefix(request) < 1:
                raise ConfigError(f"request {request.id!r} has no shared prefix to look at: set prefix_length")
            if request.params.cfg_scale > 0:
                raise ConfigError(
                    f"cfg_scale={request.params.cfg_scale:g}: one canvas a request is looked at, and a guided one has "
                    "two; leave cfg_scale out"
                )

    def check(self, requests: Sequence[Request], policy: CachePolicy) -> None:
        """Raise `ConfigError` where one of `requests` cannot run under `policy`."""
        for request in requests:
            self._engine.check(request.with_policy(policy))

    def run(self, request: Request, policy: CachePolicy, look: Look) -> None:
        """Run a request to its end; `look` is called after each pass. Raises `ConfigError` where it cannot run."""

        def probe(requests: Sequence[RunningRequest], _: Tensor) -> None:
            for running in requests:
                look(running)

        self._engine.probe = probe
        self._engine.add(request.with_policy(policy))
        while self._engine.busy:
            for event in self._engine.step():
                if event.result is not None and event.result.finish_reason not in ("stop", "length"):
                    raise RemaskError(f"the request ended early: {event.result.error or event.result.finish_reason}")

    def prefix(self, request: Request) -> int:
        """Tokens of a request's shared prefix that can be leased: rows which predict the response must stay live."""
        return min(request.prefix_length, len(request.prompt_token_ids) - self._engine.model.config.shift)

    @property
    def pool(self) -> Pool:
        """The K/V memory that passes write to."""
        return self._engine.pool

    def kv(self, running: RunningRequest, count: int) -> KV:
        """Copies of the K and V that the last pass of `running` read at the first `count` positions."""
        keys, values = [], []
        for table in running.branches[0].tables:
            slots = torch.from_numpy(table.slots[:count]).to(self.pool.k[0].device)
            for layer in table.layers:
                keys.append(self.pool.k[layer][slots])
                values.append(self.pool.v[layer][slots])
        return tuple(keys), tuple(values)


def check_masked(llm: LLM) -> None:
    """Raise `ConfigError` unless `llm` is a masked model, the kind that BiCache is defined for."""
    kind = llm.loaded.config.kind
    if kind != "masked":
        reason = {
            "uniform": "there clean rows attend to clean rows alone, and nothing of a prompt is shared",
            "block_causal": "there K/V of committed blocks are final, and shared exactly",
        }[kind]
        raise ConfigError(f"BiCache is defined for masked models, and {llm.loaded.name!r} is a {kind} one: {reason}")
