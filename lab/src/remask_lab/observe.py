"""Observation of a running engine, for measurements: read-only values about each pass, and hooks around operations.

An engine runs none of this code unless a measurement asks for it. Each function attaches an observer to the engine and
returns it for `Engine.detach`; any number may be attached. What measures gets no object of a running request.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.canvas_state import SlotTable, predicting_rows
from remask.engine.engine import Engine
from remask.engine.member import Turn
from remask.engine.observer import EngineObserver
from remask.engine.runner import PassResult, Runner
from remask.engine.running import RunningRequest
from remask.errors import ConfigError
from remask.machine.transfers import Arrival
from remask.model.attention import Attention, Sink
from remask.model.pool import Pool
from remask.model.transformer import Transformer
from remask.model.weights import LayerWeights
from remask.model.work_list import WorkList
from remask.plan.canvas import UNWRITTEN, Ledger
from remask.plan.cost import NOTHING, PassCost, Widths
from remask.plan.pass_cost import ExecutedPlan, pass_cost
from remask.plan.plan import Plan, PrefixHit


@dataclass(slots=True)
class CostMeter:
    """Counts what the passes of an engine cost, whose model has these `widths`: `total` of all, `last` of the last."""

    widths: Widths
    total: PassCost = NOTHING
    last: PassCost = NOTHING
    passes: int = 0

    def note(self, canvases: Sequence[ExecutedPlan]) -> None:
        """Add the cost of one pass over `canvases`."""
        self.last = pass_cost(self.widths, canvases)
        self.total += self.last
        self.passes += 1


@dataclass(slots=True)
class CacheMeter:
    """Means over passes of canvases, read from their ledgers. Every pass counts once.

    Attributes:
        passes: passes noted.
        upper_bound: whether rows were chosen on the device. The ledger does not know which ones, so `staleness` is an
            upper bound: it counts all candidates as old as their last pass that was certain to compute them.
    """

    passes: int = 0
    upper_bound: bool = False
    _reused: float = 0.0
    _age: float = 0.0

    @property
    def cache_ratio(self) -> float:
        """Share of the canvas' K/V that a pass takes from the cache (dKV-Cache, arXiv 2505.15781, evaluation metrics).

        The mean over passes. The paper's tokens are cached in all layers or in none; here the share is a mean over
        layers too.
        """
        return self._reused / self.passes if self.passes else 0.0

    @property
    def staleness(self) -> float:
        """Passes since the K/V that a pass attends to were written; 0 for those that it writes itself.

        The mean over positions, over the layers in which any row attends, and over passes. K/V of the prefix store
        count as written by a pass before the request's first.
        """
        return self._age / self.passes if self.passes else 0.0

    def note(self, ledger: Ledger, plan: Plan) -> None:
        """Count the pass of `plan`, which must be the last one that `ledger` has entered. Changes neither."""
        ages = ledger.step - ledger.written
        written = ledger.written != UNWRITTEN  # all K/V, except in families whose rows do not attend to later positions
        attends = np.zeros(len(ages), dtype=np.bool_)
        picked_rows = 0
        for span in plan.spans:
            attends[span.layers.start : span.layers.stop] = span.cost > 0
            if span.pick is not None:
                picked_rows += span.pick.count * len(span.layers)
                self.upper_bound = True
        self.passes += 1
        self._reused += (np.count_nonzero(ages[written]) - picked_rows) / ages.size
        attended = written & attends[:, None]
        if attended.any():
            self._age += float(ages[attended].mean())


@dataclass(frozen=True, slots=True)
class ObservedPass:
    """One pass of one request, after it ran and before any of its tokens change.

    Of a guided request it is the pass of the conditional canvas.

    Attributes:
        step, block_step: denoising steps of the request, and of its block, before this pass.
        block: positions that are denoised together; `block_length` is the length of every block.
        prompt: length of the prompt, the first positions of the canvas.
        end: the response ends before this position.
        tokens: token ids on the canvas, int64 [T]; a copy that cannot be written to.
        plan: what was computed.
        cost: row-layers computed, on both canvases of a guided request.
        prefix: the stored prefix that the request reads, if any.
        hidden: final hidden states of the predicted rows, [M, D]. They are valid until the observer returns.
    """

    request_id: str
    step: int
    block_step: int
    block: range
    block_length: int
    prompt: int
    end: int
    tokens: NDArray[np.int64]
    plan: Plan
    cost: int
    prefix: PrefixHit | None
    hidden: Tensor
    _pool: Pool
    _tables: tuple[SlotTable, ...]

    @property
    def leading(self) -> int:
        """How many rows the first layer computed. Under a dense plan they are the leading positions of the canvas."""
        return int(self.plan.spans[0].rows.sum())

    def kv(self, positions: slice) -> list[tuple[Tensor, Tensor]]:
        """Copies of K and V at `positions`, leased ones included: a pair [rows, kv_heads, Dh] per layer."""
        k, v = self._pool.k, self._pool.v
        return [(k[layer][slots], v[layer][slots]) for layer, slots in self._layer_slots(positions)]

    def outputs(self, positions: slice) -> list[tuple[Tensor, Tensor]]:
        """Copies of the attention and FFN outputs at `positions`: a pair [rows, D] per layer.

        The engine must keep outputs, as it does for `dllm-cache`.
        """
        outputs = self._pool.outputs
        return [(outputs[layer][0][slots], outputs[layer][1][slots]) for layer, slots in self._layer_slots(positions)]

    def _layer_slots(self, positions: slice) -> Iterator[tuple[int, Tensor]]:
        """Yield each layer and the pool's slots of `positions` in it, int64 [rows]."""
        for table in self._tables:
            slots = torch.from_numpy(table.slots[positions]).to(self.hidden.device)
            yield from ((layer, slots) for layer in table.layers)


