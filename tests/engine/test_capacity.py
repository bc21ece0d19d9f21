"""What fits on a device: counted by hand, at the edges, and refused with the numbers."""

import gc
import re
import weakref
from contextlib import suppress
from dataclasses import fields, replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from remask import LLM
from remask.checkpoint.loaded import dummy_weights
from remask.cli import main
from remask.engine import memory as engine_memory
from remask.engine import proof, sizing
from remask.engine.capacity import (
    DeviceMemory,
    TokenBytes,
    attention_bytes,
    check_weights_fit,
    logit_bytes,
    pass_rows,
    store_tokens,
    token_bytes,
    weight_bytes,
    workspace_bytes,
)
from remask.engine.config import EngineConfig
from remask.engine.engine import Engine
from remask.engine.request import Request
from remask.errors import ConfigError
from remask.families import preset
from remask.model.attention_torch import TorchAttention
from remask.model.config import ModelConfig, RopeScaling
from remask.model.graphs import _Buffers, graph_bytes, max_rows
from remask.model.pool import Pool
from remask.model.ranks import Ranks, Shard
from remask.model.transformer import Transformer
from remask.policies import Dense
from remask.policies.dllm import DllmCache
from remask.request.sampling_params import SamplingParams
from tests.engine.executors import NEEDS_TRITON
from tests.engine.support import CPU, small_config

GB = 10**9
LLADA, FLASH, TINY = preset("llada-8b"), preset("llada2-flash"), preset("llada-tiny")


def test_room_is_what_others_leave_of_the_share() -> None:
    assert DeviceMemory(80 * GB, 80 * GB, 0.9).room == 72 * GB
    assert DeviceMemory(80 * GB, 50 * GB, 0.9).room == 42 * GB
    assert DeviceMemory(80 * GB, 5 * GB, 0.9).room == -3 * GB
    assert str(DeviceMemory(80 * GB, 50 * GB, 0.9)) == "72.00 GB of 80.00 GB (42.00 GB left)"


def test_memory_of_a_token() -> None:
    assert token_bytes(LLADA, 2) == TokenBytes(2 * 32 * 4096 * 2, 31 * 4096 * 2)
    assert token_bytes(LLADA, 2, ranks=4) == TokenBytes(2 * 32 * 1024 * 2, 31 * 4096 * 2)
    assert token_bytes(FLASH, 2, ranks=8) == TokenBytes(2 * 32 * 128 * 2, 0), "ranks share the four heads of K/V"


@pytest.mark.parametrize("name", ["llada-tiny", "llada2-tiny", "gidd-tiny"])
def test_memory_of_weights_is_that_of_the_weights(name: str) -> None:
    config = preset(name)
    assert weight_bytes(config, torch.float32) == dummy_weights(config, torch.float32, CPU).nbytes
    assert weight_bytes(config, torch.float32) == 4 * config.parameters
    last = dummy_weights(config, torch.float32, CPU, 0, Shard(1, 2))
    assert weight_bytes(config, torch.float32, ranks=2) == last.nbytes


@given(
    total=st.integers(10**6, 10**11),
    taken=st.floats(0, 1),
    share=st.floats(0.1, 1),
    kv=st.integers(1, 10**6),
    state=st.integers(0, 10**6),
    workspace=st.integers(0, 10**9),
    canvases=st.integers(1, 64),
    longest=st.integers(1, 10_000),
    page=st.integers(0, 64),
)
def test_what_is_promised_fits_and_no_token_more_would(
    total: int, taken: float, share: float, kv: int, state: int, workspace: int, canvases: int, longest: int, page: int
) -> None:
    memory, token = DeviceMemory(total, int(total * (1 - taken)), share), TokenBytes(kv, state)
    needed = canvases * (longest + page) * kv + workspace
    if needed > memory.room:
        with pytest.raises(ConfigError, match="K/V do not fit") as refused:
            store_tokens(memory, token, workspace, canvases, longest, page)
        for fitting in map(int, re.findall(r"--max-num-seqs (\d+)", str(refused.value))):
            assert store_tokens(memory, token, workspace, fitting, longest, page) >= 0
        for fitting in map(int, re.findall(r"--max-model-len (\d+)", str(refused.value))):
            assert store_tokens(memory, token, workspace, canvases, fitting, page) >= 0
        return
    stored = store_tokens(memory, token, workspace, canvases, longest, page)
    assert needed + stored * (kv + state) <= memory.room < needed + (stored + 1) * (kv + state)


