"""The host's part of a decode: a real engine whose model answers at once. `host` starts this file of each commit.

Reads one JSON object a line with `policy`, `canvas`, `requests` and maybe `overlap` and `lists`, and answers each with
a line that adds what it took.
"""

import gc
import json
import random
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from remask.checkpoint.loaded import dummy_weights
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.families import preset
from remask.model.pool import Pool
from remask.model.stage import StepBatch
from remask.model.transformer import Transformer
from remask.model.work_list import WorkList
from remask.policies.base import CachePolicy
from remask.policies.bicache import BiCache
from remask.policies.block import BlockDual
from remask.policies.dense import Dense
from remask.request.sampling_params import SamplingParams

LAYERS, HEADS, DEPTH, INTERVAL = 32, 32, 18, 16
RESPONSE, BLOCK, STEPS = 256, 32, 128
PREFIX = 0.9  # of the prompt
VOCAB = 8
POLICIES: Mapping[str, CachePolicy] = {
    "none": Dense(),
    "block-dual": BlockDual(),
    "bicache+block-dual": BiCache(BlockDual(), depth=DEPTH, refresh_interval=INTERVAL),
}


class StubTransformer(Transformer):
    """Answers any pass with hidden states and logits that were drawn beforehand, and keeps the time that this takes.

    With `lists` it first cuts the work lists of a pass as Triton's attention does, which is the host's work on CUDA.
    """

    lists = False

    seconds = 0.0  # CPU time of the calling thread
    hidden = torch.zeros(1 << 17, 1)
    logits = torch.randn(1 << 12, VOCAB)

    def forward(self, batch: StepBatch, pool: Pool) -> Tensor:  # noqa: ARG002
        """Hidden states of the predicted rows."""
        if self.lists:
            for stage in batch.stages:
                cut(stage.work)
        start = time.thread_time()
        out = self.hidden[: len(batch.predict)]
        self.seconds += time.thread_time() - start
        return out

    def head(self, hidden: Tensor) -> Tensor:
        """As many rows of logits."""
        start = time.thread_time()
        out = self.logits[: len(hidden)].clone()
        self.seconds += time.thread_time() - start
        return out


def cut(work: WorkList) -> None:
    """Make of a list what Triton's attention sends to a device, for a model of `HEADS` heads."""
    from remask.model.attention_triton import TritonAttention

    attention: Any = TritonAttention()
    # Older engines ask how many heads of queries share one of K and V.
    heads = (HEADS, HEADS) if "groups" in signature(attention.size).parameters else (1,)
    size = attention.size(work, *heads)
    attention.numbers(work, *heads, size)


def make_model() -> StubTransformer:
    """A model of `LAYERS` layers whose tensors are as small as can be."""
    shape = replace(
        preset("llada-tiny"),
        layers=LAYERS,
        hidden=2,
        heads=1,
        kv_heads=1,
        head_dim=2,
        intermediate=2,
        vocab=VOCAB,
        mask_id=VOCAB - 1,
        stop_ids=(0,),
        max_length=1 << 13,
    )
    return StubTransformer(shape, dummy_weights(shape, torch.float32, torch.device("cpu")))


def decode(
    model: StubTransformer, policy: str, canvas: int, requests: int, overlap: bool = False, lists: bool = False
) -> dict[str, float | int]:
    """CPU time of the host in a whole decode of so many requests, without their start: admission, the prefix' own pass.

    Returns its mean over the steps in milliseconds, and the number of steps.
    """
    prompt = canvas - RESPONSE
    config = EngineConfig(max_num_seqs=requests, max_model_len=canvas, store_budget_tokens=canvas)
    if overlap:  # which older engines do not know
        config = replace(config, overlap=True)
    model.lists = lists
    engine = Engine(model, config, "stub")
    draw = random.Random(0)
    shared = [draw.randrange(1, VOCAB - 1) for _ in range(round(PREFIX * prompt))]
    for number in range(requests):
        own = [draw.randrange(1, VOCAB - 1) for _ in range(prompt - len(shared))]
        params = SamplingParams(max_tokens=RESPONSE, steps=STEPS, block_length=BLOCK, ignore_eos=True)
        engine.add(Request(str(number), shared + own, params, len(shared), POLICIES[policy]))
    engine._admission.admit(engine.clock())
    if policy.startswith("bicache"):
        engine.step()
        assert engine.stats.prefix_passes == 1
    gc.collect()
    gc.freeze()  # as servers do, or a search through all modules falls into some decodes
    model.seconds, before, finished, steps = 0.0, time.thread_time(), 0, 0
    while engine.busy:
        finished += sum(event.result is not None for event in engine.step())
        steps += 1
    seconds = time.thread_time() - before - model.seconds
    gc.unfreeze()
    assert (finished, steps) == (requests, STEPS)
    return {"ms_per_step": 1e3 * seconds / steps, "steps": steps}


def answer(cases: Sequence[str] | Any) -> None:
    """Measure the case of each line, and print it with its figures."""
    torch.set_num_threads(1)
    model = make_model()
    decode(model, "bicache+block-dual", 512, 1)  # whatever is done once is done here
    for line in cases:
        case = json.loads(line)
        print(json.dumps({**case, **decode(model, **case)}), flush=True)


if __name__ == "__main__":
    answer(sys.stdin)