Observer: TypeAlias = Callable[[Sequence[ObservedPass]], None]
"""Called after every pass with the requests' passes. For a pass over prefixes alone the sequence is empty."""


def observe_passes(engine: Engine, observer: Observer) -> EngineObserver:
    """Call `observer` after every pass of `engine`, in inference mode, until the result is detached.

    Raises `ConfigError` where the model is split over several processes.
    """
    _check_one_process(engine)
    return _attach(engine, _PassObserver(engine, observer))


class _PassObserver(EngineObserver):
    waits = True

    def __init__(self, engine: Engine, observer: Observer) -> None:
        self.engine, self.observer = engine, observer

    @torch.inference_mode()
    def on_complete(self, result: PassResult) -> None:
        self.observer(_observed_passes(self.engine, result))


def observe_cache(engine: Engine, meter: CacheMeter) -> EngineObserver:
    """Let `meter` note every pass of every request of `engine`, until the result is detached."""
    return _attach(engine, _CacheObserver(meter))


class _CacheObserver(EngineObserver):
    waits = True

    def __init__(self, meter: CacheMeter) -> None:
        self.meter = meter

    def on_write(self, turn: Turn) -> None:
        for state, plan in turn.items:
            self.meter.note(state.ledger, plan)


def observe_costs(engine: Engine, meter: CostMeter) -> EngineObserver:
    """Let `meter` note the cost of every pass of `engine`, until the result is detached."""
    return _attach(engine, _CostObserver(meter, engine.config.batch_invariant))


class _CostObserver(EngineObserver):
    def __init__(self, meter: CostMeter, batch_invariant: bool) -> None:
        self.meter, self.batch_invariant = meter, batch_invariant

    def on_launch(self, result: PassResult) -> None:
        self.meter.note([state.executed_plan(plan, self.batch_invariant) for state, plan in result.items])


def _attach(engine: Engine, observer: EngineObserver) -> EngineObserver:
    engine.attach(observer)
    return observer


