"""On a CPU: as many tokens as have room beside the weights, and the fastest number of bits that fits."""

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from remask import LLM, EngineConfig
from remask.checkpoint.loaded import dummy_weights
from remask.checks import Quantization
from remask.engine import cpu_memory, sizing
from remask.engine.capacity import DeviceMemory, product_bytes, token_bytes, weight_bytes, workspace_bytes
from remask.engine.cpu_memory import resolve_quantization
from remask.engine.engine import Engine
from remask.engine.fitting import CPU_SHARE, CpuMemory
from remask.engine.pack import pack_uncached
from remask.errors import ConfigError
from remask.families import preset
from remask.model.cpu_kernels import Kernel
from remask.model.pool import Pool
from remask.model.sizes import PRODUCT_ROWS
from remask.model.transformer import Transformer
from remask.model.weights import empty_weights
from remask.plan.canvas import Canvas
from tests.engine.support import running_canvases
from tests.live_bytes import LiveBytes

CPU = torch.device("cpu")
TINY = preset("llada-tiny")
MB = 10**6


def with_free(monkeypatch: pytest.MonkeyPatch, free: int, **limits: Any) -> Engine:
    """An engine on a machine that has so much memory left."""
    monkeypatch.setattr(sizing, "cpu_memory", lambda: (10**12, free))
    model = Transformer(TINY, dummy_weights(TINY, torch.float32, CPU, quantization=limits.pop("kind", None)))
    return Engine(model, EngineConfig(**{"max_num_seqs": 16, "store_budget_tokens": "auto", **limits}), "x")


@pytest.mark.parametrize("kind", [None, "int8"])
def test_what_is_promised_fits_and_more_memory_is_never_less(monkeypatch: pytest.MonkeyPatch, kind: str | None) -> None:
    token, before = token_bytes(TINY, 4, kv_itemsize=None if kind is None else 2), [0, 0, 0]
    seen = set[int]()
    for free in range(4 * MB, 400 * MB, 9 * MB):
        try:
            engine = with_free(monkeypatch, free, kind=kind)
        except ConfigError:
            assert before == [0, 0, 0], "more memory is never too little"
            continue
        tokens, store, longest = engine.pool.page_count * 16, engine.memory.store_budget, engine.max_model_len
        rows = engine.memory.pass_rows or 16 * (longest + 16)
        taken = engine.pool.nbytes + store * token.state + workspace_bytes(TINY, rows, longest, 4)
        assert taken + (product_bytes(TINY) if kind else 0) <= 0.9 * free + 16 * 2 * token.kv
        assert tokens >= 2 * (longest + 16) + store, "a guided request can run beside a full store"
        assert longest >= before[0]
        assert store >= min(longest, 8192), "and it holds one canvas"
        before = [longest, store, tokens - store]
        seen.add(longest)
    plenty = with_free(monkeypatch, 10**11, kind=kind)
    assert before == [plenty.max_model_len, 8192, plenty.pool.page_count * 16 - 8192]
    assert plenty.memory.pass_rows is None
    assert len(seen) > 1, "a length that nobody asked for gives way"


@pytest.mark.parametrize("kind", [None, "int8", "int4"])
def test_what_is_said_before_loading_is_what_the_engine_does(
    monkeypatch: pytest.MonkeyPatch, kind: Quantization | None
) -> None:
    """`remask models` and the choice of a quantization say it, of the shape alone."""
    weights, seen = weight_bytes(TINY, torch.float32, quantization=kind), set[int]()
    for left in range(0, 120 * MB, 8 * MB):
        before = CpuMemory.before_loading(TINY, torch.float32, kind, weights + left)
        try:
            engine = with_free(monkeypatch, left, kind=kind)
        except ConfigError:
            assert before.fitting_length() == 0
            assert before.kv_tokens() is None
        else:
            assert before.fitting_length() == engine.max_model_len
            assert (before.kv_tokens() or 0) >= engine.max_model_len
        seen.add(before.fitting_length())
    assert {0, TINY.max_length} < seen


