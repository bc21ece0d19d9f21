"""Long random runs of one engine, and every golden run by itself. Too long for every run: `scripts/soak`."""

import random
from pathlib import Path
from typing import Any

import pytest

from tests import goldens
from tests.cli.goldens import generate
from tests.cli.test_goldens import LAYERS, SUPPORTED, check

pytestmark = pytest.mark.soak

STEPS = 4000


def limits(rng: random.Random) -> dict[str, Any]:
    """Memory and budgets that are mostly too small."""
    return {
        "max_num_seqs": rng.randint(1, 8),
        "max_model_len": 32,
        "max_row_layers": rng.choice([None, 1, 50, 200, 600]),
        "page_size": rng.choice([1, 3, 4, 16]),
        "store_budget_tokens": rng.choice([4, 10, 16, 40]),
        "eviction": rng.choice(["fifo", "lru"]),
        "max_refreshes": rng.choice([None, 1, 2]),
        "prefix_match": rng.choice(["exact", "longest"]),
    }


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
