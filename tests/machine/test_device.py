"""What `auto` means, what is refused, and what waits for a device."""

from collections.abc import Iterator
from unittest.mock import Mock, call, patch

import pytest
import torch

from remask import LLM
from remask.errors import RemaskError
from remask.machine import device as config
from remask.machine.cpu import OthersUse
from remask.machine.transfers import Arrival, fetch

CPU = torch.device("cpu")
LARGE = 10**9


@pytest.mark.parametrize(
    ("flags", "parameters", "dtype", "reason"),
    [
        ({"avx2"}, LARGE, torch.float32, "no instructions for bfloat16"),
        ({"avx2", "avx512_bf16"}, LARGE, torch.bfloat16, "this CPU has avx512_bf16"),
        ({"amx_bf16", "avx512_bf16"}, LARGE, torch.bfloat16, "amx_bf16 and avx512_bf16"),
        ({"asimd", "bf16"}, LARGE, torch.bfloat16, "this CPU has bf16"),
        ({"avx512_bf16"}, 2_000_000, torch.float32, "2 million parameters gain nothing"),
    ],
)
def test_auto_takes_bfloat16_where_it_gains(
    monkeypatch: pytest.MonkeyPatch, flags: set[str], parameters: int, dtype: torch.dtype, reason: str
) -> None:
    monkeypatch.setattr(config, "instructions", lambda: frozenset(flags))
    chosen, why = config.resolve_dtype("auto", CPU, parameters)
    assert chosen is dtype
    assert reason in why


