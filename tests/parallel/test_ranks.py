"""Models in several processes: what they exchange, how they end, and what they refuse."""

import asyncio
import os
import re
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file

from remask import LLM
from remask.engine.async_engine import AsyncEngine
from remask.engine.config import EngineConfig
from remask.engine.observer import EngineObserver
from remask.engine.runner import PassResult
from remask.errors import CheckpointError, ConfigError, EngineDeadError, RankLostError
from remask.parallel import lead
from remask.parallel.group import open_store
from tests import goldens
from tests.checkpoint import checkpoints
from tests.checkpoint.adapters import adapted
from tests.goldens import uniform
from tests.parallel.ranks import Lender, begins_and_raises, interrupted, lent, raises
from tests.waiting import LONGEST_S, ended, eventually

GOLDEN = str(goldens.model_dir("llada"))
COMMON: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1}
LAYERS, WIDE = 6, 64
SAMPLING = {"max_tokens": 16, "block_length": 8, "steps": 16}


@pytest.fixture
def two(ranks: None) -> Iterator[LLM]:
    """A model in two processes, that are kept for other tests."""
    with LLM(GOLDEN, tensor_parallel=2, engine=EngineConfig(max_model_len=64), **COMMON) as llm:
        yield llm


def lead_of(llm: LLM) -> lead.LeadRanks:
    ranks = llm.model.ranks
    assert isinstance(ranks, lead.LeadRanks)
    return ranks


@pytest.mark.parametrize("cache", ["none", "block-dual", "bicache+block-dual"])
def test_a_pass_exchanges_two_sums_a_layer_and_three_numbers_a_predicted_row(two: LLM, cache: str) -> None:
    ranks, engine, predicted, passes = lead_of(two), two.engine, 0, 0

    class Count(EngineObserver):
        waits = True

        def on_complete(self, ran: PassResult) -> None:
            nonlocal predicted, passes
            predicted, passes = predicted + len(ran.hidden), passes + 1

    engine.attach(Count())
    settings = {"depth": 3} if cache.startswith("bicache") else None
    sent, received, operations = ranks.sent, ranks.received, ranks.operations
    prompts = [list(range(3, 33)) for _ in range(3)]
    two.generate(prompts, SAMPLING, prefix_length=20, cache=cache, cache_config=settings)
    sums = 2 * engine.stats.row_layers * WIDE * 4
    assert ranks.sent - sent == sums + 12 * predicted
    # Of the packed step indices are sent, and no row's numbers: less than one hidden state in four layers.
    assert 0 < ranks.received - received < engine.stats.row_layers * WIDE * 4 / LAYERS
    assert ranks.operations - operations <= passes * (2 * LAYERS + 2 + 2) + 8


def test_passes_are_queued_ahead_on_all_ranks(two: LLM) -> None:
    """Rank 0 has the tokens and chooses positions; the others are told what they compute with."""
    prompts, found = [list(range(3, 20 + n)) for n in range(3)], []
    for llm, overlap in ((two, True), (LLM(GOLDEN, engine=EngineConfig(max_model_len=64), **COMMON), False)):
        llm.session.engine = llm.session.new_engine(EngineConfig(max_model_len=64, overlap=overlap))
        found.append(llm.generate(prompts, SAMPLING, cache="block-dual"))
        assert (llm.engine.stats.queued_passes > 10) == overlap
    assert [each.token_ids for each in found[0]] == [each.token_ids for each in found[1]]


@pytest.mark.parametrize(("cache", "settings"), [("bicache", {"depth": 2}), ("reuse", {})])
def test_a_stored_prefix_is_that_of_one_process(two: LLM, cache: str, settings: dict[str, Any]) -> None:
    prompts = [[*range(3, 23), *range(first, first + 8)] for first in (30, 40)]
    one = LLM(GOLDEN, engine=EngineConfig(max_model_len=64), **COMMON)
    outputs = [
        llm.generate(prompts, SAMPLING, prefix_length=20, cache=cache, cache_config=settings) for llm in (two, one)
    ]
    assert [each.token_ids for each in outputs[0]] == [each.token_ids for each in outputs[1]]
    assert outputs[0][0].usage.prefix_tokens == 20
    two.engine.store.drop()
    assert (len(lead_of(two)._names._storages), len(lead_of(two)._names._objects)) == (0, 1)


