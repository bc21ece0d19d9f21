"""What plain reuse of a shared prefix gains and destroys, beside BiCache (BiCache figure 2, table 1)."""

from collections.abc import Mapping
from typing import Any

from remask.llm import LLM
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import contender
from remask_lab.bench.workload import Workload
from remask_lab.subjects.collapse_report import Row


def measure_collapse(
    llm: LLM, workload: Workload, bicache: Mapping[str, Any], rounds: int, progress: bool = False
) -> list[Row]:
    """`none`, `reuse` and `bicache` with these settings, side by side, as `run_bench` reports them.

    Where the workload has answers, `parts` says how many responses follow each part of the system prompt: its rules,
    and the format that it asks for. Raises `ConfigError` where a policy cannot run.
    """
    settings = {"none": {}, "reuse": {}, "bicache": bicache}
    rows = [contender(llm, name, own, workload) for name, own in settings.items()]
    results: list[Row] = run_bench(llm, workload, rows, rounds, llm.engine_config, progress).data["results"]
    return results