def test_canvases_without_room_are_refused_with_what_would_fit() -> None:
    memory, token = DeviceMemory(24 * GB, 8 * GB, 0.9), token_bytes(LLADA, 2)  # 5.6 GB beside the weights
    with pytest.raises(ConfigError) as refused:
        store_tokens(memory, token, GB, canvas_count=8, max_canvas=4096, page_size=0)
    said = str(refused.value)
    assert "8 canvases of 4096 tokens need 17.18 GB" in said
    assert "beside the weights and 1.00 GB for a pass there are 4.60 GB" in said
    assert "21.60 GB of 24.00 GB (5.60 GB left)" in said
    fitting = int(4.6 * GB) // token.kv
    assert f"Use --max-num-seqs 2 or --max-model-len {fitting // 8} or --tensor-parallel with more devices" in said
    with pytest.raises(ConfigError, match="Use --tensor-parallel with more"):
        store_tokens(DeviceMemory(24 * GB, 0, 0.9), token, GB, 8, 4096, 0)


def test_weights_without_room_are_refused_with_what_would_fit() -> None:
    device = DeviceMemory(80 * GB, 79 * GB, 0.9)
    with pytest.raises(ConfigError) as refused:
        check_weights_fit(FLASH, torch.bfloat16, device, 1, apart=True)
    said = str(refused.value)
    assert "103 billion parameters need 205.84 GB as bfloat16, and everything may take 72.00 GB of 80.00 GB" in said
    assert "Use --tensor-parallel 4 or a smaller model" in said
    check_weights_fit(FLASH, torch.bfloat16, device, 4, apart=True)
    with pytest.raises(ConfigError, match=r"103.63 GB as bfloat16 on each device"):
        check_weights_fit(FLASH, torch.bfloat16, device, 2, apart=True)
    ways = r"as float32.* Use --dtype bfloat16 or --quantization int8 or a smaller model"
    with pytest.raises(ConfigError, match=ways):
        check_weights_fit(LLADA, torch.float32, DeviceMemory(24 * GB, 20 * GB, 1.0), 1, apart=False)
    with pytest.raises(ConfigError, match="do not fit"):  # ranks of one machine share its memory
        check_weights_fit(FLASH, torch.bfloat16, device, 4, apart=False)


def test_a_pass_has_an_upper_estimate() -> None:
    rows, item = 4096, 2
    least = rows * LLADA.hidden * item * 2 + rows * 3 * LLADA.intermediate * item + 512 * LLADA.vocab * 4
    assert least < workspace_bytes(LLADA, rows, rows, item) < 4 * least
    copied = rows * 8 * 2 * FLASH.hidden * item
    assert workspace_bytes(FLASH, rows, rows, item) > copied, "a row is copied for each expert"
    assert workspace_bytes(LLADA, rows, rows, item, ranks=4) < workspace_bytes(LLADA, rows, rows, item)
    assert logit_bytes(TINY, 2 * rows) == 2 * logit_bytes(TINY, rows), "every row has logits"
    assert logit_bytes(LLADA, 8 * rows) == logit_bytes(LLADA, rows) < 1.1 * 4 * 4 * 2**26, "of few rows at a time"


@given(
    most=st.integers(1, 10**5),
    longest=st.integers(1, 5000),
    room=st.integers(0, 10**11),
    ranks=st.sampled_from([1, 4]),
)
def test_a_pass_has_as_many_rows_as_fit(most: int, longest: int, room: int, ranks: int) -> None:
    def workspace(rows: int) -> int:
        return workspace_bytes(LLADA, rows, longest, 2, ranks)

    rows = pass_rows(most, longest, room, workspace)
    assert min(most, 2 * longest) <= rows <= max(most, 2 * longest)
    assert workspace(rows) <= room or rows == 2 * longest, "a guided request alone"
    more = min(2 * rows + 1, most)
    if more > rows:
        assert workspace(more) > room