@pytest.mark.usefixtures("ranks")
def test_adapters_are_cut_as_matrices_are(tmp_path: Path) -> None:
    """Merged and beside the weights, of matrices that are cut by rows and by columns."""
    tensors = load_file(Path(GOLDEN) / "model.safetensors")
    targets = ["q_proj", "v_proj", "attn_out", "up_proj", "model.transformer.blocks.1.ff_out"]
    adapted(tmp_path / "one", tensors, 1, target_modules=targets)
    adapted(tmp_path / "two", tensors, 2, target_modules=targets)
    paths = {name: str(tmp_path / name) for name in ("one", "two")}
    found = []
    for size in (2, 1):
        limits = EngineConfig(max_model_len=64)
        with LLM(GOLDEN, tensor_parallel=size, engine=limits, adapters=paths, **COMMON) as llm:
            asked = [
                replace(each, id=str(number), adapter=name)
                for number, name in enumerate(["one", None, "two", "one"])
                for each in llm.session.requests(
                    [[5, 6, 7, number, 8]], SAMPLING, policy=llm.session.policy("block-dual")
                )
            ]
            found.append({out.id: out.token_ids for out in llm.session.run(asked)})
        with LLM(GOLDEN, tensor_parallel=size, engine=limits, adapter=paths["two"], **COMMON) as llm:
            (merged,) = llm.generate([[5, 6, 7, 2, 8]], SAMPLING, cache="block-dual")
            assert merged.token_ids == found[-1]["2"]
    assert found[0] == found[1]
    assert len(set(map(tuple, found[0].values()))) == 4


@pytest.mark.usefixtures("ranks")
def test_values_are_compared_over_the_heads_of_all_ranks() -> None:
    """How many rows stand still, and what follows from that."""
    found = []
    for size in (2, 1):
        model = str(uniform.model_dir("unif"))
        with LLM(model, tensor_parallel=size, engine=EngineConfig(max_model_len=64), **COMMON) as llm:
            sampling = {"max_tokens": 16, "block_length": 8, "seed": 1, "ignore_eos": True}
            (out,) = llm.generate([[5, 6, 7]], sampling, cache="uniform-cache", cache_config={"drift": 0.05})
            found.append((out.token_ids, out.usage.row_layers))
            (plain,) = llm.generate([[5, 6, 7]], sampling, cache="uniform-cache")
            assert out.usage.row_layers < plain.usage.row_layers
    assert found[0] == found[1]


@pytest.mark.thorough
def test_memory_of_ended_requests_is_given_back_everywhere(two: LLM) -> None:
    names = lead_of(two)._names
    for cache in ("none", "dllm-cache", "dkv-decode"):
        two.generate([[1, 2, 3, 4]] * 3, SAMPLING | {"cfg_scale": 0.5}, cache=cache)
    # What an evicted prefix or an ended request has held is gone. The pool stays.
    assert (len(names._storages), len(names._objects)) == (0, 1)


def test_where_all_ranks_fail_alike_they_go_on(two: LLM) -> None:
    first = two.generate([[1, 2, 3]], SAMPLING)
    with pytest.raises(ValueError, match="on purpose"):
        lead_of(two).run_on_all(raises, two.model, None)
    assert two.generate([[1, 2, 3]], SAMPLING)[0].token_ids == first[0].token_ids


def test_a_model_computes_outside_of_its_engine_with_one_process_only(two: LLM) -> None:
    with pytest.raises(ConfigError, match="load it with tensor_parallel=1"):
        two.model.forward(*_batch_of(two))
    refused: list[Callable[[], object]] = [
        lambda: two.session.new_engine(EngineConfig(batch_invariant=True)),
        lambda: two.session.new_engine(EngineConfig(graphs=True)),
    ]
    for act in refused:
        with pytest.raises(ConfigError, match="tensor_parallel"):
            act()
    assert two.generate([[1, 2, 3]], SAMPLING)[0].error is None, "all of it was refused before anything ran"


def test_audits_run_on_every_rank(two: LLM) -> None:
    """A depth that is earned begins at 0, and each request is audited until it is proven; nothing fails."""
    before = two.engine.stats.audits
    prompt = list(range(1, 21))
    (output,) = two.generate([prompt], SAMPLING, cache="bicache", cache_config={"depth": "earned"}, prefix_length=16)
    while two.engine.auditor.queue:
        two.engine.step()
    assert (output.error, output.usage.prefix_depth) == (None, 0)
    assert (two.engine.stats.audits, two.engine.stats.failed_audits) == (before + 1, 0)


