"""One `remask generate` call over request lines on a golden model."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from remask.cli import main
from tests.device import attention, device, graphs, overlap


def generate(
    tmp_path: Path, folder: Path, lines: Iterable[dict[str, Any]], *options: str, max_model_len: int = 512
) -> dict[str, dict[str, Any]]:
    """The answers by id, traces included; the call must succeed."""
    source, target = tmp_path / "requests.jsonl", tmp_path / "answers.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    files = ["--input", str(source), "--output", str(target), "--max-model-len", str(max_model_len)]
    common = ["--dtype", "float32", "--device", device(), "--trace"]
    free, dense = "--batch-invariant" not in options, "expert" not in (folder / "config.json").read_text("utf-8")
    common += ["--overlap"] * (overlap() and free) + ["--graphs"] * (graphs() and free and dense)
    if "--attention" not in options:
        common += ["--attention", attention()]
    assert main(["--quiet", "generate", "--model", str(folder), *files, *common, *options]) == 0
    answers = [json.loads(line) for line in target.read_text(encoding="utf-8").splitlines()]
    return {answer["id"]: answer for answer in answers}
