"""Runs passes on the device: from plans to hidden states, and from these to tokens and confidences.

A pass that fails is run again in parts, so that only the members that cause the failure end.
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from operator import attrgetter
from pkgutil import resolve_name
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.engine.canvas_state import Move, TokenBuffer
from remask.engine.capacity import logit_rows
from remask.engine.hook_passes import enter_changed_plans, run_layers, with_choices
from remask.engine.member import DeviceReads, ReaderNumbers, Scores, Turn
from remask.engine.pack import Items, Packer, Target
from remask.machine.device import is_fatal, is_out_of_memory
from remask.machine.transfers import Arrival, send
from remask.model.graphs import Graphs
from remask.model.pool import Pool
from remask.model.stage import Run, Stage, StepBatch, send_run
from remask.model.transformer import Transformer
from remask.plan.plan import Plan
from remask.plan.spans import Mask
from remask.policies.on_device import DeviceHook, PassCanvas
from remask.sampling.choice import Candidates
from remask.sampling.decoder import Decoder
from remask.sampling.rows import RowGroup
from remask.sampling.score import greedy_rows, score
from remask.sampling.vocabulary import WHOLE, SplitVocabulary, Vocabulary

log = logging.getLogger(__name__)

Batch: TypeAlias = Sequence[Turn]  # the turns of one pass, in the order of their rows


@dataclass(frozen=True, slots=True)
class PassResult:
    """A pass that was run on the device, which may not be done yet."""

    batch: Batch
    items: Items  # the canvases with the plans that ran
    hidden: Tensor  # final hidden states of the predicted rows, [M, D]


@dataclass(frozen=True, slots=True)
class PendingScores:
    """Scores of some turns of a pass, on their way to the host."""

    turns: list[tuple[Turn, int, bool]]  # each with its number of predicted positions, and whether the device chooses
    arrival: Arrival | None  # the numbers of `Runner.launch_scores`; None if there are only prefix passes
    buffered: bool  # whether the last row of the numbers says what the device has chosen

    def wait(self) -> list[tuple[Turn, Scores]]:
        """The scores of each turn. Waits for the device."""
        if self.arrival is None:
            no_scores = Scores(np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32))
            return [(turn, no_scores) for turn, *_ in self.turns]
        numbers = self.arrival.wait()
        rows = numbers[:-1] if self.buffered else numbers
        tokens, confidence, reader_rows = rows[0].astype(np.int64), rows[1], rows[2:]
        result = list[tuple[Turn, Scores]]()
        start = 0
        for turn, count, chooses in self.turns:
            columns = slice(start, start + count)
            start = columns.stop
            transfer = numbers[-1, columns] > 0 if chooses else None
            reader_numbers = _split_by_reader(turn.device_reads, reader_rows[:, columns]) if turn.device_reads else ()
            result.append((turn, Scores(tokens[columns], confidence[columns], reader_numbers, transfer)))
        return result


@dataclass(slots=True)
class LaunchedPass:
    """A pass that was launched and not read yet. If it failed as a whole, it has several parts."""

    batch: Batch = ()
    parts: list[tuple[PassResult, list[PendingScores]]] = field(default_factory=list)
    failed_turns: list[Turn] = field(default_factory=list)  # turns that could not run
    is_queued: bool = False  # whether it was launched before the previous pass was read
    # Turns of a queued pass that are not confirmed, whose results are not written
    speculative: set[Turn] = field(default_factory=set)
    # For each confirmed turn, the predicted positions that the previous pass left noisy, bool [predicted]
    noisy_masks: dict[Turn, Mask] = field(default_factory=dict)
    batch_error: Exception | None = None  # an error that no request causes, which is raised once the parts are read

    def turns(self) -> list[Turn]:
        """The turns that ran and whose results are written: no speculative ones, and none of members that ended."""
        turns = (turn for result, _ in self.parts for turn in result.batch)
        return [turn for turn in turns if turn not in self.speculative and not turn.member.ended]


class Runner(Packer):
    """Packs and runs passes of one model over one pool on the device, and scores their predictions."""

    def __init__(self, model: Transformer, pool: Pool, *, overlap: bool = False, graphs: Graphs | None = None) -> None:
        """With `overlap` tokens are kept on the device. `graphs` over `pool` repeat the layers that they can."""
        self.model = model if graphs is None else model.with_graphs(graphs)
        self.pool = pool
        config = model.config
        self._logit_rows = logit_rows(config)
        target = Target(model.device, model.arithmetic.invariant, config.sliding, roles=config.self_conditioning)
        super().__init__(target, TokenBuffer(pool.spare, model.device) if overlap else None)

    @torch.inference_mode()
    def run(self, items: Items) -> tuple[Tensor, Items]:
        """One forward pass over `items`.

        Returns the final hidden states of the predicted rows, [M, D], and the items with the plans that ran, which
        their ledgers have too. Without hooks the host never waits for the device.

        If it raises, the pass may be repeated over some or all of `items`: it writes the same rows again. A choice of
        rows (`Span.pick`, drift) cannot be made a second time, because it compares with values that it then overwrites.
        So after an error `items` and the ledgers have plans with the choices that were made.
        """
        stages: list[Stage] = []  # all that may have run, for the choices that they have made
        original = list(items)
        revised_indices = set[int]()  # of the items with a plan that `run_layers` has entered into the ledger
        hooks = self._make_hooks(items)
        try:
            batch = self.pack(items)
            stages += batch.stages
            if any(map(attrgetter("layered"), hooks)):
                hidden, final_items = run_layers(self, batch, items, hooks, stages, revised_indices)
            else:
                hidden = self.model.ranks.run_on_all(_forward, self.model, batch, self.pool)
                final_items = items
            for hook in hooks:
                hook.after_pass()
            return hidden, final_items
        except Exception:
            items[:] = with_choices(items, stages)
            enter_changed_plans(items, original, revised_indices)
            raise

    def _make_hooks(self, items: Items) -> list[DeviceHook]:
        """The device half of each kind of hook in the plans of `items`, for all canvases with that kind."""
        canvases_by_hook: dict[str, list[PassCanvas]] = {}
        for index, (state, plan) in enumerate(items):
            if plan.hook is not None:
                canvases_by_hook.setdefault(plan.hook.on_device, []).append(PassCanvas(index, state, plan))
        hooks = list[DeviceHook]()
        for name, canvases in canvases_by_hook.items():
            hooks.append(resolve_name(name)(self.model, self.pool, canvases))
        return hooks

    def before_layer(
        self, hooks: Sequence[DeviceHook], stage: Stage, h: Tensor, plans: Sequence[Plan]
    ) -> dict[int, Plan]:
        """The plans that `hooks` change before `stage` runs, by the indices of their canvases."""
        return {index: plan for hook in hooks for index, plan in hook.before(stage, h, plans).items()}

    def after_layer(self, hooks: Sequence[DeviceHook], layer: int, plans: Sequence[Plan]) -> dict[int, Plan]:
        """The plans that `hooks` change once `layer` has run, by the indices of their canvases."""
        return {index: plan for hook in hooks for index, plan in hook.after(layer, plans).items()}

    def move(self, move: Move) -> None:
        """Copy stored K/V to the slots of a canvas. The host does not wait."""
        device = self.model.device
        source, target = send_run(move.source, device), send_run(move.target, device)
        self.model.ranks.run_on_all(_move, self.pool, source, target, move.layers)

    @torch.inference_mode()
    def launch_scores(self, hidden: Tensor, turns: Sequence[Turn]) -> Arrival:
        """Score the predicted rows `hidden` [M, D] of `turns`, and start copying the scores to the host.

        They are float32 [2 + n, rows] in the order of `turns`: the tokens, their confidences, and in the next n rows
        the numbers of the readers (`sampling.score.score`). With a token buffer there is one more row: 1 where the
        device has transferred a position and written its token to the buffer, 0 elsewhere. Logits exist for a bounded
        number of rows at a time. Sets `device_reads` of the turns.
        """
        model, token_buffer, max_rows = self.model, self.token_buffer, self._logit_rows
        parts = list[Tensor]()
        width = 0  # most numbers of readers that a turn has for each row
        for turn in turns:
            if turn.member.readers:
                turn.device_reads = turn.member.device_reads(turn)
                width = max(width, sum(read.width for _, read in turn.device_reads))
        for rows, chunk, groups in _chunk_turns(turns, max_rows):
            if token_buffer is not None:
                for turn, group in zip(chunk, groups, strict=True):
                    _update_tokens(group, turn, token_buffer, model.config.mask_id)
            slices: Iterable[tuple[Tensor, list[RowGroup]]] = [(hidden[rows], groups)]
            if len(groups) == 1 and greedy_rows(groups[0]) > max_rows:
                slices = _row_slices(hidden[rows], groups[0], max_rows)
            for slice_hidden, slice_groups in slices:
                parts.append(model.ranks.run_on_all(score_rows, model, slice_hidden, slice_groups, width, self.pool))
        # float32 holds token ids exactly, as vocabularies are far below 2 ** 24.
        scores = torch.cat(parts, dim=1) if parts else hidden.new_empty((2 + width, 0), dtype=torch.float32)
        if token_buffer is not None:
            candidates = [_candidates(turn, turn.decoder) for turn in turns if turn.decoder is not None]
            scores = token_buffer.transfer(scores, candidates, kernels=model.kernels is not None)
        return Arrival(scores)


# These run on every rank. On a model of one rank they are plain calls.


@torch.inference_mode()
def _forward(model: Transformer, batch: StepBatch, pool: Pool) -> Tensor:
    return model.forward(batch, pool)


@torch.inference_mode()
def _move(pool: Pool, source: Run | Tensor, target: Run | Tensor, layers: int) -> None:
    for kv in (*pool.k[:layers], *pool.v[:layers]):
        kv[target] = kv[source].clone()  # a run is a view, and no tensor is written from a view of itself


def _row_group(turn: Turn, start: int) -> RowGroup | None:
    """How the rows of a turn, from row `start` of the logits on, are scored; None if it predicts nothing."""
    stop = start + len(turn.predicted)
    if stop == start or turn.decoder is None:
        return None
    # The decoder made the group for this call, so it may be changed.
    group = turn.decoder.group(slice(start, stop), turn.predicted)
    if turn.device_reads:
        group.reads = tuple(read for _, read in turn.device_reads)
    if group.signal is not None:
        group.signal = replace(group.signal, slots=turn.items[0][0].buffer_slots[turn.predicted])
    if len(turn.member.canvases) == 2 == len(turn.items):
        group.guide = slice(stop, stop + len(turn.predicted))
    return group


def _candidates(turn: Turn, decoder: Decoder) -> Candidates:
    """The predicted positions of a turn, from which the device chooses."""
    slots = [state.buffer_slots for state in turn.member.canvases]
    return Candidates(turn.transfers, turn.predicted, decoder.block, slots)


def _update_tokens(group: RowGroup, turn: Turn, token_buffer: TokenBuffer, mask_id: int) -> None:
    """Replace the tokens in `group` by those of the token buffer. The host may not know all of these yet."""
    if group.noisy is not None:
        slots = turn.member.canvases[0].buffer_slots[turn.predicted]
        group.noisy = group.noisy.with_current(token_buffer.tokens(send(slots, token_buffer.values.device)), mask_id)


@torch.inference_mode()
def score_rows(
    model: Transformer, hidden: Tensor, groups: Sequence[RowGroup], width: int, pool: Pool | None = None
) -> Tensor:
    """Scores of final hidden states `hidden` [M, D], float32 [2 + width, M]; see `score`.

    Ranks merge theirs. Self-conditioning signals are written to `pool`.
    """
    per_group = model.arithmetic.invariant
    write = None if pool is None or pool.signals is None else partial(_write_signal, model, pool.signals)
    return score(model.head(hidden), groups, model.config.mask_id, per_group, width, vocabulary_of(model), write)


def _write_signal(model: Transformer, signals: Tensor, logits: Tensor, group: RowGroup) -> None:
    """Write the expected embeddings of a group's rows to `signals`. `logits` are this rank's, as they are sampled."""
    assert group.signal is not None
    assert group.signal.slots is not None
    probabilities = vocabulary_of(model).softmax(logits / group.signal.temperature)
    signals.index_copy_(
        0, send(group.signal.slots, signals.device), model.expected_embedding(probabilities).to(signals.dtype)
    )


def vocabulary_of(model: Transformer) -> Vocabulary:
    """The operations over the columns of the model's logits."""
    ranks, vocab = model.ranks, model.config.vocab
    if ranks.several:
        return SplitVocabulary(ranks.shard.share(vocab), vocab, ranks.gather)
    if model.kernels is None:
        return WHOLE
    from remask.sampling.kernels_triton import TritonVocabulary

    return TritonVocabulary()