def _batch_of(llm: LLM) -> tuple[Any, Any]:
    from remask.engine.pack import pack_uncached
    from remask.plan.canvas import Canvas

    return pack_uncached(llm.model, [Canvas([1, 2, 3], (), 0)]), llm.engine.pool


def test_after_close_nothing_is_computed(two: LLM) -> None:
    two.close()
    two.close()
    with pytest.raises(RankLostError, match=r"ended by close\(\)"):
        two.generate([[1, 2, 3]], SAMPLING)


def test_of_two_threads_that_lose_a_rank_one_gives_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    reasons = []

    def slow_error(reason: str) -> RankLostError:
        reasons.append(reason)
        time.sleep(0.1)  # longer than the other thread takes to begin
        return RankLostError(reason)

    monkeypatch.setattr(lead, "RankLostError", slow_error)
    ranks = lead.LeadRanks(Mock(), (), torch.device("cpu"), open_store())
    threads = [threading.Thread(target=ranks.lose, args=(reason,)) for reason in ("one ended", "another ended")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LONGEST_S)
    assert [str(ranks.lost)] == reasons


def test_an_interrupted_pass_ends_the_model(two: LLM) -> None:
    with pytest.raises(KeyboardInterrupt):
        lead_of(two).run_on_all(interrupted, two.model)
    with pytest.raises(RankLostError, match="was interrupted"):
        lead_of(two).check()


def test_two_models_at_once(lenders: list[Lender], monkeypatch: pytest.MonkeyPatch) -> None:
    mixture: dict[str, Any] = {"model": "llada-moe-tiny", "load_format": "dummy", **COMMON}
    with lent(monkeypatch, lenders[:1]):
        a = LLM(GOLDEN, tensor_parallel=2, **COMMON)
    with a, LLM(**mixture) as whole:
        with lent(monkeypatch, lenders[1:2]):
            b = LLM(**mixture, tensor_parallel=2)
        first = a.generate([[1, 2, 3]], SAMPLING)
        assert b.generate([[1, 2, 3]], SAMPLING)[0].token_ids == whole.generate([[1, 2, 3]], SAMPLING)[0].token_ids
        b.close()
        assert a.generate([[1, 2, 3]], SAMPLING)[0].token_ids == first[0].token_ids