def test_a_model_that_this_machine_cannot_hold_is_refused_before_anything_is_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("remask.loading.memory", lambda: (16 * GB, 12 * GB))
    with pytest.raises(ConfigError, match=r"32.06 GB as float32, and everything may take 16.00 GB .*\(12.00 GB left\)"):
        LLM("llada-8b", load_format="dummy", dtype="float32", device="cpu")
    monkeypatch.setattr("remask.loading.memory", lambda: (64 * GB, 20 * GB))
    for flags, ways in ((set[str](), ""), ({"amx_bf16"}, "--dtype bfloat16 or ")):  # advised where the CPU has it
        monkeypatch.setattr("remask.loading.instructions", lambda flags=flags: frozenset(flags))
        with pytest.raises(ConfigError, match=rf"\. Use {ways}--quantization int8 or a smaller model"):
            LLM("llada-8b", load_format="dummy", dtype="float32", device="cpu")
    monkeypatch.setattr("remask.loading.memory", lambda: None)
    assert LLM("llada-tiny", load_format="dummy", device="cpu").engine.pool.page_count


OUT = (
    RuntimeError("[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB."),
    MemoryError(),
)


@pytest.mark.parametrize("error", OUT, ids=lambda error: type(error).__name__)
def test_memory_that_runs_out_is_told_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
) -> None:
    """What was asked for, and what takes less: of K/V, of weights, and of whatever else."""
    words = ["generate", "--model", "llada-tiny", "--load-format", "dummy", "--prompt", "x", "--max-num-seqs", "512"]
    words += ["--device", "cpu", "--dtype", "float32"]
    said = {
        "remask.engine.memory.Pool": r"of K/V for \d+ tokens \(max_num_seqs=512, canvases of up to 512 tokens, 8192 "
        r"stored\) were allocated.* Use a lower --max-num-seqs or --max-model-len",
        "remask.checkpoint.loaded.dummy_weights": r"MB of weights as float32 were allocated.* Use --quantization int8",
        "remask.llm.Transformer": "memory of this machine ran out .* use a lower --max-num-seqs or --max-model-len",
    }
    for place, sentence in said.items():
        with monkeypatch.context() as patch:
            patch.setattr(place, Mock(side_effect=error))
            assert main(words) == 2
        (told,) = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
        assert re.search(sentence, told)


# What keeps tokens on the device, or captures there, needs one.
LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_model_len": 256, "overlap": False, "graphs": False}


class _Cuda(Transformer):
    """A model on a device that this machine does not have; its memory is on the CPU all the same."""

    device = torch.device("cuda")


class _Pool(Pool):
    def __init__(self, config: Any, pages: int, page_size: int, dtype: Any, device: Any, outputs: Any) -> None:
        assert device.type == "cuda"
        super().__init__(config, pages, page_size, dtype, torch.device("meta"), outputs)


def on_cuda(monkeypatch: pytest.MonkeyPatch, free: int, total: int, **limits: Any) -> Engine:
    """An engine as it would be made on a CUDA device with so much memory."""
    monkeypatch.setattr(sizing, "smallest_memory", lambda _: (total, free))
    monkeypatch.setattr(engine_memory, "Pool", _Pool)
    monkeypatch.setattr(proof, "prove", lambda *_, **__: [])
    model = _Cuda(TINY, dummy_weights(TINY, torch.float32, CPU), ranks=Ranks())
    return Engine(model, EngineConfig(**{**LIMITS, **limits}), "x")


class _Allocator:
    """Memory of a device as PyTorch's allocator has it: what is freed it keeps until it is told to give it back."""

    def __init__(self, patch: pytest.MonkeyPatch, total: int) -> None:
        self.total, self.taken, self.kept = total, 0, 0
        patch.setattr(torch.cuda, "mem_get_info", lambda _: (self.total - self.taken, self.total))
        patch.setattr(torch.cuda, "empty_cache", self._give_back)

    def take(self, pool: Pool) -> None:
        self.taken += pool.nbytes
        weakref.finalize(pool, self._keep, pool.nbytes)

    def _keep(self, size: int) -> None:
        self.kept += size

    def _give_back(self) -> None:
        self.taken, self.kept = self.taken - self.kept, 0


