"""What is sent of a call, and what stands on every rank already."""

import gc
import pickle
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from remask.checkpoint.loaded import dummy_weights
from remask.families import preset
from remask.model.pool import Pool
from remask.model.stage import Save, Stage
from remask.model.transformer import Transformer
from remask.model.work_list import WorkList
from remask.parallel.message import ObjectNames, RankObjects
from remask.readers.guidance import Residual, StoredGuidance
from tests.engine.support import CPU

CONFIG = preset("llada-tiny")
OURS, THEIRS = (Transformer(CONFIG, dummy_weights(CONFIG, torch.float32, CPU)) for _ in range(2))
SEEN: list[Any] = []


class Line:
    """Rank 0 and another rank, without processes between them."""

    def __init__(self) -> None:
        self.names, self.objects = ObjectNames(), RankObjects(THEIRS)
        self.sent = 0

    def run_on_all(self, act: Any, *args: Any) -> Any:
        call, number = self.names.pack_call(act, args)
        buffer = call.buffer(CPU)
        self.sent = buffer.nbytes
        SEEN.clear()
        self.objects.run(call.content, lambda empty: empty.copy_(buffer))
        result = act(*args)
        self.names.record_result(result, number)
        return result

    @property
    def named(self) -> int:
        return len(self.objects._by_name)


def note(*args: Any) -> None:
    SEEN.append(args)


def zeros(model: Transformer, *shape: int) -> Tensor:
    return torch.zeros(shape) + (model is THEIRS)


def new_pool(model: Transformer) -> Pool:
    return Pool(model.rank_config, 2, 4, model.dtype, model.device)


def test_each_rank_has_its_own_model_and_its_own_tensors() -> None:
    line = Line()
    states = line.run_on_all(zeros, OURS, 3, 5, 2)
    line.run_on_all(note, OURS, states[1], states[2, 1:4:2], states)
    (model, layer, some, whole), _ = SEEN
    assert model is THEIRS
    assert line.sent == 0
    assert [tuple(t.shape) for t in (layer, some, whole)] == [(5, 2), (2, 2), (3, 5, 2)]
    some.fill_(7)
    assert whole[2, 1:4:2].eq(7).all()
    assert whole.sum() == 7 * 4 + 26
    assert layer.eq(1).all()
    assert not states.any(), "rank 0 has zeros of its own"


def test_the_contents_of_other_tensors_are_sent_once() -> None:
    line = Line()
    index, mask = torch.arange(5), torch.tensor([True, False, True])
    every = torch.arange(12, dtype=torch.bfloat16).view(3, 4).t()
    line.run_on_all(
        note, index, [index, {"a": mask}], every, torch.empty(0, 4), torch.tensor(2.5).expand(3), slice(1, 4)
    )
    found, _ = SEEN
    assert torch.equal(found[0], index)
    assert found[1][0] is found[0]
    assert torch.equal(found[1][1]["a"], mask)
    assert torch.equal(found[2], every)
    assert found[3].shape == (0, 4)
    assert torch.equal(found[4], torch.full((3,), 2.5))
    assert found[5] == slice(1, 4)
    assert line.sent == 48 + 16 + 32 + 16


def test_a_packed_stage_travels_as_it_is() -> None:
    line, rows = Line(), torch.arange(4)
    states = line.run_on_all(zeros, OURS, 3, 4, 2)
    save = Save(slice(0, 4), states[1], slice(None))
    stage = Stage(range(1, 2), rows, rows, None, None, WorkList.of(4, 4), save=(save,), outputs=True)
    line.run_on_all(note, stage)
    ((got,), _) = SEEN
    assert (got.layers, got.outputs, got.save[0].rows) == (range(1, 2), True, slice(0, 4))
    assert got.work.units.tolist() == [[0, 4, 0, 4, 0]]
    assert torch.equal(got.positions, rows)
    assert got.save[0].states.eq(1).all()


@torch.inference_mode()  # as passes run: elsewhere a view keeps its tensor alive
def test_what_rank_0_drops_every_rank_drops() -> None:
    line = Line()
    kept, gone = line.run_on_all(zeros, OURS, 4), line.run_on_all(zeros, OURS, 4)
    pool = line.run_on_all(new_pool, OURS)
    view = gone[1:]
    assert line.named == 3
    del gone
    gc.collect()
    line.run_on_all(note, kept, view)
    assert line.named == 2
    assert line.sent == 16, "a view of what has no name any more is sent"
    line.run_on_all(note, pool)
    ((theirs,), (ours,)) = SEEN
    assert ours is pool
    assert isinstance(theirs, Pool)
    assert theirs is not pool
    del pool, ours
    SEEN.clear()
    gc.collect()
    with pytest.raises((AttributeError, pickle.PicklingError)):
        line.run_on_all(lambda: None)  # what cannot be sent tells nobody
    line.run_on_all(note)
    assert line.named == 1


def test_a_name_is_not_taken_for_what_lies_in_the_same_memory_later() -> None:
    line = Line()
    for value in range(50):
        held = line.run_on_all(zeros, OURS, 1000)
        del held
        fresh = torch.full((1000,), float(value))
        line.run_on_all(note, fresh)
        (found,), _ = SEEN
        assert torch.equal(found, fresh)
        SEEN.clear()
    assert line.named <= 1


def test_results_that_are_one_tensor_have_one_name() -> None:
    line = Line()
    h = line.run_on_all(zeros, OURS, 4)
    h = line.run_on_all(same, h)
    line.run_on_all(note, h)
    assert line.sent == 0
    assert line.named <= 2
    del h
    SEEN.clear()
    gc.collect()
    line.run_on_all(note)
    assert line.named == 0


def same(x: Tensor) -> Tensor:
    return x.add_(1)


@torch.inference_mode()
def test_a_view_that_was_returned_outlives_its_tensor() -> None:
    line = Line()
    whole = line.run_on_all(zeros, OURS, 4)
    part = line.run_on_all(half, whole)
    del whole
    SEEN.clear()
    gc.collect()
    line.run_on_all(note, part)
    ((theirs,), _) = SEEN
    assert (line.sent, theirs.tolist()) == (0, [1, 1]), "it is that of each rank"


def half(x: Tensor) -> Tensor:
    return x[:2]


def test_every_rank_keeps_guidance_of_its_own() -> None:
    line, keep = Line(), Residual()
    line.run_on_all(fill, keep, torch.arange(6.0))
    line.run_on_all(note, StoredGuidance(1.0, keep, np.array([1])))
    (theirs,), (ours,) = SEEN
    assert ours.residual is keep
    assert theirs.residual is not keep
    assert theirs.residual.at(theirs.rows).tolist() == [1.0]
    del keep, ours, theirs
    SEEN.clear()
    gc.collect()
    line.run_on_all(note)
    assert line.named == 0


def fill(keep: Residual, x: Tensor) -> None:
    keep.add(x, torch.zeros_like(x))
