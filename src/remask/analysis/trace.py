"""One request under `none`, watched pass by pass: drift of K and V, attention, entropy, tokens that change."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from remask.analysis.mass import QueryTap, attention_mass
from remask.analysis.moments import Moments
from remask.analysis.regions import REGIONS, Regions, regions
from remask.engine.engine import Engine
from remask.engine.job import Job
from remask.errors import ConfigError, RemaskError
from remask.llm import LLM, Work
from remask.models.transformer import Transformer

HEAD_ROWS = 256  # rows of logits held at a time

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Trace:
    """What P passes over one canvas of T positions showed.

    Attributes:
        prompt, response, block: tokens of the prompt, of the response and of a block.
        region: of every position in every pass, P arrays int8 [T].
        starts: the current block's first position, P numbers.
        k_drift: how far each position's K moved between pass and next pass, P - 1 arrays [T]: the cosine distance with
            the heads concatenated, mean over layers. NaN where a position was not computed in both.
        v_drift: the same of V.
        attention: share of attention that the block's queries give to each of `REGIONS`, P arrays [8].
        entropy: of the predicted positions in nats, over all tokens but the mask; P arrays.
        change_rate: share of the response's tokens that each pass changed, P numbers.
        moments: of the drift by layer.
    """

    prompt: int
    response: int
    block: int
    moments: Moments
    region: list[Regions] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    k_drift: list[Floats] = field(default_factory=list)
    v_drift: list[Floats] = field(default_factory=list)
    attention: list[Floats] = field(default_factory=list)
    entropy: list[Floats] = field(default_factory=list)
    change_rate: list[float] = field(default_factory=list)

    @property
    def passes(self) -> int:
        """Number of passes, which is that of the denoising steps that were run."""
        return len(self.starts)


class Tracer:
    """Runs requests of one model one at a time under `none`, on an engine of its own, and watches them."""

    def __init__(self, llm: LLM) -> None:
        self._none = llm.policy("none")
        self._tap = QueryTap(llm.model.attention)
        model = Transformer(llm.model.config, llm.model.weights, self._tap)
        config = replace(llm.engine_config, max_num_seqs=1, max_row_layers=None, store_budget_tokens=0)
        decode = llm.tokenizer.decode if llm.tokenizer is not None else None
        self._engine = Engine(model, config, llm.loaded.fingerprint, decode)
        self._engine.probe = self._look
        self._trace: Trace | None = None
        self._job: Job | None = None
        self._tokens: NDArray[np.int64] | None = None
        self._before: list[Tensor] = []  # K and V of the pass before, as unit vectors [2, rows, kv_heads * Dh] a layer

    def check(self, item: Work) -> None:
        """Raise `ConfigError` where `trace` would."""
        if item.policy != self._none:
            raise ConfigError("drift is that of a model without a cache; leave cache out, or say 'none'")
        if item.request.params.cfg_scale > 0:
            raise ConfigError(
                f"cfg_scale={item.request.params.cfg_scale:g}: drift is measured on one canvas, and a guided request "
                "has two; leave cfg_scale out"
            )
        if item.request.params.correction_steps:
            raise ConfigError(
                f"correction_steps={item.request.params.correction_steps}: drift is that of blocks being denoised, "
                "and a correction goes over the whole response; leave correction_steps out"
            )
        self._engine.check(replace(item.request, prefix_length=0), self._none)

    def trace(self, item: Work) -> Trace:
        """Run a request to its end. Raises `ConfigError` where it cannot run, or asks for a cache or for guidance."""
        self.check(item)
        self._trace, self._before = None, []
        self._engine.add(replace(item.request, prefix_length=0), self._none)
        while self._engine.busy:
            self._tokens = None
            for event in self._engine.step():
                if event.result is not None and event.result.finish_reason not in ("stop", "length"):
                    raise RemaskError(f"the request ended early: {event.result.error or event.result.finish_reason}")
            if self._tokens is not None:
                assert self._job is not None
                assert self._trace is not None
                canvas = self._job.branches[0].canvas
                changed = (canvas.tokens != self._tokens)[canvas.prompt : canvas.end]
                self._trace.change_rate.append(float(changed.mean()))
        self._before = []
        assert self._trace is not None
        return self._trace

    @torch.inference_mode()
    def _look(self, jobs: Sequence[Job], hidden: Tensor) -> None:
        (self._job,) = jobs
        canvas, decoder = self._job.branches[0].canvas, self._job.decoder
        assert decoder is not None
        shape = self._engine.model.config
        if self._trace is None:
            length = self._job.decoding.block
            self._trace = Trace(canvas.prompt, canvas.end - canvas.prompt, length, Moments(shape.layers))
        trace, block = self._trace, decoder.block
        trace.starts.append(block.start)
        trace.region.append(regions(len(canvas), canvas.prompt, canvas.end, block.start, trace.block))
        trace.entropy.append(self._entropy(hidden))
        queries, self._tap.queries = self._tap.queries, []
        self._states(trace, block, queries)
        self._tokens = canvas.tokens.copy()

    def _states(self, trace: Trace, block: range, queries: Sequence[Tensor]) -> None:
        """Take in the K and V of the pass that has just run, and where its block's queries looked."""
        assert self._job is not None
        model, pool, plan = self._engine.model, self._engine.pool, self._job.plan
        length = len(trace.region[-1])
        rows = int(plan.spans[0].rows.sum())  # under `none` they are the canvas' leading positions
        reach = rows if plan.sees is None else min(rows, int(plan.sees[block.start]))
        region = torch.from_numpy(trace.region[-1][:reach].astype(np.int64)).to(model.device)
        mass = torch.zeros(len(REGIONS), device=model.device)
        states, moved = [], []
        (table,) = self._job.branches[0].tables
        slots = torch.from_numpy(table.slots[:rows]).to(model.device)
        for layer, (weights, q) in enumerate(zip(model.weights.layers, queries, strict=True)):
            k = pool.k[layer][slots]
            mass += attention_mass(
                q[block.start : block.stop], k[:reach], region, weights.sink_k, model.config.score_cap
            )
            unit = F.normalize(torch.stack([k, pool.v[layer][slots]]).flatten(2).float(), dim=-1)
            if self._before:
                moved.append(_distance(self._before[layer], unit))
            states.append(unit)
        trace.attention.append((mass / len(states)).cpu().double().numpy())
        if moved:
            k_moved, v_moved = torch.stack(moved, dim=1).cpu().double().numpy()
            trace.moments.add(k_moved, v_moved)
            for drifts, by_layer in ((trace.k_drift, k_moved), (trace.v_drift, v_moved)):
                drift = np.full(length, np.nan)
                drift[: by_layer.shape[1]] = by_layer.mean(axis=0)
                drifts.append(drift)
        self._before = states

    def _entropy(self, hidden: Tensor) -> Floats:
        """Of the rows that `hidden` [M, D] predicts, [M]."""
        model = self._engine.model
        parts = [torch.empty(0, device=model.device)]
        for at in range(0, len(hidden), HEAD_ROWS):
            logits = model.head(hidden[at : at + HEAD_ROWS])
            logits[:, model.config.mask_id] = -torch.inf
            logs = logits.log_softmax(dim=-1)
            logs[:, model.config.mask_id] = 0.0
            parts.append(-(logs.exp() * logs).sum(dim=-1))
        found: Floats = torch.cat(parts).cpu().double().numpy()
        return found


def _distance(before: Tensor, after: Tensor) -> Tensor:
    """1 - cosine of unit vectors [2, rows, D], [2, rows], without the cancellation; rows that both have."""
    common = min(before.shape[1], after.shape[1])
    distance: Tensor = (before[:, :common] - after[:, :common]).square().sum(dim=-1) / 2
    return distance