def test_a_length_that_was_asked_for_is_refused_with_what_fits(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    longest = TINY.max_length
    with pytest.raises(
        ConfigError, match=r"K/V do not fit: .* two canvases of up to .* --max-model-len (\d+) or"
    ) as no:
        with_free(monkeypatch, 30 * MB, max_model_len=longest)
    fitting = int(str(no.value).split("--max-model-len ")[1].split()[0])
    with caplog.at_level(logging.WARNING):
        engine = with_free(monkeypatch, 30 * MB, max_model_len=fitting)
    assert engine.max_model_len == fitting
    assert f"canvases have up to {fitting} tokens" in caplog.text
    with pytest.raises(ConfigError, match="K/V do not fit"):
        with_free(monkeypatch, 30 * MB, max_model_len=fitting + 16)
    with pytest.raises(ConfigError, match="or a smaller model"):
        with_free(monkeypatch, MB)


def test_requests_wait_for_pages_and_answer_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where eight may run, and two have room, all are answered, and as where all have room."""
    answers, most = [], []
    for free in (10**11, 0):
        limits = EngineConfig(max_num_seqs=8, max_model_len=64, store_budget_tokens="auto", batch_invariant=True)
        with monkeypatch.context() as patch:
            llm = LLM("bundled", dtype="float32", device="cpu", threads=1, engine=limits)
            if not free:
                cpu = CpuMemory.beside_model(llm.model, 0, 16)
                free = int((cpu.pair_bytes(64) + 8 * cpu.token.kv) / CPU_SHARE) + 1
            patch.setattr(sizing, "cpu_memory", lambda free=free: (10**12, free))
            engine = llm.session.new_engine()
        prompts = [list(range(20 + number, 60 + number)) for number in range(8)]
        for request in llm.session.requests(prompts, {"max_tokens": 16, "steps": 4}):
            engine.add(request)
        together = 0
        found: dict[str, Sequence[int]] = {}
        while engine.busy:
            ended = [event.result for event in engine.step() if event.result is not None]
            found |= {result.id: result.token_ids for result in ended}
            together = max(together, running_canvases(engine))
        answers.append(found)
        most.append(together)
    assert most == [8, 2]
    assert len(answers[0]) == 8
    assert answers[0] == answers[1]


def test_kv_beside_quantized_weights_are_half_as_wide() -> None:
    weights = dummy_weights(TINY, torch.float32, CPU, quantization="int8")
    model = Transformer(TINY, weights)
    engine = Engine(model, EngineConfig(max_model_len=64), "x")
    assert (model.dtype, engine.pool.k[0].dtype) == (torch.float32, torch.bfloat16)
    engine.pool.allocate_outputs()
    assert engine.pool.outputs[0][0].dtype == torch.float32, "outputs are added to hidden states"
    plain = Transformer(TINY, dummy_weights(TINY, torch.float32, CPU))
    assert plain.kv_dtype == torch.float32
    half = Transformer(TINY, dummy_weights(TINY, torch.float16, CPU, quantization="int8"))
    assert half.kv_dtype == torch.float16
    canvas = Canvas.masked(list(range(8, 40)), 8, TINY.mask_id)
    every = np.ones(len(canvas), dtype=bool)
    with torch.inference_mode():
        wide, few = (
            model.forward(pack_uncached(model, [canvas], [every]), Pool(TINY, 40, 1, dtype, CPU, torch.float32))
            for dtype in (torch.float32, torch.bfloat16)
        )
    off = (wide - few).norm(dim=-1) / wide.norm(dim=-1)
    assert 0 < off.max() < 0.02


@pytest.mark.thorough
@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_random_weights_stand_once_in_memory(kind: Any) -> None:
    """What is drawn and quantized is one tensor at a time; the embedding is drawn in its place."""
    config = preset("llada-100m")
    with LiveBytes() as live:
        weights = dummy_weights(config, torch.bfloat16, CPU, quantization=kind)
    largest = max(2 * layer.gate_up.numel() for layer in weights.layers)
    assert weights.embed.nbytes > 5 * largest, "a copy of it would be seen"
    shapes = empty_weights(config, torch.bfloat16, torch.device("meta")).nbytes  # which take no memory
    assert live.peak - shapes < weights.nbytes + 3 * largest


def test_many_rows_are_multiplied_some_at_a_time() -> None:
    weights = dummy_weights(TINY, torch.float32, CPU, quantization="int8")
    matrix, bias = weights.layers[0].qkv, torch.randn(weights.layers[0].qkv.shape[0])
    x = torch.randn(2 * PRODUCT_ROWS + 3, TINY.hidden)
    whole = torch.nn.functional.linear(x, matrix, bias)
    for start in range(0, len(x), 700):
        part = torch.nn.functional.linear(x[start : start + 700], matrix, bias)
        assert torch.equal(part, whole[start : start + 700])


LLADA = preset("llada-8b")
GB = 10**9


def chosen(
    monkeypatch: pytest.MonkeyPatch, speed: tuple[float, float, float], free: float | None, **changed: Any
) -> str | None:
    """What is taken where the dtype, int8 and int4 are so many times as fast as float32."""
    dtype, eight, four = ((own / 2, own, 2 * own) for own in speed)
    monkeypatch.setattr(cpu_memory, "dtype_speeds", lambda _: dtype)
    monkeypatch.setattr(cpu_memory, "int8_kernel", lambda: Kernel("fbgemm", speed=eight))
    monkeypatch.setattr(cpu_memory, "int4_kernel", lambda: Kernel("int_mm", speed=four))
    memory = None if free is None else DeviceMemory(64 * GB, int(free * GB), 1.0)
    told = {"choice": "auto", "stored": None, "config": LLADA, "dtype": torch.bfloat16, "device": CPU} | changed
    kind, why = resolve_quantization(**told, memory=memory)
    assert why.startswith("auto: ")
    return kind


EIGHT, WIDE, FOUR = (2.0, 3.0, 2.5), (4.0, 3.0, 2.5), (1.0, 3.0, 3.5)


@pytest.mark.parametrize(
    ("speed", "free", "kind"),
    [
        (EIGHT, None, "int8"),
        (EIGHT, 40, "int8"),
        (EIGHT, 11, "int8"),
        (EIGHT, 10, "int4"),
        (EIGHT, 8, "int4"),
        (EIGHT, 2, "int4"),
        (WIDE, None, None),
        (WIDE, 40, None),
        (WIDE, 11, "int8"),
        (WIDE, 7, "int4"),
        (FOUR, None, "int4"),
        ((3.0, 3.2, 3.2), None, None),
        ((1.0, 3.0, 3.2), None, "int8"),
    ],
)
def test_the_fastest_that_fits(
    monkeypatch: pytest.MonkeyPatch, speed: tuple[float, float, float], free: float | None, kind: str | None
) -> None:
    """Bits are given up for a tenth of speed at least. In 10 GB the weights of int8 fit, and no canvas beside them."""
    assert chosen(monkeypatch, speed, free) == kind


def test_int4_is_not_taken_where_it_does_not_take_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = replace(LLADA, intermediate=LLADA.intermediate + 8)
    assert chosen(monkeypatch, FOUR, None, config=odd) == chosen(monkeypatch, FOUR, 2, config=odd) == "int8"


def test_what_there_is_nothing_to_choose_for(monkeypatch: pytest.MonkeyPatch) -> None:
    assert chosen(monkeypatch, EIGHT, 40, config=preset("llada-tiny")) is None
    assert chosen(monkeypatch, EIGHT, 40, device=torch.device("cuda")) is None
    assert chosen(monkeypatch, WIDE, 40, stored="int4") == "int4"
    assert resolve_quantization("int4", None, LLADA, torch.bfloat16, CPU, None) == ("int4", "as asked")
    assert resolve_quantization(None, "int8", LLADA, torch.bfloat16, CPU, None) == ("int8", "as in the files")
    assert resolve_quantization(None, None, LLADA, torch.bfloat16, CPU, None)[0] is None


def test_the_choice_is_in_the_start_up_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr(cpu_memory, "BFLOAT16_PARAMETERS", 0)
    monkeypatch.setattr(cpu_memory, "int8_kernel", lambda: Kernel("int_mm", speed=(1.1, 3.0, 2.0)))
    monkeypatch.setattr(cpu_memory, "int4_kernel", lambda: Kernel("int_mm", speed=(1.0, 2.0, 2.0)))
    with caplog.at_level(logging.INFO):
        llm = LLM("llada-tiny", load_format="dummy", dtype="float32", device="cpu", threads=1, quantization="auto")
    assert llm.loaded.quantization == "int8"
    assert "(auto: of what fits, times as fast as float32: float32 1.0, int8 1.9, int4 1.6)" in caplog.text
    assert f"({llm.engine.pool.page_count * 16} tokens of K/V in bfloat16)" in caplog.text
