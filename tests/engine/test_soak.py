"""Every golden run by itself. Too long for every run: `scripts/soak`."""

from pathlib import Path

import pytest

from tests import goldens
from tests.cli.goldens import generate
from tests.cli.test_goldens import LAYERS, SUPPORTED, check

pytestmark = pytest.mark.soak


@pytest.mark.parametrize("model", goldens.MODELS)
@pytest.mark.parametrize(
    "options",
    [["--max-num-seqs", "1"], ["--max-num-seqs", "64"], ["--max-num-seqs", "1", "--overlap"], ["--overlap"]],
    ids=["alone", "together", "alone, ahead", "ahead"],
)
def test_all_golden_runs(tmp_path: Path, model: str, options: list[str]) -> None:
    """One at a time, and all that fit at once."""
    runs = {goldens.run_id(run): run for run in SUPPORTED if run["model"] == model}
    lines = (goldens.request_line(run, name) for name, run in runs.items())
    answers = generate(tmp_path, goldens.model_dir(model), lines, *options)
    assert set(answers) == set(runs)
    for name, run in runs.items():
        check(run, answers[name], LAYERS[model])
