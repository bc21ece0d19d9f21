"""What studies of depth ask beyond what serving needs: tasks to profile, other definitions, and rows one by one."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import product, takewhile

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from remask.checkpoint.loaded import LoadedModel
from remask.depth import measure
from remask.engine.pack import pack_uncached
from remask.model.transformer import Transformer
from remask.plan.canvas import Canvas
from remask.tasks import tariff, transit
from remask_lab.similarity.conversations import (
    ChatPrompts,
    PromptSet,
    RandomPrompts,
    TaskPrompts,
    tariff_prompts,
    transit_prompts,
)
from remask_lab.similarity.probe import KV, PrefixProbe
from remask_lab.similarity.prompts import default_prompts
from remask_lab.similarity.rule import AT_BOUNDARY, OVER_LAYERS, OVER_REQUESTS, DepthRule

RULES = tuple(DepthRule(*parts) for parts in product(OVER_LAYERS, OVER_REQUESTS, AT_BOUNDARY))
"""All rules, the default one first."""


def run_depth(similarity: Sequence[float], tau: float) -> int:
    """Number of leading layers whose similarity is strictly above `tau`."""
    return sum(1 for _ in takewhile(lambda value: value > tau, similarity))


def task_prompts(model: LoadedModel) -> dict[str, PromptSet]:
    """Return the tasks on which `model` can be profiled, by name. The task of its default prompts comes first.

    Arithmetic (GSM8K) for a tokenizer that reads it; the kinds of questions of the task tariff,
    the task relay, or rides of one, two and three hops, for those of the bundled models; random token ids for every
    model.
    """
    sets: dict[str, PromptSet] = {}
    tokenizer, default = model.tokenizer, default_prompts(model)
    if tokenizer is not None and isinstance(default, TaskPrompts):
        if default.task == "tariff":
            sets = {kind: tariff_prompts(tokenizer, kind) for kind in tariff.KINDS}
        elif default.task == "transit":
            hops = range(1, transit.MAX_HOPS + 1)
            sets = {f"{n} hop{'s' * (n > 1)}": transit_prompts(tokenizer, n) for n in hops}
        else:
            sets = {default.task: default}
    elif tokenizer is not None and isinstance(default, ChatPrompts):
        sets["arithmetic"] = default
    return {**sets, "random tokens": RandomPrompts(model.config, "random token ids")}


@torch.inference_mode()
def states(probe: PrefixProbe, tokens: Sequence[int], count: int | None = None) -> KV:
    """Copies of K and V of the first `count` positions (default: of all) of a canvas of `tokens`, without a cache.

    The tokens may be a prefix, or a canvas at any step. Raises `ConfigError` where they exceed the probe's.
    """
    probe.check_length(len(tokens))
    probe.model.forward(pack_uncached(probe.model, [Canvas(tokens, (), 0)]), probe.pool)
    keys, values = probe.kv(0, len(tokens) if count is None else count)
    return tuple(k.clone() for k in keys), tuple(v.clone() for v in values)


def row_cosines(these: KV, those: KV, share: float) -> NDArray[np.float64]:
    """The cosine below which a `share` of a prefix's rows are, of K and V layer by layer: [2, layers]."""
    found = [
        torch.cosine_similarity(a.float().flatten(1), b.float().flatten(1)).quantile(share)
        for side in range(2)
        for a, b in zip(these[side], those[side], strict=True)
    ]
    return torch.stack(found).view(2, -1).cpu().numpy().astype(np.float64)


@torch.inference_mode()
def first_predictions(
    model: Transformer, canvas: Canvas, prefix: int, depths: Iterable[int]
) -> Iterator[tuple[int, Tensor]]:
    """As `remask.depth.measure.first_predictions`, but log-probabilities, float32 [noisy positions, vocabulary]."""
    for depth, logits in measure.first_predictions(model, canvas, prefix, depths):
        yield depth, logits.float().log_softmax(-1)
