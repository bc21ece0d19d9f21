import json
from pathlib import Path
from typing import Any

import pytest

from remask.cli import main
from remask_lab.records.record import read_record
from tests.goldens import uniform as goldens

NAMES = ("regions", "passes", "tokens", "layers")


def analyze(*options: str, model: Path | None = None) -> int:
    folder = str(model or goldens.model_dir("unif"))
    return main(["--quiet", "analyze", "drift", "--model", folder, "--dtype", "float32", "--device", "cpu", *options])


def requests(tmp_path: Path, **more: Any) -> str:
    lines = [goldens.Run(goldens.trace("T1_unif_b8"), "baseline", row).request_line() | more for row in (0, 1)]
    path = tmp_path / "requests.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def test_numbers_pictures_and_a_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output, plots = tmp_path / "drift.json", tmp_path / "plots"
    assert analyze("--input", requests(tmp_path), "--output", str(output), "--plots", str(plots)) == 0
    told = read_record(output, "analyze drift").data
    recorded = goldens.diagnostics()
    assert told["subject"]["passes"] == [24, 24]
    assert told["regions"]["trailing"]["attention"] == pytest.approx(
        float(recorded["attn_mass"][..., -1].mean()), abs=1e-5
    )
    assert told["entropy"] == pytest.approx(recorded["entropy"].mean((1, 2)).tolist(), abs=1e-4)
    prompt = recorded["k_drift"][:, :, :10].mean((1, 2)).tolist()
    first, *others = told["k_drift"]["prompt"]
    assert first is None
    assert others == pytest.approx(prompt, abs=1e-5)
    assert told["regions"]["bias"]["v_drift"] == 0
    assert len(told["k_layers"]) == len(told["k_layers"][0]) == 3
    for name in NAMES:
        data = (plots / f"drift-{name}.png").read_bytes()
        assert data.startswith(b"\x89PNG")
        assert int.from_bytes(data[16:20], "big") >= 1200
    text = capsys.readouterr().out
    assert "gidd, 3 layers, float32; 2 requests, 48 passes, blocks of 8" in text
    assert told["reading"] in text
    assert "Within a block prompt, rest past, previous do not move at all." in text
    assert "tokens changed a pass: 6.25 % of the response" in text
    assert f"Saved as {output}" in text


def test_one_pass_is_not_enough_for_drift(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing fails, and nothing is made up."""
    line = {"prompt_token_ids": [5, 6, 7]}
    source, output = tmp_path / "one.jsonl", tmp_path / "one.json"
    source.write_text(json.dumps(line))
    sampling = json.dumps({"max_tokens": 4, "steps_per_block": 1, "ignore_eos": True, "seed": 0})
    options = ["--sampling", sampling, "--output", str(output), "--plots", str(tmp_path)]
    assert analyze("--input", str(source), *options) == 0
    told = read_record(output, "analyze drift").data
    assert told["regions"]["current"]["k_drift"] is None
    assert told["kv_correlation"] is None
    assert "nan" in capsys.readouterr().out


def test_a_prompt_of_the_bundled_model(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--model", "bundled-transit", "--dtype", "float32", "--prompt", "from a to b"]
    assert main(["--quiet", "analyze", "drift", *options, "--sampling", '{"max_tokens": 4}']) == 0
    assert "bundled-transit: llada, 10 layers" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"cache": "uniform-cache", "cache_config": {}}, "leave cache out"),
        ({"prompt_token_ids": []}, "prompt is empty"),
    ],
)
def test_bad_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str], more: dict[str, Any], message: str) -> None:
    assert analyze("--input", requests(tmp_path, **more)) == 2
    assert message in capsys.readouterr().err


def test_no_lines_and_a_file_for_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty.jsonl"
    empty.write_text("\n")
    assert analyze("--input", str(empty)) == 2
    assert "there is no request" in capsys.readouterr().err
    assert analyze("--input", requests(tmp_path), "--plots", str(empty)) == 2
    assert "cannot be made" in capsys.readouterr().err
