"""What a pass takes beside weights and K/V: estimates, and the tensors that the same code makes."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.checkpoint.loaded import dummy_weights
from remask.engine import capacity
from remask.engine.capacity import layer_bytes, logit_bytes
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.engine.runner import Runner
from remask.families import preset
from remask.model.pool import Pool
from remask.model.stage import Stage, StepBatch
from remask.model.transformer import Transformer
from remask.model.weights import empty_weights
from remask.model.work_list import WorkListBuilder
from remask.readers.logprobs import Logprobs
from tests.engine.executors import NEEDS_TRITON
from tests.engine.support import CPU, policy_of, run, small_config
from tests.live_bytes import LiveBytes
from tests.sampling_fields import flat_params

META, BF16 = torch.device("meta"), torch.bfloat16


def test_live_bytes_are_those_that_somebody_refers_to() -> None:
    with LiveBytes() as live:
        a = torch.zeros(100, dtype=torch.float32)
        b = a[:50]
        del a
        assert live.now == 400
        c = b + 1
        assert (live.now, live.peak) == (600, 600)
        del b
        assert (live.now, live.peak) == (200, 600)
        assert len(c) == 50


@contextmanager
def kernels_that_compute_nothing(patch: pytest.MonkeyPatch) -> Iterator[None]:
    """The code around Triton's kernels runs, and makes room for what they would compute."""
    from remask.model import attention_triton, layer_triton

    with patch.context() as context:
        for module in (attention_triton, layer_triton):
            context.setattr(module, "launch", lambda *_, **__: None)
        context.setattr(attention_triton, "send", lambda array, device: torch.from_numpy(array).to(device))
        yield


def kernel_peak(name: str, canvases: int, longest: int, prefix: int, patch: pytest.MonkeyPatch) -> tuple[int, int]:
    """Most bytes that two layers of a full pass take, and the estimate. Nothing is computed, on tensors without memory.

    `prefix` slots are read by all canvases together.
    """
    from remask.model.attention_triton import TritonAttention
    from remask.model.layer_triton import TritonLayer

    config = preset(name)
    attention = TritonAttention(config.score_cap)
    model = Transformer(config, empty_weights(config, BF16, META), attention, kernels=TritonLayer(config))
    rows, work = canvases * longest, WorkListBuilder()
    if prefix:
        work.add(0, rows, work.add_slots(np.arange(prefix)), prefix, None)
    for number in range(canvases):
        own = work.add_slots(np.arange(prefix, longest) + number * longest)
        work.add(number * longest, longest, own, longest - prefix, None)
    index = torch.zeros(rows, dtype=torch.int64, device=META)
    stage = Stage(range(2), index, index, None, None, work.build())
    pool = Pool(config, rows // 16, 16, BF16, META)
    with kernels_that_compute_nothing(patch), LiveBytes() as live:
        model.forward(StepBatch(index, (stage,), index[:canvases], 0), pool)
    return live.peak, layer_bytes(config, rows, longest, BF16.itemsize, attention)


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("canvases", "longest", "prefix"), [(8, 4096, 0), (32, 4096, 0), (32, 1280, 1152), (1, 300, 0)]
)
@pytest.mark.parametrize("name", ["llada-8b", "dream-7b", "gidd-unif-3b"])
def test_the_estimate_holds_what_the_kernels_need(
    name: str, canvases: int, longest: int, prefix: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At real sizes: float32 partial results of LLaDA-8B alone are 4.3 GB for 8 canvases of 4,096."""
    measured, estimate = kernel_peak(name, canvases, longest, prefix, monkeypatch)
    assert measured <= estimate < 2 * measured


PASSES = [
    ("llada", "none"),
    ("llada", "reuse"),
    ("llada", "bicache+block-dual"),
    ("llada", "block-prefix"),
    ("llada", "dllm-cache"),
    ("llada", "dkv-decode"),
    ("llada-moe", "none"),
    ("dream", "bicache"),
    ("gidd", "none"),
    ("gidd", "uniform-cache"),
    ("sdar", "exact"),
    ("sdar-moe", "exact"),
    ("llada2", "exact"),
]


@pytest.mark.few(5)
@pytest.mark.parametrize("dtype", [torch.float32, BF16], ids=str)
@pytest.mark.parametrize(("family", "cache"), PASSES)
def test_the_estimate_holds_the_passes_of_every_policy(
    family: str, cache: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of PyTorch's executor, with requests that share a prefix."""
    config = preset("gidd-tiny") if family == "gidd" else small_config(family)
    config = replace(config, hidden=128, head_dim=32, intermediate=256)
    most: list[int] = []
    whole = Runner.run

    def measured(self: Runner, items: Any) -> Any:
        with LiveBytes() as live:
            result = whole(self, items)
        most.append(live.peak)
        return result

    monkeypatch.setattr(Runner, "run", measured)
    longest = 96
    settings = EngineConfig(max_num_seqs=4, max_model_len=longest, attention="torch")
    engine = Engine(Transformer(config, dummy_weights(config, dtype, CPU)), settings, "x")
    params = flat_params({"max_tokens": 16, "ignore_eos": True})
    for number in range(3):
        prompt = [*range(8, 56), *(50 - number for _ in range(24))]
        prefix = 48 if cache.startswith(("bicache", "reuse")) else 0
        engine.add(Request(str(number), prompt, params, prefix, policy_of(cache)))
    assert all(result.error is None for result in run(engine, []).values())
    rows = 4 * longest
    assert max(most) <= layer_bytes(config, rows, longest, dtype.itemsize)


READINGS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 0.7},
    "top p": {"temperature": 0.7, "top_p": 0.9},
    "filtered": {"temperature": 0.7, "top_p": 0.9, "top_k": 20, "remasking": "maskgit_plus"},
    "entropy": {"temperature": 0.7, "remasking": "entropy"},
    "guided": {"temperature": 0.7, "cfg_scale": 1.0},
    "log-probabilities": {"temperature": 0.7},
}


