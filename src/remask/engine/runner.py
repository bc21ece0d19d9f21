"""Runs passes on the device, and reads them: from plans to hidden states, and from these to tokens and confidences.

A failure of a pass ends only the members that cause it: the pass is run again in parts.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from pkgutil import resolve_name
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.canvas_state import Move, TokenBuffer
from remask.engine.capacity import logit_rows
from remask.engine.hook_passes import run_layers, with_choices
from remask.engine.member import Reads, Scores, Share, Turn
from remask.engine.pack import Items, Packer, Target
from remask.machine.device import is_fatal, is_out_of_memory
from remask.machine.transfers import Arrival, send
from remask.model.graphs import Graphs
from remask.model.pool import Pool
from remask.model.stage import Run, Stage, StepBatch, send_run
from remask.model.transformer import Transformer
from remask.plan.plan import Plan
from remask.plan.spans import Mask
from remask.policies.on_device import DeviceHook, Hooked
from remask.sampling.choice import Candidates
from remask.sampling.decoder import Decoder
from remask.sampling.rows import RowGroup
from remask.sampling.score import score, weight
from remask.sampling.vocabulary import WHOLE, SplitVocabulary, Vocabulary

log = logging.getLogger(__name__)

Batch: TypeAlias = Sequence[Turn]  # the turns of one pass, in the order of their rows


@dataclass(frozen=True, slots=True)
class Ran:
    """A pass that has run, with the plans that ran."""

    batch: Batch
    items: Items
    hidden: Tensor  # final hidden states of the predicted rows, [M, D]


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Predictions of some turns of a pass, on their way to the host."""

    turns: list[tuple[Turn, int, bool]]  # each with how many positions it predicts, and whether the device chooses some
    arrival: Arrival | None  # the numbers of `Runner.launch_scores`; None of prefix passes alone
    buffered: bool  # the last row of the numbers says what the device has chosen

    def wait(self) -> list[tuple[Turn, Scores]]:
        """The numbers of each turn. Waits for the device."""
        if self.arrival is None:
            nothing = Scores(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
            return [(turn, nothing) for turn, *_ in self.turns]
        numbers = self.arrival.wait()
        rows = numbers[:-1] if self.buffered else numbers
        tokens, confidence, more = rows[0].astype(np.int64), rows[1], rows[2:]
        read, at = list[tuple[Turn, Scores]](), 0
        for turn, count, chooses in self.turns:
            span = slice(at, at + count)
            at = span.stop
            chosen = numbers[-1, span] > 0 if chooses else None
            shares = _shares(turn.reads, more[:, span]) if turn.reads else ()
            read.append((turn, Scores(tokens[span], confidence[span], shares, chosen)))
        return read


@dataclass(slots=True)
class LaunchedPass:
    """A pass that was launched and not read yet. If it failed as a whole, it has several parts."""

    batch: Batch = ()  # the turns that it was launched with
    # The passes that ran, with their predictions
    parts: list[tuple[Ran, list[PendingScores]]] = field(default_factory=list)
    failed: list[Turn] = field(default_factory=list)  # turns that could not run
    queued: bool = False  # it was queued before the pass before it was read
    # Turns that were planned then, and are not confirmed; nothing is written of them
    speculative: set[Turn] = field(default_factory=set)
    # Of each confirmed one, the predicted positions that the pass before left noisy, bool [predicted]
    still_noisy: dict[Turn, Mask] = field(default_factory=dict)
    batch_error: Exception | None = None  # an error that no request causes; it is raised once the parts are read

    def turns(self) -> list[Turn]:
        """The turns that ran, and of which is written what is read."""
        ran = (turn for ran, _ in self.parts for turn in ran.batch)
        return [turn for turn in ran if turn not in self.speculative and not turn.member.ended]


class Runner(Packer):
    """Packs and runs passes of one model over one pool on the device, and reads their logits."""

    def __init__(self, model: Transformer, pool: Pool, *, overlap: bool = False, graphs: Graphs | None = None) -> None:
        """With `overlap` tokens are kept on the device; `graphs` over `pool` repeat the layers that they can."""
        self.model, self.pool = model if graphs is None else model.with_graphs(graphs), pool
        shape = model.config
        self._logit_rows = logit_rows(shape)
        target = Target(model.device, model.arithmetic.invariant, shape.sliding, roles=shape.self_conditioning)
        super().__init__(target, TokenBuffer(pool.spare, model.device) if overlap else None)

    @torch.inference_mode()
    def run(self, items: Items) -> tuple[Tensor, Items]:
        """One forward pass over `items`. Only canvases' memory is changed.

        Returns the final hidden states of the predicted rows, [M, D], and the items with the plans that ran, which
        their ledgers hold too. Without hooks the host never waits for the device.

        Where it raises, the pass may be repeated over some or all of `items`: it writes the same rows again. A choice
        of rows (`Span.pick`, drift) cannot be made twice, because it compares with values that it then overwrites. So
        after an error `items` and the ledgers hold plans with the choices made.
        """
        begun: list[Stage] = []
        planned, revised = list(items), set[int]()
        kinds: dict[str, list[Hooked]] = {}
        for number, (state, plan) in enumerate(items):
            if plan.hook is not None:
                kinds.setdefault(plan.hook.on_device, []).append(Hooked(number, state, plan))
        hooks = list[DeviceHook]()
        for kind, canvases in kinds.items():
            hooks.append(resolve_name(kind)(self.model, self.pool, canvases))
        try:
            batch = self.pack(items)
            begun += batch.stages
            if hooks and any(plan.hook is not None and plan.hook.layered for _, plan in items):
                hidden, ran = run_layers(self, batch, items, hooks, begun, revised)
            else:
                hidden, ran = self.model.ranks.everywhere(_forward, self.model, batch, self.pool), items
            for hook in hooks:
                hook.done()
            return hidden, ran
        except Exception:
            items[:] = with_choices(items, begun)
            for number, ((state, plan), (_, before)) in enumerate(zip(items, planned, strict=True)):
                if plan is not before or number in revised:  # a refreshed plan starts over
                    state.ledger.revise(plan)
            raise

    def before_layer(
        self, hooks: Sequence[DeviceHook], stage: Stage, h: Tensor, plans: Sequence[Plan]
    ) -> dict[int, Plan]:
        """New plans of `hooks` before `stage` runs, by the numbers of their canvases."""
        return {number: plan for hook in hooks for number, plan in hook.before(stage, h, plans).items()}

    def after_layer(self, hooks: Sequence[DeviceHook], layer: int, plans: Sequence[Plan]) -> dict[int, Plan]:
        """New plans of `hooks` once `layer` has run."""
        return {number: plan for hook in hooks for number, plan in hook.after(layer, plans).items()}

    def move(self, move: Move) -> None:
        """Copy stored K/V to the slots of a canvas. The host does not wait."""
        device = self.model.device
        source, target = send_run(move.source, device), send_run(move.target, device)
        self.model.ranks.everywhere(_move, self.pool, source, target, move.layers)

    @torch.inference_mode()
    def launch_scores(self, hidden: Tensor, turns: Sequence[Turn]) -> Arrival:
        """Token and confidence of every predicted position, float32 [2 + n, rows], in the order of `turns`.

        The next n rows hold what the readers of each turn measure (`sampling.score.score`). With a token buffer there
        is one more row: 1 where the device has transferred a position and put its token into the buffer. `hidden`
        [M, D] holds the predicted rows of `turns` in order. Logits exist for a bounded number of rows at a time.
        """
        model, token_buffer, most, scores, more = self.model, self.token_buffer, self._logit_rows, list[Tensor](), 0
        for turn in turns:
            if turn.member.readers:
                turn.reads = turn.member.reads(turn)
                more = max(more, sum(read.width for _, read in turn.reads))
        for rows, chunk, groups in _chunks(turns, most):
            if token_buffer is not None:
                for turn, group in zip(chunk, groups, strict=True):
                    _update(group, turn, token_buffer, model.config.mask_id)
            whole = len(groups) > 1 or weight(groups[0]) <= most
            for part, pieces in [(hidden[rows], groups)] if whole else _pieces(hidden[rows], groups[0], most):
                scores.append(model.ranks.everywhere(score_rows, model, part, pieces, more, self.pool))
        # float32 holds token ids exactly: vocabularies are far below 2 ** 24.
        read = torch.cat(scores, dim=1) if scores else hidden.new_empty((2 + more, 0), dtype=torch.float32)
        if token_buffer is not None:
            candidates = [_candidates(turn, turn.decoder) for turn in turns if turn.decoder is not None]
            read = token_buffer.transfer(read, candidates, kernels=model.kernels is not None)
        return Arrival(read)


# These run on every rank. On a model of one rank they are plain calls.


@torch.inference_mode()
def _forward(model: Transformer, batch: StepBatch, pool: Pool) -> Tensor:
    return model.forward(batch, pool)


@torch.inference_mode()
def _move(pool: Pool, source: Run | Tensor, target: Run | Tensor, layers: int) -> None:
    for kv in (*pool.k[:layers], *pool.v[:layers]):
        kv[target] = kv[source].clone()  # a run is a view, and no tensor is written from a view of itself


def _rows(turn: Turn, at: int) -> RowGroup | None:
    """How its rows of the logits are read, if the first is row `at`; None where it predicts nothing."""
    after = at + len(turn.predicted)
    if after == at or turn.decoder is None:
        return None
    # The decoder made the group for this call, so it may be changed.
    group = turn.decoder.group(slice(at, after), turn.predicted)
    if turn.reads:
        group.reads = tuple(read for _, read in turn.reads)
    if group.signal is not None:
        group.signal = replace(group.signal, slots=turn.items[0][0].places[turn.predicted])
    if len(turn.member.canvases) == 2 == len(turn.items):
        group.guide = slice(after, after + len(turn.predicted))
    return group


def _candidates(turn: Turn, decoder: Decoder) -> Candidates:
    """Its predicted positions, from which the device chooses."""
    return Candidates(turn.transfers, turn.predicted, decoder.block, [state.places for state in turn.member.canvases])


def _update(group: RowGroup, turn: Turn, token_buffer: TokenBuffer, mask_id: int) -> None:
    """Replace tokens in `group` that the host does not know yet by those of the token buffer."""
    if group.noisy is not None:
        places = turn.member.canvases[0].places[turn.predicted]
        group.noisy = group.noisy.with_current(token_buffer.tokens(send(places, token_buffer.values.device)), mask_id)


@torch.inference_mode()
def score_rows(
    model: Transformer, hidden: Tensor, groups: Sequence[RowGroup], more: int, pool: Pool | None = None
) -> Tensor:
    """Scores of final hidden states `hidden` [M, D]; see `score`. Ranks merge theirs. Signals go to `pool`."""
    per_group = model.arithmetic.invariant
    keep = None if pool is None or pool.signals is None else partial(_keep_signal, model, pool.signals)
    return score(model.head(hidden), groups, model.config.mask_id, per_group, more, vocabulary_of(model), keep)


def _keep_signal(model: Transformer, signals: Tensor, logits: Tensor, group: RowGroup) -> None:
    """Put the expected embedding of a group's rows, with this rank's changed `logits` of them, into `signals`."""
    assert group.signal is not None
    assert group.signal.slots is not None
    chances = vocabulary_of(model).softmax(logits / group.signal.temperature)
    signals.index_copy_(
        0, send(group.signal.slots, signals.device), model.expected_embedding(chances).to(signals.dtype)
    )


def vocabulary_of(model: Transformer) -> Vocabulary:
    """How to reduce over the columns of the model's logits."""
    ranks, total = model.ranks, model.config.vocab
    if ranks.several:
        return SplitVocabulary(ranks.shard.share(total), total, ranks.gather)
    if model.kernels is None:
        return WHOLE
    from remask.sampling.kernels_triton import TritonVocabulary

    return TritonVocabulary()


def _chunks(turns: Sequence[Turn], most: int) -> Iterator[tuple[slice, list[Turn], list[RowGroup]]]:
    """Yield turns of at most `most` rows by weight, or one: the rows of the pass, the turns, and a group for each."""
    start = at = weighed = 0
    chunk, groups = list[Turn](), list[RowGroup]()
    for turn in turns:
        group = _rows(turn, at - start)
        if group is None:
            continue
        more = weight(group)
        if chunk and weighed + more > most:
            yield slice(start, at), chunk, groups
            start, chunk, groups, weighed = at, [], [], 0
            group = _rows(turn, 0)
            assert group is not None
        chunk.append(turn)
        groups.append(group)
        at = start + (group.rows if group.guide is None else group.guide).stop
        weighed += more
    if chunk:
        yield slice(start, at), chunk, groups


def _pieces(hidden: Tensor, group: RowGroup, most: int) -> Iterator[tuple[Tensor, list[RowGroup]]]:
    """Cut the rows `hidden` [M, D] of a group that weighs more than `most` into pieces."""
    count = group.rows.stop - group.rows.start
    # Pieces of equal size, so that the result depends on the request alone.
    number = min(count, -(-weight(group) // most))
    for start, stop in pairwise(count * piece // number for piece in range(number + 1)):
        part = hidden[start:stop]
        if group.guide is not None:
            part = torch.cat([part, hidden[group.guide][start:stop]])
        yield part, [group.piece(start, stop)]


def run_isolated(runner: Runner, batch: Batch, failed: list[Turn]) -> Iterator[Ran]:
    """Run a pass over `batch`, whose plans the ledgers hold. Where it fails, run it in parts, over what can run.

    Turns that cannot run get their `error`, and are added to `failed`. Raises errors that no single member causes:
    those of the device and of memory.
    """
    if not batch:
        return
    items: Items = []
    for turn in batch:
        items += turn.items
    try:
        hidden, ran = runner.run(items)
    except Exception as error:
        if not _blames(batch, error, failed):
            return
        names = tuple(turn.member.id for turn in batch)
        log.warning("a pass over %s failed and is run in parts: %s", names, error)
        _revise(batch, items)
    else:
        if ran is not items:
            _revise(batch, ran)
        yield Ran(batch, ran, hidden)
        return
    for part in _parts(runner, batch, failed):
        yield from run_isolated(runner, part, failed)


def score_isolated(runner: Runner, ran: Ran, failed: list[Turn]) -> list[PendingScores]:
    """The scores of each turn of a pass. Turns that cannot be read get their `error`, are `failed`, and left out."""
    batch, buffered = ran.batch, runner.token_buffer is not None
    try:
        # Prefix passes stand first, and nothing is read of them.
        arrival = None if batch[-1].decoder is None else runner.launch_scores(ran.hidden, batch)
    except Exception as error:
        if not _blames(batch, error, failed):
            return []
    else:
        chooses = buffered and arrival is not None
        turns = list[tuple[Turn, int, bool]]()
        for turn in batch:
            turns.append((turn, len(turn.predicted), chooses and turn.transfers is not None))
        return [PendingScores(turns, arrival, buffered)]
    scored, at = list[PendingScores](), 0
    for turn in batch:
        rows = sum(len(plan.predicted) for _, plan in turn.items)
        scored += score_isolated(runner, Ran([turn], [], ran.hidden[at : at + rows]), failed)
        at += rows
    return scored


def _blames(batch: Batch, error: Exception, failed: list[Turn]) -> bool:
    """Whether one of several turns causes `error`. A turn alone fails with it. Raises what no turn causes."""
    if is_fatal(error) or is_out_of_memory(error):
        raise error
    if len(batch) > 1:
        return True
    batch[0].error = error
    failed.append(batch[0])
    return False


def _revise(batch: Batch, items: Items) -> None:
    left = iter(items)
    for turn in batch:
        turn.revise([next(left) for _ in turn.items])


def _shares(reads: Reads, more: NDArray[np.float32]) -> tuple[Share, ...]:
    ends = accumulate(read.width for _, read in reads)
    return tuple((reader, more[end - read.width : end]) for (reader, read), end in zip(reads, ends, strict=True))


def _parts(runner: Runner, batch: Batch, failed: list[Turn]) -> list[Batch]:
    """The turns to run again after a failed pass: without those that cannot be packed, or else in two halves."""
    packed = []
    for turn in batch:
        try:
            runner.pack(list(turn.items))
        except Exception as error:
            _blames([turn], error, failed)
        else:
            packed.append(turn)
    if len(packed) < len(batch):  # then the pass was not packed either, and nothing ran on the device
        return [packed]
    half = len(batch) // 2
    return [batch[:half], batch[half:]]
