"""The measurement beside llama.cpp: the file that it writes, and the report, with a stand-in for llama.cpp."""

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from remask import LLM
from remask.checkpoint.load import load_weights, read_config
from remask.checkpoint.loaded import dummy_weights
from remask.errors import ConfigError
from remask.families import preset
from remask.plan.canvas import Canvas
from remask_lab.speed import llama_cpp
from remask_lab.speed.__main__ import MEASUREMENTS
from remask_lab.speed.command import run_measurement
from remask_lab.speed.llama_cpp import TYPES, write_gguf

CPU, TINY = torch.device("cpu"), preset("llada-tiny")
measure = partial(run_measurement, "speed", "llama_cpp", *MEASUREMENTS["llama_cpp"])


@pytest.mark.parametrize(("kind", "error"), [("f32", 0.0), ("q8_0", 0.01), ("q4_0", 0.1)])
def test_a_file_holds_the_weights_that_it_was_made_of(tmp_path: Path, kind: str, error: float) -> None:
    weights = dummy_weights(TINY, torch.float32, CPU)
    write_gguf(path := tmp_path / "model.gguf", TINY, weights, kind)
    family, config = read_config(path)
    assert (config.family, config.mask_id, config.tied) == ("llada", TINY.mask_id, TINY.tied)
    read = load_weights(path, family, config, torch.float32, CPU, progress=False)
    for (field, _, own), (_, _, other) in zip(weights.named_tensors(), read.named_tensors(), strict=True):
        assert float((own - other).norm()) <= error * float(own.norm()), field


def test_only_files_of_llada_are_written(tmp_path: Path) -> None:
    dream = preset("dream-tiny")
    with pytest.raises(ConfigError, match="files are written of llada models"):
        write_gguf(tmp_path / "x.gguf", dream, dummy_weights(dream, torch.float32, CPU), "f32")


def test_the_report_has_both(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    @contextmanager
    def stand_in(path: Path, canvas: Canvas, threads: int) -> Iterator[llama_cpp.Pass]:
        """The same file in float32, so that few bits differ from it."""
        assert threads == 1
        yield llama_cpp.our_pass(llama_cpp.open_ours(path, None, argparse.Namespace(threads=1)), canvas)

    asked: list[str] = []
    answer = llama_cpp.answer

    def watched(llm: LLM, canvas: Canvas, steps: int, block: int, cache: str) -> None:
        before = llm.engine.stats.steps
        answer(llm, canvas, steps, block, cache)
        assert llm.engine.stats.steps - before == steps == 8
        asked.append(cache)

    monkeypatch.setattr(llama_cpp, "find_spec", lambda _: object())
    monkeypatch.setattr(llama_cpp, "version", lambda _: "0")
    monkeypatch.setattr(llama_cpp, "their_pass", stand_in)
    monkeypatch.setattr(llama_cpp, "answer", watched)
    measure(["--model", "llada-tiny", "--prompt", "8", "--response", "8", "--block", "4"])
    told = json.loads(capsys.readouterr().out)
    assert asked == [*llama_cpp.CACHES] * len(TYPES)
    exact, eight, four = told["results"]
    assert (exact["ours"], eight["ours"], four["ours"]) == ("float32", "int8", "int4")
    assert exact["logits_apart"] == 0
    assert 0 < eight["logits_apart"] < 0.1
    assert eight["from_float32"]["ours"] < four["from_float32"]["ours"] < 1
    for found in told["results"]:
        assert found["answer_s"]["llama.cpp"] == 8 * found["pass_s"]["llama.cpp"]


def test_without_the_package_the_command_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llama_cpp, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match="pip install llama-cpp-python"):
        measure([])
    with pytest.raises(ConfigError, match="q9"):
        measure(["--kinds", "q9"])


def test_distance_of_logits() -> None:
    assert llama_cpp.rms_error(np.array([[1.0, 2.0]]), np.array([[1.0, 2.0]])) == 0
    assert llama_cpp.rms_error(np.array([[3.0, 0.0]]), np.array([[0.0, 4.0]])) == pytest.approx(1.25)
