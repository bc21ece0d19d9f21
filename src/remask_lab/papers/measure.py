"""Measuring a cell: side by side with its baseline, in one run."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from remask.core.depth import DepthLookup
from remask.depth.profile import depth_entries
from remask.errors import ConfigError
from remask.llm import LLM
from remask.policies import CachePolicy
from remask_lab.bench.bench import run_bench
from remask_lab.bench.contenders import Contender
from remask_lab.bench.workload import Workload
from remask_lab.likelihood.judge import Judge
from remask_lab.likelihood.perplexity import Policy
from remask_lab.likelihood.perplexity import measure as perplexity
from remask_lab.papers.autoregressive import Autoregressive
from remask_lab.papers.cell import Cell
from remask_lab.papers.operations import operation_times
from remask_lab.papers.workload import draw

KEPT = (
    "throughput_tok_s",
    "ratio_to_none",
    "ratio_range",
    "work_ratio_to_none",
    "accuracy",
    "accuracy_interval",
    "agreement_with_none",
    "forwards",
    "row_layers",
    "prefix_hits",
    "prefix_depth",
    "extra_memory_bytes",
)
DETAILS = ("flops", "executed_flops", "flops_saved", "efficiency_kept", "cache_ratio")
BASELINE, OURS = "baseline", "ours"


@dataclass(slots=True)
class Bench:
    """Measures cells on one model.

    Attributes:
        llm: the model.
        rounds: turns of each contender.
        seed: of the workload.
        prompts: file of texts, where a cell reads texts.
        judge: scores texts, where they are to be judged.
        ar_model: folder or hub id of the autoregressive model; None: random weights of the same shape.
    """

    llm: LLM
    rounds: int
    seed: int
    prompts: str | None = None
    judge: Judge | None = None
    ar_model: str | None = None

    def measure(self, cell: Cell) -> dict[str, Any]:
        """The result of `cell`; where its policy cannot run on the model or with its sampling, "left_out" says why.

        Raises `ConfigError` where the baseline cannot run.
        """
        baseline = self._contender(cell if cell.baseline is None else cell.baseline, BASELINE)
        if cell.measure == "autoregressive":
            return self._autoregressive(baseline)
        try:
            ours = baseline if cell.baseline is None else self._contender(cell, OURS)
        except ConfigError as error:
            return {"left_out": str(error)}
        if cell.measure == "operations":
            return self._operations(baseline, ours)
        rows = [baseline] if ours is baseline else [baseline, ours]
        detail = cell.measure == "detailed"
        config = replace(self.llm.engine_config, max_num_seqs=cell.concurrency)
        record = run_bench(self.llm, _workload(baseline), rows, self.rounds, config, progress=False, detail=detail)
        result = record.data["results"][-1]
        names = (*KEPT, *DETAILS) if detail else KEPT
        kept = {name: result[name] for name in names} | {"prefix_ratio": _workload(ours).prefix_ratio}
        return kept | self._judged(cell, _workload(ours))

    def _contender(self, cell: Cell, name: str) -> Contender:
        workload = draw(self.llm, cell.workload, cell.params, self.seed, self.prompts)
        policy = self._policy(cell)
        self.llm.engine.check(workload.tasks[0].request.with_policy(policy))
        return Contender(name, policy, workload, baseline=BASELINE)

    def _policy(self, cell: Cell) -> CachePolicy:
        if cell.tau is None:
            return self.llm.policy(cell.cache, cell.settings)
        tau = cell.tau
        return self.llm.policy(cell.cache, cell.settings, lambda: self._lookup(tau))

    def _lookup(self, tau: float) -> DepthLookup:
        """Depths at another threshold than the table's own, from the similarities that it keeps."""
        table = self.llm.depth_table
        if not table.curves:
            raise ConfigError(
                f"the depth table of {table.model} was published without similarities, so it cannot be read at tau "
                f"{tau:g}; measure one with `remask profile --model ... --output FILE` and give --depth-table FILE"
            )
        return DepthLookup(depth_entries(table.curves, tau))

    def _judged(self, cell: Cell, workload: Workload) -> dict[str, Any]:
        if self.judge is None:
            return {}
        prompts = [task.request.prompt_token_ids for task in workload.tasks]
        policies = [Policy(cell.cache, cell.settings)]
        row = perplexity(self.llm, self.judge, prompts, policies, cell.params, self.seed)[0]
        return {"perplexity": row.perplexity, "perplexity_interval": [row.low, row.high], "judge": self.judge.name}

    def _operations(self, baseline: Contender, ours: Contender) -> dict[str, Any]:
        return {
            f"{row.name}_ms": operation_times(self.llm, _workload(row), row.policy, self.rounds)
            for row in (baseline, ours)
        }

    def _autoregressive(self, baseline: Contender) -> dict[str, Any]:
        model, config = Autoregressive(self.llm, self.ar_model), self.llm.engine_config
        workload, batch = _workload(baseline), config.max_num_seqs
        new = len(workload.tasks) * workload.tasks[0].request.params.max_tokens
        model.seconds(workload, batch)
        speeds, ratios = [], []
        for _ in range(self.rounds):
            speeds.append(new / model.seconds(workload, batch))
            record = run_bench(self.llm, workload, [baseline], 1, config, progress=False)
            ratios.append(speeds[-1] / record.data["results"][0]["throughput_tok_s"])
        return {
            "throughput_tok_s": float(np.median(speeds)),
            "ratio_to_none": float(np.median(ratios)),
            "ratio_range": [min(ratios), max(ratios)],
            "model": model.name,
            "parameters": model.parameters,
        }


def _workload(contender: Contender) -> Workload:
    assert contender.workload is not None
    return contender.workload
