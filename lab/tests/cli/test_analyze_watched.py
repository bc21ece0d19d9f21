"""`remask analyze decoding`, `features` and `steps`: files, pictures, readings, and bad options."""

import json
from pathlib import Path

import pytest

from remask.cli import main
from remask_lab.records.record import read_record

SAMPLING = ["--sampling", '{"max_tokens": 8, "steps": 8, "block_length": 8}']
MODELS = {
    "bundled-transit": [*SAMPLING, "--model", "bundled-transit", "--prompt", "from abbey go 2"],
    "bundled-uniform": ["--model", "bundled-uniform", "--prompt", "board"],
    "sdar-tiny": ["--model", "sdar-tiny", "--load-format", "dummy", "--input"],
}
PICTURES = {
    "decoding": ("passes", "tokens", "aligned", "layers"),
    "features": ("maps", "layers", "changes"),
    "steps": ("tokens", "cost", "probability", "drift"),
}


def analyze(subject: str, *options: str) -> int:
    return main(["--quiet", "analyze", subject, "--dtype", "float32", "--device", "cpu", *options])


@pytest.mark.few(11)
@pytest.mark.parametrize("subject", PICTURES)
@pytest.mark.parametrize("model", MODELS)
def test_numbers_pictures_and_a_reading(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], subject: str, model: str
) -> None:
    source, output, plots = tmp_path / "in.jsonl", tmp_path / "x.json", tmp_path / "plots"
    source.write_text(json.dumps({"prompt_token_ids": [5, 6, 7, 8]}))
    options = [*MODELS[model], *([str(source)] if MODELS[model][-1] == "--input" else [])]
    assert analyze(subject, *options, "--output", str(output), "--plots", str(plots)) == 0
    record = read_record(output, f"analyze {subject}")
    out = capsys.readouterr().out
    assert record.data["reading"] in out
    assert record.about["model"] == model
    for name in PICTURES[subject]:
        assert (plots / f"{subject}-{name}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("subject", ["decoding", "features"])
def test_one_pass_draws_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str], subject: str) -> None:
    options = ["--model", "bundled-transit", "--prompt", "from a", "--plots", str(tmp_path / "plots")]
    assert analyze(subject, *options, "--sampling", '{"max_tokens": 4, "steps": 1, "block_length": 4}') == 0
    assert "Picture" not in capsys.readouterr().out