@pytest.mark.thorough
def test_an_engine_that_is_gone_takes_nothing_from_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether its parts have been collected or not, and whatever PyTorch keeps; one that is there does."""
    allocator = _Allocator(monkeypatch, 2 * 10**9)

    class Counted(_Pool):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            allocator.take(self)

    monkeypatch.setattr(proof, "prove", lambda *_, **__: [])
    monkeypatch.setattr(engine_memory, "Pool", Counted)
    model = _Cuda(TINY, dummy_weights(TINY, torch.float32, CPU))
    settings = EngineConfig(**LIMITS, store_budget_tokens="auto")
    engine = Engine(model, settings, "x")
    first, pool = engine.memory.store_budget, engine.pool.nbytes
    assert allocator.taken == pool > 10**8
    gc.disable()  # or it might be collected by chance
    try:
        del engine
        assert allocator.taken == pool
        again = Engine(model, settings, "x")
    finally:
        gc.enable()
    assert again.memory.store_budget == first
    assert Engine(model, settings, "x").memory.store_budget < first / 2, "what is there takes its part"


def test_the_pool_of_a_cuda_device_takes_what_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sizing is real; the device is not."""
    token, page = token_bytes(TINY, 4), 16
    for share in (None, 0.7):
        engine = on_cuda(monkeypatch, 10**9, 2 * 10**9, store_budget_tokens="auto", gpu_memory_utilization=share)
        stored = engine.memory.store_budget
        states = stored * token.state
        taken = engine.pool.page_count * page * token.kv + states + 10**9
        assert stored == engine.store.budget_tokens > 10_000
        assert taken <= (share or 0.9) * 2 * 10**9, "pages that end beyond their canvas included"
        assert taken > 0.8 * (share or 0.9) * 2 * 10**9
    assert on_cuda(monkeypatch, 10**9, 2 * 10**9, store_budget_tokens=77).memory.store_budget == 77


@NEEDS_TRITON
def test_an_engine_whose_kernels_fail_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is shared out for what runs then."""
    made = on_cuda(monkeypatch, 10**9, 2 * 10**9, store_budget_tokens="auto")
    monkeypatch.setattr(proof, "prove", lambda *_, **__: ["merged pass: 3 of 9 rows differ"])
    model = _Cuda(TINY, dummy_weights(TINY, torch.float32, CPU))
    settings = EngineConfig(**LIMITS, store_budget_tokens="auto")
    fallen = Engine(model, settings, "x")
    assert (made.choice.executor.name, fallen.choice.executor.name) == ("triton", "torch")
    assert isinstance(fallen.model.attention, TorchAttention)
    assert fallen.model.kernels is None
    assert fallen.memory.store_budget != made.memory.store_budget
    with pytest.raises(ConfigError, match=r"attention='triton' was asked for.*merged pass: 3 of 9 rows differ"):
        Engine(model, replace(settings, attention="triton"), "x")


def _tensors(buffers: _Buffers) -> list[Tensor]:
    held = [getattr(buffers, each.name) for each in fields(buffers)]
    return [*(own for own in held if isinstance(own, Tensor)), *(own for pair in buffers.cos_sin for own in pair)]


def test_graphs_have_memory_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their buffers, and what a pass computes in one layer."""
    monkeypatch.setattr("remask.engine.engine.make_graphs", lambda *_: None)
    engines = [on_cuda(monkeypatch, 10**9, 2 * 10**9, store_budget_tokens="auto", graphs=on) for on in (False, True)]
    stored = [engine.memory.store_budget for engine in engines]
    longest, attention = 256 + 16, engines[0].model.attention
    token, room = token_bytes(TINY, 4), graph_bytes(engines[0].model, torch.float32, max_rows(TINY))
    room += workspace_bytes(TINY, max_rows(TINY), longest, 4, attention=attention)
    room += attention_bytes(TINY, max_rows(TINY), longest, 4, attention, pad=True)
    assert stored[0] - stored[1] == pytest.approx(room / (token.kv + token.state), abs=1)


@pytest.mark.parametrize(
    "config",
    [
        replace(small_config("llada"), rope_float32=False),
        replace(small_config("llada"), rope_scaling=RopeScaling("linear", 2.0, length=8, growth=0.1)),
        replace(small_config("llada"), rope_float32=True),
        small_config("diffusion-gemma"),
    ],
    ids=["plain", "scaled queries", "float32 angles", "sliding heads of another width"],
)
def test_bytes_of_graphs_are_those_of_their_buffers(config: ModelConfig) -> None:
    model = Transformer(config, dummy_weights(config, torch.bfloat16, CPU))
    buffers = [_Buffers.of(model, rows, torch.zeros(1, config.hidden, dtype=torch.bfloat16)) for rows in (1, 2, 3, 4)]
    assert graph_bytes(model, torch.bfloat16, 4) == sum(own.nbytes for made in buffers for own in _tensors(made))