@pytest.mark.usefixtures("ranks")
def test_a_rank_that_cannot_load_its_part_is_named(tmp_path: Path) -> None:
    tensors = checkpoints.random_tensors(checkpoints.LLADA)
    tensors["model.transformer.ff_out.weight"][-1, -1] = torch.nan  # the last rank's
    folder = checkpoints.write(tmp_path / "model", checkpoints.LLADA, tensors)
    with pytest.raises(CheckpointError, match=r"rank 1 of 2 .*failed: CheckpointError: .*holds 1 values of"):
        LLM(str(folder), tensor_parallel=2, **COMMON)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"tensor_parallel": 0}, "tensor_parallel"),
        ({"tensor_parallel": 3}, "its 4 attention heads are not a multiple of 3.* Use 1 or 2 or 4"),
        ({"tensor_parallel": 2, "engine": EngineConfig(batch_invariant=True)}, "leave one of the two out"),
    ],
)
def test_bad_settings_start_nothing(given: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", lambda *_args, **_more: pytest.fail("a process was started"))
    with pytest.raises(ConfigError, match=said):
        LLM(GOLDEN, **given, **COMMON)


def test_every_rank_has_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert lead.rank_devices(torch.device("cpu"), 3) == [torch.device("cpu")] * 3
    assert [str(each) for each in lead.rank_devices(torch.device("cuda"), 2)] == ["cuda:0", "cuda:1"]
    assert [str(each) for each in lead.rank_devices(torch.device("cuda:2"), 2)] == ["cuda:2", "cuda:3"]
    with pytest.raises(ConfigError, match="needs 5 CUDA devices, and 4 can be seen"):
        lead.rank_devices(torch.device("cuda:1"), 4)


@pytest.mark.thorough
def test_a_rank_that_fails_alone_ends_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    lender = Lender()
    try:
        with lent(monkeypatch, [lender]), LLM(GOLDEN, tensor_parallel=2, **COMMON) as llm:
            # Rank 0 returns and does not know; the next call finds out.
            lead_of(llm).run_on_all(raises, llm.model, 1)
            with pytest.raises(RankLostError, match=r"rank 1 of 2 .* ValueError: on purpose.* load it again"):
                llm.generate([[1, 2, 3]], SAMPLING)
    finally:
        lender.end()


@pytest.mark.thorough
def test_ranks_that_fail_at_different_operations_are_out_of_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """What rank 0 sends next would be taken for something else."""
    lender = Lender()
    try:
        with (
            lent(monkeypatch, [lender]),
            LLM(GOLDEN, tensor_parallel=2, **COMMON) as llm,
            pytest.raises(RankLostError, match=r"rank 1 of 2 .* ValueError: on purpose.* load it again"),
        ):
            lead_of(llm).run_on_all(begins_and_raises, llm.model)
    finally:
        lender.end()


async def _killed_while(llm: LLM, runs: bool) -> str:
    """Kill the other process of a served model, and return what its engine died of."""
    outer, (worker,) = AsyncEngine(llm.engine, 4), lead_of(llm)._workers
    outer.start()
    long = llm.session.requests([[1, 2, 3]], {"max_tokens": 500, "steps": 500, "block_length": 500})
    ticket = outer.submit([llm.engine.check(each) for each in long]) if runs else None
    if ticket is not None:  # it computes
        await anext(aiter(ticket))
    os.kill(worker.process.pid, signal.SIGKILL)
    if ticket is not None:
        with pytest.raises(EngineDeadError) as died:
            async for _ in ticket:
                pass
        return str(died.value)
    await asyncio.to_thread(eventually, lambda: not outer.alive)
    return str(outer.error)


@pytest.mark.thorough
@pytest.mark.parametrize("runs", [True, False])
def test_a_killed_rank_ends_the_engine_and_its_requests(runs: bool) -> None:
    """Whether it computes or not: nobody waits for a timeout."""
    limits = EngineConfig(max_model_len=512, max_num_seqs=2)
    with LLM("llada-tiny", load_format="dummy", tensor_parallel=2, engine=limits, **COMMON) as llm:
        said = asyncio.run(_killed_while(llm, runs))
        assert "RankLostError: rank 1 of 2" in said
        assert "was killed by signal 9" in said


SCRIPT = """
import sys, time
from remask import LLM
llm = LLM(sys.argv[1], tensor_parallel=2, dtype="float32", device="cpu", threads=1)
print([list(map(int, o.token_ids)) for o in llm.generate([[1, 2, 3]], {"max_tokens": 4})], flush=True)
print(llm.model.ranks._workers[0].process.pid, flush=True)
if sys.argv[2] == "sleep":
    time.sleep(600)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["sleep", "end"])
def test_ranks_end_with_rank_0(how: str) -> None:
    """A user's script without a guarded main part. It is killed, or ends without a word to the ranks."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT, GOLDEN, how], stdout=subprocess.PIPE, text=True) as rank0:
        assert rank0.stdout is not None
        assert rank0.stdout.readline().startswith("[[")
        pid = int(rank0.stdout.readline())
        if how == "sleep":
            os.kill(pid, signal.SIGINT)
            os.kill(pid, signal.SIGTERM)
            (mask,) = re.findall(r"^SigIgn:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
            ignored = {number for number in (signal.SIGINT, signal.SIGTERM) if int(mask, 16) >> number - 1 & 1}
            assert ignored == {signal.SIGINT, signal.SIGTERM}, "rank 0 ends it"
            rank0.kill()
        code = rank0.wait(LONGEST_S)
        assert code == (0 if how == "end" else -signal.SIGKILL)
    eventually(lambda: ended(pid))


@pytest.mark.thorough
def test_ranks_meet_where_nobody_else_reads(monkeypatch: pytest.MonkeyPatch, lenders: list[Lender]) -> None:
    """In a folder of this user alone, which is gone with the model, or where it cannot start; no port is open."""
    seen: list[Path] = []

    def opened() -> str:
        seen.append(Path(open_store()))
        return str(seen[-1])

    monkeypatch.setattr("remask.parallel.lead.open_store", opened)
    with monkeypatch.context() as patched:
        patched.setattr(lead.Worker, "__init__", Mock(side_effect=OSError("no more processes")))
        with pytest.raises(OSError, match="no more processes"):
            LLM(GOLDEN, tensor_parallel=2, **COMMON)
    assert not seen.pop().parent.exists()
    with lent(monkeypatch, lenders):
        model = LLM(GOLDEN, tensor_parallel=2, **COMMON)
    (store,) = seen
    assert stat.S_IMODE(store.parent.stat().st_mode) == 0o700
    assert store.exists()
    model.close()
    assert not store.parent.exists()
