"""`remask analyze precision`: what it counts, and what it refuses."""

from pathlib import Path

import pytest

from remask import LLM
from remask.cli import main
from remask.errors import ConfigError
from remask.request.sampling_params import SamplingParams
from remask_lab.bench.workload import random_workload
from remask_lab.records.record import read_record
from remask_lab.subjects.precision import (
    OTHER,
    USUAL,
    Arithmetic,
    Divergence,
    _divergence,
    arithmetics,
    measure_precision,
    reading,
)


def analyze(subject: str, *options: str) -> int:
    return main(["--quiet", "analyze", subject, "--device", "cpu", *options])


def test_precision_of_a_dummy_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "x.json", tmp_path / "plots"
    model = ["--model", "gidd-tiny", "--load-format", "dummy", "--requests", "4", "--batch", "2"]
    model += ["--prompt-tokens", "20"]
    sampling = ["--sampling", '{"max_tokens": 6, "uniform": {"canvas_length": 32}, "block_length": 3}']
    assert analyze("precision", *model, *sampling, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, "analyze precision")
    rows = record.data["rows"]
    assert [(row["arithmetic"]["dtype"], row["arithmetic"]["cache"]) for row in rows] == [
        (dtype, cache) for dtype in ("float32", "bfloat16") for cache in ("none", "none", "block-prefix")
    ]
    assert rows[0]["tokens"] == rows[2]["tokens"] == 0, "in float32 the cache is exact"
    assert rows[4]["reference"] == rows[3]["arithmetic"]
    assert rows[3]["reference"] == rows[0]["arithmetic"]
    assert record.about["settings"]["dtypes"] == ["float32", "bfloat16"]
    assert record.data["reading"] in capsys.readouterr().out
    assert (plots / "precision.png").exists()


def test_other_kernels_run_where_the_usual_one_is_pytorchs() -> None:
    llm = LLM("llada-tiny", load_format="dummy", dtype="float32")
    workload = random_workload(llm, 3, 1, 0, SamplingParams(max_tokens=4, ignore_eos=True), 6, 4)
    usual = Arithmetic("float32", 1, "none", USUAL)
    assert [row.attention for row in arithmetics(llm, 2)] == [USUAL, USUAL, OTHER]
    rows = measure_precision([llm], workload, 2)
    assert [row.reference for row in rows] == [usual] * 3
    assert str(rows[2].arithmetic) == "float32, batch 1, softmax step by step"
    exact = LLM("sdar-tiny", load_format="dummy", dtype="float32")
    assert [row.cache for row in arithmetics(exact, 2)] == ["none", "none", "none", "exact"]
    for batch, message in ((1, "is no batch"), (4, "3 requests make no batch of 4")):
        with pytest.raises(ConfigError, match=message):
            measure_precision([llm], workload, batch)


def test_what_a_divergence_is() -> None:
    first, other = Arithmetic("float32", 1, "none", USUAL), Arithmetic("bfloat16", 1, "none", USUAL)
    found = _divergence(other, first, ((1, 2, 3, 4), (5, 6), (7,)), ((1, 2, 9, 9), (5, 6, 7, 8), (7,)), 0.5)
    assert (found.tokens, found.responses, found.onset) == (1 - (0.5 + 0.5 + 1) / 3, 2 / 3, 0.5)
    same = Divergence(first, first, 0.0, 0.0, 0.0, 1.0)
    told = reading([same, found, Divergence(first, other, 0.0, 0.0, 0.0, None)])
    assert told == (
        "Bfloat16, batch 1 changes 33.33 % of tokens, in 66.7 % of responses, against float32, batch 1, on average "
        "from 50 % of a response on. Not a token changes under float32, batch 1 (as bfloat16, batch 1). Accuracy lies "
        "between 50.0 % and 100.0 %."
    )