def test_passes_run_in_parts_where_those_of_all_canvases_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """And in whole ones where they do. What is left for a pass holds it, whatever remains for the store."""
    token, longest, item, seen = token_bytes(TINY, 4), 256 + 16, 4, set[int]()
    for megabytes in range(20, 200, 20):
        try:
            engine = on_cuda(monkeypatch, megabytes * 10**6, 10**9, gpu_memory_utilization=1.0, max_num_seqs=16)
        except ConfigError:
            assert not seen, "more memory is never too little"
            continue
        rows = engine.memory.pass_rows
        assert rows is not None
        assert engine._lifecycle.scheduler.limits.max_rows == rows
        taken = 10**9 - megabytes * 10**6 + (16 * longest + engine.memory.store_budget) * token.kv
        taken += engine.memory.store_budget * token.state
        assert taken + workspace_bytes(TINY, rows, longest, item, attention=engine.model.attention) <= 10**9
        seen.add(rows)
    assert max(seen) == 16 * longest > min(seen) >= 2 * longest
    limited = on_cuda(monkeypatch, 10**9, 10**9, gpu_memory_utilization=1.0, max_num_seqs=16, max_row_layers=1000)
    assert limited.memory.pass_rows == 1000, "a row has a layer at least"


def test_what_a_policy_keeps_must_have_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The outputs of layers are as large as K/V, and "auto" gives all that is left to the store."""
    asked = Request("a", [8, 9], SamplingParams(max_tokens=4), policy=DllmCache())
    share: dict[str, Any] = {"gpu_memory_utilization": 1.0}
    engine = on_cuda(monkeypatch, 10**9, 2 * 10**9, store_budget_tokens="auto", **share)
    with pytest.raises(ConfigError, match=r"outputs of attention and feed-forward") as refused:
        engine.check(asked)
    engine.check(replace(asked, policy=Dense()))
    found = re.search(r"--store-budget-tokens (\d+)", str(refused.value))
    assert found is not None
    fitting = int(found[1])
    assert 0 < fitting < engine.memory.store_budget
    on_cuda(monkeypatch, 10**9, 2 * 10**9, store_budget_tokens=fitting, **share).check(asked)
    with pytest.raises(ConfigError, match="are left; use --store-budget-tokens"):
        on_cuda(monkeypatch, 10**9, 2 * 10**9, store_budget_tokens=fitting + 64, **share).check(asked)


def test_a_cuda_device_that_is_too_small_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="K/V do not fit"):
        on_cuda(monkeypatch, 10**6, 10**9, gpu_memory_utilization=1.0)
    with pytest.raises(ConfigError, match=r"store_budget_tokens=99999999 needs .* there is room for [0-9]+ tokens"):
        on_cuda(monkeypatch, 10**9, 2 * 10**9, store_budget_tokens=99999999)


def test_the_length_that_is_advised_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where what has no room are the pages that end beyond their canvas."""
    share, advised = {"gpu_memory_utilization": 1.0, "store_budget_tokens": 0}, list[int]()
    for free in range(8 * 10**6, 20 * 10**6, 10**5):
        with suppress(ConfigError):
            on_cuda(monkeypatch, free, 10**9, **share)
            break
        with pytest.raises(ConfigError, match="canvases of 256 tokens need") as refused:
            on_cuda(monkeypatch, free, 10**9, **share)
        for fitting in map(int, re.findall(r"--max-model-len (\d+)", str(refused.value))):
            on_cuda(monkeypatch, free, 10**9, **share, max_model_len=fitting)
            advised.append(fitting)
    assert advised
    assert 240 < advised[-1] < 256


def test_the_share_of_a_gpu_is_refused_on_a_cpu() -> None:
    model = Transformer(TINY, dummy_weights(TINY, torch.float32, CPU))
    with pytest.raises(ConfigError, match=r"gpu_memory_utilization=0\.5 is for CUDA devices, and the model is on cpu"):
        Engine(model, EngineConfig(gpu_memory_utilization=0.5), "x")
    assert Engine(model, EngineConfig(store_budget_tokens="auto"), "x").memory.store_budget == 8192
    for bad in (0.0, 1.5, -1.0):
        with pytest.raises(ConfigError, match="gpu_memory_utilization"):
            EngineConfig(gpu_memory_utilization=bad)
    with pytest.raises(ConfigError, match="store_budget_tokens"):
        replace(EngineConfig(), store_budget_tokens="some")  # type: ignore[arg-type]
