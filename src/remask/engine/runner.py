"""Running a pass. Where its plans watch attention, layer by layer: what drifted is refreshed from the next layer on."""

from collections.abc import Sequence

import torch
from torch import Tensor

from remask.core.plan import Plan
from remask.engine.branch import Branch
from remask.engine.chunks import PrefixPass, keep_leaving_states
from remask.engine.pack import pack
from remask.engine.watching import Eye, look
from remask.models.pool import Pool
from remask.models.transformer import Transformer

Items = list[tuple[Branch, Plan]]


@torch.inference_mode()
def run_pass(model: Transformer, pool: Pool, items: Items, passes: Sequence[PrefixPass]) -> tuple[Tensor, Items]:
    """One forward pass over `items`, of which `passes` are the first. Nothing given is changed but canvases' memory.

    Returns the final hidden states of the predicted rows, [M, D], and the items with the plans that were run, which
    their ledgers hold too. Where nothing is watched nothing waits for the device; else the host reads two numbers a
    watched canvas after every layer but the last.
    """
    batch = keep_leaving_states(pack(items, model.device), passes)
    if all(plan.watch is None for _, plan in items):
        return model.forward(batch, pool), items
    items, stages = list(items), batch.stages
    eyes = [
        Eye(number, branch, plan.watch, model.device)
        for number, (branch, plan) in enumerate(items)
        if plan.watch is not None
    ]
    h = model.embed(batch.tokens)
    while stages:
        stage, stages = stages[0], stages[1:]
        h = model.run(stage, h, pool)
        # A stage without layers has still to keep what leaves this one.
        if not stages or not len(stages[0].layers):
            continue
        done = stage.layers.stop
        drifted = look(model, pool, eyes, done - 1)
        for eye in drifted:
            plan = items[eye.number][1].refreshed(done)
            eye.branch.ledger.revise(plan)
            items[eye.number] = eye.branch, plan
        if drifted:
            batch = keep_leaving_states(pack(items, model.device, first=done), passes)
            stages = batch.stages
    return model.leave(h[batch.predict]), items
