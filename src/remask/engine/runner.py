"""Runs passes on the device, and reads them: from plans to hidden states, and from these to tokens and confidences.

A pass runs in one call, or layer by layer where hooks act between layers and may change plans.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pkgutil import resolve_name

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, Move, TokenBuffer
from remask.engine.capacity import logit_rows
from remask.engine.member import Turn
from remask.engine.pack import Packer, Target
from remask.machine.transfers import Arrival, send
from remask.model.graphs import Graphs
from remask.model.pool import Pool
from remask.model.stage import Run, Stage, StepBatch, send_run
from remask.model.transformer import Transformer
from remask.plan.plan import Plan
from remask.policies.on_device import DeviceHook, Hooked
from remask.sampling.choice import Candidates
from remask.sampling.decoder import Decoder
from remask.sampling.rows import RowGroup
from remask.sampling.score import score, weight
from remask.sampling.vocabulary import WHOLE, SplitVocabulary, Vocabulary

Items = list[tuple[CanvasState, Plan]]


class Runner:
    """Runs passes of one model over one pool on the device, and reads their logits."""

    def __init__(self, model: Transformer, pool: Pool, *, overlap: bool = False, graphs: Graphs | None = None) -> None:
        """With `overlap` tokens are kept on the device, so that a pass can be queued before the last one is read.

        `graphs`, over `pool`, repeat the layers that they can.
        """
        self.model, self.pool = model if graphs is None else model.with_graphs(graphs), pool
        self.token_buffer = TokenBuffer(pool.spare, model.device) if overlap else None
        self._logit_rows = logit_rows(model.config)
        shape = model.config
        target = Target(model.device, model.arithmetic.invariant, shape.sliding, roles=shape.self_conditioning)
        self._packer = Packer(target, self.token_buffer)

    @torch.inference_mode()
    def run(self, items: Items) -> tuple[Tensor, Items]:
        """One forward pass over `items`. Only canvases' memory is changed.

        Returns the final hidden states of the predicted rows, [M, D], and the items with the plans that ran; their
        ledgers hold these plans too. Without hooks the host never waits for the device.

        Where it raises, the pass may be repeated over some or all of `items`: it reads what earlier passes wrote, and
        writes the same rows again. A choice of rows (`Span.pick`, drift) cannot be made twice, because it compares with
        values that it then overwrites. So after an error `items` and the ledgers hold plans with the choices made.
        """
        begun: list[Stage] = []
        planned, revised = list(items), set[int]()
        kinds: dict[str, list[Hooked]] = {}
        for number, (state, plan) in enumerate(items):
            if plan.hook is not None:
                kinds.setdefault(plan.hook.on_device, []).append(Hooked(number, state, plan))
        hooks = self._hooks(kinds) if kinds else ()
        try:
            batch = self.pack(items)
            begun += batch.stages
            if hooks and any(plan.hook is not None and plan.hook.layered for _, plan in items):
                hidden, ran = self._run_layers(batch, items, hooks, begun, revised)
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

    def _hooks(self, kinds: Mapping[str, list[Hooked]]) -> Sequence[DeviceHook]:
        """The device halves of the plans' hooks, one for each kind of hook."""
        return [resolve_name(kind)(self.model, self.pool, canvases) for kind, canvases in kinds.items()]

    def _run_layers(
        self,
        batch: StepBatch,
        admitted: Items,
        hooks: Sequence[DeviceHook],
        begun: list[Stage],
        revised: set[int],
    ) -> tuple[Tensor, Items]:
        """The pass of `batch`, layer by layer. Stages that are packed again are added to `begun`.

        Plans that hooks change before a layer runs are changed in `admitted` too. Plans that they change after a layer
        are only in the returned items; the numbers of these canvases are added to `revised`, and their ledgers hold the
        new plans.
        """
        model, stages, everywhere = self.model, batch.stages, self.model.ranks.everywhere
        planned, items = list(admitted), list(admitted)
        h = everywhere(_enter, model, batch, self.pool)
        while stages:
            stage, stages = stages[0], stages[1:]
            if len(stage.layers):
                changed = self.before_layer(hooks, stage, h, [plan for _, plan in items])
                for number, plan in changed.items():
                    items[number] = items[number][0], plan
                    if number not in revised:
                        admitted[number] = items[number]
                if changed:
                    stage = self.pack_layer(items, stage.layers.start)  # later ones have the rows that they had
                    begun.append(stage)
            h = everywhere(_run, model, stage, h, self.pool)
            # A stage without layers has still to keep what leaves this one.
            if stages and not len(stages[0].layers):
                continue
            done = stage.layers.stop
            changed = self.after_layer(hooks, done - 1, [plan for _, plan in items])
            for number, plan in changed.items():
                state = items[number][0]
                state.ledger.revise(plan)
                revised.add(number)
                items[number] = state, plan
            if changed:
                batch = self.pack(items, first=done)
                stages = batch.stages
                begun += stages
        hidden = everywhere(_leave, model, h, batch.predict)
        for number, ((state, plan), (_, before)) in enumerate(zip(items, planned, strict=True)):
            if plan is not before and number not in revised:
                state.ledger.revise(plan)
        return hidden, items

    def pack(self, items: Items, first: int = 0) -> StepBatch:
        """`items` as one batch from layer `first` on."""
        return self._packer.pack(items, first)

    def pack_layer(self, items: Items, layer: int) -> Stage:
        """The stage of `layer` alone, for the rows that leave the layer before."""
        return self._packer.pack_layer(items, layer)

    def forget(self) -> None:
        """Drop what is kept of the last passes."""
        self._packer.forget()

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
        is one more row: 1 where the device has transferred a position and put its token into the buffer. Rows of
        unconditional canvases are merged into those of the conditional ones. `hidden` [M, D] holds the predicted rows
        of `turns` in order. Logits exist for a bounded number of rows at a time: for a few turns, or a part of one.
        """
        model, token_buffer, most, scores = self.model, self.token_buffer, self._logit_rows, list[Tensor]()
        more = 0
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
def _enter(model: Transformer, batch: StepBatch, pool: Pool) -> Tensor:
    h = model.embed(batch.tokens)
    return h if batch.signals is None else model.told(h, batch.signals, pool)


@torch.inference_mode()
def _run(model: Transformer, stage: Stage, h: Tensor, pool: Pool) -> Tensor:
    return model.run(stage, h, pool)


@torch.inference_mode()
def _leave(model: Transformer, h: Tensor, predict: Tensor) -> Tensor:
    return model.leave(h[predict])


@torch.inference_mode()
def _move(pool: Pool, source: Run | Tensor, target: Run | Tensor, layers: int) -> None:
    for each in (*pool.k[:layers], *pool.v[:layers]):
        each[target] = each[source].clone()  # a run is a view, and no tensor is written from a view of itself


def with_choices(items: Items, stages: Sequence[Stage]) -> Items:
    """`items` with the rows that `stages` have chosen so far."""
    chosen = [
        (layer, pick.keys, stage.partial.slots[rows].cpu().numpy())
        for stage in stages
        if stage.partial is not None
        for pick in stage.partial.picks
        for layer, rows in zip(stage.layers, pick.chosen, strict=False)
    ]
    items = list(items)
    for number, (state, plan) in enumerate(items):
        for layer, keys, slots in chosen:
            pick = plan.spans.at(layer).pick
            if pick is not None and (pick.by == "key") == keys:
                plan = plan.chosen(layer, pick.among & np.isin(state.slots(layer), slots))
        items[number] = state, plan
    return items


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
        group.noisy = group.noisy.on(token_buffer.tokens(send(places, token_buffer.values.device)), mask_id)


@torch.inference_mode()
def score_rows(
    model: Transformer, hidden: Tensor, groups: Sequence[RowGroup], more: int, pool: Pool | None = None
) -> Tensor:
    """Scores of the rows with final hidden states `hidden` [M, D], float32 [2 + more, rows]; see `score`.

    Every rank computes the logits of its own tokens, and the results are merged. Signals of groups go to `pool`.
    """
    per_group = model.arithmetic.invariant
    keep = None if pool is None or pool.signals is None else partial(_keep_signal, model, pool.signals)
    return score(model.head(hidden), groups, model.config.mask_id, per_group, more, vocabulary_of(model), keep)


def _keep_signal(model: Transformer, signals: Tensor, logits: Tensor, group: RowGroup) -> None:
    """Put the expected embedding of a group's rows, with this rank's changed `logits` of them, into `signals`."""
    assert group.signal is not None
    assert group.signal.slots is not None
    chances = vocabulary_of(model).softmax(logits / group.signal.temperature)
    signals.index_copy_(0, send(group.signal.slots, signals.device), model.expected(chances).to(signals.dtype))


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
    """Cut `turns` into chunks of at most `most` rows by weight; a chunk of one turn may have more.

    Yields the chunk's rows of the pass, its turns, and a group for each, whose rows count from the chunk's first.
    """
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
