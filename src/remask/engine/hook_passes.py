"""Passes with layer hooks, which run layer by layer, as hooks may change plans between layers."""

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
    """The part of a `Runner` that a pass with hooks uses."""

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
    repeat_items: Items,
    hooks: Sequence[DeviceHook],
    stages_run: list[Stage],
    revised_indices: set[int],
) -> tuple[Tensor, Items]:
    """Run `batch` layer by layer. Returns hidden states [M, D] and the items with their final plans.

    `repeat_items` has the plans with which the pass can be repeated if it fails. A plan that a hook changes before a
    layer runs replaces the one there. A plan that it changes after a layer does not, but is entered into the ledger of
    its canvas at once, and the index of the canvas is added to `revised_indices`. Stages that are packed again are
    added to `stages_run`.
    """
    model, pool, run_on_all = runner.model, runner.pool, runner.model.ranks.run_on_all
    stages = batch.stages
    original = list(repeat_items)
    items = list(repeat_items)
    h = run_on_all(_enter, model, batch, pool)
    while stages:
        stage, stages = stages[0], stages[1:]
        if len(stage.layers):
            new_plans = runner.before_layer(hooks, stage, h, [plan for _, plan in items])
            for index, plan in new_plans.items():
                items[index] = items[index][0], plan
                if index not in revised_indices:
                    repeat_items[index] = items[index]
            if new_plans:
                stage = runner.pack_layer(items, stage.layers.start)  # the rows of later stages are unchanged
                stages_run.append(stage)
        h = run_on_all(_run, model, stage, h, pool)
        # A stage without layers follows, which saves the states that leave this one.
        if stages and not len(stages[0].layers):
            continue
        stop = stage.layers.stop
        new_plans = runner.after_layer(hooks, stop - 1, [plan for _, plan in items])
        for index, plan in new_plans.items():
            state = items[index][0]
            state.ledger.revise(plan)
            revised_indices.add(index)
            items[index] = state, plan
        if new_plans:
            batch = runner.pack(items, first=stop)
            stages = batch.stages
            stages_run += stages
    hidden = run_on_all(_leave, model, h, batch.predict)
    for index, ((state, plan), (_, original_plan)) in enumerate(zip(items, original, strict=True)):
        if plan is not original_plan and index not in revised_indices:
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
    """`items` with the picks of their plans replaced by the rows that `stages` have chosen so far."""
    choices = []  # layer, whether K was compared, and the slots of the chosen rows
    for stage in stages:
        if stage.partial is not None:
            for pick in stage.partial.picks:
                # Layers that have not run yet have chosen nothing.
                for layer, rows in zip(stage.layers, pick.picked_rows, strict=False):
                    choices.append((layer, pick.keys, stage.partial.slots[rows].cpu().numpy()))
    result = []
    for state, plan in items:
        for layer, by_key, slots in choices:
            span_pick = plan.spans.at(layer).pick
            if span_pick is not None and (span_pick.by == "key") == by_key:
                plan = plan.with_choice(layer, span_pick.candidates & np.isin(state.slots(layer), slots))
        result.append((state, plan))
    return result


def enter_changed_plans(items: Items, original: Items, revised_indices: set[int]) -> None:
    """Enter into the ledgers the plans with which a failed pass can be repeated, where the ledgers have others.

    The ledgers have the plans of `original`, except at `revised_indices`: there a hook has changed the plan after a
    layer, for that run of the pass alone.
    """
    for index, ((state, plan), (_, original_plan)) in enumerate(zip(items, original, strict=True)):
        if plan is not original_plan or index in revised_indices:
            state.ledger.revise(plan)
