"""Passes with layer hooks: they run layer by layer, and what acts between layers may change their plans."""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from remask.engine.pack import Items
from remask.model.pool import Pool
from remask.model.stage import Stage, StepBatch
from remask.model.transformer import Transformer
from remask.plan.plan import Plan
from remask.policies.on_device import DeviceHook


class LayerRunner(Protocol):
    """What of a `Runner` a pass with hooks needs."""

    model: Transformer
    pool: Pool

    def pack(self, items: Items, first: int = 0) -> StepBatch: ...

    def pack_layer(self, items: Items, layer: int) -> Stage: ...

    def before_layer(
        self, hooks: Sequence[DeviceHook], stage: Stage, h: Tensor, plans: Sequence[Plan]
    ) -> dict[int, Plan]: ...

    def after_layer(self, hooks: Sequence[DeviceHook], layer: int, plans: Sequence[Plan]) -> dict[int, Plan]: ...


def run_layers(
    runner: LayerRunner,
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
    model, pool, stages, everywhere = runner.model, runner.pool, batch.stages, runner.model.ranks.everywhere
    planned, items = list(admitted), list(admitted)
    h = everywhere(_enter, model, batch, pool)
    while stages:
        stage, stages = stages[0], stages[1:]
        if len(stage.layers):
            changed = runner.before_layer(hooks, stage, h, [plan for _, plan in items])
            for number, plan in changed.items():
                items[number] = items[number][0], plan
                if number not in revised:
                    admitted[number] = items[number]
            if changed:
                stage = runner.pack_layer(items, stage.layers.start)  # later ones have the rows that they had
                begun.append(stage)
        h = everywhere(_run, model, stage, h, pool)
        # A stage without layers has still to keep what leaves this one.
        if stages and not len(stages[0].layers):
            continue
        done = stage.layers.stop
        changed = runner.after_layer(hooks, done - 1, [plan for _, plan in items])
        for number, plan in changed.items():
            state = items[number][0]
            state.ledger.revise(plan)
            revised.add(number)
            items[number] = state, plan
        if changed:
            batch = runner.pack(items, first=done)
            stages = batch.stages
            begun += stages
    hidden = everywhere(_leave, model, h, batch.predict)
    for number, ((state, plan), (_, before)) in enumerate(zip(items, planned, strict=True)):
        if plan is not before and number not in revised:
            state.ledger.revise(plan)
    return hidden, items


@torch.inference_mode()
def _enter(model: Transformer, batch: StepBatch, pool: Pool) -> Tensor:
    h = model.embed(batch.tokens)
    return h if batch.signals is None else model.self_condition(h, batch.signals, pool)


@torch.inference_mode()
def _run(model: Transformer, stage: Stage, h: Tensor, pool: Pool) -> Tensor:
    return model.run(stage, h, pool)


@torch.inference_mode()
def _leave(model: Transformer, h: Tensor, predict: Tensor) -> Tensor:
    return model.head_input(h[predict])


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
