"""Running passes: in one call, or layer by layer where hooks act between layers and may change plans."""

from collections.abc import Sequence
from pkgutil import resolve_name

import numpy as np
import torch
from torch import Tensor

from remask.engine.canvas_state import CanvasState, Move
from remask.engine.capacity import logit_rows
from remask.engine.pack import Packer
from remask.engine.prefix_pass import PrefixPass, keep_leaving_states
from remask.engine.read import read_rows
from remask.engine.running import Reads, RunningRequest
from remask.engine.token_buffer import TokenBuffer
from remask.machine.transfers import Arrival
from remask.model.graphs import Graphs
from remask.model.pool import Pool
from remask.model.runs import send_run
from remask.model.stage import Run, Stage, StepBatch
from remask.model.transformer import Transformer
from remask.plan.plan import Plan
from remask.policies.on_device.base import DeviceHook, Hooked

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
        self._packer = Packer(model.device, model.arithmetic.invariant, self.token_buffer)

    @torch.inference_mode()
    def run(self, items: Items, passes: Sequence[PrefixPass]) -> tuple[Tensor, Items]:
        """One forward pass over `items`, of which `passes` are the first. Only canvases' memory is changed.

        Returns the final hidden states of the predicted rows, [M, D], and the items with the plans that ran; their
        ledgers hold these plans too. Without hooks the host never waits for the device.

        Where it raises, the pass may be repeated over some or all of `items`: it reads what earlier passes wrote, and
        writes the same rows again. A choice of rows (`Span.pick`, drift) cannot be made twice, because it compares with
        values that it then overwrites. So after an error `items` and the ledgers hold plans with the choices made.
        """
        begun: list[Stage] = []
        planned, revised = list(items), set[int]()
        hooks = self._hooks(items)
        try:
            batch = self.pack(items, passes)
            begun += batch.stages
            if hooks and any(plan.hook is not None and plan.hook.layered for _, plan in items):
                hidden, ran = self._run_layers(batch, items, passes, hooks, begun, revised)
            else:
                hidden, ran = self.model.ranks.everywhere(_forward, self.model, batch, self.pool), items
            for hook in hooks:
                hook.done()
            return hidden, ran
        except Exception:
            items[:] = with_choices(items, begun)
            for number, ((branch, plan), (_, before)) in enumerate(zip(items, planned, strict=True)):
                if plan is not before or number in revised:  # a refreshed plan starts over
                    branch.ledger.revise(plan)
            raise

    def _hooks(self, items: Items) -> list[DeviceHook]:
        """The device halves of the plans' hooks, one for each kind of hook."""
        kinds: dict[str, list[Hooked]] = {}
        for number, (branch, plan) in enumerate(items):
            if plan.hook is not None:
                kinds.setdefault(plan.hook.on_device, []).append(Hooked(number, branch, plan))
        if not kinds:
            return []
        return [resolve_name(kind)(self.model, self.pool, canvases) for kind, canvases in kinds.items()]

    def _run_layers(
        self,
        batch: StepBatch,
        admitted: Items,
        passes: Sequence[PrefixPass],
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
        h = everywhere(_embed, model, batch.tokens)
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
                branch = items[number][0]
                branch.ledger.revise(plan)
                revised.add(number)
                items[number] = branch, plan
            if changed:
                batch = self.pack(items, passes, first=done)
                stages = batch.stages
                begun += stages
        hidden = everywhere(_leave, model, h, batch.predict)
        for number, ((branch, plan), (_, before)) in enumerate(zip(items, planned, strict=True)):
            if plan is not before and number not in revised:
                branch.ledger.revise(plan)
        return hidden, items

    def pack(self, items: Items, passes: Sequence[PrefixPass], first: int = 0) -> StepBatch:
        """`items` as one batch from layer `first` on, which keeps the hidden states that leave pieces of `passes`."""
        batch = self._packer.pack(items, first)
        return keep_leaving_states(batch, passes) if passes else batch

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

    def move(self, moves: Sequence[Move]) -> None:
        """Copy stored K/V to the slots of canvases, with keys re-rotated. The host does not wait."""
        device, everywhere = self.model.device, self.model.ranks.everywhere
        for each in moves:
            source, target = send_run(each.source, device), send_run(each.target, device)
            everywhere(_move, self.model, self.pool, source, target, each.layers, each.by)

    def read(self, hidden: Tensor, requests: Sequence[RunningRequest], reads: Sequence[Reads]) -> Arrival:
        """The result of `read_rows`, float32 [2 + n, rows], in the order of `requests`."""
        return read_rows(self.model, hidden, requests, reads, self._logit_rows, self.token_buffer)


# These run on every rank. On a model of one rank they are plain calls.


@torch.inference_mode()
def _forward(model: Transformer, batch: StepBatch, pool: Pool) -> Tensor:
    return model.forward(batch, pool)


@torch.inference_mode()
def _embed(model: Transformer, tokens: Tensor) -> Tensor:
    return model.embed(tokens)


@torch.inference_mode()
def _run(model: Transformer, stage: Stage, h: Tensor, pool: Pool) -> Tensor:
    return model.run(stage, h, pool)


@torch.inference_mode()
def _leave(model: Transformer, h: Tensor, predict: Tensor) -> Tensor:
    return model.leave(h[predict])


@torch.inference_mode()
def _move(model: Transformer, pool: Pool, source: Run | Tensor, target: Run | Tensor, layers: int, by: int) -> None:
    for k, v in zip(pool.k[:layers], pool.v[:layers], strict=True):
        k[target] = model.turned(k[source], by)
        v[target] = v[source].clone()  # a run is a view, and no tensor is written from a view of itself


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
    for number, (branch, plan) in enumerate(items):
        for layer, keys, slots in chosen:
            pick = plan.spans.at(layer).pick
            if pick is not None and (pick.by == "key") == keys:
                plan = plan.chosen(layer, pick.among & np.isin(branch.slots(layer), slots))
        items[number] = branch, plan
    return items