def test_a_named_dtype_is_taken_as_it_is() -> None:
    assert config.resolve_dtype("float16", CPU, 1) == (torch.float16, "as asked")
    assert config.resolve_dtype("auto", torch.device("meta"), 1)[0] is torch.bfloat16
    with pytest.raises(RemaskError, match="Did you mean 'float16'"):
        config.resolve_dtype("float61", CPU, 1)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Sixteen idle cores without a quota, on which nobody has set a number of threads."""
    for name in config.THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    before = torch.get_num_threads()
    torch.set_num_threads(16)
    for name, value in (("cores", 16), ("physical_cores", 16), ("quota", None), ("measure_others_use", None)):
        monkeypatch.setattr(config, name, lambda *_, value=value: value)
    config._chosen_thread_counts.cache_clear()
    yield monkeypatch
    config._chosen_thread_counts.cache_clear()
    torch.set_num_threads(before)


NINE_USED = "other processes use 9.0 of 16 cores"


def others(used: float) -> OthersUse:
    return OthersUse(seconds=1.0, cores=16, used=used, stolen=0.0)


@pytest.mark.parametrize(
    ("parameters", "spare", "facts", "number", "reason"),
    [
        (LARGE, 0, {}, 16, "16 cores"),
        (LARGE, 1, {}, 15, "16 cores, 1 of them left to HTTP"),
        (2_030_000, 1, {}, 1, "2.03 million parameters keep no more busy"),
        (9_000_000, 0, {}, 4, "9 million parameters keep no more busy"),
        (LARGE, 0, {"physical_cores": 8}, 8, "8 cores"),
        (LARGE, 0, {"quota": 2.5}, 2, "the container may use 2.5 of 16 cores"),
        (LARGE, 1, {"quota": 2.5}, 1, "the container may use 2.5 of 16 cores, 1 of them left to HTTP"),
        (LARGE, 0, {"quota": 0.5}, 1, "the container may use 0.5 of 16 cores"),
        (LARGE, 0, {"quota": 32.0}, 16, "16 cores"),
        (LARGE, 0, {"measure_others_use": others(13.4)}, 3, "other processes use 13.4 of 16 cores"),
        (LARGE, 1, {"measure_others_use": others(9.0)}, 6, f"{NINE_USED}, 1 of them left to HTTP"),
        (LARGE, 0, {"measure_others_use": others(16.0)}, 1, "other processes use 16.0 of 16 cores"),
        (LARGE, 0, {"measure_others_use": others(0.1)}, 16, "16 cores"),
    ],
)
def test_threads_are_chosen_by_what_is_tightest(
    machine: pytest.MonkeyPatch, parameters: int, spare: int, facts: dict[str, object], number: int, reason: str
) -> None:
    for name, value in facts.items():
        machine.setattr(config, name, lambda *_, value=value: value)
    assert config.resolve_threads(None, parameters, spare, None) == config.Threads(number, reason)


def test_one_core_serves_as_well(machine: pytest.MonkeyPatch) -> None:
    for name in ("cores", "physical_cores"):
        machine.setattr(config, name, lambda: 1)
    torch.set_num_threads(1)
    assert config.resolve_threads(None, LARGE, 1, None).count == 1


def test_what_a_user_sets_wins_and_is_named(machine: pytest.MonkeyPatch) -> None:
    assert config.resolve_threads(3, LARGE, 1, None) == config.Threads(3, "as asked")
    torch.set_num_threads(5)
    assert config.resolve_threads(None, 1, 1, None) == config.Threads(5, "as this process has set it")
    machine.setenv("OMP_NUM_THREADS", "5")
    assert config.resolve_threads(None, 1, 1, None) == config.Threads(5, "from OMP_NUM_THREADS")
    config.set_threads(config.Threads(3, "as asked"))
    assert config.resolve_threads(None, 1, 1, None) == config.Threads(5, "from OMP_NUM_THREADS")
    for bad in (0, -1, 1.5, True):
        with pytest.raises(RemaskError, match="threads must be"):
            config.resolve_threads(bad, 1, 0, None)  # type: ignore[arg-type]


def test_an_earlier_models_number_is_no_users(machine: pytest.MonkeyPatch) -> None:
    config.set_threads(config.resolve_threads(None, 1, 0, None))
    assert torch.get_num_threads() == 1
    assert config.resolve_threads(None, LARGE, 0, None).count == 16


def test_a_model_computes_on_the_number_and_says_why(
    machine: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO"):
        LLM("llada-tiny", load_format="dummy")
    assert torch.get_num_threads() == 1
    assert "threads=1 (0.127 million parameters keep no more busy)" in caplog.text
    LLM("llada-tiny", load_format="dummy", threads=2)
    assert torch.get_num_threads() == 2


def test_devices() -> None:
    assert config.resolve_device("cpu") == torch.device("cpu")
    expected = "cuda" if torch.cuda.is_available() else "cpu"
    assert config.resolve_device("auto").type == expected
    for name in ("nonsense", "cuda:77"):
        with pytest.raises(RemaskError, match=f"device '{name}' cannot be used"):
            config.resolve_device(name)


def test_what_is_queued_later_does_not_delay_it() -> None:
    """The copy is queued at once, and what is waited for is the point behind it, before anything is read."""
    done = Mock()
    tensor = Mock(is_cuda=True, device="cuda:0", shape=(2,), dtype=torch.float32)
    done.pinned.cpu.return_value = torch.tensor([1, 2])
    done.empty.return_value, done.Event.return_value = done.pinned, done.event
    with patch.object(torch, "empty", done.empty), patch.object(torch, "cuda", done):
        arrival = Arrival(tensor)
    queued = [
        call.empty((2,), dtype=torch.float32, pin_memory=True),
        call.pinned.copy_(tensor, non_blocking=True),
        call.Event(),
        call.current_stream("cuda:0"),
        call.event.record(done.current_stream.return_value),
    ]
    assert done.mock_calls == queued
    assert arrival.wait().tolist() == [1, 2]
    assert done.mock_calls == [*queued, call.event.synchronize(), call.pinned.cpu()]


@pytest.mark.parametrize("numbers", [[1.0, 2.0], []])
def test_on_a_cpu_there_is_no_way(numbers: list[float]) -> None:
    assert fetch(torch.tensor(numbers)).tolist() == numbers