def _chunk_turns(turns: Sequence[Turn], max_rows: int) -> Iterator[tuple[slice, list[Turn], list[RowGroup]]]:
    """Split the turns into chunks of at most `max_rows` `greedy_rows`; a single turn may exceed that.

    Yields the rows of each chunk, its turns, and their row groups.
    """
    start = stop = chunk_rows = 0
    chunk, groups = list[Turn](), list[RowGroup]()
    for turn in turns:
        group = _row_group(turn, stop - start)
        if group is None:
            continue
        group_rows = greedy_rows(group)
        if chunk and chunk_rows + group_rows > max_rows:
            yield slice(start, stop), chunk, groups
            start, chunk_rows = stop, 0
            chunk, groups = [], []
            group = _row_group(turn, 0)
            assert group is not None
        chunk.append(turn)
        groups.append(group)
        stop = start + (group.rows if group.guide is None else group.guide).stop
        chunk_rows += group_rows
    if chunk:
        yield slice(start, stop), chunk, groups


def _row_slices(hidden: Tensor, group: RowGroup, max_rows: int) -> Iterator[tuple[Tensor, list[RowGroup]]]:
    """Cut the rows `hidden` [M, D] of a group that counts as more than `max_rows` rows into slices."""
    row_count = group.rows.stop - group.rows.start
    # Slices of equal size, so that the result depends on the request alone.
    slice_count = min(row_count, -(-greedy_rows(group) // max_rows))
    for start, stop in pairwise(row_count * index // slice_count for index in range(slice_count + 1)):
        rows = hidden[start:stop]
        if group.guide is not None:
            rows = torch.cat([rows, hidden[group.guide][start:stop]])
        yield rows, [group.slice_rows(start, stop)]


def run_isolated(runner: Runner, batch: Batch, failed_turns: list[Turn]) -> Iterator[PassResult]:
    """Run a pass over `batch`, whose plans the ledgers have entered. If it fails, run it in parts, without what fails.

    Turns that cannot run get their `error`, and are added to `failed_turns`. Raises errors of the device and of memory,
    which no single member causes.
    """
    if not batch:
        return
    items: Items = []
    for turn in batch:
        items += turn.items
    try:
        hidden, final_items = runner.run(items)
    except Exception as error:
        if not _record_failure(batch, error, failed_turns):
            return
        names = tuple(turn.member.id for turn in batch)
        log.warning("a pass over %s failed and is run in parts: %s", names, error)
        _revise(batch, items)
    else:
        if final_items is not items:
            _revise(batch, final_items)
        yield PassResult(batch, final_items, hidden)
        return
    for part in _split_batch(runner, batch, failed_turns):
        yield from run_isolated(runner, part, failed_turns)


def score_isolated(runner: Runner, result: PassResult, failed_turns: list[Turn]) -> list[PendingScores]:
    """Launch the scores of a pass; if that fails, of its turns one by one.

    Turns that cannot be scored get their `error`, are added to `failed_turns`, and left out. Raises errors of the
    device and of memory.
    """
    batch, buffered = result.batch, runner.token_buffer is not None
    try:
        # Prefix passes come first, and have no scores.
        arrival = None if batch[-1].decoder is None else runner.launch_scores(result.hidden, batch)
    except Exception as error:
        if not _record_failure(batch, error, failed_turns):
            return []
    else:
        chooses = buffered and arrival is not None
        turns = list[tuple[Turn, int, bool]]()
        for turn in batch:
            turns.append((turn, len(turn.predicted), chooses and turn.transfers is not None))
        return [PendingScores(turns, arrival, buffered)]
    scores = list[PendingScores]()
    start = 0
    for turn in batch:
        rows = sum(len(plan.predicted) for _, plan in turn.items)
        single = PassResult([turn], [], result.hidden[start : start + rows])
        scores += score_isolated(runner, single, failed_turns)
        start += rows
    return scores


def _record_failure(batch: Batch, error: Exception, failed_turns: list[Turn]) -> bool:
    """Give the `error` of a failed batch to its turn, and add that to `failed_turns`, if it has only one.

    Returns whether it has several, any of which may be the cause. Raises `error` if no turn causes it.
    """
    if is_fatal(error) or is_out_of_memory(error):
        raise error
    if len(batch) > 1:
        return True
    batch[0].error = error
    failed_turns.append(batch[0])
    return False


def _revise(batch: Batch, items: Items) -> None:
    """Replace the plans of the turns by those of `items`, which are in the same order."""
    remaining = iter(items)
    for turn in batch:
        turn.revise([next(remaining) for _ in turn.items])


def _split_by_reader(reads: DeviceReads, rows: NDArray[np.float32]) -> tuple[ReaderNumbers, ...]:
    """The rows of each reader; `rows` [n, predicted] has them one after the other."""
    stops = accumulate(read.width for _, read in reads)
    return tuple((reader, rows[stop - read.width : stop]) for (reader, read), stop in zip(reads, stops, strict=True))


def _split_batch(runner: Runner, batch: Batch, failed_turns: list[Turn]) -> list[Batch]:
    """Split a failed pass for another run: without turns that cannot be packed, which have failed, or else in two."""
    packable = []
    for turn in batch:
        try:
            runner.pack(list(turn.items))
        except Exception as error:
            _record_failure([turn], error, failed_turns)
        else:
            packable.append(turn)
    if len(packable) < len(batch):  # then the pass was not packed either, and nothing ran on the device
        return [packable]
    half = len(batch) // 2
    return [batch[:half], batch[half:]]