@pytest.mark.few(3)
@pytest.mark.parametrize("most", [8, 96], ids="rows={}".format)
@pytest.mark.parametrize("kind", READINGS)
def test_the_estimate_holds_the_reading_of_logits(kind: str, most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 32 predicted rows of each of three requests: also where one request has more rows than are read at a time."""
    config = replace(small_config("llada"), vocab=4096, mask_id=4095)
    monkeypatch.setattr(capacity, "MAX_LOGITS", most * config.vocab)
    found: list[tuple[int, int]] = []
    whole = Runner.launch_scores

    def measured(self: Runner, hidden: Tensor, turns: Any) -> Any:
        with LiveBytes() as live:
            result = whole(self, hidden, turns)
        found.append((live.peak, len(hidden)))
        return result

    monkeypatch.setattr(Runner, "launch_scores", measured)
    engine = Engine(Transformer(config, dummy_weights(config, BF16, CPU)), EngineConfig(max_num_seqs=8), "x")
    params = flat_params({"max_tokens": 32, "steps": 4, "ignore_eos": True, **READINGS[kind]})
    for number in range(3):
        top = 5 if kind == "log-probabilities" else None
        engine.add(Request(str(number), [*range(8, 40)], params, readers=() if top is None else (Logprobs(top),)))
    assert all(result.error is None for result in run(engine, []).values())
    few = 3 * 32 * 4 * 64  # what is read of the rows, and hidden states of some
    assert all(peak <= logit_bytes(config, rows) + few for peak, rows in found), found
    assert max(peak for peak, _ in found) > logit_bytes(config, 96) / 6


@pytest.mark.parametrize("cache", ["none", "bicache+block-dual"])
def test_passes_are_cut_to_the_rows_that_have_room(cache: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers do not depend on it. Among the requests is a guided one, which runs alone."""
    config = small_config("llada")
    answers = []
    whole = Runner.run
    for most in (None, 70):
        widths: list[tuple[int, int]] = []

        def counted(self: Runner, items: Any, widths: list[tuple[int, int]] = widths) -> Any:
            widths.append((max(map(len, stages_of(self, items))), len(items)))
            return whole(self, items)

        monkeypatch.setattr(Runner, "run", counted)
        weights = dummy_weights(config, torch.float64, CPU)
        engine = Engine(Transformer(config, weights), EngineConfig(max_num_seqs=4, max_model_len=64), "x")
        engine.memory.pass_rows = most
        engine._lifecycle.scheduler.limits = replace(engine._lifecycle.scheduler.limits, max_rows=most)
        for number in range(3):
            guided = {"cfg_scale": 1.0} if number == 2 else {}
            params = flat_params({"max_tokens": 16, "ignore_eos": True, **guided})
            prefix = 16 if cache.startswith("bicache") else 0
            policy = policy_of(cache, **({"depth": 2} if prefix else {}))
            engine.add(Request(str(number), [*range(8, 24), 30 + number], params, prefix, policy))
        answers.append({name: (result.token_ids, result.error) for name, result in run(engine, []).items()})
        if most is not None:
            assert all(rows <= most or count <= 2 for rows, count in widths)
        else:
            assert max(rows for rows, _ in widths) > 70
    assert answers[0] == answers[1]


def stages_of(runner: Runner, items: Any) -> Sequence[Tensor]:
    """The positions of the rows of each stage of a pass."""
    return [stage.positions for stage in runner.pack(items).stages]