class _RunnerReplacement(EngineObserver):
    def __init__(self, make: Callable[[Transformer, Pool], Runner]) -> None:
        self.make = make

    def runner(self, model: Transformer, pool: Pool) -> Runner:
        return self.make(model, pool)


def _replace_runner(engine: Engine, make: Callable[[Transformer, Pool], Runner]) -> EngineObserver:
    """Let `engine` run its passes by the runner that `make` returns. Raises `ConfigError` as `_check_one_process`."""
    _check_one_process(engine)
    return _attach(engine, _RunnerReplacement(make))


def _observed_passes(engine: Engine, result: PassResult) -> list[ObservedPass]:
    """The passes of all running requests of a batch. Passes over prefixes and closing passes are left out."""
    passes, row = [], 0
    for turn in result.batch:
        first, running, decoder = row, turn.member, turn.decoder
        row += sum(int(plan.predict.sum()) for _, plan in turn.items)
        # A closing pass follows the last denoising step, and only completes pages for other requests.
        if not isinstance(running, RunningRequest) or decoder is None or running.closing:
            continue
        canvas = running.canvases[0].canvas
        tokens = canvas.tokens.copy()
        tokens.flags.writeable = False
        passes.append(
            ObservedPass(
                request_id=running.id,
                step=decoder.step,
                block_step=decoder.block_step,
                block=decoder.block,
                block_length=running.pending.decoding.block_length,
                prompt=canvas.prompt,
                end=canvas.end,
                tokens=tokens,
                plan=turn.plan,
                cost=turn.tally.cost,
                prefix=running.canvases[0].prefix,
                hidden=result.hidden[first : first + len(turn.plan.predicted)],
                _pool=engine.pool,
                _tables=running.canvases[0].tables,
            )
        )
    return passes


def replace_attention(engine: Engine, attention: Attention) -> EngineObserver:
    """Let `engine` compute attention by `attention`, until the result is detached. Its K/V memory stays the same."""
    return _replace_runner(engine, lambda model, pool: Runner(model.with_attention(attention), pool))


@dataclass(frozen=True, slots=True)
class ScoredPass:
    """A pass of the only request of an engine, before tokens are chosen by its logits.

    Attributes:
        tokens: token ids of the positions to which `rows` attend, int64 [T].
        positions: canvas positions that are predicted, int64 [P].
        rows: the rows that predict them, int64 [P].
        sees: number of leading positions that each row attends to, int64 [T].
        block: positions that are denoised together.
        temperature: temperature of the last pass' logits that the rows of a self-conditioned model take in; None
            where they take in none.
        logits: of the predicted rows, float32 [P, V].
    """

    tokens: NDArray[np.int64]
    positions: NDArray[np.int64]
    rows: NDArray[np.int64]
    sees: NDArray[np.int64]
    block: range
    temperature: float | None
    logits: Tensor


def replace_logits(engine: Engine, judge: Callable[[ScoredPass], Tensor]) -> EngineObserver:
    """Let `engine` choose tokens by the logits [P, V] that `judge` returns for each pass, until the result is detached.

    The engine must run one request at a time, without `overlap`.
    """
    return _replace_runner(engine, lambda model, pool: _JudgedRunner(model, pool, judge))


class _HeadlessTransformer(Transformer):
    """Passes on its input in place of logits, for a runner that computes the logits before."""

    def head(self, hidden: Tensor) -> Tensor:
        return hidden


