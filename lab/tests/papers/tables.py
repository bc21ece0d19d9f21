"""Small tables over models with random weights, that a test may run whole."""

from dataclasses import replace
from pathlib import Path

from remask import LLM, EngineConfig
from remask_lab.papers.definition import PaperTable, read_table
from remask_lab.papers.measure import Measurer

SMALL = """
title = "A small table"
paper = "A paper"
source = "table 1"
kind = "masked"
notes = ["A note."]

[published]
setting = "a machine"
columns = ["X", "Y"]
metrics = [{ name = "throughput", unit = "tok/s" }, { name = "its change", unit = "%", show = "({:+} %)" }]

[scales.bundled]
model = "llada-tiny"
load_format = "dummy"
workload = { name = "random", requests = 3, prefixes = 1, prefix_tokens = 24, prompt_tokens = 4 }
sampling = { max_tokens = 8, steps = 8 }
concurrency = 2

[scales.paper]
model = "llada-tiny"
load_format = "dummy"
workload = { name = "random", requests = 2, prefixes = 1, prefix_tokens = 48, prompt_tokens = 4 }
sampling = { max_tokens = 16, steps = 16 }

[[rows]]
name = "nothing"
published.X = [1200]

[[rows]]
name = "half"
steps = 0.5
[rows.published]
X = [90.61, nan]
Y = [1.5, -2.0]

[[rows]]
name = "greedy"
cache = "dkv-greedy"
published = {}

[[rows]]
name = "shorter"
cache = "reuse"
at.bundled.workload = { prompt_tokens = 2 }
at.paper.sampling = { block_length = 4 }
published = {}

[[rows]]
name = "half again"
steps = 0.5
published.Y = [0.0]

[[rows]]
name = "elsewhere"
missing = "It cannot be."
published.Y = [3]
"""


def small_table(folder: Path, text: str = SMALL) -> PaperTable:
    """The small table, or another one."""
    path = folder / "small.toml"
    path.write_text(text, encoding="utf-8")
    return read_table(path)


def bench(model: str = "llada-tiny", concurrency: int = 2) -> Measurer:
    """One that measures with random weights."""
    engine = EngineConfig(max_num_seqs=concurrency, max_model_len=128)
    return Measurer(LLM(model, load_format="dummy", dtype="float32", device="cpu", engine=engine), rounds=1, seed=5)


def retuned(table: PaperTable, **scale: object) -> PaperTable:
    """`table` with another scale "bundled"."""
    own = replace(table.scales["bundled"], **scale)  # type: ignore[arg-type]
    return replace(table, scales={**table.scales, "bundled": own})