class _JudgedRunner(Runner):
    def __init__(self, model: Transformer, pool: Pool, judge: Callable[[ScoredPass], Tensor]) -> None:
        super().__init__(_HeadlessTransformer(model.config, model.weights, model.attention, model.arithmetic), pool)
        self.scored, self.judge = model, judge
        self.temperature: float | None = None

    def launch_scores(self, hidden: Tensor, turns: Sequence[Turn]) -> Arrival:
        """Compute logits of the predicted rows `hidden` [M, D], and choose tokens by those that `judge` returns."""
        (turn,) = turns
        if turn.decoder is None or not len(turn.predicted):
            return super().launch_scores(hidden, turns)
        state, plan = turn.items[0]
        sees = np.full(len(state.canvas), len(state.canvas)) if plan.sees is None else plan.sees
        rows = predicting_rows(turn.predicted, state.shift)
        length = int(sees[rows].max())
        scored = ScoredPass(
            tokens=state.canvas.tokens[:length].copy(),
            positions=turn.predicted,
            rows=rows,
            sees=sees[:length].clip(max=length),
            block=turn.decoder.block,
            temperature=self.temperature if state.conditioned else None,
            logits=self.scored.head(hidden).float(),
        )
        signal = turn.decoder.group(slice(len(rows)), turn.predicted).signal
        self.temperature = None if signal is None else signal.temperature
        return super().launch_scores(self.judge(scored).to(hidden), turns)


Section: TypeAlias = Callable[[str], AbstractContextManager[Any]]
"""Returns the context manager around an operation, by its name. Operations are nested."""

SECTIONS = ("projections", "attention", "mlp", "head", "norms", "selection", "watch", "sampling", "packing")


def run_in_sections(engine: Engine, section: Section) -> EngineObserver:
    """Run each operation of `engine` inside `section(name)`, `name` from `SECTIONS`, until the result is detached.

    "projections" are Q, K, V and the attention output, with RoPE and the writing of K/V; "selection" is the choice of
    rows by how far they moved, "watch" layer hooks, and "sampling" everything from logits to tokens on the host.
    Planning, scheduling, embedding, residuals, and rows that are carried or restored between stages run outside.
    """
    return _replace_runner(
        engine, lambda model, pool: _SectionedRunner(_SectionedTransformer(model, section), pool, section)
    )


def _check_one_process(engine: Engine) -> None:
    """Raise `ConfigError` where the model is split over several processes, as hooks see one process alone."""
    if engine.model.ranks.several:
        raise ConfigError(
            f"an observed engine must run in one process, not {engine.model.ranks.shard.size}; load the model with "
            "tensor_parallel=1"
        )


def _within(section_name: str, method: Callable[..., Any]) -> Any:
    """Wrap a method of an object with an attribute `section`, to run inside `section(section_name)`."""

    def run_in_section(self: Any, *args: Any, **kwargs: Any) -> Any:
        with self.section(section_name):
            return method(self, *args, **kwargs)

    return run_in_section


class _SectionedAttention:
    def __init__(self, inner: Attention, section: Section) -> None:
        self.inner, self.section = inner, section

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, work: WorkList, sink: Sink | None = None) -> Tensor:
        with self.section("attention"):
            return self.inner(q, k, v, work, sink)


class _SectionedTransformer(Transformer):
    def __init__(self, model: Transformer, section: Section) -> None:
        attention = _SectionedAttention(model.attention, section)
        super().__init__(model.config, model.weights, attention, model.arithmetic, kernels=model.kernels)
        self.section = section

    norm = _within("norms", Transformer.norm)
    head = _within("head", Transformer.head)
    value_similarity = _within("selection", Transformer.value_similarity)
    project = _within("projections", Transformer.project)
    _pick_rows = _within("selection", Transformer._pick_rows)
    _feed_forward = _within("mlp", Transformer._feed_forward)

    def _linear(self, x: Tensor, w: LayerWeights, field: str, *args: Any, **kwargs: Any) -> Tensor:
        with self.section("projections") if field == "out" else nullcontext():
            return super()._linear(x, w, field, *args, **kwargs)


class _SectionedRunner(Runner):
    def __init__(self, model: Transformer, pool: Pool, section: Section) -> None:
        super().__init__(model, pool)
        self.section = section

    pack = _within("packing", Runner.pack)
    pack_layer = _within("packing", Runner.pack_layer)
    before_layer = _within("watch", Runner.before_layer)
    after_layer = _within("watch", Runner.after_layer)
    launch_scores = _within("sampling", Runner.launch_scores)
